"""From what a rank issues to a program: the order of CUDA streams, and what it costs."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc
from tests.simulator.rehearsal_tables import GIB, SIDE, machine, message, place, run, tables, work, written

from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.errors import JobError
from foretrace.simulator.network.cost import Network
from foretrace.simulator.rehearsed.notes import in_flight, model_flops
from foretrace.simulator.rehearsed.run import simulate_rehearsal
from foretrace.simulator.rehearsed.works import op_of
from foretrace.simulator.schedules import SCHEDULES, plan
from foretrace.simulator.schedules import in_flight as in_flight_of
from foretrace.simulator.workload.ops import gemm
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.errors import RunError
from foretrace.traces.layout import Group, Layout
from foretrace.traces.rehearsal import Rehearsal, read_rank, read_rehearsal, write_rank, write_rehearsal

DP = Group(id=1, axis="dp", ranks=(0, 1))


def test_a_rehearsal_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = tables([("op", 0, 0, -1), ("communication", 0, 0, 3)])
    write_rank(tmp_path, 5, found)
    assert read_rank(tmp_path, 5) == found
    works, messages = ["rows", "along", "aligned"], ["sent_bytes", "received_bytes"]
    later = {"places": ["trains"], "works": works, "messages": messages}
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
    with pytest.raises(RunError, match=r"job\.steps is null: a whole number is needed"):
        Rehearsal(world_size=1, ranks=(0,), representatives=(0,), groups=(), job={"steps": None})
    (tmp_path / "rehearsal.json").write_text(
        '{"format_version": 1, "world_size": 1, "ranks": [0], "representatives": [0], "memory": {"0": 4}}'
    )
    with pytest.raises(RunError, match=r"memory\.0 is 4"):
        read_rehearsal(tmp_path)


@pytest.mark.parametrize(
    "peak",
    [{"peak_bytes": "4"}, {"bytes": 4}, {"bytes": {"buffers": None}}, {"host": 4}, {"host": {"bytes": []}}],
)
def test_memory_of_a_rank_is_whole_numbers(peak: dict[str, Any]) -> None:
    with pytest.raises(RunError, match="memory of a rank"):
        Rehearsal(world_size=1, ranks=(0,), representatives=(0,), groups=(), memory={"0": peak})


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


def test_steps_without_work_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="hold no work"):
        run(tmp_path, {0: tables([("op", 0, 0, -1)], places=[place(step=0)])}, [DP])


def test_unknown_kernels_are_listed_with_their_share(tmp_path: Path) -> None:
    """By their time, the longest first; three calls that are three times as long are nine to one."""
    works = [
        work(name=name, kind="memory", flops=0, bytes_moved=size * GIB, is_known=name == "aten.add")
        for name, size in (("short.kernel", 1), ("long.kernel", 3), ("aten.add", 6))
    ]
    events = [("op", at, 0, -1) for at in (0, 1, 1, 1, 2)]
    simulation = run(tmp_path, {0: tables(events, works=works)}, [DP])
    (said,) = [warning for warning in simulation.info.warnings if "nobody has measured" in warning]
    assert said.endswith("long.kernel 56.3 %, short.kernel 6.3 %")


@pytest.mark.parametrize("n", [0, 1, 8, 9])
def test_numbers_that_a_script_was_told_are_listed(tmp_path: Path, n: int) -> None:
    """Up to eight, and how many more there are, beside what the rehearsal has noted itself."""
    stated = tuple(f"train.py:{at} reads a number: told {at}.5 (nothing is known of it)" for at in range(n))
    found = run(
        tmp_path, {0: tables([("op", 0, 0, -1)])}, [DP], stated=stated, notes=("noted",)
    ).info.warnings
    assert "noted" in found
    listed = "; ".join(f"train.py:{at}: {at}.5" for at in range(min(n, 8)))
    said = [warning.partition("was told: ")[2] for warning in found if "was told" in warning]
    assert said == [listed + "; and 1 more" * (n > 8)] * (n > 0)


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


def test_flops_are_those_of_all_ranks(tmp_path: Path) -> None:
    found = tables([("op", 0, 0, -1)])
    run(tmp_path, {0: found}, [DP])
    rehearsal = read_rehearsal(tmp_path)
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


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_micro_batches_in_flight_are_those_of_the_schedule(schedule: str) -> None:
    """From the order of issue alone, each pass of a micro-batch in two operations."""
    kinds = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
    for actions in plan(schedule, 4, 8):
        places = [
            place(kind=kinds[action.kind], stage=action.stage, microbatch=action.microbatch)
            for action in actions
        ]
        found = tables([("op", 0, 0, -1)] * (2 * len(actions)), places=places)
        numbers = pa.array([number for number in range(len(actions)) for _ in range(2)], pa.int32())
        at = found.events.schema.get_field_index("place")
        field = found.events.schema.field(at)
        found = found._replace(events=found.events.set_column(at, field, numbers))
        assert in_flight(found) == in_flight_of(actions)
    assert in_flight(tables([("op", 0, 0, -1)])) == 1


def test_a_script_in_a_type_without_a_peak_is_one_line(tmp_path: Path) -> None:
    """On a processor it says how the script is rehearsed as it runs there."""
    run(tmp_path, {0: tables([("op", 0, 0, -1)])}, [DP])
    with pytest.raises(JobError, match=r"computes in bf16, .* only for fp32: .* --without-gpu"):
        simulate_rehearsal(tmp_path, lambda n: load_cluster("localhost", n))
