"""From what ranks issue to a program: the order of CUDA streams, who meets whom, what it costs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc

from simulator.compute.timing import ComputeModel
from simulator.errors import JobError
from simulator.network.cost import Network
from simulator.rehearsed.figures import model_flops, rows_and_tokens
from simulator.rehearsed.rank import RankWriter
from simulator.rehearsed.run import simulate_rehearsal
from simulator.rehearsed.works import op_of, priced
from simulator.workload.ops import gemm
from topologies.catalog import load_cluster
from topologies.cluster import Cluster
from traces.errors import RunError
from traces.layout import Group, Layout
from traces.rehearsal import (
    EVENTS,
    MESSAGES,
    PLACES,
    WHAT,
    WORKS,
    RankTables,
    Rehearsal,
    read_rank,
    read_rehearsal,
    write_rank,
    write_rehearsal,
)

MACHINE = "dgx-h100"
SIDE = 8192
GIB = 2**30


def machine(n_gpus: int) -> Cluster:
    """Return the machine of all tests."""
    return load_cluster(MACHINE, max(n_gpus, 8))


def work(**changes: Any) -> dict[str, Any]:
    """Return a large product, or something else."""
    product = {
        "name": "aten.mm",
        "kind": "gemm",
        "shapes": "",
        "dtype": "bf16",
        "m": SIDE,
        "n": SIDE,
        "k": SIDE,
    }
    sizes = {"flops": 2 * SIDE**3, "bytes_moved": 6 * SIDE**2, "batch": 1, "v_dim": 0}
    even = {"rows": (), "along": ""}
    return {**product, **sizes, **even, "causal": False, "kernels": 1, "is_known": True, **changes}


def message(kind: str = "all_reduce", **changes: Any) -> dict[str, Any]:
    """Return a collective of group 1, or a transfer."""
    fixed = {
        "group": 1,
        "size_bytes": GIB,
        "dtype": "bf16",
        "peer": -1,
        "is_async": True,
        "name": "gradients",
        "sent_bytes": (),
        "received_bytes": (),
    }
    return {"kind": kind, **fixed, **changes}


def place(**changes: Any) -> dict[str, Any]:
    """Return a place in a forward."""
    fixed = {"kind": "forward", "name": "layers.0", "layer": 0, "step": 1, "microbatch": -1, "stage": -1}
    return {**fixed, "virtual_stage": -1, "trains": True, **changes}


def tables(
    events: Sequence[tuple[str, int, int, int]],
    works: Sequence[dict[str, Any]] = (),
    messages: Sequence[dict[str, Any]] = (),
    places: Sequence[dict[str, Any]] = (),
) -> RankTables:
    """Return the tables of events (what, item, stream, number), all at the first place."""
    rows = [
        {
            "what": WHAT.index(what),
            "item": item,
            "place": 0,
            "stream": stream,
            "number": number,
            "allocated_bytes": 100,
        }
        for what, item, stream, number in events
    ]
    return RankTables(
        pa.Table.from_pylist(rows, EVENTS),
        pa.Table.from_pylist(list(works) or [work()], WORKS),
        pa.Table.from_pylist(list(messages) or [message()], MESSAGES),
        pa.Table.from_pylist(list(places) or [place()], PLACES),
    )


def written(found: RankTables) -> RankWriter:
    """Return the tasks of a rank."""
    compute = ComputeModel(machine(8).device, "bf16")
    groups = {1: Group(id=1, axis="dp", ranks=(0, 1))}
    return RankWriter(found, priced(found.works, compute), groups, range(1, 2))


def run(folder: Path, ranks: dict[int, RankTables], groups: Sequence[Group], **changes: Any) -> Any:
    """Write a rehearsal and time it."""
    world = changes.pop("world_size", 2)
    for rank, found in ranks.items():
        write_rank(folder / "rehearsal", rank, found)
    settings: dict[str, Any] = {
        "layout": Layout(dp=world),
        "representatives": (0,) * world,
        "job": {"first_step": 1, "steps": 1, "input_shape": [1, 4096], "forwards_per_step": 1},
    }
    rehearsal = Rehearsal(
        world_size=world, ranks=tuple(ranks), name="test", groups=tuple(groups), **{**settings, **changes}
    )
    write_rehearsal(folder / "rehearsal", rehearsal)
    return simulate_rehearsal(folder, machine)


DP = Group(id=1, axis="dp", ranks=(0, 1))


def test_a_rehearsal_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = tables([("op", 0, 0, -1), ("communication", 0, 0, 3)])
    write_rank(tmp_path, 5, found)
    assert read_rank(tmp_path, 5) == found
    later = {"places": ["trains"], "works": ["rows", "along"], "messages": ["sent_bytes", "received_bytes"]}
    for part, names in later.items():  # a rehearsal that was written earlier
        before = getattr(found, part).drop_columns(names)
        with ipc.new_file(str(tmp_path / "rank-00005" / f"{part}.arrow"), before.schema) as writer:
            writer.write_table(before)
    assert read_rank(tmp_path, 5) == found
    rehearsal = Rehearsal(world_size=2, ranks=(0,), representatives=(0, 0), groups=(DP,), layout=Layout(dp=2))
    write_rehearsal(tmp_path, rehearsal)
    assert read_rehearsal(tmp_path) == rehearsal


def test_what_is_no_rehearsal_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no rehearsal"):
        read_rehearsal(tmp_path)
    (tmp_path / "rehearsal.json").write_text('{"format_version": 99}')
    with pytest.raises(RunError, match="reads up to 1"):
        read_rehearsal(tmp_path)


def test_a_product_costs_what_it_costs_in_any_simulation() -> None:
    compute = ComputeModel(machine(8).device, "bf16")
    assert compute.op_s(op_of(work(), compute.device)) == compute.op_s(
        gemm("aten.mm", SIDE, SIDE, SIDE, "bf16")
    )


def test_the_memory_that_is_drawn_reaches_the_peak_that_is_printed(tmp_path: Path) -> None:
    """Both have what the device reserves for itself beside the 100 bytes of the script."""
    memory = {"0": {"peak_bytes": 100, "bytes": {"activations": 100}}}
    simulation = run(tmp_path, {0: tables([("op", 0, 0, -1)])}, [DP], memory=memory)
    peak = 100 + machine(8).device.reserved_bytes
    assert max(simulation.memory["bytes"].to_pylist()) == peak == simulation.summary["peak_memory_bytes"]


def test_operations_on_end_become_one_task() -> None:
    found = written(tables([("op", 0, 0, -1)] * 3)).tasks
    one = written(tables([("op", 0, 0, -1)])).tasks
    assert len(found) == len(one) == 1
    assert found[0].duration_ns == pytest.approx(3 * one[0].duration_ns, abs=3)
    assert found[0].flops == 3 * 2 * SIDE**3


def test_an_asynchronous_collective_runs_beside_its_stream_until_it_is_waited_for() -> None:
    events = [
        ("op", 0, 0, -1),
        ("communication", 0, 0, 0),
        ("op", 0, 0, -1),
        ("wait", -1, 0, 1),
        ("op", 0, 0, -1),
    ]
    before, collective, beside, after = written(tables(events)).tasks
    assert (before.stream, collective.stream) == ("compute", "dp")
    assert collective.after == (0,)
    assert 1 not in beside.after
    assert 1 in after.after


def test_one_that_is_not_asynchronous_holds_its_stream_up() -> None:
    events = [("communication", 0, 0, 0), ("op", 0, 0, -1)]
    _, after = written(tables(events, messages=[message(is_async=False)])).tasks
    assert after.after == (0,)


def test_a_mark_stands_for_what_its_stream_had_been_given_by_then() -> None:
    """Stream 1 goes on when the first operation of stream 0 is done, not the second."""
    events = [
        ("op", 0, 0, -1),
        ("mark", 7, 0, -1),
        ("op", 0, 0, -1),
        ("wait_mark", 7, 1, -1),
        ("op", 0, 1, -1),
    ]
    first, side, second = written(tables(events)).tasks[0], None, None
    for number, task in enumerate(written(tables(events)).tasks[1:], 1):
        side, second = (task, second) if task.stream == "copy" else (side, number)
    assert first.stream == "compute"
    assert side is not None
    assert 0 in side.after
    assert second not in side.after


def test_steps_that_warm_up_are_left_out() -> None:
    assert written(tables([("op", 0, 0, -1)], places=[place(step=0)])).tasks == []


def test_a_step_with_hidden_communication_lasts_as_long_as_its_compute(tmp_path: Path) -> None:
    events = [("communication", 0, 0, 0), *[("op", 0, 0, -1)] * 50, ("wait", -1, 0, 0)]
    simulation = run(tmp_path, {0: tables(events)}, [DP])
    alone_s = 50 * ComputeModel(machine(8).device, "bf16").op_s(gemm("x", SIDE, SIDE, SIDE, "bf16"))
    assert simulation.summary["step_time_s"] == pytest.approx(alone_s, rel=1e-6)
    assert simulation.summary["hidden_by_axis"]["dp"] > 0
    assert simulation.summary["exposed_comm_fraction"] == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_processor_has_no_streams(tmp_path: Path, is_async: bool) -> None:
    """What a GPU does on a side stream holds a processor up, unless it was asked for asynchronously."""
    events = [("communication", 0, 3, 0), *[("op", 0, 0, -1)] * 2, ("wait", -1, 0, 0)]
    found = tables(events, [work(dtype="fp32")], [message(dtype="fp32", is_async=is_async)])
    on_gpu = run(tmp_path, {0: found}, [DP]).summary
    assert on_gpu["hidden_by_axis"]["dp"] > 0
    on_processor = simulate_rehearsal(tmp_path, lambda n: load_cluster("localhost", n)).summary
    assert (on_processor["hidden_by_axis"].get("dp", 0) > 0) == is_async
    assert ("streams: a processor has none" in str(on_processor["rests_on"])) > (
        "streams: a processor has none" in str(on_gpu["rests_on"])
    )


def test_a_collective_that_nothing_hides_costs_what_the_network_says(tmp_path: Path) -> None:
    simulation = run(tmp_path, {0: tables([("communication", 0, 0, 0)])}, [DP])
    found = Network(machine(2)).collective("all_reduce", GIB, (0, 1))
    assert simulation.summary["step_time_s"] == pytest.approx((found.latency_ns + found.wire_ns) / 1e9)
    assert simulation.info.representatives == (0, 0)
    assert simulation.run.spans([1]).num_rows == simulation.run.spans([0]).num_rows


PP = Group(id=1, axis="pp", ranks=(0, 1))


def test_sender_and_receiver_meet(tmp_path: Path) -> None:
    """The receiver waits while the sender computes: a bubble, and both end together."""
    send, recv = message("send", peer=1), message("recv", peer=0)
    sender = tables([*[("op", 0, 0, -1)] * 20, ("communication", 0, 0, 0)], messages=[send])
    receiver = tables([("communication", 0, 0, 0), ("wait", -1, 0, 0), ("op", 0, 0, -1)], messages=[recv])
    simulation = run(tmp_path, {0: sender, 1: receiver}, [PP], layout=Layout(pp=2), representatives=(0, 1))
    ends = {
        row["kind"]: row["start_ns"] + row["duration_ns"]
        for row in simulation.spans.to_pylist()
        if row["category"] == "p2p"
    }
    assert ends["send"] == ends["recv"]
    assert simulation.summary["bubble_fraction"] > 0.1
    assert not [warning for warning in simulation.info.warnings if "not rehearsed" in warning]


def test_a_stage_that_is_done_first_idles_until_the_last_one_is(tmp_path: Path) -> None:
    """Two stages of equal work, one after the other: each idles for half of the step."""
    ops = [("op", 0, 0, -1)] * 400
    sender = tables([*ops, ("communication", 0, 0, 0)], messages=[message("send", peer=1)])
    receiver = tables(
        [("communication", 0, 0, 0), ("wait", -1, 0, 0), *ops], messages=[message("recv", peer=0)]
    )
    simulation = run(tmp_path, {0: sender, 1: receiver}, [PP], layout=Layout(pp=2), representatives=(0, 1))
    windows = [row["duration_ns"] for row in simulation.spans.to_pylist() if row["category"] == "step"]
    assert len(windows) == 2
    assert windows[0] == windows[1]
    assert simulation.summary["bubble_fraction"] == pytest.approx(0.5, abs=0.01)


def _twice(events: Sequence[tuple[str, int, int, int]], messages: Sequence[dict[str, Any]]) -> RankTables:
    """Return two steps of *events*, in each of which a message of each kind is sent once."""
    numbered = [
        (what, item, stream, {"communication": at, "wait": at * len(events) + number}.get(what, -1))
        for at in range(2)
        for what, item, stream, number in events
    ]
    found = tables(numbered, messages=messages, places=[place(step=1), place(step=2)])
    column = found.events.schema.get_field_index("place")
    field = EVENTS.field(column)
    places = pa.array([at for at in range(2) for _ in events], field.type)
    return found._replace(events=found.events.set_column(column, field, places))


def test_of_several_steps_each_has_the_idle_time_before_its_work(tmp_path: Path) -> None:
    """There and back through two stages: the second is done first, and waits for the next step to reach it.

    As in a recording, a step ends with the stage's own work, and what it waits behind that is in the next
    one's window; in the first one's is what came behind a step that was not simulated. So all are as long.
    """
    ops = [("op", 0, 0, -1)] * 100
    n = len(ops)
    there_and_back = [("communication", 0, 0, 0), ("communication", 1, 0, 0), ("wait", -1, 0, n + 1)]
    first = _twice([*ops, *there_and_back, *ops], [message("send", peer=1), message("recv", peer=1)])
    through = [("communication", 0, 0, 0), ("wait", -1, 0, 0), *ops, ("communication", 1, 0, 0)]
    second = _twice(through, [message("recv", peer=0), message("send", peer=0)])
    job = {"first_step": 1, "steps": 2, "input_shape": [1, 4096], "forwards_per_step": 1}
    simulation = run(
        tmp_path,
        {0: first, 1: second},
        [PP],
        layout=Layout(pp=2),
        representatives=(0, 1),
        job=job,
    )
    rows = simulation.spans.to_pylist()
    windows = [row for row in rows if row["category"] == "step"]
    assert len({row["duration_ns"] for row in windows}) == 1
    assert min(row["start_ns"] for row in rows) == 0
    for rank in (0, 1):
        one, other = ((w["start_ns"], w["start_ns"] + w["duration_ns"]) for w in windows if w["rank"] == rank)
        ends = [
            max(
                row["start_ns"] + row["duration_ns"]
                for row in rows
                if row["rank"] == rank and row["category"] != "step" and row["step"] == step
            )
            for step in (windows[0]["step"], windows[1]["step"])
        ]
        assert ends == [one[1], other[1]]
        assert one[1] == other[0]


def test_a_ring_of_ranks_of_which_one_stands_for_all_meets_itself(tmp_path: Path) -> None:
    ring = Group(id=1, axis="cp", ranks=(0, 1, 2, 3))
    both = [message("send", peer=1), message("recv", peer=3)]
    found = tables([("communication", 0, 0, 0), ("communication", 1, 0, 0)], messages=both)
    simulation = run(tmp_path, {0: found}, [ring], world_size=4, layout=Layout(cp=4))
    assert not [warning for warning in simulation.info.warnings if "not rehearsed" in warning]


def test_a_peer_that_was_not_rehearsed_is_said(tmp_path: Path) -> None:
    sender = tables([("communication", 0, 0, 0)], messages=[message("send", peer=1)])
    simulation = run(tmp_path, {0: sender}, [PP], layout=Layout(pp=2), representatives=(0, 0))
    assert any("rehearse with --ranks auto" in warning for warning in simulation.info.warnings)


def test_a_pipeline_rank_alone_is_not_taken_for_its_neighbours(tmp_path: Path) -> None:
    """It sends to the next stage and receives from the last: nobody is there, and nothing waits for ever."""
    both = [message("send", peer=1), message("recv", peer=3)]
    found = tables(
        [("communication", 1, 0, 0), ("wait", -1, 0, 0), ("communication", 0, 0, 0)], messages=both
    )
    ring = Group(id=1, axis="pp", ranks=(0, 1, 2, 3))
    simulation = run(
        tmp_path, {0: found}, [ring], world_size=4, layout=Layout(pp=4), representatives=(0,) * 4
    )
    assert any("2 transfers go to" in warning for warning in simulation.info.warnings)


def test_steps_without_work_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="hold no work"):
        run(tmp_path, {0: tables([("op", 0, 0, -1)], places=[place(step=0)])}, [DP])


def test_unknown_kernels_are_listed_with_their_share(tmp_path: Path) -> None:
    custom = work(name="mine.kernel", kind="memory", flops=0, is_known=False)
    simulation = run(tmp_path, {0: tables([("op", 0, 0, -1)], works=[custom])}, [DP])
    assert any("mine.kernel 100.0 %" in warning for warning in simulation.info.warnings)


def test_a_small_model_waits_for_its_host(tmp_path: Path) -> None:
    """A thousand kernels of four microseconds take the host longer to launch."""
    small = work(kind="memory", flops=0, bytes_moved=512)
    simulation = run(tmp_path, {0: tables([("op", 0, 0, -1)] * 1000, works=[small])}, [DP])
    launch_s = 1000 * 0.65 * machine(8).device.launch_s
    assert simulation.summary["step_time_s"] >= launch_s
    assert any("launching takes longer" in line for line in simulation.summary["rests_on"])


def test_what_a_script_does_between_the_parts_of_a_step_is_launched_without_a_framework(
    tmp_path: Path,
) -> None:
    """A copy for each of a thousand ranks takes the host 8 us, no 42 as in the model; then it runs."""
    small = work(kind="memory", flops=0, bytes_moved=4)
    found = tables([("op", 0, 0, -1)] * 1000, works=[small], places=[place(name="gradients")])
    simulation = run(tmp_path, {0: found}, [DP])
    assert simulation.summary["step_time_s"] == pytest.approx(1000 * (8e-6 + 4e-6), rel=0.01)


def test_tokens_and_flops_are_those_of_all_ranks(tmp_path: Path) -> None:
    found = tables([("op", 0, 0, -1)])
    run(tmp_path, {0: found}, [DP])
    rehearsal = read_rehearsal(tmp_path)
    assert rows_and_tokens(rehearsal) == (2, 2 * 4096)
    pictures = replace(rehearsal, job={**rehearsal.job, "input_shape": [32, 3, 224, 224]})
    assert rows_and_tokens(pictures) == (64, 0)
    assert model_flops(rehearsal, {0: found}) == 2 * 2 * SIDE**3


def test_attention_counts_in_full_and_recomputation_not_at_all(tmp_path: Path) -> None:
    attention = work(kind="attention_backward", causal=True, flops=1000)
    run(tmp_path, {0: tables([("op", 0, 0, -1)], works=[attention])}, [DP])
    rehearsal = read_rehearsal(tmp_path)
    assert model_flops(rehearsal, {0: tables([("op", 0, 0, -1)], works=[attention])}) == 2 * 1600
    again = tables([("op", 0, 0, -1)], works=[attention], places=[place(kind="recompute")])
    assert model_flops(rehearsal, {0: again}) == 0
    updated = tables([("op", 0, 0, -1)], places=[place(kind="optimizer")])  # as Muon does
    assert model_flops(rehearsal, {0: updated}) == 0
