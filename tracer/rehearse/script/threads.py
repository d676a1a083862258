"""Lets threads that a script starts issue what they issue in the world that is not there.

The modes that see operators are of one thread: without them a thread of the script would reach the processor,
and be seen by nobody. Operators are handled one at a time, whichever thread issues them.
"""
# ruff: noqa: SLF001 - this module enters modes as torch does, in a thread that does not leave them

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tracer.rehearse.errors import Finished, RehearsalError
from tracer.rehearse.events.lane import INPUT, SETUP
from tracer.rehearse.words import DEPENDS, UNSUPPORTED, place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from tracer.rehearse.session import RehearsalSession

WAKING: Final = signal.SIGRTMIN + 3
"""Sent to the first thread when another has ended the rehearsal: it may be waiting for that other."""

PATIENCE_S: Final = 10.0
"""Time for which an operator of another thread is waited for when the rehearsal is over."""


ENDED: Final = "a thread of the script ended with an error, what it had left to issue is not there: {}"
"""What to say of it: the script may not hear of it, as in a real run, where it may not happen."""


class Threads:
    """Gives a thread that is started the modes of the thread that starts it.

    Args:
        session: the rehearsal.
        modes: those that threads are given, if they are in force where a thread is started.
        one_at_a_time: told a lock that is to be held while an operator is handled.
    """

    def __init__(
        self, session: RehearsalSession, modes: Sequence[Any], one_at_a_time: Callable[[Any], None]
    ) -> None:
        self._session, self._modes, self._one_at_a_time = session, modes, one_at_a_time
        self._turn = threading.RLock()
        self._are_some = False
        self._ended_by: BaseException | None = None

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Let threads that are started be seen; what ends the rehearsal in one of them ends it here."""
        kind: Any = threading.Thread
        start = kind.start
        signal.signal(WAKING, self._woken)

        def started(thread: Any) -> None:
            if modes := self._in_force():
                self._begin_with(thread, modes)
            start(thread)

        kind.start = started
        try:
            yield
            if self._ended_by is not None:  # and nobody was woken: the script has ended at the same time
                raise self._ended_by
        finally:
            signal.signal(WAKING, signal.SIG_IGN)
            if self._are_some:
                self._turn.acquire(timeout=PATIENCE_S)  # kept: nothing more is written down

    def _in_force(self) -> list[Any]:
        """Return those of our modes that are in force in this thread, the outermost last."""
        from torch.overrides import _get_current_function_mode_stack
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        here = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]
        return [mode for mode in self._modes if any(mode is other for other in here)]

    def _begin_with(self, thread: Any, modes: Sequence[Any]) -> None:
        """Have *thread* begin with *modes*, and with the owner of this one."""
        if not self._are_some:
            self._are_some = True
            self._one_at_a_time(self)
        run, lane = thread.run, self._session.lane
        owner = ("forward", INPUT) if lane.owner[0] == SETUP else lane.owner

        def ran() -> None:
            _enter(modes)
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
        """End the rehearsal with *error*, in the first thread."""
        self._ended_by = error
        signal.pthread_kill(threading.main_thread().ident or 0, WAKING)

    def __enter__(self) -> None:
        """Wait for the turn of this thread to have an operator handled."""
        self._turn.acquire()
        if self._ended_by is not None and threading.current_thread() is threading.main_thread():
            self._turn.release()
            self._raise()

    def __exit__(self, *error: object) -> None:
        self._turn.release()

    def _woken(self, number: int, frame: Any) -> None:
        del number
        if frame is not None and self._may_raise(frame):  # else the next operator does
            self._raise()

    def _may_raise(self, frame: FrameType | None) -> bool:
        """Whether *frame* waits for a thread, or is of the script with nothing of torch around it.

        What calls Python out of C++, as autograd does, may abort where that raises.
        """
        if frame is not None and frame.f_code.co_filename == threading.__file__:
            return True
        is_torch = self._session.placement.asker.is_torch
        while frame is not None and not is_torch(frame):
            if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
                return True
            frame = frame.f_back
        return False

    def _raise(self) -> None:
        error, self._ended_by = self._ended_by, None
        if error is not None:
            raise error


def passes_of_threads(kind: Any) -> Any:
    """Return *kind*, that of the hook of backward passes, with passes counted for each thread by itself."""

    class Passes(kind):  # type: ignore[misc]  # a class that is given
        """A forward is a recomputation inside of a backward pass of its own thread alone."""

        @property
        def n_running(self) -> int:
            """Backward passes of this thread that run, one inside the other."""
            return int(self._lane.n_backwards)

        @n_running.setter
        def n_running(self, number: int) -> None:
            self._lane.n_backwards = number

    return Passes


def _enter(modes: Sequence[Any]) -> None:
    """Enter *modes* for good; a mode counts how often it was entered, for all threads together."""
    from torch import overrides
    from torch.utils import _python_dispatch

    for mode in modes:
        takes_functions = isinstance(mode, overrides.TorchFunctionMode)
        (overrides._push_mode if takes_functions else _python_dispatch._push_mode)(mode)
