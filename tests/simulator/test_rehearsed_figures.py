"""Figures of a rehearsed run: closed forms over all ranks, rows and tokens, memory, what is in flight."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.simulator.rehearsal_tables import (
    GIB,
    GROUPS,
    SIDE,
    Event,
    batch,
    machine,
    place,
    run,
    tables,
    work,
)

from foretrace.simulator.errors import JobError
from foretrace.simulator.network.cost import Network
from foretrace.simulator.network.nccl import choice
from foretrace.simulator.rehearsed.notes import in_flight, layers_of, model_flops, stage_of
from foretrace.simulator.rehearsed.run import simulate_rehearsal
from foretrace.simulator.rehearsed.works import HOST_BYTES_PER_S
from foretrace.simulator.render import document
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.placement import place as placed
from foretrace.traces.batch import Batch
from foretrace.traces.layout import Group, Layout
from foretrace.traces.rehearsal import Rehearsal, read_rehearsal

OF_BATCH = ("tokens_per_step", "tokens_per_s", "tokens_per_s_per_gpu", "rows_per_s_per_gpu", "mfu")
JOB = {"first_step": 1, "steps": 1, **batch(2 * 3 * 2, 4096)}
LIMIT = machine(8).device.memory_bytes - machine(8).device.reserved_bytes
WORLD: dict[str, Any] = {"world_size": 4, "layout": Layout(pp=2, dp=2), "representatives": (0, 0, 2, 2)}
ACROSS = [Group(id=1, axis="dp", ranks=(0, 1)), Group(id=2, axis="dp", ranks=(2, 3))]


def _held(sizes: Sequence[int]) -> dict[str, Any]:
    """Return memory of ranks 0 and 2 of which all is of activations but a byte."""
    items = [{"activations": size - 1, "gradients": 1} for size in sizes]
    return {str(2 * at): {"bytes": one, "stages": [at]} for at, one in enumerate(items)}


def test_the_headline_is_that_of_all_ranks_over_a_step(tmp_path: Path) -> None:
    """Two stages of which one has a product more: rates are of four GPUs, memory is that of the fullest."""
    ranks = {0: tables([("op", 0, 0, -1)] * 3), 2: tables([("op", 0, 0, -1)] * 2)}
    simulation = run(tmp_path, ranks, ACROSS, job=JOB, memory=_held((LIMIT, LIMIT // 2)), **WORLD)
    found, device = simulation.summary, machine(8).device
    step_s, rows = found["step_time_s"], 2 * 3 * 2
    assert found["tokens_per_s"] == pytest.approx(rows * 4096 / step_s)
    assert found["tokens_per_s_per_gpu"] == pytest.approx(rows * 4096 / step_s / 4)
    assert found["rows_per_s_per_gpu"] == pytest.approx(rows / step_s / 4)
    flops = 2 * (3 + 2) * 2 * SIDE**3
    assert found["mfu"] == pytest.approx(flops / step_s / 4 / device.peak("bf16"))
    assert (found["peak_memory_bytes"], found["memory_limit_bytes"]) == (device.memory_bytes,) * 2
    assert found["fits"]
    assert [(one["rank"], one["stage"], one["holds"]) for one in found["stages"]] == [
        (0, 0, [0]),
        (2, 1, [1]),
    ]
    assert not [warning for warning in simulation.info.warnings if "fit" in warning]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((LIMIT + 1, 9), "rank 0 does not fit: "),
        ((9, LIMIT + 1), "rank 2 does not fit: "),
        ((LIMIT + 1, LIMIT + 2), "2 of 2 rehearsed ranks do not fit, rank 2 least: "),
    ],
)
def test_a_byte_too_much_does_not_fit(tmp_path: Path, sizes: tuple[int, int], words: str) -> None:
    """It says so once, of the fullest, and names its largest parts, the largest first."""
    ranks = dict.fromkeys((0, 2), tables([("op", 0, 0, -1)]))
    simulation = run(tmp_path, ranks, ACROSS, memory=_held(sizes), **WORLD)
    assert not simulation.summary["fits"]
    (said,) = [warning for warning in simulation.info.warnings if "fit" in warning]
    assert said.startswith(words)
    assert said.partition("largest: ")[2].startswith("activations ")
    assert said.endswith("gradients 1 B")


def _rehearsal(**changes: Any) -> Rehearsal:
    settings = {"world_size": 16, "ranks": (5,), "representatives": (5,) * 16}
    return Rehearsal(**{**settings, "name": "", "groups": (), **changes})


def test_nothing_is_said_of_a_step_whose_batch_is_unknown(tmp_path: Path) -> None:
    """Not in figures, nor in dollars; with stated tokens all is there."""
    ranks = {0: tables([("op", 0, 0, -1)])}
    for job in (JOB | Batch(unknown="nobody tells").job, {"first_step": 1, "steps": 1}):
        simulation = run(tmp_path, ranks, ACROSS, **WORLD | {"job": job, "representatives": (0,) * 4})
        assert [simulation.summary[name] for name in OF_BATCH] == [None] * len(OF_BATCH)
        assert document(simulation, None, None, price="2 USD/h")["usd_per_1b_tokens"] is None
        assert "unknown" in simulation.summary["batch"]
    stated = simulate_rehearsal(tmp_path, machine, tokens_per_step=10**6).summary
    assert stated["tokens_per_s"] == pytest.approx(10**6 / stated["step_time_s"])
    assert stated["mfu"] > 0


def test_where_no_layout_says_it_a_stage_is_the_place_in_the_longest_pipeline() -> None:
    groups = (Group(id=1, axis="pp", ranks=(5, 9)), Group(id=2, axis="pp", ranks=(1, 3, 5)))
    found = tables([("op", 0, 0, -1)], places=[place(layer=at) for at in (-1, 0, 0, 3)])
    stage = stage_of(
        _rehearsal(groups=(*groups, Group(id=3, axis="dp", ranks=(0, 1, 2, 5)))), 5, machine(8), found
    )
    assert stage["stage"] == 2
    assert stage["layers"] == layers_of(found) == 2
    assert stage_of(_rehearsal(), 5, machine(8), found)["stage"] == 0


def test_micro_batches_are_those_of_a_step_and_a_part_of_a_stage() -> None:
    """What has no number, as an evaluation, or is no pass, as an optimizer, is none in flight."""
    parts = [
        place(step=step, microbatch=at, virtual_stage=part, stage=0, kind=kind)
        for step in (1, 2)
        for part in (0, 1)
        for at in (0, 1)
        for kind in ("forward", "backward")
    ]
    for other in (place(), place(kind="optimizer", microbatch=7)):
        order = [0, *range(1, len(parts) + 1), 0]
        events: list[Event] = [("op", 0, 0, -1, at) for at in order]
        assert in_flight(tables(events, places=[other, *parts])) == 1


def test_only_training_in_the_steps_that_were_kept_counts() -> None:
    """Of two steps the mean; passes without gradients and steps that warmed up are nobody's FLOPs."""
    places = [place(step=1), place(step=2), place(step=2, trains=False), place(step=0)]
    works = [work(flops=10), work(kind="attention", causal=True, flops=100), work(kind="attention", flops=7)]
    events: list[Event] = [("op", 0, 0, -1, 0), ("op", 1, 0, -1, 1), ("op", 2, 0, -1, 1)]
    events += [("op", 0, 0, -1, 2), ("op", 0, 0, -1, 3), ("communication", 0, 0, 0, 0)]
    rehearsal = _rehearsal(job={"first_step": 1, "steps": 2}, representatives=(2,) * 3, world_size=3)
    assert model_flops(rehearsal, {2: tables(events, works, places=places)}) == 3 * (10 + 200 + 7) / 2


def test_memory_over_time_is_what_was_in_use_when_each_thing_was_issued(tmp_path: Path) -> None:
    """Rank by rank: of what is issued at once the most, of operations that became one their most."""
    sent = ("communication", 0, 0, 0, 0, 70)
    events: list[Event] = [("op", 0, 0, -1, 0, 90), ("op", 0, 0, -1, 0, 20), sent, ("op", 0, 0, -1, 0, 50)]
    ranks = {0: tables(events), 2: tables([("op", 0, 0, -1, 0, 11), ("op", 0, 3, -1, 0, 12)])}
    simulation = run(tmp_path, ranks, ACROSS, **WORLD)
    reserved, rows = machine(8).device.reserved_bytes, simulation.memory.to_pylist()
    assert all(row["category"] == "total" for row in rows)
    assert [row["bytes"] - reserved for row in rows if row["rank"] == 2] == [12]
    assert [row["bytes"] - reserved for row in rows if row["rank"] == 0] == [90, 70]
    starts = [
        row["start_ns"]
        for row in simulation.spans.to_pylist()
        if (row["rank"], row["category"]) == (0, "compute")
    ]
    assert [row["t_ns"] for row in rows if row["rank"] == 0] == starts


@pytest.mark.parametrize("world", [2, 16])
def test_ranks_of_a_node_share_its_processors(tmp_path: Path, world: int) -> None:
    """As many as there are: two of a small world, else those of a node. What it computes is no launch."""
    host = work(name="aten._fused_adamw_", kind="on_host", dtype="fp32", flops=0, bytes_moved=GIB, kernels=0)
    small = work(kind="memory", flops=0, bytes_moved=4)
    events: list[Event] = [("op", 0, 0, -1), *[("op", 1, 0, -1)] * 9]
    group = Group(id=1, axis="dp", ranks=tuple(range(world)))
    simulation = run(tmp_path, {0: tables(events, works=[host, small])}, [group], world_size=world)
    (span,) = [row for row in simulation.spans.to_pylist() if row["name"].endswith("on the host")]
    assert span["duration_ns"] == pytest.approx(GIB * min(world, 8) / HOST_BYTES_PER_S * 1e9)
    assert any("launching takes longer" in line for line in simulation.summary["rests_on"])


def test_a_rank_whose_host_is_slower_is_named_and_others_are_not(tmp_path: Path) -> None:
    """A kernel of the model takes the host 0.65 of an operation; one of a backward beside it, too."""
    small, named = work(kind="memory", flops=0, bytes_moved=4), place(kind="backward", name="loss")
    ranks = {
        0: tables([("op", 0, 0, -1)]),
        2: tables([("op", 0, 0, -1)] * 500, works=[small], places=[named]),
    }
    simulation = run(tmp_path, ranks, ACROSS, **WORLD)
    rests = simulation.summary["rests_on"]
    assert [line for line in rests if "launching" in line] == [
        "launching takes longer than computing on rank 2"
    ]
    each_s = 0.65 * machine(8).device.launch_s + 4e-6
    assert simulation.summary["step_time_s"] == pytest.approx(500 * each_s, rel=0.01)


def test_where_ranks_are_and_what_nccl_may_do_decide(tmp_path: Path) -> None:
    """A collective that nothing hides costs what the network says of that placement and those algorithms."""
    wide = Group(id=1, axis="dp", ranks=tuple(range(16)))
    run(tmp_path, {0: tables([("communication", 0, 0, 0)])}, [wide], world_size=16)
    cluster = load_cluster("dgx-h100", 32)
    times = set()
    for policy, algorithm, protocol in (("packed", "", ""), ("spread", "", ""), ("packed", "tree", "LL")):
        asked: Any = {"placement": policy, "nccl_algo": algorithm, "nccl_proto": protocol}
        found = simulate_rehearsal(tmp_path, lambda n: cluster, **asked).summary["step_time_s"]
        network = Network(cluster, placed(16, cluster, policy), choice(algorithm, protocol))
        cost = network.collective("all_reduce", GIB, wide.ranks)
        assert found == pytest.approx((cost.latency_ns + cost.wire_ns) / 1e9)
        times.add(found)
    assert len(times) == 3


def test_a_run_says_what_it_is_of(tmp_path: Path) -> None:
    """Steps are counted from the first that was kept; the type is that of most work."""
    works = [
        work(dtype="fp32"),
        work(kind="memory", dtype="bf16", flops=10**18),
        work(is_known=False, flops=10**18),
    ]
    found = tables([("op", at, 0, -1) for at in range(3)], works=works, places=[place(step=4)])
    job = {**JOB, "first_step": 4}
    groups = [group for group in GROUPS.values() if max(group.ranks) < 2]
    simulation = run(tmp_path, {0: found}, groups, job=job, checked=("held against a run",))
    assert simulation.info.job["precision"] == "fp32"
    assert set(simulation.spans["step"].to_pylist()) == {0}
    assert simulation.info.representatives == read_rehearsal(tmp_path).representatives
    assert "held against a run" in simulation.summary["rests_on"]
    device = machine(8).device
    expected = 2 * (2 * SIDE**3 + 2 * 10**18) / simulation.summary["step_time_s"] / 2 / device.peak("fp32")
    assert simulation.summary["mfu"] == pytest.approx(expected)


def test_a_rehearsal_without_ranks_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="holds no rehearsed rank"):
        run(tmp_path, {}, [GROUPS[1]])
