"""How ranks are arranged: parallel degrees, coordinates and process groups.

All index arithmetic between a rank and its coordinates lives here and nowhere else. Ranks form one grid
with ``tp`` varying fastest and ``pp`` slowest, Megatron's order ``tp-cp-ep-dp-pp``. Experts do not multiply
the number of ranks: those of a pipeline rank are dealt out a second time, ``expert_tp`` varying fastest, then
``ep``, then the replicas of experts. Unless said otherwise ``expert_tp`` is ``tp``: an expert group is then
made of neighbours in the ``(dp, cp)`` plane that share ``tp`` and ``pp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from foretrace.door import MOST_RANKS
from foretrace.traces.errors import LayoutError

if TYPE_CHECKING:  # a script that is recorded has not imported it
    from numpy.typing import NDArray

AXES = ("tp", "cp", "ep", "dp", "pp")  # axes along which ranks communicate, innermost first

EXPERT_AXES = ("edp", "ep", "etp")
"""Axes of the grid in which experts are dealt out, outermost first: replicas, experts, parts of an expert."""


class Coord(NamedTuple):
    """Position of one rank in the grid."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group: ranks that differ along one axis only."""

    id: int  # number of the group, unique within a run; the ``group`` column of the timeline
    axis: str  # one of ``AXES``, or ``"world"``
    ranks: tuple[int, ...]  # global ranks in group order


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel degrees of a run; ``tp`` varies fastest with rank, ``pp`` slowest.

    >>> Layout(pp=4, dp=16, tp=8).world_size
    512
    >>> Layout(dp=2, tp=8, ep=8, expert_tp=1).expert_replicas
    2
    """

    # stages, replicas, parts of a sequence, parts of a layer
    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1  # ranks that the experts of a layer are dealt out to
    # ranks that every expert is cut over, Megatron-LM's ``--expert-tensor-parallel-size``; 0: as many as
    # other layers. A number that is ``tp`` anyway is kept as 0.
    expert_tp: int = 0

    def __post_init__(self) -> None:
        for axis in fields(self):
            degree = getattr(self, axis.name)
            as_tp = axis.name == "expert_tp" and degree == 0
            if isinstance(degree, bool) or not isinstance(degree, int) or (degree < 1 and not as_tp):
                raise LayoutError(
                    f"{axis.name}={degree!r}: a parallel degree is a whole number of at least 1"
                )
        if max(asdict(self).values()) > MOST_RANKS or self.world_size > MOST_RANKS:
            raise LayoutError(
                f"pp*dp*cp*tp = {self.world_size:,} ranks: at most {MOST_RANKS:,}, also of a degree"
            )
        if self.expert_tp == self.tp:
            object.__setattr__(self, "expert_tp", 0)
        self._check_experts()

    def _check_experts(self) -> None:
        """Raise LayoutError unless ranks can be dealt out to experts."""
        n_ranks = self.dp * self.cp * self.tp
        if self.expert_tp and n_ranks % (self.ep * self.expert_tp):
            if n_ranks % self.expert_tp:
                advice = f"expert_tp={_nearest_divisor(n_ranks, self.expert_tp)}"
            else:
                advice = f"ep={_nearest_divisor(n_ranks // self.expert_tp, self.ep)}"
            raise LayoutError(
                f"ep*expert_tp = {self.ep}*{self.expert_tp} = {self.ep * self.expert_tp} does not divide "
                f"dp*cp*tp = {self.dp}*{self.cp}*{self.tp} = {n_ranks}; try {advice}"
            )
        if not self.expert_tp and (self.dp * self.cp) % self.ep:
            raise LayoutError(
                f"ep={self.ep} does not divide dp*cp = {self.dp}*{self.cp} = {self.dp * self.cp}; "
                f"groups are cut out of dp*cp ranks, try ep={_nearest_divisor(self.dp * self.cp, self.ep)}"
                + self._smaller_parts(n_ranks)
            )

    def _smaller_parts(self, n_ranks: int) -> str:
        """Return with which ``expert_tp`` the experts would go round after all, in words; empty if none."""
        parts = [n for n in range(1, self.tp) if self.tp % n == 0 and n_ranks % (self.ep * n) == 0]
        return f", or expert_tp={' or '.join(map(str, parts))}" if parts else ""

    @property
    def world_size(self) -> int:
        """Number of ranks, ``pp * dp * cp * tp``."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def etp(self) -> int:
        """Ranks that every expert is cut over, ``tp`` unless ``expert_tp`` says otherwise."""
        return self.expert_tp or self.tp

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same part of the same experts, ``dp * cp * tp / (ep * etp)``."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def degrees(self) -> dict[str, int]:
        """Every degree by name, as stored in ``run.json``; ``expert_tp`` only where it is not ``tp``."""
        found = asdict(self)
        if not self.expert_tp:
            del found["expert_tp"]
        return found

    def rank(self, coord: Coord) -> int:
        """Return the rank at *coord*."""
        return ((coord.pp * self.dp + coord.dp) * self.cp + coord.cp) * self.tp + coord.tp

    def coord(self, rank: int) -> Coord:
        """Return the coordinates of *rank*. Raises LayoutError if *rank* is outside the world."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"rank {rank} is outside a world of {self.world_size} (0 to {self.world_size - 1})"
            )
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coord(pp=pp, dp=dp, cp=cp, tp=tp)

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return the groups of *axis*: ranks whose other coordinates agree, in rank order.

        >>> Layout(dp=2, tp=2).groups("dp")
        [(0, 2), (1, 3)]
        >>> Layout(dp=2, tp=2, ep=2, expert_tp=1).groups("ep")
        [(0, 1), (2, 3)]
        """
        return sorted(map(tuple, self.members(axis).tolist()))

    def members(self, axis: str) -> NDArray[np.int64]:
        """Return the groups of *axis*, one a row, each in rank order."""
        grid = np.arange(self.world_size).reshape(self.pp, self.dp, self.cp, self.tp)
        if axis == "world":
            members = grid.reshape(1, -1)
        elif axis in EXPERT_AXES:
            experts = grid.reshape(self.pp, self.expert_replicas, self.ep, self.etp)
            position = 1 + EXPERT_AXES.index(axis)
            members = np.moveaxis(experts, position, -1).reshape(-1, experts.shape[position])
        elif axis in Coord._fields:
            position = Coord._fields.index(axis)
            members = np.moveaxis(grid, position, -1).reshape(-1, getattr(self, axis))
        else:
            raise LayoutError(f"unknown axis {axis!r}: one of {', '.join((*AXES, 'world'))}")
        return members

    def process_groups(self, axes: Sequence[str] = ("tp", "cp", "ep", "dp", "pp", "world")) -> list[Group]:
        """Return every group of more than one rank, numbered in the order of *axes*."""
        found: list[Group] = []
        for axis in axes:
            for ranks in self.groups(axis):
                if len(ranks) > 1:
                    found.append(Group(id=len(found), axis=axis, ranks=ranks))
        return found


def _nearest_divisor(n: int, wanted: int) -> int:
    """Return the divisor of *n* closest to *wanted*."""
    return min((d for d in range(1, n + 1) if n % d == 0), key=lambda d: (abs(d - wanted), d))


# Ranks as a person writes them: ``0-7,9``.

_MOST_DIGITS: Final = 9  # of a number, so many are read: more than any world needs


def ranks_in(text: str, *, below: int = MOST_RANKS) -> tuple[int, ...]:
    """Return the ranks that a list of numbers and ranges names, both ends of a range included, in order.

    Args:
        text: the list.
        below: size of the world.

    Raises:
        LayoutError: it is no such list, or names ranks that are not there.

    >>> ranks_in("9,0-3")
    (0, 1, 2, 3, 9)
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise LayoutError(f"{text!r} is not a list of ranks: give numbers and ranges, e.g. 0,8-11")
        begin, end = (int(number[:_MOST_DIGITS]) for number in (first, last or first))
        if end < begin:
            raise LayoutError(f"{part.strip()} in {text!r} goes down and names no rank: write {last}-{first}")
        if end >= below:
            raise LayoutError(f"{text!r} names rank {last or first}; there are 0 to {below - 1}")
        found.update(range(begin, end + 1))
    return tuple(sorted(found))
