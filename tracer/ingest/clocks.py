"""Puts ranks on one clock: a collective that everybody contributes to ends everywhere at the same moment.

The typical difference of the ends of shared collectives is the difference of two clocks; what is left over
says how well it is known. Ranks of one host agree already, to some microseconds (8 GPUs: 1 to 7 µs).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from foretrace.tracer.ingest.matching import Ends, collectives, shared
from foretrace.traces.info import Clock

LEAST_NS: Final = 50_000
"""Differences below this are left alone: ranks of one host have one clock."""


def common_clock(tables: dict[int, pa.Table]) -> dict[int, Clock]:
    """Return the clock of each rank; ranks that share no collective with others keep their own time."""
    ends = {rank: collectives(table) for rank, table in tables.items()}
    clock: dict[int, Clock] = {}
    for root in sorted(tables):
        if root in clock:
            continue
        clock[root] = Clock()
        waiting = [root]
        while waiting:
            known = waiting.pop(0)
            for rank in sorted(set(tables) - set(clock)):
                difference = _difference(ends[known], ends[rank])
                if difference is not None:
                    clock[rank] = _chained(clock[known], *difference)
                    waiting.append(rank)
    return clock


def _difference(a: dict[int, Ends], b: dict[int, Ends]) -> tuple[int, int] | None:
    """Return what must be added to the times of *b*, and half its spread; None without shared ends."""
    gaps = [
        a[group].end_ns[left] - b[group].end_ns[right]
        for group in a.keys() & b.keys()
        for left, right in [shared(a[group], b[group])]
        if len(left)
    ]
    if not gaps:
        return None
    gap = np.concatenate(gaps)
    offset = int(np.median(gap))
    return offset, int(np.quantile(np.abs(gap - offset), 0.95))


def _chained(known: Clock, offset_ns: int, spread_ns: int) -> Clock:
    """Return the clock of a rank that differs by *offset_ns* from one whose clock is *known*."""
    if abs(offset_ns) <= max(LEAST_NS, 3 * spread_ns):
        spread_ns, offset_ns = spread_ns + abs(offset_ns), 0
    return Clock(offset_ns=known.offset_ns + offset_ns, uncertainty_ns=known.uncertainty_ns + spread_ns)
