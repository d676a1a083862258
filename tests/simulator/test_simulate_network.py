"""Settings about the network reach the simulation, and slow layouts are spoken of."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis.strategies import integers, sampled_from
from tests.simulator.searched import cheapest

from foretrace.simulator.cli import simulate
from foretrace.simulator.config import job_from
from foretrace.simulator.errors import SimulationError
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.network.advice import across
from foretrace.simulator.network.cost import job_network
from foretrace.simulator.search.describe import described
from foretrace.simulator.search.space import Space
from foretrace.simulator.simulate import simulate as run
from foretrace.simulator.validate.runs import validate_steps
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.errors import CatalogError

JOB = ["--model", "llama2-7b", "--cluster", "dgx-h100", "--gpus", "64", "--global-batch", "64", "--tp", "8"]
JOB += ["--framework", "megatron"]  # else it is predicted by the conventions of each


def simulated(*flags: str) -> dict[str, object]:
    """Return what ``foretrace simulate --json`` prints."""
    result = CliRunner().invoke(simulate, [*JOB, *flags, "--json"], catch_exceptions=False)
    found: dict[str, object] = json.loads(result.stdout)
    return found


def step_s(found: dict[str, object]) -> float:
    """Return the step time."""
    return float(str(found["step_time_s"]))


def test_ranks_dealt_out_over_nodes_are_slower_and_it_is_said() -> None:
    packed, spread = simulated(), simulated("--placement", "spread")
    assert step_s(spread) > 1.2 * step_s(packed)
    assert not [line for line in list(packed["warnings"]) if "lies across" in line]  # type: ignore[call-overload]
    (warning,) = [line for line in list(spread["warnings"]) if "lies across" in line]  # type: ignore[call-overload]
    assert "tp=8 lies across 8 nodes" in warning
    assert "another placement would keep it inside" in warning


RACKS = {"model": "qwen3-30b-a3b", "cluster": "gb200-nvl72", "gpus": 256, "global_batch": 256}


@given(tp=sampled_from([1, 2, 4]), ep=sampled_from([4, 8, 16, 32, 64]), n_racks=integers(2, 9))
def test_no_group_straddles_a_rack_that_it_fits_into(tp: int, ep: int, n_racks: int) -> None:
    """Racks of 72 have 64 ranks, or as many as go round: experts and tensors stay inside NVLink."""
    job = job_from({**RACKS, "gpus": n_racks * 64, "global_batch": n_racks * 64, "tp": tp, "ep": ep})
    assert across(job.layout, job_network(job)) == []
    assert job.most_ranks_per_node % math.lcm(tp, ep) == 0
    assert 64 <= job.most_ranks_per_node <= 72


def test_a_group_that_straddles_racks_is_spoken_of_everywhere(tmp_path: Path) -> None:
    whole, torn = (job_from({**RACKS, "ep": 64, **more}) for more in ({}, {"ranks_per_node": 72}))
    assert whole.filled_per_node == 64
    runs = [run(job) for job in (whole, torn)]
    assert runs[1].summary["step_time_s"] > 1.1 * runs[0].summary["step_time_s"]
    assert "ranks on 64 of the 72 GPUs of a node" in " ".join(runs[0].summary["rests_on"])
    assert [["ep=64 lies across 2 nodes" in line for line in one.info.warnings] for one in runs] == [
        [],
        [True],
    ]
    table = tmp_path / "runs.csv"
    columns = {**RACKS, "ep": 64, "step_time_s": 1.0}
    rows = [",".join(map(str, [*columns.values(), n])) for n in (64, 72)]
    table.write_text("\n".join([",".join([*columns, "ranks_per_node"]), *rows]), encoding="utf-8")
    words = sorted(one.what for one in validate_steps(table).rows)
    assert [line.endswith("ep across nodes") for line in words] == [False, True]


def test_a_search_says_which_groups_straddle() -> None:
    space = Space(
        cluster=load_cluster("gb200-nvl72", 128),
        model=load_model("qwen3-30b-a3b"),
        global_batch=128,
        seq_len=2048,
        tp=(1,),
        pp=(1,),
        ep=(64, 128),
        micro_batch=(1,),
        sharding=("zero1",),
        recompute=("none",),
    )
    found = [described(one, {("gb200-nvl72", 128): None}, None) for one in cheapest(space.families(), 2).best]
    assert {one["ep"]: one["across_nodes"] for one in found} == {64: [], 128: ["ep"]}
    assert {one["ranks_per_node"] for one in found} == {64}


def test_algorithms_and_protocols_are_those_that_are_left() -> None:
    free, forced = simulated(), simulated("--nccl-algo", "ring", "--nccl-proto", "ll")
    assert step_s(forced) > step_s(free)


def test_shared_links_are_an_engine_of_their_own() -> None:
    free, shared = simulated("--engine", "event"), simulated("--engine", "contended")
    assert step_s(shared) >= step_s(free)


def test_mistakes_are_named() -> None:
    with pytest.raises(CatalogError, match="placement 'pakced'"):
        simulated("--placement", "pakced")
    with pytest.raises(SimulationError, match="algorithm 'rnig'"):
        simulated("--nccl-algo", "rnig")
