"""How long devices do nothing because their host has yet to launch what comes next."""

from __future__ import annotations

from typing import Final

import numpy as np

from foretrace.traces.analysis.activity import in_window, sweep
from foretrace.traces.analysis.metrics import breakdown, represented
from foretrace.traces.analysis.windows import windows
from foretrace.traces.columns import Int64Array, int64, is_one_of
from foretrace.traces.run import Run

LAUNCH: Final = "launch"
"""Kind of the spans in which a host launches; a simulated one has them where its device is faster."""


def launching_share(run: Run) -> float:
    """Return the share of the steps in which nothing is under way on a rank but launches, over all ranks.

    Only of runs with spans of launches: why devices of a recorded run were idle is what ``gaps`` says. The
    run has a step with a length.
    """
    rows = breakdown(run)
    stands_for = represented(run)
    total_ns = sum(row.window_ns * row.represents for row in rows)
    found_ns = sum(stands_for[rank] * _launching_ns(run, rank) for rank in run.stored_ranks)
    return found_ns / total_ns


def _launching_ns(run: Run, rank: int) -> int:
    """Return the time in steps of a stored rank in which only launches are under way, in ns."""
    table = run.spans([rank])
    launches = is_one_of(table, "category", ("host",)) & is_one_of(table, "kind", (LAUNCH,))
    rows = np.flatnonzero(launches & ~is_one_of(table, "stream", ("idle",)))
    if not len(rows):
        return 0
    start = int64(table, "start_ns")[rows]
    order = np.argsort(start)
    start, end = start[order], (start + int64(table, "duration_ns")[rows])[order]
    swept, found_ns = sweep(run, rank), 0
    for window in windows(run):
        if window.rank == rank:
            done = in_window(run, swept, window, rank)
            other = done.state == done.states.index("other")
            launched_ns = _until(done.end_ns, start, end) - _until(done.start_ns, start, end)
            found_ns += int(launched_ns[other].sum())
    return found_ns


def _until(point: Int64Array, start: Int64Array, end: Int64Array) -> Int64Array:
    """Return the time before each *point* in spans from *start* to *end*, which do not overlap, in ns."""
    before = np.concatenate([[0], np.cumsum(end - start)])
    begun = np.searchsorted(start, point)  # spans that begin before it
    beyond = np.maximum(np.where(begun > 0, end[begun - 1] - point, 0), 0)
    return np.asarray(before[begun] - beyond, np.int64)
