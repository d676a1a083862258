"""Forward and backward passes that a rank computes in turns, as DualPipe pairs them.

While the data of one micro-batch is on its way, the rank computes the other; what a person wants to see is
the pair. The schedule is not asked: the spans tell, whether they were simulated or recorded. Reference:
DeepSeek-V3, arXiv:2412.19437, figures 4 and 5.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.columns import Int64Array, int64, is_one_of

FORWARD: Final = ("forward",)  # kinds of work of a forward pass

_BACKWARD: Final = ("recompute", "backward", "backward_input", "backward_weight")


def pairs_of(spans: pa.Table, row: Int64Array) -> Int64Array:
    """Return the pair that each cell of a compute lane belongs to, counted from 1; 0: none.

    A pair is a stretch in which the work of one forward and one backward pass, of different micro-batches or
    stages, takes turns at least twice. The idle time between the turns belongs to it.

    Args:
        spans: the timeline of the rank.
        row: row of *spans* of each cell in order, negative for idle time. Shape ``(n_cells,)``.
    """
    pair = np.zeros(len(row), np.int64)
    work = np.flatnonzero(row >= 0)
    line = _lines(spans)[row[work]]
    begins = np.flatnonzero(np.diff(line, prepend=-2) != 0)
    turn = line[begins]
    if len(turn) < 3:
        return pair
    again = (turn[:-2] == turn[2:]) & _belong_together(turn[:-2], turn[1:-1])
    bounds = np.flatnonzero(np.diff(again.astype(np.int8), prepend=0, append=0))
    if not len(bounds):
        return pair
    last_of_turn = np.append(begins[1:], len(work)) - 1
    first, last = bounds[::2].copy(), bounds[1::2] + 1
    first[1:] = np.maximum(first[1:], last[:-1] + 1)  # a turn between two pairs counts as the first one's
    number = np.arange(1, len(first) + 1)
    # Running sums of these are the number of a pair from its first cell to its last.
    change = np.zeros(len(row) + 1, np.int64)
    np.add.at(change, work[begins[first]], number)
    np.add.at(change, work[last_of_turn[last]] + 1, -number)
    return np.cumsum(change[:-1])


def _lines(spans: pa.Table) -> Int64Array:
    """Return a number per span, one for each pass: even if forward, odd if backward, -1 if neither."""
    microbatch, stage = int64(spans, "microbatch"), int64(spans, "virtual_stage")
    forward, backward = (is_one_of(spans, "kind", kinds) for kinds in (FORWARD, _BACKWARD))
    width = int(stage.max(initial=0)) + 2
    found: Int64Array = (microbatch * width + stage + 1) * 2 + backward
    return np.where((forward | backward) & (microbatch >= 0), found, -1)


def _belong_together(one: Int64Array, other: Int64Array) -> NDArray[np.bool_]:
    """Return whether two passes may be a pair: a forward and a backward, not of one micro-batch and stage."""
    found: NDArray[np.bool_] = (one >= 0) & (other >= 0) & (one % 2 != other % 2) & (one // 2 != other // 2)
    return found
