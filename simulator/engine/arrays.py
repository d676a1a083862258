"""Who comes before whom, over arrays on numba: what both compiled passes begin with."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from foretrace.simulator.engine.deadlock import NEVER
from foretrace.simulator.engine.jit import jit
from foretrace.simulator.program import Int32Array, Int64Array


def previous_on_stream(rank: Int32Array, stream: Int32Array, n_streams: int) -> Int64Array:
    """Return for every task the one before it on its stream, -1 for the first."""
    last = np.full((rank.max() + 1 if len(rank) else 0) * n_streams, NEVER, np.int64)
    previous = np.empty(len(rank), np.int64)
    for task in range(len(rank)):
        lane = np.int64(rank[task]) * n_streams + stream[task]
        previous[task] = last[lane]
        last[lane] = task
    return previous


def grouped(key: Int64Array, n_keys: int) -> tuple[Int64Array, Int64Array]:
    """Return the positions of each key as CSR: those of key *k* are ``at[start[k]:start[k + 1]]``."""
    start = np.zeros(n_keys + 1, np.int64)
    for k in key:
        if k >= 0:
            start[k + 1] += 1
    for k in range(n_keys):
        start[k + 1] += start[k]
    at = np.empty(start[n_keys], np.int64)
    fill = start[:-1].copy()
    for position in range(len(key)):
        k = key[position]
        if k >= 0:
            at[fill[k]] = position
            fill[k] += 1
    return start, at


def successors_of(
    previous: Int64Array, dep_start: Int64Array, deps: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return how much each task waits for, and who waits for it, as CSR: ``at[start[i]:start[i + 1]]``."""
    n = len(previous)
    waits = dep_start[1:] - dep_start[:-1] + (previous >= 0)
    before = np.empty(n + len(deps), np.int64)  # for every edge, its beginning
    after = np.empty(n + len(deps), np.int64)  # and its end
    before[:n] = previous
    before[n:] = deps
    for task in range(n):
        after[task] = task
        after[n + dep_start[task] : n + dep_start[task + 1]] = task
    start, edges = csr(before, n)
    return waits, start, after[edges]


previous: Final[Any] = jit(previous_on_stream)
"""``previous_on_stream``, compiled."""
csr: Final[Any] = jit(grouped)
"""``grouped``, compiled."""
successors: Final[Any] = jit(successors_of)
"""``successors_of``, compiled."""
