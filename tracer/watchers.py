"""Threads that wait for a work in place of the training, without holding the interpreter's lock.

Handing a work to a thread costs the training some 100 µs where all cores are busy, and the thread as much
again when it is woken: ``tracer.completion`` says for what that is worth it.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final

from tracer.clock import now_ns
from tracer.records import Communication

Batch = list[Communication]

MOST_WATCHERS: Final = 64
"""Threads at most: who posts many transfers ahead and waits for them later should not get one for each."""

GRACE_S: Final = 0.2
"""How long a thread that is told to give up is waited for: it is in a wait, which ends soon or never."""


SET_TERMINATE: Final = "_ZSt13set_terminatePFvvE"
"""``std::set_terminate`` as compilers write it."""

_left: list[threading.Thread] = []
"""Threads that were inside of a wait when nobody wanted its end any more."""


def leave() -> None:
    """See that threads which are inside of a wait do not abort the process, which ends.

    Up to 3.13 Python ends a thread that asks for its lock while it shuts down, by ``pthread_exit``. That
    unwinds frames of C++ that allow no exception, and ``std::terminate`` would end the process by SIGABRT.
    What it calls is therefore ``pause``: the thread stands still, and the process ends as it would have.
    """
    if not any(thread.is_alive() for thread in _left):
        return
    with suppress(OSError, AttributeError):  # another C++ library: nothing can be done
        set_terminate = getattr(ctypes.CDLL("libstdc++.so.6"), SET_TERMINATE)
        set_terminate.argtypes = [ctypes.c_void_p]
        set_terminate.restype = ctypes.c_void_p
        set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))


class Watch:
    """What a watcher tells: whether the transfer is complete, and the error that it ended with."""

    __slots__ = ("done", "error")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None


class Watchers:
    """Threads that wait for a batch of works each; as many as batches were ever watched at once.

    Args:
        wait: the original ``Work.wait``.
        ended: called with each communication when its wait has returned.
    """

    def __init__(self, wait: Callable[[Any], Any], ended: Callable[[Communication], None]) -> None:
        self._wait = wait
        self._ended = ended
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Batch] = SimpleQueue()
        self._n_idle = 0
        self._threads: list[threading.Thread] = []
        self._gives_up = False

    @property
    def has_room(self) -> bool:
        """Whether a thread can be had for one batch more."""
        return self._n_idle > 0 or len(self._threads) < MOST_WATCHERS

    def watch(self, batch: Batch) -> None:
        """Have a thread wait for the communications of *batch*, in that order, and note the end of each."""
        for communication in batch:
            if communication.is_p2p:
                communication.watch = Watch()
        with self._lock:
            if self._n_idle:
                self._n_idle -= 1
            else:
                thread = threading.Thread(target=self._run, name="foretrace-watcher", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queue.put(batch)

    def close(self, timeout_s: float) -> bool:
        """Let each thread end when it has followed what it was given, or in time; nothing is watched then.

        A thread that is left inside of a wait is a danger to the end of the process (``leave``).

        Returns:
            Whether all threads have ended within *timeout_s*.
        """
        deadline = time.monotonic() + timeout_s
        for _ in self._threads:
            self._queue.put([])
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        self._gives_up = True
        deadline = time.monotonic() + GRACE_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        left = [thread for thread in self._threads if thread.is_alive()]
        if left and not _left:
            atexit.register(leave)
        _left.extend(left)
        return not left

    def _run(self) -> None:
        while batch := self._queue.get():
            for communication in batch:
                if self._gives_up:
                    return
                self._follow(communication)
            with self._lock:
                self._n_idle += 1

    def _follow(self, communication: Communication) -> None:
        watch, work = communication.watch, communication.work
        if work is None:  # the training has waited for it meanwhile
            return
        try:
            self._wait(work)
        except BaseException as error:  # handed on to whoever waits in the training
            if watch is not None:
                watch.error = error
        if communication.end is None:
            communication.end = now_ns()
        if watch is not None:
            watch.done.set()
        self._ended(communication)


def join(watch: Watch, timeout: Any = None) -> bool:
    """Wait for a watcher as ``Work.wait(timeout)`` waits for the work; raises what the work raised."""
    seconds = timeout.total_seconds() if timeout is not None else 0
    if not watch.done.wait(seconds if seconds > 0 else None):
        raise RuntimeError(f"timed out after {seconds} s waiting for a point-to-point transfer")
    if watch.error is not None:
        raise watch.error
    return True
