"""Max-min fair rates on numba, and what flows at them: ``simulator.network.fluid`` over arrays."""

from __future__ import annotations

from math import ceil
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from foretrace.simulator.engine.deadlock import NEVER
from foretrace.simulator.engine.jit import jit
from foretrace.simulator.network.fluid import FULL, ROUNDING_NS
from foretrace.simulator.program import Int64Array

Floats = NDArray[np.float64]
Ways = tuple[Int64Array, Int64Array, Floats]
"""Links of each transfer as CSR, and what share of each it fills at full rate."""

RISING: Final = -1.0
"""Rate of a transfer that is not final yet."""


def fair_rates(
    active: Int64Array,
    ways: Ways,
    scratch: tuple[Floats, Floats, Int64Array],
    capacity: Floats,
    rate: Floats,
) -> None:
    """Set the *rate* of every active transfer, between 0 and 1.

    Args:
        active: transfers under way, in the order in which they set off.
        ways: links of every transfer.
        scratch: for every link two floats and an integer, to work with.
        capacity: what is left of the width of every link, as a share.
        rate: rate of every transfer; those of *active* are set.
    """
    start, link, _ = ways
    demand, free, seen = scratch
    for job in active:
        rate[job] = RISING
        for way in link[start[job] : start[job + 1]]:
            free[way], seen[way] = capacity[way], 0
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


def next_arrival(active: Int64Array, left_ns: Floats, rate: Floats, now: int) -> int:
    """Return when the first transfer under way arrives if nothing else happens; -1 if none ever does."""
    soonest = np.inf
    for job in active:
        if left_ns[job] <= ROUNDING_NS * max(rate[job], FULL):
            return now
        if rate[job] > 0:
            soonest = min(soonest, left_ns[job] / rate[job])
    if soonest == np.inf:
        return NEVER
    return now + max(0, ceil(soonest - ROUNDING_NS))


def let_flow(
    active: Int64Array, n_active: int, elapsed_ns: int, left_ns: Floats, rate: Floats
) -> tuple[int, int]:
    """Let bytes flow; put first in *active* who is still under way, then who has arrived; count both."""
    arrived = np.empty(n_active, np.int64)
    kept = n_arrived = 0
    for at in range(n_active):
        job = active[at]
        left_ns[job] -= elapsed_ns * rate[job]
        if left_ns[job] <= ROUNDING_NS * max(rate[job], FULL):
            arrived[n_arrived] = job
            n_arrived += 1
        else:
            active[kept] = job
            kept += 1
    active[kept:n_active] = arrived[:n_arrived]
    return kept, n_arrived


_room: Final[Any] = jit(room_left)
_fill: Final[Any] = jit(fill_links)
next_end: Final[Any] = jit(next_arrival)
"""``next_arrival``, compiled."""
move: Final[Any] = jit(let_flow)
"""``let_flow``, compiled."""
share: Final[Any] = jit(fair_rates)
"""``fair_rates``, compiled."""
