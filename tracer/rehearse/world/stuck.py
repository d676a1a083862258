"""Ends the rehearsal of a script that gets nowhere: one that waits, or goes on, for ever.

What a script waits for in a real run may be what no rehearsal has: another rank that writes a file, a server,
a device that is busy. A thread looks at the script from time to time.
"""

from __future__ import annotations

import _thread
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from foretrace.tracer.rehearse.words import STUB, is_library

POLL_S: Final = 5.0
"""Seconds between two looks."""

WAITING_S: Final = 300.0
"""Seconds after which a script that does nothing at all is said to wait for ever."""

BUSY_S: Final = 1800.0
"""Seconds after which a script that does nothing new is said to go on for ever: reading data may be long."""

LEAST_USED: Final = 0.005
"""Seconds of the processor per second below which a script waits. A download takes more."""

WAITS: Final = (
    "{place}: the script has waited here for {minutes:.0f} minutes, for what a rehearsal may not have, as a "
    f"file of another rank, a process or a server; leave it out in a stub file ({STUB})"
)
GOES_ON: Final = (
    "{place}: nothing new has happened for {minutes:.0f} minutes, no step among it; if the loop here ends at "
    f"all, make it shorter, by an argument of the script or in a stub file ({STUB})"
)


class Watchdog:
    """Looks whether a script gets anywhere.

    Args:
        end: ends the rehearsal with an error in these words.
        waiting_s: as ``WAITING_S``.
        busy_s: as ``BUSY_S``.
    """

    def __init__(
        self,
        session: Any,
        end: Callable[[str], None],
        *,
        waiting_s: float = WAITING_S,
        busy_s: float = BUSY_S,
    ) -> None:
        self._session, self._end = session, end
        self._waiting_s, self._busy_s = waiting_s, busy_s
        self._done, self._new = self._look(), self._look_for_new()
        self._did_s = self._met_s = time.monotonic()
        self._used_s, self._minutes = time.process_time(), 0.0

    def watch(self) -> None:
        """Look from now on, until the process ends, at the thread that calls this."""
        main = _thread.get_ident()

        def look() -> None:
            while True:
                time.sleep(min(POLL_S, self._waiting_s / 4))
                if words := self.found():
                    where = _place(sys._current_frames().get(main))  # noqa: SLF001 - no other way
                    self._end(words.format(place=where, minutes=self._minutes))

        _thread.start_new_thread(look, ())

    def found(self) -> str:
        """Return what is wrong with the script, empty if it gets somewhere."""
        now, used, done, new = time.monotonic(), time.process_time(), self._look(), self._look_for_new()
        # Since the last sign of work: a script that waits uses next to nothing from then on.
        is_at_work = used - self._used_s > LEAST_USED * self._waiting_s or _has_programs()
        if done != self._done or is_at_work:
            self._done, self._did_s, self._used_s = done, now, used
        if new != self._new:
            self._new, self._met_s = new, now
        for words, since, most in (
            (WAITS, self._did_s, self._waiting_s),
            (GOES_ON, self._met_s, self._busy_s),
        ):
            if now - since >= most:
                self._minutes = (now - since) / 60
                return words
        return ""

    def _look(self) -> tuple[int, ...]:
        """Return what changes whenever an operator is issued, or memory taken."""
        session = self._session
        return session.position.step, session.tape.next_number, session.memory.n_held

    def _look_for_new(self) -> tuple[int, ...]:
        """Return what changes whenever something happens that has not happened before."""
        session = self._session
        return session.position.step, session.tape.n_distinct, len(session.stated.told)


def _has_programs() -> bool:
    """Whether a program runs that this process has started; Linux alone says so."""
    return any(file.read_text() for file in Path("/proc/self/task").glob("*/children"))


def _place(frame: FrameType | None) -> str:
    """Return the innermost line of the script's in *frame* or its callers."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "somewhere" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
