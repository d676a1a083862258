"""What a rank issues runs as on a GPU: when each thing may start is said by a clock for every stream."""

from collections.abc import Sequence
from typing import Any, Final

import pytest
from hypothesis import example, given, settings
from hypothesis.strategies import DrawFn, composite, integers, sampled_from
from tests.simulator.rehearsal_tables import GROUPS, Event, machine, message, place, tables, work, written

from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.engine import choose
from foretrace.simulator.network.cost import Network
from foretrace.simulator.rehearsed.program import Joiner, RankTasks, assembled
from foretrace.simulator.rehearsed.rank import RankTask
from foretrace.simulator.rehearsed.works import priced

MIB = 2**20
WORKS = [
    work(),
    work(name="aten.add", kind="memory", flops=0, bytes_moved=256 * MIB),
    work(name="host.to_device", kind="to_device", flops=0, bytes_moved=64 * MIB),
    work(name="aten._fused_adamw_", kind="on_host", dtype="fp32", flops=0, bytes_moved=28 * MIB, kernels=0),
]
ON_HOST = 3
MESSAGES = [message(size_bytes=64 * MIB), message(is_async=False), message(group=2, size_bytes=16 * MIB)]
COMPUTE, NETWORK = ComputeModel(machine(8).device, "bf16"), Network(machine(8))
SECONDS = priced(tables([], WORKS).works, COMPUTE).seconds
COSTS = [NETWORK.collective("all_reduce", one["size_bytes"], GROUPS[one["group"]].ranks) for one in MESSAGES]
STREAMS = (0, 3)


@composite
def issued(draw: DrawFn) -> list[Event]:
    """Return what a rank issues on two streams, at two places, all of whose waits are for something."""
    events: list[Event] = []
    sent, marks = list[int](), list[int]()
    for _ in range(draw(integers(1, 16))):
        possible = ["op", "op", "communication", "communication", "mark", "host_wait", "host_wait"]
        what = draw(sampled_from(possible + ["wait"] * 4 * bool(sent) + ["wait_mark"] * 4 * bool(marks)))
        item, number = -1, -1
        if what == "op":
            item = draw(sampled_from(range(len(WORKS))))
        elif what == "communication":
            item, number = draw(sampled_from(range(len(MESSAGES)))), len(sent)
            sent.append(len(events))
        elif what == "mark":
            item = len(marks)
            marks.append(item)
        elif what == "wait":
            number = draw(sampled_from(sent))
        elif what == "wait_mark":
            item = draw(sampled_from(marks))
        events.append((what, item, draw(sampled_from(STREAMS)), number, draw(integers(0, 1))))
    return events


def clocked(events: Sequence[Event]) -> tuple[list[float], float]:
    """Return when each communication starts, and when all is done, in seconds, as the documents of CUDA say.

    A stream works in order. An event stands for what its stream had been given; a communication starts when
    the stream that asks for it has come so far and the one before it in its group is done. The host goes on
    at once, unless it waits for a stream, as it does before it computes with what it has asked for.
    """
    at = dict.fromkeys(STREAMS, 0.0)
    in_group, ends, marks = dict[int, float](), dict[int, float](), dict[int, float]()
    waited = host = done = 0.0
    starts: list[float] = []
    for index, (what, item, stream, number, *_) in enumerate(events):
        if what == "op" and item == ON_HOST:
            host = max(host, waited) + SECONDS[item]
            done = max(done, host)
        elif what == "op":
            at[stream] = max(at[stream], host) + SECONDS[item]
            done = max(done, at[stream])
        elif what == "communication":
            one, cost = MESSAGES[item], COSTS[item]
            starts.append(max(at[stream], host, in_group.get(one["group"], 0.0)))
            ends[index] = in_group[one["group"]] = starts[-1] + (cost.latency_ns + cost.wire_ns) / 1e9
            at[stream] = at[stream] if one["is_async"] else ends[index]
            done = max(done, ends[index])
        elif what == "wait":
            at[stream] = max(at[stream], ends[number])
        elif what == "mark":
            marks[item] = at[stream]
        elif what == "wait_mark":
            at[stream] = max(at[stream], marks[item])
        else:
            waited = max(waited, at[stream])
    return starts, done


def _run(events: Sequence[Event], **asked: Any) -> list[tuple[RankTask, int, int]]:
    """Return what becomes of *events*, when it starts and when it ends, in nanoseconds."""
    works = [one for at, one in enumerate(WORKS) if at in {event[1] for event in events if event[0] == "op"}]
    number = {id(one): at for at, one in enumerate(works)}
    given: Any = [
        (what, number[id(WORKS[item])] if what == "op" else item, *rest) for what, item, *rest in events
    ]
    places = [place(), place(name="layers.1", layer=1)]
    found = written(tables(given, works, MESSAGES, places), **asked)
    joiner = Joiner(NETWORK, GROUPS, (0, 0, 0, 0))
    program = assembled([RankTasks(0, found.tasks, found.places)], joiner, 1)
    spans = choose("event", program.n_tasks, lambda _: None).run(program, ()).to_pylist()
    return [
        (task, span["start_ns"], span["start_ns"] + span["duration_ns"])
        for task, span in zip(found.tasks, spans, strict=False)
    ]


TWO_WAITED_FOR: Final[list[Event]] = [
    ("op", 0, 0, -1),
    ("host_wait", -1, 0, -1),
    ("op", 1, 3, -1),
    ("host_wait", -1, 3, -1),
    ("op", ON_HOST, 0, -1),
]


@settings(max_examples=80)
@given(issued())
@example(TWO_WAITED_FOR)
def test_everything_starts_when_the_clocks_of_its_stream_say(events: list[Event]) -> None:
    """Operations that became one task, and what was asked for before and after them, included."""
    found = _run(events)
    starts, end = clocked(events)
    sent = [start for task, start, _ in found if task.meeting is not None]
    assert sent == pytest.approx([start * 1e9 for start in starts], abs=20)
    assert max((end for _, _, end in found), default=0) == pytest.approx(end * 1e9, abs=20)


@pytest.mark.parametrize("n", [1, 50])
def test_a_host_that_reads_each_result_launches_the_next_operation_after_it(n: int) -> None:
    """Nothing hides a launch then: all of them and all operations follow each other, messages included."""
    launch_s = 2 * SECONDS[1]
    wait: Event = ("host_wait", -1, 0, -1)
    steps: list[list[Event]] = [
        [("op", 1, 0, -1), wait, ("communication", 1, 0, number), wait] for number in range(n)
    ]
    events = [event for step in steps for event in step]
    found = _run(events, launch_s=[launch_s])
    each_s = 2 * launch_s + SECONDS[1] + (COSTS[1].latency_ns + COSTS[1].wire_ns) / 1e9
    assert max(end for _, _, end in found) == pytest.approx(n * each_s * 1e9, abs=20 * n)


def test_a_step_waits_for_what_it_has_sent_and_for_nothing_of_one_before() -> None:
    """Whatever the place is at which somebody waits, as at the begin of a step."""
    places = [place(step=0), place(step=1)]
    events: list[Event] = [("communication", 0, 0, 0, 0), ("wait", -1, 0, 0, 1), ("op", 0, 0, -1, 1)]
    events += [("communication", 0, 0, 1, 1), ("wait", -1, 0, 3, 0), ("op", 0, 0, -1, 1)]
    tasks = written(tables(events, places=places)).tasks
    assert [task.after for task in tasks] == [(), (0,), (0, 1)]


@pytest.mark.parametrize(
    ("changes", "at", "stream", "label"),
    [
        ({}, {"kind": "backward"}, "compute", ("compute", "backward", "layers.0")),
        ({}, {"kind": "optimizer", "name": ""}, "compute", ("compute", "optimizer", "optimizer")),
        ({"name": "fsdp.split"}, {}, "compute", ("compute", "copy", "layers.0")),
        ({"kind": "to_device"}, {}, "copy", ("copy", "offload", "to the device")),
        ({"kind": "to_host"}, {}, "copy", ("copy", "offload", "from the device")),
        ({"name": "input.to_device", "kind": "to_device"}, {}, "copy", ("copy", "input", "to the device")),
        ({"kind": "on_host"}, {"kind": "optimizer"}, "host", ("host", "optimizer", "optimizer on the host")),
        ({"kind": "on_host"}, {"name": "loss"}, "host", ("host", "forward", "loss on the host")),
    ],
)
def test_work_is_named_after_its_place_or_after_what_is_copied(
    changes: dict[str, Any], at: dict[str, Any], stream: str, label: tuple[str, str, str]
) -> None:
    (task,) = written(tables([("op", 0, 0, -1)], [work(**changes)], [], [place(**at)])).tasks
    assert (task.stream, task.label[:3]) == (stream, label)


def test_each_group_has_a_stream_and_each_kind_of_transfer_with_a_peer() -> None:
    """Those of the same name are numbered; messages without splits are even."""
    pairs = [("send", 1, "x"), ("recv", 1, "x"), ("send", 2, "x"), ("send", 1, "y"), ("send", 1, "x")]
    messages = [message(kind, group=2, peer=peer, name=name) for kind, peer, name in pairs]
    messages += [message(), message("all_to_all", group=2), message(group=9), message()]
    events: list[Event] = [("communication", at, 0, at) for at in range(len(messages))]
    tasks = written(tables(events, messages=messages)).tasks
    transfers = ["tp.send", "tp.recv", "tp.send.1", "tp.send.2", "tp.send"]
    assert [task.stream for task in tasks] == [*transfers, "dp", "tp", "", "dp"]
    assert [task.label.category for task in tasks] == ["p2p"] * 5 + ["collective"] * 4
    assert [task.label.axis for task in tasks] == ["tp"] * 5 + ["dp", "tp", "", "dp"]
    assert {task.meeting.splits for task in tasks if task.meeting} == {None}
    assert [task.meeting.sequence for task in tasks if task.meeting] == list(range(len(messages)))
