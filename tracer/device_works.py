"""Communications of tensors of a GPU: when each began and ended there, as far as that is proven.

One on the stream that is current has an event before and one behind it, and those are its times. One beside
it, on a stream of NCCL, begins when the issuing stream has come to it and the one before it on that stream
has ended. Its end is proven by one of

- the wait of a stream: an event behind the wait, if the stream was held up by it. A stream that comes there
  later is not held up, and the event tells the time of that stream: the end was earlier;
- its duration, the time between two events of NCCL's own stream. Its ``Work`` tells it, but keeps the memory
  of its tensors, and so is kept no longer than until the training waits for it. Torch's flight recorder
  tells it about all works, also those that are gone.

Without either, what is known are bounds, and the span says so. No stream of ours may wait for a work, though
that would tell its end: torch hands out 32 streams in turn, and ours may be one on which the training works.
The future of a work records its tensors on such a stream, so that their memory is free only when that has
come there. A second wait lets go of tensors that NCCL still reads.

Threads of the training only record events, and look at none. All else is done on the thread that writes.
"""

from __future__ import annotations

import bisect
import operator
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from threading import get_ident
from typing import Any, Final, NamedTuple

from foretrace.tracer import internals
from foretrace.tracer.clock import now_ns
from foretrace.tracer.groups import GroupInfo
from foretrace.tracer.records import Communication, Launch
from foretrace.tracer.stamps import ANCHORED_NS, CudaStamp, Resolver, Stamp, cuda_stamp

COINCIDE_NS: Final = 10_000
"""Time between two events of a stream with nothing between them: less than this is no wait."""

READ_NS: Final = 10_000_000_000
"""Time between two looks at the flight recorder: each takes some 20 ms, most of it with the interpreter's
lock."""

MOST_WAITING: Final = 1_000
"""Communications under way for which it is looked at earlier: by default it keeps the last 2,000."""

CLOSING_NS: Final = 200_000_000
"""Time between two looks when a recording ends: torch's watchdog notes an end within 0.1 s."""

PATIENCE_NS: Final = 30_000_000_000
"""Time after a call at which the flight recorder tells its duration or never will."""


class DeviceWorks:
    """What is under way, on a GPU or not, and what the training does with what is on a GPU.

    Attributes:
        by_work: communications under way by the identity of their work; of a batch the last.
        by_storage: communications under way by the address of a tensor that they fill.
    """

    def __init__(self) -> None:
        self.by_work: dict[int, Communication] = {}
        self.by_storage: dict[int, Communication] = {}
        self._lock = threading.Lock()
        self._batches: dict[tuple[int, GroupInfo], list[Communication]] = {}

    def follow(self, communication: Communication, work: Any) -> None:
        """Know *communication* by its work and by the tensors that it fills."""
        communication.work = work
        self.by_work[id(work)] = communication
        for storage in communication.storages:
            if storage:  # empty tensors are nowhere, all of them
                self.by_storage[storage] = communication

    def forget(self, communication: Communication) -> None:
        """Stop following *communication*."""
        work, communication.work = communication.work, None
        if work is not None and self.by_work.get(id(work)) is communication:
            del self.by_work[id(work)]
        for storage in communication.storages:
            if self.by_storage.get(storage) is communication:
                del self.by_storage[storage]

    def issued_on_device(self, communication: Communication, work: Any, called: int) -> None:
        """Follow *communication*, of tensors of a GPU, to its end.

        Args:
            communication: just issued.
            work: its ``Work``; None if it went to the stream that is current, or into a batch.
            called: wall-clock time before the call, as ``time.time_ns`` has it.
        """
        batch = self._batches.get((get_ident(), communication.group)) if self._batches else None
        if isinstance(communication.start, int):  # captured into a graph: nothing runs
            communication.end = now_ns()
        elif batch is not None:
            batch.append(communication)
        else:
            self._launched([communication], work, called, is_batch=False)

    def batch_begun(self, group: GroupInfo) -> None:
        """What this thread issues in *group* from now on has no work of its own, but one for all."""
        self.batch_failed(group)
        self._batches[get_ident(), group] = []

    def batch_issued(self, group: GroupInfo, work: Any, called: int) -> None:
        """Note the work of a batch, of all that were collected; None if it went to the current stream."""
        if batch := self._batches.pop((get_ident(), group), None):
            self._launched(batch, work, called, is_batch=True)

    def batch_failed(self, group: GroupInfo) -> None:
        """An exception has ended the batch of this thread, if there is one: its end is not known."""
        for one in self._batches.pop((get_ident(), group), ()):
            one.is_bound, one.end = True, cuda_stamp(one.device)

    def _launched(self, members: list[Communication], work: Any, called: int, *, is_batch: bool) -> None:
        last = members[-1]
        if work is None:
            end = cuda_stamp(last.device)
            for one in members:
                one.start, one.end = last.start, end
            return
        launch = Launch(work, tuple(members), (called, time.time_ns()), now_ns(), last.start, is_batch)
        for one in members:
            one.launch = launch
            for storage in one.storages:
                if storage:
                    self.by_storage[storage] = last
        self.follow(last, work)

    def reached(self, communication: Communication) -> None:
        """The current stream is going to wait for *communication* of a GPU."""
        launch = communication.launch
        if launch is not None and launch.before is None:
            stamp = cuda_stamp(communication.device)
            with self._lock:
                if launch.members:
                    launch.before = stamp

    def waited_on_device(self, communication: Communication) -> None:
        """The current stream has been made to wait for *communication*: it comes here when that has ended."""
        launch = communication.launch
        if launch is not None and launch.before is not None:
            stamp = cuda_stamp(communication.device)
            launch.waited_ns = now_ns()
            self._end(launch, stamp)

    def ask(self, launch: Launch) -> None:
        """Note the end of *launch* if nobody waits for it and its work is complete; on the writing thread."""
        work = launch.work
        if work is None or launch.before is not None or not work.is_completed():
            return
        duration_ns = internals.device_ns(work)
        with self._lock:
            if launch.before is not None:  # waited for meanwhile
                return
            launch.duration_ns = duration_ns
            self._end(launch, now_ns())

    def _end(self, launch: Launch, end: Stamp) -> None:
        members, launch.members, launch.work = launch.members, (), None
        for one in members:
            self.forget(one)
            one.end = end


class FlightEntry(NamedTuple):
    """What the flight recorder knows of one operation."""

    made: int  # wall-clock time of its call, as ``time.time_ns`` has it
    duration_ns: int | None  # how long it ran, None if that is not known
    may_come: bool  # whether that may become known


_MADE: Final = operator.attrgetter("made")


class FlightRecorder:
    """How long works ran, as torch's flight recorder knows it; asked on the writing thread.

    Args:
        read: returns name of the group, time of the call, duration and whether it may come, as
            ``internals.flight_entries``; None if there is no flight recorder that may be read.
    """

    def __init__(self, read: Callable[[], list[tuple[str, int, int | None, bool]] | None]) -> None:
        self._read = read
        self._entries: dict[str, list[FlightEntry]] = {}
        self._is_absent = self._is_wanted = False
        self._read_ns = 0

    def look(self, n_waiting: int, *, closing: bool = False) -> None:
        """Read it, if something was asked that it may tell by now and it was not read just before.

        Args:
            n_waiting: communications under way, which it may have to tell of.
            closing: the recording ends.
        """
        is_due = now_ns() - self._read_ns > (CLOSING_NS if closing else READ_NS)
        if self._is_absent or not self._is_wanted or not (is_due or n_waiting > MOST_WAITING):
            return
        self._is_wanted = False
        try:
            entries = self._read()
        except Exception:  # that of another torch; what it would tell stays unknown
            entries = None
        self._read_ns = now_ns()
        self._is_absent = entries is None
        found: defaultdict[str, list[FlightEntry]] = defaultdict(list)
        for name, made, duration_ns, may_come in entries or ():
            found[name].append(FlightEntry(made, duration_ns, may_come))
        self._entries = {name: sorted(ones, key=_MADE) for name, ones in found.items()}

    def tell(self, launch: Launch, group: GroupInfo) -> bool:
        """Note the duration of *launch*, of *group*, if it is known; whether it is, or never will be.

        A call and an entry belong together if the entry was made while the call lasted. A call that launches
        several operations as one makes an entry for each, and then one that has a duration.
        """
        if self._is_absent:
            return True
        began, ended = launch.called
        entries = self._entries.get(group.name, [])
        first = bisect.bisect_left(entries, began, key=_MADE)
        made = entries[first : bisect.bisect_right(entries, ended, key=_MADE)]
        durations = [entry for entry in made if entry.duration_ns is not None]
        if len(durations) == 1 and durations[0] is made[-1]:
            launch.duration_ns = made[-1].duration_ns
            launch.from_ns = launch.returned_ns - (ended - made[-1].made)
            return True
        may_come = any(entry.may_come for entry in made) or self._read_ns <= launch.returned_ns
        if not may_come or now_ns() - launch.returned_ns > PATIENCE_NS:
            return True
        self._is_wanted = True
        return False


class _Queue:
    """When the stream of NCCL that works for a group is free: not before, and not later."""

    __slots__ = ("beside_ns", "from_ns", "until_ns")

    def __init__(self) -> None:
        self.from_ns = self.until_ns = 0
        self.beside_ns = 0  # transfers outside of batches may be on it, or on streams of their own


class DeviceTimes:
    """Finds out when communications of a GPU began and ended; used on the thread that writes.

    Those of a group must come in the order of their issue.

    Args:
        moments: tells when stamps were.
        recorder: tells how long works ran.

    Attributes:
        ask: looks whether what nobody waits for is complete.
    """

    def __init__(self, moments: Resolver, recorder: FlightRecorder | None = None) -> None:
        self._moments = moments
        self.recorder = FlightRecorder(internals.flight_entries) if recorder is None else recorder
        self.ask: Callable[[Launch], None] = lambda launch: None
        self._queues: defaultdict[int, _Queue] = defaultdict(_Queue)

    def of(self, one: Communication, *, last: bool) -> tuple[int, int] | None:
        """Return the start and the end of *one*, None while they are not known; note whether they are bounds.

        Args:
            one: a communication of any device.
            last: the recording ends: nobody will tell more.
        """
        launch, ns = one.launch, self._moments.ns
        if launch is not None and launch.work is not None and launch.before is None:
            self.ask(launch)
        if one.end is None or not self._moments.knows(one.start, one.end):
            return None
        if launch is None:
            start_ns = ns(one.start)
            return start_ns, max(ns(one.end), start_ns)
        if launch.times is None:
            stamps = launch.start, 0 if launch.before is None else launch.before
            if not self._moments.knows(*stamps) or not self._settle(launch, one, last=last):
                return None
        start_ns, end_ns, one.is_bound = launch.times or (0, 0, True)
        return start_ns, end_ns

    def _is_held_up(self, launch: Launch, end: Stamp | None) -> bool:
        """Whether *end* is proven: the stream that came to the wait for *launch* was held up by it.

        Between the two events there is nothing else. An idle stream comes to the second one when the host
        has issued it, however long that took.
        """
        if not isinstance(end, CudaStamp) or not isinstance(launch.before, CudaStamp):
            return False  # waited for while a graph was captured, or found complete
        before_ns, end_ns = self._moments.ns(launch.before), self._moments.ns(end)
        return end_ns > max(before_ns + COINCIDE_NS, launch.waited_ns + ANCHORED_NS)

    def _settle(self, launch: Launch, one: Communication, *, last: bool) -> bool:
        """Find the times of *launch*, of which *one* is a part; False: more may be told of it later."""
        ns, queue = self._moments.ns, self._queues[one.group.id]
        is_aside = one.is_p2p and not launch.is_batch
        is_held_up = self._is_held_up(launch, one.end)

        def begun() -> tuple[int, int]:
            """Return when it began: not before, and not later."""
            from_ns = max(ns(launch.start), launch.from_ns, 0 if is_aside else queue.from_ns)
            return from_ns, max(from_ns, launch.returned_ns, queue.until_ns, queue.beside_ns)

        from_ns, until_ns = begun()
        if launch.duration_ns is None and not (is_held_up and until_ns - from_ns <= ANCHORED_NS):
            if not self.recorder.tell(launch, one.group) and not last:
                return False
            from_ns, until_ns = begun()
        is_exact, duration_ns = until_ns - from_ns <= ANCHORED_NS, launch.duration_ns
        end_ns = ns(one.end or 0)  # at the latest
        if is_held_up:
            over_ns, is_bound = end_ns, duration_ns is None and not is_exact
            start_ns = from_ns if duration_ns is None else max(end_ns - duration_ns, from_ns)
        elif duration_ns is not None:
            start_ns, is_bound = from_ns, not is_exact
            over_ns = from_ns + duration_ns
            end_ns = min(over_ns if is_exact else until_ns + duration_ns, end_ns)
        else:
            start_ns, over_ns, is_bound = from_ns, from_ns, True
        end_ns = max(end_ns, start_ns)
        if is_aside:
            queue.beside_ns = max(queue.beside_ns, end_ns)
        else:
            queue.from_ns = max(queue.from_ns, min(over_ns, end_ns))
            queue.until_ns = max(queue.until_ns, end_ns)
        launch.times = start_ns, end_ns, is_bound
        return True
