"""Finds out when a communication was complete, without holding anything up.

Where the end of a communication comes from:

==================  ========================================================================================
on a GPU            ``tracer.device_works``
on gloo, waited     the return of ``Work.wait`` or of ``wait_tensor`` in the thread that needs the result
on gloo, overlapped the first moment at which a hook finds it complete, or a thread of ours that waits for it
==================  ========================================================================================

Hooks run whenever a block begins, forward or backward, and with each collective: asking a work costs them
1 µs. That is late by the time from one hook to the next. A thread that waits for the same ``Work`` without
holding the interpreter's lock is exact, but costs some 300 µs where all cores are busy. So there is one
where it costs little: when the training itself is going to wait in C++, as DDP for its last buckets, and now
and then.

Two kinds of work cannot be waited for twice. A p2p transfer counts each wait and is complete only when waited
for: its end is the return of the training's own wait, and a bound if that returned at once. A reduce-scatter
of gloo does its last copy inside ``wait``: it is complete when its waiter returns, and never watched.
Callbacks on the futures of gloo would be simpler, but they need the interpreter's lock on gloo's own threads,
and so deadlock with any caller that waits while it holds the lock.
"""

from __future__ import annotations

import _thread
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from threading import get_ident
from typing import Any, Final, cast

from foretrace.tracer import internals
from foretrace.tracer.clock import now_ns
from foretrace.tracer.groups import GroupInfo
from foretrace.tracer.records import Communication, Launch
from foretrace.tracer.stamps import NAP_S, Stamp, cuda_stamp

SLICE: Final = timedelta(seconds=0.1)
"""How long a thread waits for a collective before it looks whether it should give up: 0.2 ms of a processor
each time. To give up does nothing to the collective."""

LAST_S: Final = 5.0
"""How long the thread is waited for once it is told to give up: `SLICE`, on a machine that lets it."""


class Watcher:
    """A thread that waits for collectives one after the other, without the interpreter's lock.

    Handing it one costs the training some 100 µs where all cores are busy, and as much again when it wakes.
    It is made when it is first needed, and is no object of ``threading``: such a one knows
    ``sys.excepthook``, and with that of torch all process groups, which would outlive Python.

    Attributes:
        has_begun: whether there is one.
        has_failed: whether a collective that nobody else waited for has failed, in this step.
    """

    def __init__(self, wait: Callable[..., Any], ended: Callable[[Communication], None]) -> None:
        self._wait, self._ended = wait, ended
        self._queue: SimpleQueue[Communication | None] = SimpleQueue()
        self._has_ended = threading.Event()
        self.has_begun = self.has_failed = self._gives_up = False

    def watch(self, one: Communication) -> None:
        """Have the end of *one* noted, a collective that was issued after those which were given before."""
        if not self.has_begun:
            self.has_begun = True
            _thread.start_new_thread(self._run, ())
        self._queue.put(one)

    def close(self, timeout_s: float) -> None:
        """Let the thread end when it has followed what it was given, or in time; nothing is watched then."""
        if self.has_begun:
            self._queue.put(None)
            if not self._has_ended.wait(timeout_s):
                self._gives_up = True
                self._has_ended.wait(LAST_S)

    def _run(self) -> None:
        while not self._gives_up and (one := self._queue.get()) is not None:
            work = one.work
            if work is not None and self._is_over(one, work):  # else the training has waited for it meanwhile
                if one.end is None:
                    one.end = now_ns()
                self._ended(one)
        self._has_ended.set()

    def _is_over(self, communication: Communication, work: Any) -> bool:
        """Wait for a collective, whatever becomes of it; False: not to its end."""
        while not self._gives_up:
            try:
                self._wait(work, SLICE)
            except Exception:  # it has failed, or the time is over
                if not work.is_completed():
                    continue
                # Whoever waits for it in the training is told, and may go on.
                self.has_failed |= fails(self._wait, work) and not communication.claimed_ns
            return True
        return False


def fails(wait: Callable[..., Any], work: Any) -> bool:
    """Whether a collective that is over has failed, by the original ``Work.wait``; ``is_success`` warns."""
    try:
        wait(work, SLICE)
    except Exception:
        return True
    return False


LOOSE_NS: Final = 200_000
"""Time after which an unfinished communication may be handed to a watcher: what is waited for at once, as by
tensor parallelism, should not pay for one."""

WATCH_EVERY_NS: Final = 50_000_000
"""Time between two collectives that are watched rather than asked: 300 µs each are 0.6 % of it."""

WAIT_EVERY_NS: Final = 10_000_000
"""Time between two waits of the training in which a thread is woken for each end: the wait hides what that
costs, but not in steps that are shorter than this."""

MOST_ASKED: Final = 8  # communications that one hook looks at

MOST_BUSY: Final = 2
"""Collectives of a group that one hook finds incomplete and asks no more: gloo works on two at a time
(``ProcessGroupGloo::Options::threads``), in the order of their issue, and asking costs."""

KEPT_WORKS: Final = 64
"""How many transfers are kept before looking which of them the training has dropped without a wait."""

COINCIDE_NS: Final = 100_000
"""A shorter wait for a transfer has found it complete: it ended before, nobody knows when."""

CLOSE_TIMEOUT_S: Final = 5.0
"""How long the end of a recording waits for communications that are under way. They are complete as a rule,
and only a watcher has still to be scheduled and to note it; one that hangs must not hold up the training."""

_OURS: Final = 2
"""References to a work that the training has dropped: our record, and the argument of ``getrefcount``."""


class Completions:
    """Keeps the communications that are under way, and notes the end of each.

    Attributes:
        by_work: communications under way by the identity of their work; of a batch the last.
        by_storage: communications under way by the address of a tensor that they fill.
        loose: collectives of the processor under way that nobody is known to wait for.
        raised_ns: when a wait of the training raised, 0: none has, or the training has gone on since.
        has_failed: whether what nobody waited for has failed, in this step.
    """

    def __init__(self, wait: Callable[..., Any], rank: int) -> None:
        self.by_work: dict[int, Communication] = {}
        self.by_storage: dict[int, Communication] = {}
        self._wait, self._lock = wait, threading.Lock()
        self._batches: dict[tuple[int, GroupInfo], list[Communication]] = {}
        self._rank = rank
        self.watcher = Watcher(wait, self.forget)  # the thread that waits beside the training
        self.loose: deque[Communication] = deque()
        self._transfers: list[Communication] = []
        self._most_transfers = KEPT_WORKS
        self._watched_ns = self._waited_ns = 0
        self.raised_ns = self._stepped_ns = 0
        self._is_closing = self.has_failed = False

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

    def issued(self, communication: Communication, work: Any, *, watchable: bool) -> None:
        """Follow *communication*, of tensors of the processor, to its end."""
        if work is None:
            communication.end = now_ns()
            return
        self.follow(communication, work)
        if communication.is_p2p:
            self._transfers.append(communication)
            if len(self._transfers) > self._most_transfers:
                self._prune()
        elif watchable:
            if self.loose:
                self.sweep()
            self.loose.append(communication)

    def sweep(self) -> None:
        """See which of the communications that nobody has waited for are complete by now."""
        now, loose, n_busy = now_ns(), self.loose, 0
        group = None
        kept: list[Communication] = []
        with self._lock:
            while loose and len(kept) < MOST_ASKED and n_busy < MOST_BUSY:
                communication = loose.popleft()
                if not self._is_seen_to(communication, now):
                    kept.append(communication)
                    n_busy = n_busy + 1 if communication.group is group else 1
                    group = communication.group
            loose.extendleft(reversed(kept))

    def _is_seen_to(self, communication: Communication, now: int) -> bool:
        """Whether *communication* is complete, or somebody waits for it who will tell."""
        work = communication.work
        if communication.claimed_ns or work is None:
            return True
        is_old = now - _issued_ns(communication) > LOOSE_NS
        if work.is_completed():
            communication.end = now_ns()
            self.has_failed |= fails(self._wait, work)
            self.forget(communication)
            return True
        if is_old and not self._is_closing and now - self._watched_ns > WATCH_EVERY_NS:
            self._watched_ns = now
            self.watcher.watch(communication)
            return True
        return False

    def failure_seen(self) -> bool:
        """Whether a communication has failed, as c10d says, and the training has not gone on since.

        What waits in C++ raises a moment before c10d says of the work that it is over.
        """
        until_ns = now_ns() + round(SLICE.total_seconds() * 1e9)
        while not (self.raised_ns or self.has_failed or self.watcher.has_failed):
            held = [one for one in [*self.by_work.values()] if one.device < 0 and not one.is_p2p]
            held = [one for one in held if _issued_ns(one) > self._stepped_ns]
            works = [work for one in held if (work := one.work) is not None]
            over = [work for work in works if work.is_completed()]
            if any(fails(self._wait, work) for work in over):
                return True
            if len(over) == len(works) or now_ns() > until_ns:
                return False
            time.sleep(NAP_S)
        return True

    def raised(self) -> None:
        """A wait of the training raises: it ends the training if nothing that is issued later completes."""
        self.raised_ns = now_ns()
        self.has_failed = self.watcher.has_failed = False

    def step_ended(self) -> None:
        """The training goes on to another step, whatever has failed."""
        self.raised_ns, self._stepped_ns = 0, now_ns()
        self.has_failed = self.watcher.has_failed = False

    def wait_follows(self) -> None:
        """The training is going to wait in C++ for the collectives under way: have their ends noted."""
        now = now_ns()
        if self.loose and now - self._waited_ns > WAIT_EVERY_NS:
            self._waited_ns = now
            with self._lock:
                for one in sorted(self.loose, key=_issued_ns):
                    self.watcher.watch(one)
                self.loose.clear()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Learn the end of what is still under way, as the last reduction of a step that nobody waits for.

        A p2p transfer is left to the training: it may be waited for only once.
        """
        self._is_closing = True  # and nobody begins to wait: a thread inside of a wait may outlive Python
        self._prune()
        until_ns = now_ns() + round(timeout_s * 1e9)
        while (n_loose := len(self.loose)) and now_ns() < until_ns:
            self.sweep()
            if len(self.loose) == n_loose:
                time.sleep(NAP_S)
        self.loose.clear()
        self.watcher.close(max(until_ns - now_ns(), 0) / 1e9)

    def claim(self, communication: Communication) -> None:
        """Keep watchers off *communication* because the training is going to wait for it."""
        if communication.device >= 0:
            self.reached(communication)
        else:
            communication.claimed_ns = now_ns()

    def ended(self, communication: Communication) -> None:
        """Note that somebody who needed *communication* has it."""
        if communication.end is None and communication.is_p2p and communication.peer < 0:
            self._received(communication)
        if communication.device >= 0:
            self.waited_on_device(communication)
            return
        if communication.end is None:
            communication.end = now = now_ns()
            communication.is_bound = communication.is_p2p and now - communication.claimed_ns < COINCIDE_NS
        if self.raised_ns and _issued_ns(communication) > self.raised_ns:
            self.raised_ns = 0
        self.forget(communication)
        with self._lock:
            if self.loose and self.loose[-1] is communication:  # as what is waited for at once
                self.loose.pop()

    def _received(self, communication: Communication) -> None:
        """A receive from anybody is over: its work tells who has sent."""
        source = internals.source_of(communication.work)
        if source >= 0:
            peer = communication.group.ranks[source]
            communication.sequence = communication.group.next_transfer((peer, self._rank))
            communication.peer = peer

    def _prune(self) -> None:
        """End the transfers whose work the training has dropped: it will never wait for them."""
        kept = []
        for one in self._transfers:
            if one.work is None:
                continue
            if sys.getrefcount(one.work) > _OURS:
                kept.append(one)
            else:
                one.end, one.is_bound = now_ns(), True
                self.forget(one)
        self._transfers, self._most_transfers = kept, KEPT_WORKS + 2 * len(kept)


def _issued_ns(communication: Communication) -> int:
    """Return when a communication that no device has a part in was issued."""
    return cast("int", communication.start)
