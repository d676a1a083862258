"""Finds out when a communication was complete, without holding anything up.

Where the end of a communication comes from:

==================  ========================================================================================
on CUDA             an event behind the communication, on a stream that its future hands out: nobody waits
on gloo, waited     the return of ``Work.wait`` or of ``wait_tensor`` in the thread that needs the result
on gloo, overlapped a thread of ours that waits for the same ``Work`` without holding the interpreter's lock
==================  ========================================================================================

A gloo communication that nobody has waited for within ``LOOSE_NS`` counts as overlapped. Two kinds of work
cannot be waited for twice. A p2p transfer counts each wait, so whoever waits for a transfer that we watch
waits for our thread instead; it is watched only if its ``Work`` was handed to Python, where all waiting can
be seen. A reduce-scatter of gloo does its last copy inside ``wait``: it is complete when its waiter returns,
and never watched. Callbacks on the futures of gloo would be simpler, but they need the interpreter's lock
on gloo's own threads, and so deadlock with any caller that waits while it holds the lock.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

from tracer.clock import now_ns
from tracer.records import Communication
from tracer.stamps import Stamp, cuda_stamp, host_stamp

LOOSE_NS: Final = 200_000
"""Time after which an unfinished communication is handed to a watcher. Waking one costs some 100 µs on a
busy machine, so that what is waited for at once, as tensor parallelism does, should not pay for it."""


KEPT_WORKS: Final = 64
"""How many finished transfers are kept before looking which of them the training has dropped unasked."""

CLOSE_TIMEOUT_S: Final = 5.0
"""How long the end of a recording waits for communications that are under way. They are complete as a rule,
and only a watcher has still to be scheduled and to note it; one that hangs must not hold up the training."""

_OURS: Final = 2
"""References to a work that the training has dropped: our record, and the argument of ``getrefcount``."""


class Watch:
    """What a watcher tells: whether the transfer is complete, and the error that it ended with."""

    __slots__ = ("done", "error")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None


class Watchers:
    """Threads that wait for a work each; there are as many as works were ever watched at once.

    Args:
        wait: the original ``Work.wait``.
        ended: called with each communication when its wait has returned.
    """

    def __init__(self, wait: Callable[[Any], Any], ended: Callable[[Communication], None]) -> None:
        self._wait = wait
        self._ended = ended
        self._lock = threading.Lock()
        self._queue: deque[Communication | None] = deque()
        self._ready = threading.Semaphore(0)
        self._n_idle = 0
        self._threads: list[threading.Thread] = []

    def watch(self, communication: Communication) -> None:
        """Have a thread wait for *communication* and note its end."""
        communication.watch = Watch()
        with self._lock:
            if self._n_idle:
                self._n_idle -= 1
            else:
                thread = threading.Thread(target=self._run, name="foretrace-watcher", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._hand_over(communication)

    def close(self, timeout_s: float) -> bool:
        """Let each thread end when it has followed what it was given; nothing may be watched afterwards.

        A thread that were left inside of a wait would be killed by Python's shutdown when the wait returns,
        and with it the process: killing it unwinds C++ frames that allow no exception.

        Returns:
            Whether all threads have ended within *timeout_s*.
        """
        deadline = time.monotonic() + timeout_s
        for _ in self._threads:
            self._hand_over(None)
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def _hand_over(self, communication: Communication | None) -> None:
        self._queue.append(communication)
        self._ready.release()

    def _run(self) -> None:
        while True:
            self._ready.acquire()
            communication = self._queue.popleft()
            if communication is None:
                return
            self._follow(communication)
            with self._lock:
                self._n_idle += 1

    def _follow(self, communication: Communication) -> None:
        watch = communication.watch
        try:
            self._wait(communication.work)
        except BaseException as error:  # handed on to whoever waits in the training
            watch.error = error
        if communication.end is None:
            communication.end = now_ns()
        watch.done.set()
        self._ended(communication)


class Completions:
    """Keeps the communications that are under way, and notes the end of each.

    Args:
        wait: the original ``Work.wait``.

    Attributes:
        by_storage: communications under way by the address of a tensor that they fill.
    """

    def __init__(self, wait: Callable[..., Any]) -> None:
        self._watchers = Watchers(wait, self._watched)
        self._lock = threading.Lock()
        self._by_work: dict[int, Communication] = {}
        self.by_storage: dict[int, Communication] = {}
        self._loose: deque[Communication] = deque()
        self._unclaimed: deque[Communication] = deque()
        self._coalesced: list[Communication] = []

    def issued(
        self,
        communication: Communication,
        work: Any,
        *,
        watch_now: bool,
        watchable: bool,
        is_coalesced: bool = False,
    ) -> None:
        """Follow *communication* to its end.

        Args:
            communication: just issued.
            work: its ``Work``; None if it was complete on return.
            watch_now: whether it is certain that nobody will wait for it soon.
            watchable: whether a second thread may wait for it.
            is_coalesced: whether it has no work of its own but shares one with others of its batch.
        """
        on_device = communication.on_device
        if on_device and isinstance(communication.start, int):  # captured into a graph: nothing runs
            communication.end = now_ns()
        elif on_device and is_coalesced:
            self._coalesced.append(communication)
            return
        elif on_device and (work is None or communication.group.on_nccl):
            communication.end = _cuda_end(work)
        elif work is None:
            communication.end = now_ns()
        if communication.end is not None:
            return
        communication.work = work
        self._by_work[id(work)] = communication
        for storage in communication.storages:
            self.by_storage[storage] = communication
        if watchable and not on_device:
            if watch_now:
                self._watchers.watch(communication)
            else:
                self._loose.append(communication)

    @property
    def is_sweeping_due(self) -> bool:
        """Whether there is anything that ``sweep`` would look at."""
        return bool(self._loose or self._unclaimed)

    def sweep(self, now: int) -> None:
        """Hand to a watcher whatever has been under way for long without being waited for."""
        loose = self._loose
        while loose and (loose[0].is_claimed or now - int(loose[0].start) > LOOSE_NS):  # type: ignore[arg-type]
            communication = loose.popleft()
            with self._lock:
                if not communication.is_claimed:
                    self._watchers.watch(communication)
        if len(self._unclaimed) > KEPT_WORKS:
            self._prune()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Learn the end of what is still under way, as the last reduction of a step that nobody waits for.

        A p2p transfer that is not watched yet is left to the training: it may be waited for only once.
        """
        with self._lock:
            for communication in self._loose:
                if not communication.is_claimed and not communication.is_p2p:
                    self._watchers.watch(communication)
            self._loose.clear()
        self._watchers.close(timeout_s)

    def of_work(self, work: Any) -> Communication | None:
        """Return the communication under way that *work* stands for."""
        return self._by_work.get(id(work))

    def batch_issued(self, work: Any) -> None:
        """Note the work of a batch: it tells the end of all that were collected."""
        if self._coalesced and (end := _cuda_end(work)) is not None:
            batch, self._coalesced = self._coalesced, []
            for communication in batch:
                communication.end = end

    def batch_ended(self) -> None:
        """Note that a work has been waited for that is not that of any one communication: of a batch."""
        batch, self._coalesced = self._coalesced, []
        for communication in batch:
            communication.end = cuda_stamp()

    def claim(self, communication: Communication) -> Watch | None:
        """Keep watchers off *communication* because the training waits for it; return the one it has."""
        with self._lock:
            communication.is_claimed = True
            return cast("Watch | None", communication.watch)

    def ended(self, communication: Communication) -> None:
        """Note that somebody who needed *communication* has it."""
        if communication.end is None:
            communication.end = cuda_stamp() if communication.on_device else host_stamp()
        self.forget(communication)

    def forget(self, communication: Communication) -> None:
        """Stop following *communication*."""
        work, communication.work = communication.work, None
        if work is not None and self._by_work.get(id(work)) is communication:
            del self._by_work[id(work)]
        for storage in communication.storages:
            if self.by_storage.get(storage) is communication:
                del self.by_storage[storage]

    @property
    def has_watched_transfers(self) -> bool:
        """Whether the training may still ask for a transfer that a watcher has waited for in its place."""
        return any(
            communication.is_p2p and communication.watch for communication in [*self._by_work.values()]
        )

    def _prune(self) -> None:
        """Forget the finished transfers whose work the training no longer holds."""
        for _ in range(len(self._unclaimed)):
            communication = self._unclaimed.popleft()
            if communication.work is not None and sys.getrefcount(communication.work) > _OURS:
                self._unclaimed.append(communication)
            else:
                self.forget(communication)

    def _watched(self, communication: Communication) -> None:
        """A transfer is followed on until the training asks for it, so that it finds the watcher's answer."""
        if communication.is_p2p:
            self._unclaimed.append(communication)
        else:
            self.forget(communication)


def join(watch: Watch, timeout: Any = None) -> bool:
    """Wait for a watcher as ``Work.wait(timeout)`` waits for the work; raises what the work raised."""
    seconds = timeout.total_seconds() if timeout is not None else 0
    if not watch.done.wait(seconds if seconds > 0 else None):
        raise RuntimeError(f"timed out after {seconds} s waiting for a point-to-point transfer")
    if watch.error is not None:
        raise watch.error
    return True


def _cuda_end(work: Any) -> Stamp | None:
    """Return the end of a communication on a CUDA stream, None if its work does not tell.

    That of gloo must not be asked: its future calls back on a thread of gloo, which would need Python's lock.
    """
    if work is None:
        return cuda_stamp()
    stamps: list[Stamp] = []
    try:
        # The callback runs at once, on a stream that waits for the communication.
        work.get_future().add_done_callback(lambda _: stamps.append(cuda_stamp()))
    except RuntimeError:
        return None
    return stamps[0] if stamps else None
