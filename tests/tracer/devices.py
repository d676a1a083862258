"""A GPU that is not there, with NCCL: streams, events, works and torch's flight recorder, on its own clock.

What a stream does is settled as soon as it is given to it, so that the true times of all are known. A look at
the clock takes a moment, and so the host comes on while it polls.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foretrace.tracer import completion, device_works, stamps
from foretrace.tracer.groups import GroupInfo
from foretrace.tracer.records import Block, Communication
from foretrace.tracer.sink import UnderWay
from foretrace.tracer.stamps import CudaStamp, Events, Resolver

MS = 1_000_000
AHEAD_NS = 12_345 * MS
"""How far the wall clock is ahead of the clock of the process."""

LOOK_NS = 100
"""Time that a look at the clock takes."""


class Stream:
    """An in-order queue of the device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.device_index = 0
        self.free_ns = 0

    def run(self, duration_ns: int) -> tuple[int, int]:
        """Give it a kernel; return its start and its end."""
        start_ns = max(self.free_ns, self._device.now_ns)
        self.free_ns = start_ns + duration_ns
        return start_ns, self.free_ns

    def wait(self, reached_ns: int) -> None:
        """Let what it is given from now on begin no earlier than *reached_ns*."""
        self.free_ns = max(self.free_ns, reached_ns)


class Event:
    """An event on a stream; only threads that may look at it can."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.device = SimpleNamespace(index=0)

    def record(self, stream: Stream) -> None:
        """Let *stream* come to it behind what it has been given."""
        self.reached_ns = max(stream.free_ns, self._device.now_ns)
        self._device.now_ns += self._device.call_ns

    def query(self) -> bool:
        """Whether the device has come to it."""
        assert self._device.may_ask, "an event was looked at on a thread that trains"
        return self._device.now_ns >= self.reached_ns

    def elapsed_time(self, other: Event) -> float:
        """Return milliseconds, as a number of 32 bits."""
        assert self._device.may_ask, "an event was looked at on a thread that trains"
        return float(np.float32((other.reached_ns - self.reached_ns) / 1e6))


class Work:
    """A work of NCCL. A second wait, or its future, nobody may ask for."""

    def __init__(self, device: Device, start_ns: int, end_ns: int, *, is_timed: bool = True) -> None:
        self._device, self._is_timed = device, is_timed
        self.start_ns, self.end_ns = start_ns, end_ns

    def is_completed(self) -> bool:
        """Whether the device is through."""
        assert self._device.may_ask, "a work was asked on a thread that trains"
        return self._device.now_ns >= self.end_ns

    def _get_duration(self) -> float:
        """Return how long it ran, in milliseconds."""
        if not self._is_timed:
            raise RuntimeError("getDuration only works if timing was enabled")
        return float(np.float32((self.end_ns - self.start_ns) / 1e6))


class Device:
    """The device, the host that feeds it, and the part of ``torch.cuda`` that a resolver uses.

    Args:
        has_recorder: whether torch's flight recorder is on.
        kept: entries that it keeps.
        is_bound: whether groups are bound to their device.

    Attributes:
        now_ns: time of the host.
        call_ns: time that a call of the driver takes.
        may_ask: whether the thread that runs may look at events.
        true: start and end of each communication.
        n_failing: times that the flight recorder cannot be read from now on.
    """

    def __init__(self, *, has_recorder: bool = True, kept: int = 2000, is_bound: bool = False) -> None:
        self.now_ns, self.call_ns, self.kept = 1_000 * MS, 2_000, kept
        self.may_ask, self.is_bound = False, is_bound
        self._has_recorder, self.n_failing = has_recorder, 0
        self._entries: list[tuple[str, int, Work]] = []
        self._nccl: dict[tuple[int, int], Stream] = {}
        self.compute = self.current = Stream(self)
        self.true: dict[Communication, tuple[int, int]] = {}
        self.works = completion.Completions(lambda *_: True, 0)
        recorder = device_works.FlightRecorder(self.entries)
        self.times = device_works.DeviceTimes(Resolver(self), recorder)
        self.times.ask = self.works.ask

    def clock(self) -> int:
        """Return the time of the host, a moment later than before."""
        self.now_ns += LOOK_NS
        return self.now_ns

    def Event(self, *, enable_timing: bool) -> Event:  # noqa: N802 - as torch has it
        """Return an event."""
        return Event(self)

    def Stream(self) -> Stream:  # noqa: N802 - as torch has it
        """Return a stream."""
        return Stream(self)

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        """Make *index* the current device."""
        yield

    def stamp(self, index: int) -> CudaStamp:
        """Stand for ``cuda_stamp``."""
        event = Event(self)
        event.record(self.current)
        return CudaStamp(event)

    def entries(self) -> list[list[dict[str, Any]]]:
        """Return what the flight recorder keeps; the watchdog comes by every 100 ms."""
        assert self.may_ask
        if self.n_failing:
            self.n_failing -= 1
            raise RuntimeError("not now")
        seen_ns = self.now_ns // (100 * MS) * 100 * MS
        kept = self._entries[-self.kept :] if self._has_recorder else []
        return [
            [
                {
                    "process_group": (name, "a group"),
                    "profiling_name": "nccl:all_reduce",
                    "time_created_ns": made,
                    "retired": work.end_ns <= seen_ns,
                    **({"duration_ms": work._get_duration()} if work.end_ns <= seen_ns else {}),
                }
                for name, made, work in kept
            ]
        ]

    def issue(
        self,
        group: GroupInfo,
        duration_ns: int,
        kind: str = "all_reduce",
        *,
        peer: int = -1,
        is_sync: bool = False,
    ) -> Communication:
        """Call a communication of *duration_ns*, as the hook does."""
        one = self.described(group, kind, peer)
        called = self.wall_ns()
        self.now_ns += 10_000
        work = self.launched(group, duration_ns, [one], is_sync=is_sync)
        self.now_ns += 5_000
        self.works.issued_on_device(one, work, called)
        return one

    def described(self, group: GroupInfo, kind: str = "all_reduce", peer: int = -1) -> Communication:
        """Return what a hook notes before the call."""
        place = (0, -1, -1, -1)
        number = group.next_collective()
        return Communication(kind, group, number, peer, 64, "bf16", Block("b"), place, self.stamp(0), (), 0)

    def launched(
        self, group: GroupInfo, duration_ns: int, members: list[Communication], *, is_sync: bool = False
    ) -> Work | None:
        """Run something on NCCL's stream, or on the current one; return its work.

        A transfer by itself has a stream of its pair, or, in a group that is bound to its device, none.
        """
        own = members[0].peer if len(members) == 1 and not self.is_bound else -1
        stream = self.current if is_sync else self._nccl.setdefault((group.id, own), Stream(self))
        made = self.wall_ns()
        self.now_ns += 3_000
        stream.wait(self.current.free_ns)
        work = Work(self, *stream.run(duration_ns))
        self._entries.append((group.name, made, work))
        self.true |= dict.fromkeys(members, (work.start_ns, work.end_ns))
        return None if is_sync else work

    def batch(self, group: GroupInfo, duration_ns: int, kinds: list[str]) -> list[Communication]:
        """Call several as one."""
        self.works.batch_begun(group)
        members = []
        for kind in kinds:
            members.append(self.described(group, kind, 1))
            self.now_ns += 10_000
            self.works.issued_on_device(members[-1], None, 0)
        called = self.wall_ns()
        stream = self._nccl.setdefault((group.id, -1), Stream(self))
        made = self.wall_ns()
        stream.wait(self.current.free_ns)
        work = Work(self, *stream.run(duration_ns))
        self._entries.append((group.name, made, work))
        self.true |= dict.fromkeys(members, (work.start_ns, work.end_ns))
        self.works.batch_issued(group, work, called)
        return members

    def found(self) -> Iterator[tuple[Communication, int, int]]:
        """Yield what ``UnderWay`` finds of all that was issued, once the device is through and at the end."""
        under_way = UnderWay(self.times)
        for one in self.true:
            under_way.add(one)
        for look in range(4):
            self.now_ns = max(
                [self.now_ns + 11_000 * MS, self.compute.free_ns, *(end for _, end in self.true.values())]
            )
            with self.writing():
                self.times.recorder.look(0, closing=True)
                yield from under_way.take(last=look == 3)

    def wait(self, one: Communication) -> None:
        """Wait for *one* on the current stream, as ``Work.wait`` does with our hook around it."""
        if one.launch is None or one.launch.work is None:
            return
        work = one.launch.work
        self.works.reached(one)
        self.now_ns += 4_000
        self.current.wait(work.end_ns)
        self.works.waited_on_device(one)

    def wall_ns(self) -> int:
        """Return the wall-clock time."""
        return self.clock() + AHEAD_NS

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the thread that writes."""
        self.may_ask = True
        yield
        self.may_ask = False


@contextmanager
def pretending(device: Device) -> Iterator[Device]:
    """Put *device*, and its clock, in place of what the recorder uses."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (completion, device_works, stamps):
            patch.setattr(module, "now_ns", device.clock)
        patch.setattr(stamps, "EVENTS", Events())
        patch.setattr(time, "sleep", lambda s: setattr(device, "now_ns", device.now_ns + round(s * 1e9)))
        patch.setattr(time, "time_ns", device.wall_ns)
        patch.setattr(completion, "cuda_stamp", device.stamp)
        yield device
