"""Which ranks and which steps of a training are recorded.

>>> window = Window.parsed(ranks="0,8-11", steps="10:20")
>>> window.has_rank(9), window.has_step(10), window.has_step(20), window.is_past(20)
(True, True, False, True)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from foretrace.door import counted
from foretrace.tracer.errors import RecordError
from foretrace.traces.errors import LayoutError
from foretrace.traces.layout import ranks_in

_ENDLESS: Final = 1 << 31  # a step that no training reaches: the column is 32 bits wide


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Ranks and steps to record; both are all of them unless said otherwise."""

    ranks: frozenset[int] | None = None  # global ranks, None for all
    # ranges of optimizer steps, None for all and for what comes before the first
    steps: tuple[range, ...] | None = None
    period: int = 0  # steps after which the ranges begin again; 0: they do not

    @classmethod
    def parsed(cls, *, ranks: str = "", steps: str = "") -> Self:
        """Return the window that two texts describe; an empty one leaves nothing out.

        Args:
            ranks: numbers and ranges that include both ends, e.g. ``"0,8-11"``.
            steps: ranges without their end, e.g. ``"10:20"``, ``"100:"``, ``"0:2,50:52"``, ``"7"``.

        Raises:
            RecordError: a text says something else.
        """
        return cls(
            ranks=_ranks(ranks) if ranks else None,
            steps=tuple(_steps(part.strip()) for part in steps.split(",")) if steps else None,
        )

    @classmethod
    def scheduled(
        cls, *, ranks: Iterable[int] | None, wait: int, warmup: int, active: int, repeat: int = 0
    ) -> Self:
        """Return what ``torch.profiler.schedule`` with the same numbers would record.

        Raises RecordError: a number is negative, or nothing would be recorded.
        """
        if min(wait, warmup, repeat) < 0 or active < 1:
            raise RecordError(
                f"wait={wait}, warmup={warmup}, active={active}, repeat={repeat}: active is at least 1, "
                "the others at least 0"
            )
        idle, period = wait + warmup, wait + warmup + active
        # Without an end it is one cycle, and its period.
        cycles = tuple(range(i * period + idle, (i + 1) * period) for i in range(repeat or 1))
        chosen = None if ranks is None else frozenset(ranks)
        return cls(ranks=chosen, steps=cycles, period=0 if repeat else period)

    def has_rank(self, rank: int) -> bool:
        """Whether *rank* is recorded."""
        return self.ranks is None or rank in self.ranks

    def has_step(self, step: int) -> bool:
        """Whether *step* is recorded; -1 is what comes before the first."""
        if self.steps is None:
            return True
        at = step % self.period if self.period and step >= 0 else step
        return any(at in steps for steps in self.steps)

    def is_past(self, step: int) -> bool:
        """Whether neither *step* nor any after it is recorded."""
        return self.steps is not None and not self.period and step >= max(r.stop for r in self.steps)

    def first_rank(self, world_size: int) -> int:
        """Return the lowest rank that is recorded; it writes the description of the run."""
        return next((rank for rank in range(world_size) if self.has_rank(rank)), 0)

    def describe(self, world_size: int) -> dict[str, list[int]]:
        """Return what ``RunInfo.job`` says of it: the ranks that are recorded, if not all are."""
        if self.ranks is None:
            return {}
        return {"recorded_ranks": [rank for rank in range(world_size) if rank in self.ranks]}

    def check_world(self, world_size: int) -> None:
        """Raise RecordError unless some rank of the world is to be recorded."""
        if self.ranks is not None and not self.ranks & frozenset(range(world_size)):
            raise RecordError(
                f"ranks {', '.join(map(str, sorted(self.ranks)))}: none of them is in a world of "
                f"{world_size}; give some of 0 to {world_size - 1}"
            )


def _ranks(text: str) -> frozenset[int]:
    try:
        return frozenset(ranks_in(text))
    except LayoutError as error:
        raise RecordError(f"ranks {error}") from None


def _steps(part: str) -> range:
    first, colon, last = part.partition(":")
    start = counted(first or "0")
    stop = counted(last or str(_ENDLESS)) if colon else start + 1
    if start < 0 or stop <= start or not part:
        raise RecordError(f"steps {part!r}: give ranges of steps, e.g. 10:20, 100: or 7")
    return range(start, stop)
