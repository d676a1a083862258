"""Max-min fair rates on numba: ``simulator.fluid.max_min`` over arrays."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simulator.fluid import FULL
from simulator.program import Int64Array

Floats = NDArray[np.float64]
Ways = tuple[Int64Array, Int64Array, Floats]
"""Links of each transfer as CSR, and what share of each it fills at full rate."""

RISING: Final = -1.0
"""Rate of a transfer that is not final yet."""


def fair_rates(
    active: Int64Array, ways: Ways, scratch: tuple[Floats, Floats, Int64Array], rate: Floats
) -> None:
    """Set the *rate* of every active transfer, between 0 and 1; all links have their full width.

    Args:
        active: transfers under way, in the order in which they set off.
        ways: links of every transfer.
        scratch: for every link two floats and an integer, to work with.
        rate: of every transfer; those of *active* are set.
    """
    start, link, _ = ways
    demand, free, seen = scratch
    for job in active:
        rate[job] = RISING
        for way in link[start[job] : start[job + 1]]:
            free[way], seen[way] = 1.0, 0
    rising, level, turn = len(active), 0.0, 0
    while rising:
        step = _room(active, ways, demand, free, rate)
        if level + step >= 1:
            break
        level += step
        turn += 1
        rising -= _fill(active, ways, scratch, rate, (step, level, turn))
    for job in active:
        if rate[job] == RISING:
            rate[job] = 1.0


def room_left(active: Int64Array, ways: Ways, demand: Floats, free: Floats, rate: Floats) -> float:
    """Return how far the rates that still rise can rise together, and set the *demand* of their links."""
    start, link, load = ways
    for job in active:
        if rate[job] == RISING:
            demand[link[start[job] : start[job + 1]]] = 0.0
    for job in active:
        if rate[job] == RISING:
            for edge in range(start[job], start[job + 1]):
                demand[link[edge]] += load[edge]
    step = np.inf
    for job in active:
        if rate[job] == RISING:
            for way in link[start[job] : start[job + 1]]:
                step = min(step, free[way] / demand[way])
    return step


def fill_links(
    active: Int64Array,
    ways: Ways,
    scratch: tuple[Floats, Floats, Int64Array],
    rate: Floats,
    move: tuple[float, float, int],
) -> int:
    """Let all rates rise by a step to a level, in turn number so-and-so; return how many are final now."""
    start, link, _ = ways
    demand, free, seen = scratch
    step, level, turn = move
    for job in active:
        if rate[job] == RISING:
            for way in link[start[job] : start[job + 1]]:
                if seen[way] < turn:
                    seen[way] = turn
                    free[way] = max(0.0, free[way] - step * demand[way])
    n_final = 0
    for job in active:
        if rate[job] == RISING:
            for way in link[start[job] : start[job + 1]]:
                if free[way] <= FULL * max(demand[way], 1.0):
                    rate[job] = level
                    n_final += 1
                    break
    return n_final


_jit: Final[Any] = njit(cache=True)
_room: Final[Any] = _jit(room_left)
_fill: Final[Any] = _jit(fill_links)
share: Final[Any] = _jit(fair_rates)
"""``fair_rates``, compiled."""
