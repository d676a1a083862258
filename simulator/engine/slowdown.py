"""How much longer a task computes while communication holds part of its GPU.

A communication kernel holds processors, one per channel, from its launch to its end, and takes memory
bandwidth while bytes move. What is bound by arithmetic has the processors that are left, what is bound by
memory the bandwidth that is left: ``(1 - m) / (1 - p) + m / (1 - b)`` times as long, with *m* the share of
the task's time that is bound by memory, *p* and *b* the shares of processors and bandwidth that are taken.
Shares are whole parts per million, so that sums do not depend on the order of arrivals.

Pure functions: the event engine calls them, the compiled engines compile them.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from foretrace.simulator.network.fluid import ROUNDING_NS

MILLION: Final = 1_000_000
"""Parts of a whole."""

MOST: Final = 900_000
"""Most of a GPU that communications are taken to hold together, so that compute always goes on.

NCCL's largest ``NCCL_MAX_CTAS`` is 64, half of an H100; more than one such kernel at a time is rare.
"""


def slowdown(memory_bound: int, processors: int, memory: int) -> float:
    """Return how many times as long a task takes, at least 1.

    *memory_bound*: share of its time that is bound by memory, in parts per million.

    >>> slowdown(0, 200_000, 300_000), slowdown(1_000_000, 200_000, 300_000)
    (1.25, 1.4285714285714286)
    """
    if processors == 0 and memory == 0:
        return 1.0
    bound = memory_bound / MILLION
    busy = (1.0 - bound) / (1.0 - min(processors, MOST) / MILLION)
    return max(1.0, busy + bound / (1.0 - min(memory, MOST) / MILLION))


def due_ns(now_ns: int, left_ns: float, factor: float) -> int:
    """Return when a task ends that needs *left_ns* alone and takes *factor* times as long from now on."""
    return now_ns + max(1, ceil(left_ns * factor - ROUNDING_NS))
