"""Streams and events of the rehearsed GPU, as its driver has noted them, on the tape of a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretrace.tracer.rehearse.events.tape import HOST_WAIT, WAIT_MARK, Tape

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.device.driver import Driver
    from foretrace.tracer.rehearse.events.lane import IssueLane


class Streams:
    """What streams wait for.

    Args:
        tape: where it is written down.
        lane: told the current stream of its thread.
        driver: notes what is asked of streams and events.
    """

    def __init__(self, tape: Tape, lane: IssueLane, driver: Driver) -> None:
        self._tape, self._lane, self._driver = tape, lane, driver
        self._marks: dict[int, int] = {}
        for _ in driver.take():  # of what was imported
            pass

    def follow(self) -> None:
        """Write down what has happened to streams and events since the last call."""
        self._lane.stream = self._driver.stream(-1)  # of this thread, as PyTorch keeps it
        for entry in [*self._driver.take()]:
            if entry.kind == "record":
                self._marks[entry.number] = self._tape.mark(entry.stream)
            elif entry.kind == "wait" and entry.number in self._marks:
                self._tape.note(WAIT_MARK, self._marks[entry.number], stream=entry.stream)
            elif entry.kind.startswith("synchronize"):
                self._tape.note(HOST_WAIT)
