"""Laws of machines with nodes of several kinds: each runs its own kernels, and nobody gains by a slow one."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.simulator.predicted import simulate
from tests.simulator.searched import cheapest

from foretrace.simulator.config import job_from
from foretrace.simulator.errors import JobError, SimulationError
from foretrace.simulator.job import Job
from foretrace.simulator.models.model import Model
from foretrace.simulator.search.space import Space
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.errors import TopologyError

SMALL = Model(
    name="small",
    n_layers=2,
    hidden=4096,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    ffn_hidden=14336,
    vocab=32000,
)
N_NODES = 4


def machine(tmp_path: Path, base: str, other: str, n_others: int) -> str:
    """Return a machine of four nodes, the last *n_others* of which are like *other*."""
    path = tmp_path / f"{base}-{other}-{n_others}.toml"
    others = f'[[others]]\nmachine = "{other}"\nnodes = {n_others}\n' if n_others else ""
    path.write_text(f'base = "{base}"\nname = "mixed"\nn_gpus = 32\n{others}', encoding="utf-8")
    return str(path)


def made(cluster: str, **given: Any) -> Job:
    base = {"cluster": cluster, "gpus": 8 * N_NODES, "global_batch": 32, "seq_len": 4096}
    return job_from({**base, "framework": "megatron", **given}, model=SMALL)


H100, B200 = ("dgx-h100", "dgx-a100"), ("dgx-b200", "dgx-h100")


@pytest.mark.parametrize(
    ("layout", "pair"),
    [({}, H100), ({"tp": 8}, B200), ({"tp": 2, "pp": 2}, H100), ({"sharding": "fsdp"}, B200)],
    ids=str,
)
def test_a_faster_node_never_slows_a_step(
    layout: dict[str, Any], pair: tuple[str, str], tmp_path: Path
) -> None:
    """From all fast to all slow nodes, so that no mixture beats its fastest kind or loses to its slowest.

    Collectives of up to 16 MiB inside a node were measured to take longer on B200 than on H100.
    """
    (fast, slow), slack = pair, 5e-3 if pair[0] == "dgx-b200" and "tp" in layout else 1e-9
    clusters = [machine(tmp_path, fast, slow, n) for n in range(N_NODES)] + [slow]
    times = [
        simulate(made(cluster, **layout), only_figures=True).summary["step_time_s"] for cluster in clusters
    ]
    for faster, slower in pairwise(times):
        assert faster <= slower * (1 + slack)
    assert times[0] < times[-1]


def test_the_answer_does_not_depend_on_which_kind_is_the_base(tmp_path: Path) -> None:
    clusters = [machine(tmp_path, *pair, 2) for pair in (("dgx-h100", "dgx-a100"), ("dgx-a100", "dgx-h100"))]
    for layout in ({}, {"tp": 8}, {"tp": 4, "sharding": "fsdp"}):
        first, second = (simulate(made(cluster, **layout)).summary for cluster in clusters)
        for name in ("step_time_s", "mfu", "peak_memory_bytes", "memory_limit_bytes", "tokens_per_s"):
            assert first[name] == pytest.approx(second[name], rel=1e-12), (name, layout)
        assert sorted(first["rests_on"]) == sorted(second["rests_on"])
        assert first["intervals"]["step_time_from"] == second["intervals"]["step_time_from"]
    prices = {load_cluster(cluster, 32).mean_price_usd_per_gpu_hour for cluster in clusters}
    assert len(prices) == 1


def test_every_kind_runs_as_long_as_on_a_machine_of_its_own(tmp_path: Path) -> None:
    """Replicas that meet nobody: the compute of each rank is that of its kind, kernel by kernel."""
    mixed = simulate(made(machine(tmp_path, "dgx-h100", "dgx-a100", 2)))
    for name, rank in (("dgx-h100", 0), ("dgx-a100", 16)):
        alone = simulate(made(name)).spans.to_pylist()
        own = [one for one in mixed.spans.to_pylist() if one["rank"] == rank]
        times = [
            [(one["name"], one["duration_ns"]) for one in rows if one["stream"] == "compute"]
            for rows in (own, [one for one in alone if one["rank"] == 0])
        ]
        assert times[0] == times[1]


def test_precision_is_what_every_kind_has(tmp_path: Path) -> None:
    for pair in (("dgx-h100", "dgx-a100"), ("dgx-a100", "dgx-h100")):
        with pytest.raises((SimulationError, TopologyError), match="a100"):
            made(machine(tmp_path, *pair, 1), fp8=True)
    with pytest.raises(JobError, match="h100"):
        made(machine(tmp_path, "dgx-b200", "dgx-h100", 1), fp8=True, recipe="mxfp8")


def test_a_search_finds_what_simulating_everything_finds(tmp_path: Path) -> None:
    """The base is the slower kind: what bounds a step from below by the base alone leaves out the best."""
    pytest.importorskip("numba")
    space = Space(
        model=SMALL,
        cluster=load_cluster(machine(tmp_path, "dgx-a100", "dgx-h100", 2), 32),
        global_batch=32,
        seq_len=4096,
        tp=(1, 8),
        pp=(1, 2),
        micro_batch=(1,),
        schedule=("1f1b", "zb-v"),
        sharding=("zero1",),
        recompute=("none",),
    )
    found = cheapest(space.families(), 3).best
    assert len(found) == 3
    every = sorted(simulate(job, only_figures=True).summary["step_time_s"] for job in space.jobs())
    assert [one.summary["step_time_s"] for one in found] == pytest.approx(every[:3], rel=1e-6)
