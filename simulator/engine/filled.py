"""How full links were while a program ran: step functions of time, one per link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrace.simulator.engine.changes import Way
from foretrace.simulator.network.fluid import Span
from foretrace.simulator.program import Int64Array

UNIT: Final = 2.0**-40
"""Share of a link that is counted as one: sums of whole numbers come back to zero exactly."""

SAME: Final = 2**10
"""Units by which a link's load must change to be noted, one in a thousand million of its width."""


class Filled(NamedTuple):
    """How full links were, each from a change of its load to the next, where it was not idle.

    Attributes:
        ways: the links.
        way: index into ``ways``; shape ``(n,)``, sorted, by time within one link.
        start_ns, end_ns: when; shape ``(n,)``.
        used: share of the link's nominal capacity in use; shape ``(n,)``.
    """

    ways: tuple[Way, ...]
    way: Int64Array
    start_ns: Int64Array
    end_ns: Int64Array
    used: NDArray[np.float64]


def filled(spans: Sequence[Span]) -> Filled:
    """Return how full links were, of what ``simulator.network.fluid`` noted; links are ``Way``."""
    ways = tuple(sorted({span.link for span in spans}))
    number = {way: at for at, way in enumerate(ways)}
    way = np.array([number[span.link] for span in spans], np.int64)
    start_ns, end_ns = (np.array([span[at] for span in spans], np.int64) for at in (1, 2))
    used = _units(np.array([span.used for span in spans], np.float64))
    return levels(
        ways, np.concatenate([way, way]), np.concatenate([start_ns, end_ns]), np.concatenate([used, -used])
    )


def of_rates(
    log: tuple[Int64Array, Int64Array, NDArray[np.float64]],
    loads: tuple[Int64Array, Int64Array, NDArray[np.float64]],
    ways: tuple[Way, ...],
) -> Filled:
    """Return how full links were, of the rates at which communications went.

    Args:
        log: when the rate of a communication changed, of which, and what it was from then on, in the order of
            time; each starts and ends at rate 0. Shape ``(n,)`` each.
        loads: links of each communication as CSR, and what share of each it fills at rate 1.
        ways: the links.
    """
    at_ns, job, rate = log
    first, link, load = loads
    order = np.argsort(job, kind="stable")
    at_ns, job, rate = at_ns[order], job[order], rate[order]
    counts = first[job + 1] - first[job]
    row = np.repeat(np.arange(len(job)), counts)
    edge = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first[job], counts)
    now = _units(load[edge] * rate[row])
    same = np.zeros(len(job), np.bool_)
    same[1:] = job[1:] == job[:-1]
    before = np.zeros(len(edge), np.int64)
    later = np.flatnonzero(same[row])
    before[later] = now[later - counts[row[later]]]
    return levels(ways, link[edge], at_ns[row], now - before)


def levels(ways: tuple[Way, ...], way: Int64Array, at_ns: Int64Array, change: Int64Array) -> Filled:
    """Return how full links were, of the *change* of their loads at some times, in ``UNIT``."""
    by_name = sorted(range(len(ways)), key=ways.__getitem__)
    way = np.argsort(np.array(by_name, np.int64))[way]
    order = np.lexsort((at_ns, way))
    way, at_ns, total = way[order], at_ns[order], np.cumsum(change[order])
    last = np.ones(len(way), np.bool_)
    last[:-1] = (way[1:] != way[:-1]) | (at_ns[1:] != at_ns[:-1])
    way, at_ns, total = way[last], at_ns[last], total[last]
    noted = np.ones(len(way), np.bool_)
    noted[1:] = (way[1:] != way[:-1]) | (np.abs(total[1:] - total[:-1]) > SAME)
    way, at_ns, total = way[noted], at_ns[noted], total[noted]
    busy = np.flatnonzero(total > SAME)
    until = np.minimum(busy + 1, len(at_ns) - 1)
    used = total[busy].astype(np.float64) * UNIT
    return Filled(tuple(ways[at] for at in by_name), way[busy], at_ns[busy], at_ns[until], used)


def _units(share: NDArray[np.float64]) -> Int64Array:
    return np.rint(share / UNIT).astype(np.int64)
