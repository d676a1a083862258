"""What may happen to a machine while a program runs: links that slow down or fail, GPUs that throttle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from foretrace.simulator.errors import EngineError, ProgramError
from foretrace.simulator.program import Int64Array

NEAR, FAR, IN, OUT = "near", "far", "in", "out"

WAYS: Final = tuple((tier, direction) for tier in (NEAR, FAR) for direction in (IN, OUT))
"""Links of a rank."""


SWITCHES: Final = ("leaf", "spine")
"""Tiers of links between switches."""


class Way(NamedTuple):
    """A link of one rank, or of one switch upward.

    Attributes:
        rank: whose; the number of the switch where the tier is one of ``SWITCHES``.
        tier: ``"near"``, into its node, ``"far"``, out of it, or one of ``SWITCHES``.
        direction: ``"in"`` or ``"out"``; of a switch down or up.
    """

    rank: int
    tier: str
    direction: str


class Above(NamedTuple):
    """What communications fill of the links between switches.

    *loads*: for each kind of communication the share of every link that it fills at full rate. *kind*: which
    of ``loads`` each communication of a program has; shape ``(n_instances,)``, or none.
    """

    loads: tuple[Mapping[Way, float], ...] = ()
    kind: Int64Array = np.zeros(0, np.int64)


class Change(NamedTuple):
    """Something happens to a link: it is slow, down or well again.

    *way*: to which link. *capacity*: share of its width from then on; 0 is down.
    """

    at_ns: int
    way: Way
    capacity: float


class Throttle(NamedTuple):
    """Something happens to a GPU: it computes more slowly, or as fast as it should again.

    *factor*: how many times as long its compute takes from then on; what is under way counts in part.
    """

    at_ns: int
    rank: int
    factor: float


def of_links(changes: Sequence[Change | Throttle]) -> list[Change]:
    """Return those of *changes* that happen to links. Raises ProgramError if there can be no such link."""
    found = [change for change in changes if isinstance(change, Change)]
    for at_ns, way, capacity in found:
        between = way.tier in SWITCHES and way.direction in {IN, OUT}
        # ``not ... >= 0`` also refuses a NaN, which compares false with everything.
        if not (between or way[1:] in WAYS) or way.rank < 0 or at_ns < 0 or not capacity >= 0:
            raise ProgramError(
                f"change of {tuple(way)} at {at_ns} ns to {capacity}: a rank, near or far, in or out, "
                "from 0 ns on, and a capacity of at least 0"
            )
    return found


def of_gpus(changes: Sequence[Change | Throttle]) -> list[Throttle]:
    """Return those of *changes* that happen to GPUs. Raises ProgramError if a figure is not possible."""
    found = [change for change in changes if isinstance(change, Throttle)]
    for at_ns, rank, factor in found:
        if rank < 0 or at_ns < 0 or not 0 < factor < float("inf"):
            raise ProgramError(
                f"rank {rank} computes {factor} times as long from {at_ns} ns on: "
                "a rank and a time of at least 0, and a factor above 0"
            )
    return found


def without_links(name: str, changes: Sequence[Change | Throttle], above: Above | None) -> list[Throttle]:
    """Return *changes* of GPUs for an engine *name* in which nobody shares links.

    Raises EngineError if a link changes, too, or *above* says what is filled of links between switches.
    """
    if of_links(changes) or above is not None:
        what = "link_changes" if above is None else "links between switches"
        raise EngineError(
            f"{what} need shared links, but the engine is {name}: --engine contended or contended-compiled"
        )
    return of_gpus(changes)
