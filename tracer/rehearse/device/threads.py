"""Makes the rehearsal see the operators of threads that a script starts.

The modes that see operators belong to one thread. Without them, operators of another thread would really run
on the CPU and not be recorded. Operators are handled one at a time, whichever thread issues them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.rehearse.errors import Finished, RehearsalError
from foretrace.tracer.rehearse.replacing import replaces
from foretrace.tracer.rehearse.state import State
from foretrace.tracer.rehearse.tape.tape import INPUT, SETUP
from foretrace.tracer.rehearse.words import DEPENDS, UNSUPPORTED, place

WAKING: Final = signal.SIGRTMIN + 3
"""Sent to the main thread when another thread has ended the rehearsal: it may be waiting for that thread."""

PATIENCE_S: Final = 10.0
"""Longest wait for an operator of another thread when the rehearsal is over."""


ENDED: Final = "a thread of the script ended with an error, so the rest of its work is missing: {}"
"""Note about an error in a thread. The script may not notice it, and a real run may not have it."""


class Threads:
    """Gives each new thread the modes of the thread that starts it.

    Args:
        modes: given to a new thread if they are active in the thread that starts it.
        one_at_a_time: called with a lock that must be held while an operator is handled.
    """

    def __init__(self, session: State, modes: Sequence[Any], one_at_a_time: Callable[[Any], None]) -> None:
        import torch

        self._session, self._modes, self._one_at_a_time = session, modes, one_at_a_time
        # Re-entrant: the handler of an operator issues other operators.
        self._turn = threading.RLock()
        self._roots = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
        self._are_some = False
        self._ended_by: BaseException | None = None

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Give new threads the modes; an error that ends the rehearsal in a thread is raised here."""
        signal.signal(WAKING, self._woken)

        @replaces(threading.Thread)
        def start(original: Any, thread: Any) -> None:
            if modes := self._in_force():
                self._begin_with(thread, modes)
            original(thread)

        try:
            yield
            if self._ended_by is not None:  # the main thread was not woken: the script ended just then
                raise self._ended_by
        finally:
            # Ignored, not reset: a thread that ends late may still send it, which would then end the process.
            signal.signal(WAKING, signal.SIG_IGN)
            if self._are_some:
                self._turn.acquire(timeout=PATIENCE_S)  # never released: nothing more is recorded

    def _in_force(self) -> list[Any]:
        """Return those of our modes that are active in this thread, in the order of their entry."""
        here = internals.modes_in_force()
        return [mode for mode in self._modes if any(mode is other for other in here)]

    def _begin_with(self, thread: Any, modes: Sequence[Any]) -> None:
        """Make *thread* begin with *modes*, and with the owner of the present thread."""
        # The lock takes time at each operator: there is none before the first thread.
        if not self._are_some:
            self._are_some = True
            self._one_at_a_time(self)
        run, lane = thread.run, self._session.lane
        import torch

        owner = ("forward", INPUT) if lane.owner[0] == SETUP else lane.owner

        def ran() -> None:
            _enter(modes)
            # Each thread has its own setting. A backward has to be where its thread's ``lane`` is.
            torch.autograd.set_multithreading_enabled(False)
            lane.owner = owner
            try:
                run()
            except Finished as error:
                self._end_with(error)
            except Exception as error:
                if isinstance(error, RehearsalError) or type(error).__name__ in DEPENDS | UNSUPPORTED:
                    self._end_with(error)
                    return
                self._session.warn(ENDED.format(f"{place(error)}: {type(error).__name__}: {error}"[:200]))
                raise

        thread.run = ran

    def _end_with(self, error: BaseException) -> None:
        """End the rehearsal with *error*, in the main thread."""
        self._ended_by = error
        # A signal, because the main thread may wait in C for this one, as in a lock.
        signal.pthread_kill(threading.main_thread().ident or 0, WAKING)

    def __enter__(self) -> None:
        """Wait until this thread may handle an operator."""
        self._turn.acquire()
        if self._ended_by is not None and threading.current_thread() is threading.main_thread():
            self._turn.release()
            self._raise()

    def __exit__(self, *error: object) -> None:
        self._turn.release()

    def _woken(self, number: int, frame: Any) -> None:
        if frame is not None and self._may_raise(frame):  # else the next operator raises
            self._raise()

    def _may_raise(self, frame: FrameType | None) -> bool:
        """Whether *frame* waits for a thread, or belongs to the script without torch among its callers.

        C++ code that calls Python, such as autograd, may abort if Python raises.
        """
        if frame is not None and frame.f_code.co_filename == threading.__file__:
            return True
        while frame is not None and not frame.f_code.co_filename.startswith(self._roots):
            if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
                return True
            frame = frame.f_back
        return False

    def _raise(self) -> None:
        error, self._ended_by = self._ended_by, None
        if error is not None:
            raise error


def passes_of_threads(kind: Any) -> Any:
    """Return *kind*, the class of the backward hook, with backward passes counted per thread."""

    class Passes(kind):  # type: ignore[misc]  # a class that is given
        """A forward counts as a recomputation only inside a backward of its own thread."""

        @property
        def n_running(self) -> int:
            """Nested backward passes that run in this thread."""
            return int(self._lane.n_backwards)

        @n_running.setter
        def n_running(self, number: int) -> None:
            self._lane.n_backwards = number

    return Passes


def _enter(modes: Sequence[Any]) -> None:
    """Enter *modes* and never leave: a mode counts its entries over all threads."""
    for mode in modes:
        internals.enter(mode)
