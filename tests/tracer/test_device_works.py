"""Times of communications on a GPU are those of the device, or say that they are bounds."""

from itertools import pairwise
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tracer.devices import AHEAD_NS, MS, Device, Stream, Work, pretending

from foretrace.tracer import internals
from foretrace.tracer.collectives import CollectiveHook
from foretrace.tracer.completion import Completions
from foretrace.tracer.device_works import READ_NS
from foretrace.tracer.groups import GroupInfo, Groups
from foretrace.tracer.hooks import BatchHook
from foretrace.tracer.lane import Lane
from foretrace.tracer.operators import RECORDED
from foretrace.tracer.records import Communication, Position
from foretrace.tracer.sink import Streams
from foretrace.tracer.stamps import ANCHORED_NS, GATE

TOLERANCE_NS = 2 * ANCHORED_NS
"""What an anchor may be off, and a host that is not ahead of the device between a stamp and a launch."""


def group(number: int = 7) -> GroupInfo:
    return GroupInfo(number, "dp", (0, 1), name=f"group {number}")


def checked(device: Device) -> dict[Communication, tuple[int, int]]:
    """Return what is found, if none of it is wrong: near the truth, or bounds that hold it."""
    found = {}
    for one, start_ns, end_ns in device.found():
        true_start_ns, true_end_ns = device.true[one]
        if one.is_bound:
            assert start_ns <= true_start_ns + TOLERANCE_NS
            assert end_ns >= true_end_ns - TOLERANCE_NS
        else:
            assert abs(start_ns - true_start_ns) <= TOLERANCE_NS
            assert abs(end_ns - true_end_ns) <= TOLERANCE_NS
        found[one] = start_ns, end_ns
    assert found.keys() == device.true.keys()
    return found


@pytest.mark.parametrize(("has_recorder", "n_failing"), [(True, 0), (True, 1), (False, 0)])
def test_two_short_gathers_behind_a_long_computation(*, has_recorder: bool, n_failing: int) -> None:
    """They are waited for long after their end, where an event behind the wait tells nothing of them."""
    with pretending(Device(has_recorder=has_recorder)) as device:
        device.n_failing = n_failing
        gathers = [device.issue(world, MS, "all_gather") for world in [group()] for _ in range(2)]
        device.compute.run(20 * MS)
        for one in gathers:
            device.wait(one)
        found = checked(device)
        assert all(one.is_bound != has_recorder for one in gathers)
        if has_recorder:
            assert all(abs(end_ns - start_ns - MS) < 1000 for start_ns, end_ns in found.values())


@pytest.mark.parametrize("has_recorder", [True, False])
def test_a_stream_that_is_held_up_proves_the_end(*, has_recorder: bool) -> None:
    with pretending(Device(has_recorder=has_recorder)) as device:
        device.compute.run(5 * MS)  # the host is ahead
        for _ in range(3):
            device.wait(device.issue(group(), 3 * MS))
            device.compute.run(MS)
        assert not any(one.is_bound for one in checked(device))


def test_an_idle_stream_proves_nothing() -> None:
    """Between the events before and behind the wait time passes, but it is the host's."""
    with pretending(Device(has_recorder=False)) as device:
        one = device.issue(group(), MS)
        device.now_ns += 50 * MS
        launch = one.launch
        assert launch is not None
        device.works.reached(one)
        device.now_ns += 50 * MS  # the training is slow to make the wait, which is over at once
        device.works.waited_on_device(one)
        checked(device)
        assert one.is_bound


def test_a_start_behind_an_unknown_end_is_a_bound() -> None:
    """The second began when the first had ended, and that was some time before it was waited for."""
    with pretending(Device(has_recorder=False)) as device:
        world = group()
        first, second = device.issue(world, MS), device.issue(world, 5 * MS)
        device.compute.run(2 * MS)
        device.wait(first)
        device.wait(second)
        checked(device)
        assert second.is_bound


def test_a_transfer_may_have_a_stream_of_its_own() -> None:
    with pretending(Device(has_recorder=False)) as device:
        world = group()
        gather = device.issue(world, 5 * MS)
        sent = device.issue(world, MS, "send", peer=1)
        device.compute.run(2 * MS)
        device.wait(sent)
        device.wait(gather)
        checked(device)


CALLS = st.one_of(
    st.tuples(st.just("compute"), st.integers(0, 20 * MS)),
    st.tuples(st.just("host"), st.sampled_from([1_000, 50_000, MS, 30 * MS])),
    st.tuples(st.sampled_from(["issue", "sync", "send", "batch"]), st.integers(10_000, 5 * MS)),
    st.tuples(st.just("wait"), st.integers(0, 5)),
    st.tuples(st.just("stream"), st.integers(0, 2)),
)


@given(
    calls=st.lists(CALLS, min_size=1, max_size=25),
    has_recorder=st.booleans(),
    kept=st.sampled_from([3, 2000]),
    is_bound=st.booleans(),
    n_groups=st.integers(1, 2),
)
def test_whatever_is_called_times_are_true_or_marked(
    calls: list[tuple[str, int]], *, has_recorder: bool, kept: int, is_bound: bool, n_groups: int
) -> None:
    groups = [group(number) for number in range(n_groups)]
    with pretending(Device(has_recorder=has_recorder, kept=kept, is_bound=is_bound)) as device:
        streams = [device.compute, Stream(device), Stream(device)]
        open_: list[Communication] = []
        for number, (what, value) in enumerate(calls):
            own = groups[number % n_groups]
            if what == "compute":
                device.current.run(value)
            elif what == "host":
                device.now_ns += value
            elif what == "stream":
                device.current = streams[value]
            elif what == "wait" and open_:
                device.wait(open_.pop(value % len(open_)))
            elif what == "batch":
                open_.append(device.batch(own, value, ["send", "recv"])[0])
            elif what != "wait":
                peer = 1 if what == "send" else -1
                kind = "send" if what == "send" else "all_reduce"
                open_.append(device.issue(own, value, kind, peer=peer, is_sync=what == "sync"))
        checked(device)


def test_what_nobody_waits_for_is_found_by_the_thread_that_writes() -> None:
    with pretending(Device(has_recorder=False)) as device:
        device.compute.run(5 * MS)
        world = group()
        buckets = [device.issue(world, 2 * MS) for _ in range(3)]
        works = [one.launch.work for one in buckets if one.launch is not None]
        assert [work.end_ns for work in works] == sorted(work.end_ns for work in works)
        found = checked(device)
        assert not any(one.is_bound for one in buckets)
        assert all(first[1] <= second[0] for first, second in pairwise(found.values()))
        assert all(one.launch is not None and one.launch.work is None for one in buckets)
        assert not device.works.by_work


def test_what_the_training_has_waited_for_is_dropped_at_once() -> None:
    """Its tensors are free as soon as they would be without a recording."""
    with pretending(Device()) as device:
        one = device.issue(group(), MS)
        one.storages = (1000,)
        device.works.by_storage[1000] = one
        assert one.launch is not None
        assert device.works.by_work[id(one.launch.work)] is one
        device.wait(one)
        assert one.work is one.launch.work is None
        assert not device.works.by_work
        assert not device.works.by_storage


def test_a_work_that_does_not_tell_has_an_end_that_is_a_bound() -> None:
    with pretending(Device(has_recorder=False)) as device:
        one = device.issue(group(), MS)
        assert one.launch is not None
        one.launch.work._is_timed = False
        checked(device)
        assert one.is_bound


def test_the_flight_recorder_is_read_seldom() -> None:
    n_read = 0
    with pretending(Device()) as device:
        read = device.entries

        def counted() -> Any:
            nonlocal n_read
            n_read += 1
            return read()

        device.times.recorder._read = counted
        for _ in range(100):
            one = device.issue(group(), MS)
            device.compute.run(20 * MS)
            device.wait(one)
            device.now_ns += READ_NS // 10
            with device.writing():
                device.times.recorder.look(0)
                device.times.of(one, last=False)
        assert 5 <= n_read <= 11


def test_a_wall_clock_that_is_set_makes_no_time_wrong() -> None:
    with pretending(Device()) as device:
        first = device.issue(group(), MS)
        device.compute.run(20 * MS)
        device.wait(first)
        device._entries = [(name, made + 3600 * 1000 * MS, work) for name, made, work in device._entries]
        checked(device)
        assert first.is_bound
    assert AHEAD_NS  # the two clocks never agree here


def test_batches_of_threads_and_of_groups_are_apart_and_an_exception_ends_its_own() -> None:
    with pretending(Device()) as device:
        mine, other = group(1), group(2)
        device.works.batch_begun(mine)
        lost = device.described(mine)
        device.works.issued_on_device(lost, None, 0)  # then an exception, and no end of the batch
        aside = device.issue(other, MS)
        assert aside.launch is not None
        thread = Thread(target=lambda: device.batch(mine, MS, ["send", "recv"]))
        thread.start()
        thread.join()
        theirs = [one for one in device.true if one.kind in {"send", "recv"}]
        assert len({id(one.launch) for one in theirs}) == 1
        assert lost.end is None
        batch = device.batch(mine, MS, ["all_reduce"])
        assert lost.is_bound
        assert lost.end is not None
        assert lost.launch is None
        assert batch[0].launch is not None
        for one in (theirs[0], *batch, aside):
            device.wait(one)
        checked(device)
        assert not any(one.is_bound for one in device.true)


def test_a_batch_that_goes_to_the_current_stream_ends_there() -> None:
    with pretending(Device()) as device:
        world = group()
        device.works.batch_begun(world)
        members = [device.described(world, "all_gather") for _ in range(2)]
        for one in members:
            device.works.issued_on_device(one, None, 0)
        start_ns, end_ns = device.compute.run(2 * MS)
        device.works.batch_issued(world, None, 0)
        device.true |= dict.fromkeys(members, (start_ns, end_ns))
        checked(device)


def test_no_work_is_asked_while_a_graph_is_captured() -> None:
    with pretending(Device()) as device:
        captured = device.described(group())
        captured.start = device.clock()
        device.works.issued_on_device(captured, Work(device, 0, 0), 0)
        assert isinstance(captured.end, int)
        assert captured.launch is None


def test_tensors_without_elements_are_not_taken_for_each_other() -> None:
    works = Completions(lambda *_: True, 0)
    with pretending(Device()) as device:
        one = device.described(group())
        one.storages = (0, 1000)
        works.issued_on_device(one, Work(device, 0, 0), 0)
    assert set(works.by_storage) == {1000}


def test_a_hang_keeps_no_tensors_when_the_recording_ends() -> None:
    with pretending(Device()) as device:
        one = device.issue(group(), 10**9 * MS)
        device.true[one] = 0, 0  # found() does not wait for it
        assert list(device.found()) == []
        assert one.launch is not None
        assert one.launch.work is None


def test_ends_of_bounds_may_overlap_but_not_on_one_stream() -> None:
    streams = Streams()
    with pretending(Device()) as device:
        ones = [device.described(group()) for _ in range(3)]
    placed = [streams.place(one, 10 * i, 100) for i, one in enumerate(ones)]
    assert [stream for stream, *_ in placed] == ["dp", "dp.1", "dp.2"]


def test_a_wait_of_the_training_and_the_thread_that_writes_agree() -> None:
    """Whoever comes first has the end; the other one changes nothing."""
    with pretending(Device(has_recorder=False)) as device:
        completions = Completions(lambda *_: True, 0)
        one = device.described(group())
        work = Work(device, device.now_ns, device.now_ns + MS)
        completions.issued_on_device(one, work, 0)
        device.now_ns += 5 * MS
        assert one.launch is not None
        with device.writing():
            completions.ask(one.launch)
        end = one.end
        assert isinstance(end, int)
        completions.claim(one)
        completions.ended(one)
        assert one.end is end
        assert one.launch.duration_ns == MS
        with GATE.asking() as allowed:
            assert allowed


class Raising:
    """A class of process groups whose batches may end in an error."""

    fails = False

    def _start_coalescing(self, device: Any) -> None: ...

    def _end_coalescing(self, device: Any) -> str:
        if self.fails:
            raise RuntimeError("a peer is gone")
        return "the work"


def test_an_error_at_the_end_of_a_batch_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is the training's: what is issued next is no part of it."""
    monkeypatch.setattr(internals, "batching", lambda: (Raising, "_start_coalescing", "_end_coalescing"))
    made, world = Raising(), group()
    with pretending(Device()) as device:
        session: Any = SimpleNamespace(
            completions=device.works,
            groups=SimpleNamespace(of=lambda _: world),
            guarded=lambda _, function: function,
        )
        hook = BatchHook(session)
        made._start_coalescing("cuda")
        lost = device.described(world)
        device.works.issued_on_device(lost, None, 0)
        made.fails = True
        with pytest.raises(RuntimeError, match="a peer is gone"):
            made._end_coalescing("cuda")
        assert lost.is_bound
        after = device.issue(world, MS)
        assert after.launch is not None
        made.fails = False
        made._start_coalescing("cuda")
        assert made._end_coalescing("cuda") == "the work"  # of nothing
        hook.remove()
        device.wait(after)
        checked(device)
    assert "_end_coalescing" in vars(Raising)


class OnGpu(SimpleNamespace):
    """What a hook asks a tensor of a GPU."""

    is_cuda, dtype, nbytes = True, "torch.bfloat16", 64

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return 4096


@pytest.mark.parametrize("is_sync", [True, False])
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "cuda:mine", "torchcomms"])
def test_a_call_is_known_by_the_device_of_its_tensors_whatever_the_backend_is_called(
    monkeypatch: pytest.MonkeyPatch, backend: str, *, is_sync: bool
) -> None:
    """With a work it runs beside the current stream, without one on it; a backend is asked once to time."""
    torch = pytest.importorskip("torch")
    asked: list[Any] = []

    def timed(process_group: Any) -> None:
        asked.append(process_group)
        raise RuntimeError("no timing")

    monkeypatch.setattr(internals, "time_on_device", timed)
    with pretending(Device()) as device:
        monkeypatch.setattr("foretrace.tracer.collectives.cuda_stamp", device.stamp)
        work = None if is_sync else Work(device, device.now_ns, device.now_ns + MS)
        monkeypatch.setattr(internals, "redispatch", lambda _: lambda *_: ([], work))
        session: Any = SimpleNamespace(
            groups=Groups(2, lambda _: backend, lambda _: (0, 1)),
            completions=Completions(lambda *_: True, 0),
            disabled=set(),
            guarded=lambda _, function: function,
            issued=SimpleNamespace(note=lambda _: None),
            lane=Lane(Position(), lambda _: None),
            pausing=lambda: (lambda: None, lambda *_: None),
            position=Position(),
            rank=0,
        )
        put: list[Communication] = []
        session.sink = SimpleNamespace(put=put.append)
        hook: Any = CollectiveHook.__new__(CollectiveHook)
        hook._session, hook._lane, hook._after = session, session.lane, 1

        def unbox(boxed: Any) -> Any:
            if boxed is None:
                raise TypeError("no work")
            return boxed

        hook._unbox_group = hook._unbox_work = unbox
        kernel = hook._noting("allreduce_", RECORDED["allreduce_"], torch.ops.c10d.allreduce_.default)
        made = SimpleNamespace(group_name="0", group_desc="default_pg")
        made = type("ProcessGroup", (), vars(made))()
        for _ in range(2):
            kernel(1, [OnGpu()], made, "sum", None, -1)
        assert asked == [made]
        assert [one.launch is None for one in put] == [is_sync] * 2
        assert all((one.end is None) is not is_sync for one in put)
