"""What happens next in a program whose tasks hold each other up: a heap of times, in compiled code."""

from __future__ import annotations

from heapq import heapify, heappop
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from foretrace.simulator.engine.deadlock import NEVER
from foretrace.simulator.engine.jit import jit
from foretrace.simulator.engine.shared_gpus import DUE
from foretrace.simulator.program import Int64Array

Heap = list[tuple[int, int]]
"""What happens when: a time in ns and a number for what."""


def planned(at_ns: Int64Array, first: int) -> Heap:
    """Return the heap on which there are only changes, numbered from *first* on."""
    heap = [(int(change_ns), int(first + at)) for at, change_ns in enumerate(at_ns)]
    heap.append((int(np.int64(0)), int(np.int64(0))))  # for its type
    heap.pop()
    heapify(heap)
    return heap


def due_now(
    now: int,
    counts: tuple[int, int],
    known: tuple[Int64Array, NDArray[np.int64], Int64Array],
    found: tuple[Int64Array, Int64Array, Int64Array],
    heap: Heap,
) -> tuple[int, int, int, int]:
    """Take all that happens now from the heap, and return how much of each kind.

    Written to *found*: the tasks that end, the communications whose bytes set off on shared links, those
    whose bytes arrive and the changes; the last two in one array, from its two ends.
    """
    n, m = counts
    ways, of_task, end_ns = known
    ended, fresh, others = found
    n_ended = n_fresh = n_met = n_changed = 0
    while heap and heap[0][0] == now:
        code = heappop(heap)[1]
        if code < n:
            if of_task[code, DUE] == now and end_ns[code] == NEVER:
                end_ns[code] = now
                ended[n_ended] = code
                n_ended += 1
        elif code >= n + m:
            n_changed += 1
            others[len(others) - n_changed] = code - n - m
        elif ways[code - n] == ways[code - n + 1]:
            others[n_met] = code - n
            n_met += 1
        else:
            fresh[n_fresh] = code - n
            n_fresh += 1
    return n_ended, n_fresh, n_met, n_changed


plan: Final[Any] = jit(planned)
"""``planned``, compiled."""
due: Final[Any] = jit(due_now)
"""``due_now``, compiled."""
