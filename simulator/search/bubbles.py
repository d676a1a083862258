"""How much of a pipeline idles: schedules by stages and micro-batches, run action by action.

No model and no machine: a stage's forward takes one unit, its backward two, halves of it if split, messages
nothing. So a schedule shows as its authors draw it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any, Final, NamedTuple

from foretrace.simulator.errors import ScheduleError
from foretrace.simulator.schedules import SCHEDULES, Formula, held_stages, in_flight, plan, spans

FORWARD: Final = 1
BACKWARD: Final = 2
"""Units that a stage takes for a micro-batch: the backward of a product is two products."""

MOST_PER_STAGE: Final = 32
"""Micro-batches per stage up to which the number that passes an efficiency is looked for."""

GUESSES: Final = 6
"""Times that it is looked for where it should be, before halving."""

_PARTS: Final = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD // 2, "W": BACKWARD // 2}


class Bubble(NamedTuple):
    """What idles in a schedule.

    Attributes:
        schedule, n_stages, n_microbatches, virtual_stages: which; *n_stages* are pipeline ranks.
        fraction: idle over total, mean over ranks.
        overhead: idle over ideal, which is what computing takes.
        inside: the same of the rank that idles most, between its own first and last action.
        in_flight: most micro-batches, or parts of one, that a rank holds at once.
    """

    schedule: str
    n_stages: int
    n_microbatches: int
    virtual_stages: int
    fraction: float
    overhead: float
    inside: float
    in_flight: int

    @property
    def _formula(self) -> Formula | None:
        return SCHEDULES[self.schedule].idles if self.schedule in SCHEDULES else None

    @property
    def published(self) -> float | None:
        """Overhead by the formula of the schedule's authors; None if there is none."""
        if self._formula is None:
            return None
        return self._formula.overhead(self.n_stages, self.n_microbatches, self.virtual_stages)

    @property
    def differs(self) -> str:
        """Why ``overhead`` is not what the authors of the schedule say, in words; empty if it is."""
        formula, said = self._formula, self.published
        # Both are quotients of small whole numbers; what is left is rounding.
        if formula is None or said is None or math.isclose(said, self.overhead, abs_tol=1e-12):
            return ""
        if math.isclose(said, self.inside, abs_tol=1e-12):
            return f"{formula.words}: the formula leaves out that ranks start and end one after the other"
        return f"{formula.words}: {formula.unless}"

    @property
    def efficiency(self) -> float:
        """Share of the time in which ranks compute."""
        return 1 - self.fraction

    def describe(self) -> dict[str, Any]:
        """Return all of it as plain JSON types."""
        said = {"published": self.published, "differs": self.differs}
        return {**self._asdict(), "efficiency": self.efficiency, **said}


def bubble(schedule: str, n_stages: int, n_microbatches: int, virtual_stages: int | None = None) -> Bubble:
    """Return what idles when *n_stages* ranks work on *n_microbatches*.

    >>> found = bubble("1f1b", 4, 12)
    >>> round(found.fraction, 3), found.overhead
    (0.2, 0.25)

    Raises ScheduleError if the schedule does not allow these sizes.
    """
    orders = plan(schedule, n_stages, n_microbatches, virtual_stages)
    per_rank = max(len(held_stages(order)) for order in orders)
    last = 1 + max(action.stage for order in orders for action in order)
    copies = n_stages * per_rank // last  # DualPipe has every stage twice
    found = spans(orders, _PARTS)
    total = max(end for _, end in found)
    work = [sum(_PARTS[action.kind] for action in order) for order in orders]
    ideal = sum(work) / n_stages
    return Bubble(
        schedule=schedule,
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        virtual_stages=per_rank // copies if copies > 1 else per_rank,
        fraction=1 - ideal / total,
        overhead=total / ideal - 1,
        inside=max((end - start) / own - 1 for (start, end), own in zip(found, work, strict=True)),
        in_flight=max(map(in_flight, orders)),
    )


def passes(schedule: str, n_stages: int, efficiency: float, virtual_stages: int | None = None) -> int | None:
    """Return the fewest micro-batches that reach *efficiency*; None if ``MOST_PER_STAGE`` are too few.

    Efficiency grows with micro-batches where the schedule allows them. What idles hardly does, so that one
    answer says about where to ask next; if that does not find it soon, halving does. Raises ScheduleError if
    there is no such schedule.
    """
    if schedule not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {schedule!r}: one of {', '.join(SCHEDULES)}")
    fits = SCHEDULES[schedule].fits
    allowed = [m for m in range(1, MOST_PER_STAGE * n_stages + 1) if fits(n_stages, m)]
    overhead = 1 / efficiency - 1 if efficiency else math.inf
    low, high = 0, len(allowed)
    at, asked = bisect_left(allowed, 2 * n_stages), 0
    while low < high:
        # A guess stays between the ends, so that each answer halves something at least.
        at = min(max(at, low), high - 1)
        found = bubble(schedule, n_stages, allowed[at], virtual_stages)
        low, high = (low, at) if found.efficiency >= efficiency else (at + 1, high)
        asked += 1
        # What idles hardly depends on the number: divided by the overhead to reach it says where to look.
        idle = found.overhead * allowed[at]
        at = bisect_left(allowed, idle / overhead if overhead else math.inf, key=float)
        # After some guesses by halving, which ends for sure.
        at = at if asked < GUESSES else (low + high) // 2
    return allowed[low] if low < len(allowed) else None
