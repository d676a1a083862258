"""A script that asks the same for ever: it waits for an answer that a rehearsal does not give.

A search that goes on until it has converged, or a retry until it succeeds, ends in a real run when a number
has changed. Here it is told the same each time. This module does not import torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.hints import STUB
from foretrace.tracer.rehearse.values.loops import Standing, standing

OFTEN: Final = 100
"""Times that a question is asked in a step before loops around it are looked at."""

TOO_OFTEN: Final = 2000
"""Times that it is then asked with nothing changed until it is said to be asked for ever. Episodes of an
environment, which reads a choice in each of its steps and decides itself when they end, mostly have fewer."""

TOO_OFTEN_WHETHER: Final = 300
"""As many, of questions whether something holds."""

LEAST_S: Final = 2.0
"""Seconds of the processor that this takes at least: elements of a tensor, which one call may ask for one by
one, take less."""


UNSAID: Final = 60
"""How many times as often, and as long, where it cannot be said whether anything has changed."""


class Unending:
    """Counts the questions of a step."""

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}
        self._same: dict[Any, tuple[int, float]] = {}
        self._is_paused = False

    def step_ended(self) -> None:
        """A step is over: the script gets somewhere."""
        self._asked.clear()
        self._same.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no question inside this context: those of the elements of one list."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def asked(self, told: str) -> None:
        """Count a question.

        Args:
            told: what the script was told, with the place that asked.

        Raises:
            RehearsalError: it is asked for ever.
        """
        if self._is_paused:
            return
        self._asked[told] = n_times = self._asked.get(told, 0) + 1
        if n_times < OFTEN:
            return
        found = standing(sys._getframe(1))  # noqa: SLF001 - no other way is as fast
        n_same, began_s = self._same.get((told, found), (0, time.process_time()))
        self._same[told, found] = n_same + 1, began_s
        is_whether = "told True" in told or "told False" in told
        most, least_s = TOO_OFTEN_WHETHER if is_whether else TOO_OFTEN, LEAST_S
        if found is None:
            most, least_s = most * UNSAID, least_s * UNSAID
        if n_same + 1 >= most and time.process_time() - began_s >= least_s:
            raise RehearsalError(_words(told, found, n_same + 1))


def _words(told: str, found: Standing | None, n_times: int) -> str:
    if found is None:
        return (
            f"{told} {n_times:,} times without a step: if a loop waits for another answer, give that in a "
            f"stub file ({STUB}), else make it shorter by an argument of the script"
        )
    return (
        f"the loop at {Path(found.name).name}:{found.line} does not end here: {told} {n_times:,} times, with "
        "nothing else changed that could end it; a real run ends it by another answer: give that, or leave "
        f"the loop out, in a stub file ({STUB})"
    )
