"""Threads that wait for a work in place of the training, without holding the interpreter's lock.

Handing a work to a thread costs the training some 100 µs where all cores are busy, and the thread as much
again when it is woken: ``tracer.completion`` says for what that is worth it.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from foretrace.tracer.clock import now_ns
from foretrace.tracer.records import Communication

Batch = list[Communication]

MOST_WATCHERS: Final = 64
"""Threads at most: who posts many transfers ahead and waits for them later should not get one for each."""

SLICE: Final = timedelta(seconds=0.1)
"""How long a thread waits for a collective before it looks whether it should give up: 0.2 ms of a processor
each time. To give up waiting for a collective of gloo does nothing to it; for a transfer it closes the
connection, so that transfers are waited for in one piece."""

GRACE_S: Final = 0.2
"""How long threads that are told to give up are waited for where they wait for transfers, which end soon or
never."""

LAST_S: Final = 5.0
"""How long the others are waited for: each ends within `SLICE`, on a machine that lets it."""

_left: list[Watchers] = []
"""Those with threads inside of a wait for a transfer when nobody wanted its end any more."""


def leave() -> None:
    """Have threads that are inside of a wait for a transfer give it up: the process ends.

    Up to 3.13 Python ends a thread that asks for its lock while it shuts down, by ``pthread_exit``. That
    unwinds frames of C++ that allow no exception, and ``std::terminate`` would end the process by SIGABRT.
    """
    for watchers in _left:
        watchers.give_up()


class Watch:
    """What a watcher tells: whether the transfer is complete, and the error that it ended with."""

    __slots__ = ("done", "error")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None


class Watchers:
    """Threads that wait for a batch of works each; as many as batches were ever watched at once.

    They are no objects of ``threading``: such a one knows ``sys.excepthook``, and with that of torch all
    process groups, which would outlive Python with a thread that is left inside of a wait.

    Args:
        wait: the original ``Work.wait``.
        ended: called with each communication when its wait has returned.

    Attributes:
        n_threads: how many there are.
    """

    def __init__(self, wait: Callable[..., Any], ended: Callable[[Communication], None]) -> None:
        self._wait = wait
        self._ended = ended
        self._changed = threading.Condition()
        self._queue: SimpleQueue[Batch] = SimpleQueue()
        self.n_threads = self._n_idle = 0
        self._transfers: list[Any] = []
        self._gives_up = self._leaves = False

    @property
    def has_room(self) -> bool:
        """Whether a thread can be had for one batch more."""
        return self._n_idle > 0 or self.n_threads < MOST_WATCHERS

    def watch(self, batch: Batch) -> None:
        """Have a thread wait for the communications of *batch*, in that order, and note the end of each."""
        for communication in batch:
            if communication.is_p2p:
                communication.watch = Watch()
        with self._changed:
            if self._n_idle:
                self._n_idle -= 1
            else:
                _thread.start_new_thread(self._run, ())
                self.n_threads += 1
        self._queue.put(batch)

    def close(self, timeout_s: float) -> bool:
        """Let each thread end when it has followed what it was given, or in time; nothing is watched then.

        Threads give up waiting for a collective. One that is left inside of a wait for a transfer is a danger
        to the end of the process (``leave``).

        Returns:
            Whether all threads have ended.
        """
        for _ in range(self.n_threads):
            self._queue.put([])
        with self._changed:
            self._changed.wait_for(lambda: not self.n_threads, timeout_s)
            self._gives_up = True
            self._changed.wait_for(lambda: not self.n_threads, GRACE_S)
            self._changed.wait_for(lambda: self.n_threads <= len(self._transfers), LAST_S)
            if self.n_threads:
                if not _left:
                    atexit.register(leave)
                _left.append(self)
            return not self.n_threads

    def give_up(self) -> None:
        """Have threads end that wait for transfers, too, which are then as if nobody had waited for them."""
        with self._changed:
            self._leaves = True
            for work in self._transfers:
                give_up(work)
            self._changed.wait_for(lambda: not self.n_threads, LAST_S)

    def _run(self) -> None:
        while not self._gives_up and (batch := self._queue.get()):
            for communication in batch:
                if not self._gives_up:
                    self._follow(communication)
            with self._changed:
                self._n_idle += 1
        with self._changed:
            self.n_threads -= 1
            self._changed.notify_all()

    def _follow(self, communication: Communication) -> None:
        watch, work = communication.watch, communication.work
        if work is None:  # the training has waited for it meanwhile
            return
        if watch is None:
            if not self._is_over(work):
                return
        else:
            watch.error = self._waited_for(work)
            if self._leaves:
                return
        if communication.end is None:
            communication.end = now_ns()
        if watch is not None:
            watch.done.set()
        self._ended(communication)

    def _is_over(self, work: Any) -> bool:
        """Wait for a collective, whatever becomes of it; False: not to its end."""
        while not self._gives_up:
            try:
                self._wait(work, SLICE)
            except Exception:  # it has failed, or the time is over
                if not work.is_completed():
                    continue
            return True
        return False

    def _waited_for(self, work: Any) -> BaseException | None:
        """Wait for a transfer; return the error, which is handed on to whoever waits in the training.

        A wait that would begin when the process ends does not: nobody would end it.
        """
        with self._changed:
            if self._leaves:
                return None
            self._transfers.append(work)
        try:
            self._wait(work)
        except BaseException as error:
            return error
        finally:
            with self._changed:
                self._transfers.remove(work)
        return None


def join(watch: Watch, timeout: Any = None) -> bool:
    """Wait for a watcher as ``Work.wait(timeout)`` waits for the work; raises what the work raised."""
    seconds = timeout.total_seconds() if timeout is not None else 0
    if not watch.done.wait(seconds if seconds > 0 else None):
        raise RuntimeError(f"timed out after {seconds} s waiting for a point-to-point transfer")
    if watch.error is not None:
        raise watch.error
    return True


CLASSES: Final = ("N4c10d16ProcessGroupGloo8SendWork", "N4c10d16ProcessGroupGloo8RecvWork")
"""Works of transfers of gloo, as compilers write their names."""

_VIRTUAL: Final = 2 * ctypes.sizeof(ctypes.c_void_p)
"""Bytes in a table of functions before those: an offset and the type (Itanium C++ ABI, 2.5.2)."""


def give_up(work: Any) -> bool:
    """Have whoever waits for a transfer give up, or else who waits for it next; whether that could be done.

    Args:
        work: a ``Work``.
    """
    with suppress(OSError, AttributeError, ValueError):  # another torch
        library = _library()
        address = _address(work)
        table = ctypes.c_void_p.from_address(address).value if address else None
        for name in CLASSES:
            own = ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{name}E"))
            if table == own + _VIRTUAL:
                abort = library[f"_Z{name}5abortEv"]
                abort.argtypes, abort.restype = [ctypes.c_void_p], None
                abort(address)
                return True
    return False


def _library() -> ctypes.CDLL:
    """Return torch's library for processors, which a process that has a group has loaded."""
    import torch

    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _address(work: Any) -> int | None:
    """Return where the object of C++ is that *work* holds, None if it is no plain one of torch."""
    import torch.distributed as dist

    if type(work) is not dist.Work:  # a class of Python's own may hold it elsewhere
        return None
    return ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value
