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
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.clock import now_ns
from foretrace.tracer.groups import GroupInfo
from foretrace.tracer.records import Communication, Launch
from foretrace.tracer.stamps import ANCHORED_NS, CudaStamp, Resolver, Stamp

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

_MADE: Final = operator.itemgetter("time_created_ns")


class FlightRecorder:
    """How long works ran, as torch's flight recorder knows it; asked on the writing thread."""

    def __init__(self, read: Callable[[], Sequence[Sequence[Mapping[str, Any]]]]) -> None:
        self._read = read
        self._entries: dict[str, list[Mapping[str, Any]]] = {}
        self._is_absent = self._is_wanted = False
        self._tried_ns = self._read_ns = 0

    def look(self, n_waiting: int, *, closing: bool = False) -> None:
        """Read it, if something was asked that it may tell by now, and this was not tried just before."""
        is_due = now_ns() - self._tried_ns > (CLOSING_NS if closing else READ_NS)
        if self._is_absent or not self._is_wanted or not (is_due or n_waiting > MOST_WAITING):
            return
        # Whoever is not told by this look asks for the next one.
        self._is_wanted, self._tried_ns = False, now_ns()
        found: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
        try:
            for entry in chain.from_iterable(self._read()):
                if not entry["profiling_name"].startswith("gloo"):
                    found[entry["process_group"][0]].append(entry)
        except Exception:  # that of another torch, or this once; what it would tell stays unknown
            return
        self._read_ns = now_ns()
        # Somebody has asked, so there has been a call: a recorder without entries is off.
        self._is_absent = not found
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
        durations = [entry for entry in made if "duration_ms" in entry]
        if len(durations) == 1 and durations[0] is made[-1]:
            launch.duration_ns = round(made[-1]["duration_ms"] * 1e6)
            # The entry has wall-clock time; the end of the call is known on that clock and on our own.
            launch.from_ns = launch.returned_ns - (ended - _MADE(made[-1]))
            return True
        may_come = any(not entry["retired"] for entry in made) or self._read_ns <= launch.returned_ns
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

    Attributes:
        ask: looks whether what nobody waits for is complete.
    """

    def __init__(self, moments: Resolver, recorder: FlightRecorder | None = None) -> None:
        self._moments = moments
        self.recorder = FlightRecorder(internals.flight_recorders) if recorder is None else recorder
        self.ask: Callable[[Launch], None] = lambda launch: None
        self._queues: defaultdict[int, _Queue] = defaultdict(_Queue)

    def of(self, one: Communication, *, last: bool) -> tuple[int, int] | None:
        """Return when *one* began and ended, None while it is not known; note whether these are bounds."""
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
            # The recorder may have told a later moment from which on it can have begun.
            from_ns, until_ns = begun()
        is_exact, duration_ns = until_ns - from_ns <= ANCHORED_NS, launch.duration_ns
        end_ns = ns(one.end or 0)  # at the latest
        # Either the end is proven, or a duration goes with a start, or there are only bounds.
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
