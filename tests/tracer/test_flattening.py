"""Time is owned by one block at a time, and streams never overlap, whatever happens."""

from collections import defaultdict
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from, tuples

from foretrace.tracer.groups import GroupInfo
from foretrace.tracer.lane import NOBODY, Lane
from foretrace.tracer.records import Block, Communication, Position, Segment
from foretrace.tracer.sink import GLOO_THREADS, Streams

BLOCKS = [Block("model", is_glue=True), Block("layers.0", 0), Block("layers.0.mlp", 0), NOBODY]
ACTIONS = tuples(sampled_from(["push", "pop", "replace", "pause", "resume"]), integers(0, 3), integers(0, 9))


@given(actions=lists(ACTIONS, max_size=40))
def test_segments_follow_each_other_and_cover_the_time_that_is_owned(
    actions: list[tuple[str, int, int]],
) -> None:
    now, owned, waits, stack = 0, 0, 0, [NOBODY]
    segments: list[Segment] = []
    lane = Lane(Position(), segments.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretrace.tracer.lane.now_ns", lambda: now)
        for name, which, passed in actions:
            now += passed
            owned += passed * (not waits and stack[-1] is not NOBODY)
            block = BLOCKS[which]
            if name == "push":
                lane.push("forward", block)
                stack.append(block)
            elif name == "pop" and len(stack) > 1:
                lane.pop(lane.depth - 1)
                stack.pop()
            elif name == "replace" and len(stack) > 1:
                lane.replace("backward", block)
                stack[-1] = block
            elif name == "pause":
                assert lane.pause()
                waits += 1
            elif name == "resume" and waits:
                lane.resume(is_paused=True)
                waits -= 1
            assert lane.block == stack[-1]
        lane.pop(0)
    assert sum(s.end - s.start for s in segments) == owned  # type: ignore[operator, misc]
    ends, starts = [s.end for s in segments], [s.start for s in segments]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))  # type: ignore[operator]
    assert all(s.block is not NOBODY for s in segments)


def communication(kind: str, *, on_gloo: bool = True, peer: int = -1, group: int = 1) -> Communication:
    """Return a communication as a hook would describe it."""
    info = GroupInfo(group, "pp" if peer >= 0 else "dp", (0, 1), on_gloo)
    return Communication(kind, info, 0, peer, 8, "fp32", NOBODY, (0, -1, -1, -1), 0)


@given(
    spans=lists(
        tuples(integers(0, 50), integers(0, 30), sampled_from(["all_reduce", "reduce_scatter", "send"]))
    ),
    on_gloo=sampled_from([True, False]),
)
def test_streams_never_overlap_and_ends_are_kept(spans: list[tuple[int, int, str]], *, on_gloo: bool) -> None:
    streams = Streams()
    placed: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for issued, duration, kind in sorted(spans):
        one = communication(kind, on_gloo=on_gloo, peer=1 if kind == "send" else -1)
        stream, start, _ = streams.place(one, issued, issued + duration)
        assert issued <= start <= issued + duration
        assert kind != "send" or start == issued
        placed[stream].append((start, issued + duration))
    for found in placed.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(found)))


@given(durations=lists(integers(1, 30), min_size=1, max_size=12))
def test_collectives_of_one_group_use_no_more_streams_than_it_has_workers(durations: list[int]) -> None:
    """All issued at once: gloo works on two at a time, others on one."""
    for on_gloo, n_workers in ((True, GLOO_THREADS), (False, 1)):
        streams, free = Streams(), [0] * n_workers
        for duration in durations:
            worker = free.index(min(free))
            start, free[worker] = free[worker], free[worker] + duration
            one = communication("all_reduce", on_gloo=on_gloo)
            stream, found, _ = streams.place(one, 0, free[worker])
            assert found == start
            assert stream in {"dp", "dp.1"} if on_gloo else stream == "dp"


def test_an_empty_lane_owns_nothing() -> None:
    emitted: list[Any] = []
    lane = Lane(Position(), emitted.append)
    lane.resume(lane.pause())
    lane.pop(0)
    lane.replace("forward", BLOCKS[1])
    assert emitted == []
    assert lane.block is NOBODY


class Device:
    """Compute streams of a device: the time of each is its own, and known when something is given to it."""

    def __init__(self) -> None:
        self.now = 0
        self.own = {name: Stream(self, name) for name in ("compute", "compute.1")}
        self.at: Any = self.own["compute"]

    def current(self) -> Any:
        return self.at

    def stamp(self) -> int:
        return int(self.at.stamp())


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self._device, self.name = device, name

    def stamp(self) -> int:
        self._device.now += 1
        return self._device.now

    def is_same(self, stream: Any) -> bool:
        return bool(stream == self.name)


def test_only_waits_of_the_compute_stream_are_cut_out_of_its_time() -> None:
    emitted: list[Any] = []
    lane, device = Lane(Position(), emitted.append), Device()
    lane.move_to(cast("Any", device))
    lane.push("forward", BLOCKS[1])  # at 1
    device.at = None
    lane.resume(lane.pause())  # another stream waits while this thread has it current
    lane.resume(lane.pause_stream("gather"))
    device.at = device.own["compute"]
    lane.resume(lane.pause())  # from 2 to 3
    device.at = None
    lane.resume(lane.pause_stream("compute"))  # from 4 to 5, told from elsewhere
    lane.pop(0)  # at 6
    assert [(segment.start, segment.end) for segment in emitted] == [(1, 2), (3, 4), (5, 6)]


def test_a_block_on_another_stream_has_the_times_of_that_stream() -> None:
    """The block around it owns nothing meanwhile, and goes on, on its own stream, when it is over."""
    emitted: list[Segment] = []
    lane, device = Lane(Position(), emitted.append), Device()
    lane.move_to(cast("Any", device))
    lane.push("forward", BLOCKS[0])
    device.at = device.own["compute.1"]
    depth = lane.push("forward", BLOCKS[1])
    inner = lane.push("forward", BLOCKS[2])
    lane.resume(lane.pause_stream("compute"))  # the main stream waits, which does not own the time
    lane.pop(inner)
    lane.pop(depth)
    device.at = device.own["compute"]
    lane.pop(0)
    found = [(one.block.name, one.stream, one.start, one.end) for one in emitted]
    assert found == [
        ("model", "compute", 1, 2),
        ("layers.0", "compute.1", 3, 4),
        ("layers.0.mlp", "compute.1", 4, 5),
        ("layers.0", "compute.1", 5, 6),
        ("model", "compute", 7, 8),
    ]


@given(
    actions=lists(
        tuples(
            sampled_from(["push", "pop", "replace", "pause"]),
            integers(0, 3),
            sampled_from(["compute", "compute.1"]),
        ),
        max_size=40,
    )
)
def test_spans_of_one_stream_never_overlap(actions: list[tuple[str, int, str]]) -> None:
    emitted: list[Segment] = []
    lane, device = Lane(Position(), emitted.append), Device()
    lane.move_to(cast("Any", device))
    for name, which, stream in actions:
        device.at = device.own[stream]
        if name == "push":
            lane.push("forward", BLOCKS[which])
        elif name == "pop":
            lane.pop(max(lane.depth - 1, 0))
        elif name == "replace":
            lane.replace("backward", BLOCKS[which])
        else:
            lane.resume(lane.pause())
    lane.pop(0)
    by_stream: dict[str, list[Any]] = defaultdict(list)
    for one in emitted:
        by_stream[one.stream].append(one)
    for found in by_stream.values():
        assert all(before.end <= after.start for before, after in pairwise(found))
