"""Ends of communications on a GPU: told by what runs anyway, with nothing that waits in the training's place.

The works are stand-ins that know what those of NCCL know; what must not be asked of them they do not have.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from foretrace.tracer.clock import now_ns
from foretrace.tracer.completion import Completions
from foretrace.tracer.groups import GroupInfo
from foretrace.tracer.records import Block, Communication
from foretrace.tracer.stamps import GATE, CudaStamp
from foretrace.tracer.streams import Streams

GROUP = GroupInfo(id=7, axis="dp", ranks=(0, 1), on_nccl=True)
MS = 1_000_000


class Work:
    """A work of NCCL: neither its future nor a second wait may be asked for."""

    def __init__(self, duration_ms: float | None = None) -> None:
        self.is_done = False
        self.n_asked = 0
        self._duration_ms = duration_ms

    def is_completed(self) -> bool:
        """Whether the device is through."""
        self.n_asked += 1
        return self.is_done

    def _get_duration(self) -> float:
        """Return how long it ran, in milliseconds."""
        if self._duration_ms is None:
            raise RuntimeError("getDuration only works if timing was enabled")
        return self._duration_ms


@pytest.fixture
def stamps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, CudaStamp]]:
    """Record every stamp on a device, with the index of the device."""
    made: list[tuple[int, CudaStamp]] = []

    def stamp(device: int) -> CudaStamp:
        made.append((device, CudaStamp(SimpleNamespace())))
        return made[-1][1]

    monkeypatch.setattr("foretrace.tracer.device_works.cuda_stamp", stamp)
    return made


def waits(work: Any) -> bool:
    """Stand for ``Work.wait``, which nobody may call for a work on a device."""
    raise AssertionError(f"{work} was waited for")


def issued(kind: str = "all_reduce", *, peer: int = -1, sequence: int = 0) -> Communication:
    """Return a communication of tensors of GPU 3."""
    start = CudaStamp(None)
    return Communication(
        kind, GROUP, sequence, peer, 64, "bf16", Block("b"), (0, -1, -1, -1), start, (1000 + sequence,), 3
    )


def test_a_collective_on_the_current_stream_ends_there(stamps: list[tuple[int, CudaStamp]]) -> None:
    completions, one = Completions(waits, rank=0), issued()
    completions.issued_on_device(one, None)
    assert stamps == [(3, one.end)]
    assert not completions.loose


def test_what_the_training_waits_for_ends_behind_the_wait(stamps: list[tuple[int, CudaStamp]]) -> None:
    completions, one, work = Completions(waits, rank=0), issued(), Work(duration_ms=2.0)
    completions.issued_on_device(one, work)
    assert completions.by_work[id(work)] is completions.by_storage[1000] is one
    completions.claim(one)
    completions.ended(one)
    assert stamps == [(3, one.end)]
    assert one.duration_ns is None
    assert one.work is None  # its tensors are free as soon as they would be without a recording
    assert not completions.by_work
    assert not completions.by_storage
    assert not completions.loose


def test_what_a_hook_finds_complete_says_how_long_it_ran(stamps: list[tuple[int, CudaStamp]]) -> None:
    completions = Completions(waits, rank=0)
    works = [Work(duration_ms=2.0), Work(duration_ms=3.0)]
    both = [issued(sequence=i) for i in range(2)]
    for one, work in zip(both, works, strict=True):
        completions.issued_on_device(one, work)
    for work in works:
        work.is_done = True
    found_ns = now_ns()
    completions.sweep()
    assert not stamps
    assert [one.duration_ns for one in both] == [2 * MS, 3 * MS]
    assert all(isinstance(one.end, int) and one.end >= found_ns and one.work is None for one in both)
    # Issued 1 ms apart, the second when the first is not over: it begins when that has ended.
    streams, late_ns = Streams(), 100 * MS
    assert streams.place(both[0], 10 * MS, late_ns) == ("dp", 10 * MS, 12 * MS)
    assert streams.place(both[1], 11 * MS, late_ns) == ("dp", 12 * MS, 15 * MS)


def test_a_work_that_does_not_tell_has_ended_when_it_is_found(stamps: list[tuple[int, CudaStamp]]) -> None:
    completions, one, work = Completions(waits, rank=0), issued(), Work()
    completions.issued_on_device(one, work)
    work.is_done = True
    before = now_ns()
    completions.ended(one)
    assert not stamps
    assert isinstance(one.end, int)
    assert before <= one.end <= now_ns()
    assert Streams().place(one, 5, one.end) == ("dp", 5, one.end)


def test_a_batch_ends_with_its_one_work(stamps: list[tuple[int, CudaStamp]]) -> None:
    completions, work, other = Completions(waits, rank=0), Work(), Work()
    batch = [issued("send", peer=1), issued("recv", peer=1, sequence=1)]
    completions.batch_begun()
    for one in batch:
        completions.issued_on_device(one, None)
    completions.batch_issued(work)
    beside = issued(sequence=2)
    completions.issued_on_device(beside, other)
    completions.ended(beside)  # waited for before the batch is
    assert [one.end for one in batch] == [None, None]
    completions.ended(completions.by_work[id(work)])
    assert batch[0].end is batch[1].end is stamps[-1][1]
    assert not completions.by_work
    assert not completions.by_storage


def test_no_work_is_asked_while_a_graph_is_captured(stamps: list[tuple[int, CudaStamp]]) -> None:
    completions, one, work = Completions(waits, rank=0), issued(), Work()
    completions.issued_on_device(one, work)
    GATE.capture_begins()
    try:
        completions.sweep()
        captured = issued(sequence=1)
        captured.start = now_ns()
        completions.issued_on_device(captured, Work())
    finally:
        GATE.capture_ended()
    assert work.n_asked == 0
    assert isinstance(captured.end, int)
    work.is_done = True
    completions.close()
    assert one.end is not None


def test_tensors_without_elements_are_not_taken_for_each_other(stamps: list[tuple[int, CudaStamp]]) -> None:
    completions, one = Completions(waits, rank=0), issued()
    one.storages = (0, 1000)
    completions.issued_on_device(one, Work())
    assert set(completions.by_storage) == {1000}


def test_a_hang_does_not_hold_up_the_end(stamps: list[tuple[int, CudaStamp]]) -> None:
    completions, one = Completions(waits, rank=0), issued()
    completions.issued_on_device(one, Work())
    completions.close(timeout_s=0.01)
    assert one.end is None
    assert not completions.loose
