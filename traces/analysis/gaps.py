"""Why a device was idle: what the host was doing before the launch that ended each pause.

A trace that knows launches says so itself, in spans of stream ``idle``: ``host`` (not launched yet, and what
the host was doing), ``launch`` (from the launch to the start), ``queued`` (launched before, held back on the
device).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from foretrace.traces.analysis.critical_path import GAP, CriticalPath
from foretrace.traces.analysis.windows import windows
from foretrace.traces.columns import factorized, int64, is_one_of, labels, summed
from foretrace.traces.run import Run


def gaps(run: Run) -> list[dict[str, Any]]:
    """Return by cause how long devices were idle, over all stored ranks, longest first; empty if unknown."""
    table = run.spans()
    numbered = any(window.step >= 0 for window in windows(run))
    inside = (int64(table, "step") >= 0) | (not numbered)
    table = table.take(np.flatnonzero(is_one_of(table, "stream", ("idle",)) & inside))
    if not table.num_rows:
        return []
    kinds, kind_names = labels(table, "kind")
    codes, names = labels(table, "name")
    key = factorized(kinds, codes)
    first, count, total_ns = summed(key, int64(table, "duration_ns"))
    found = [
        {
            "cause": kind_names[kinds[row]],
            "doing": names[codes[row]],
            "count": int(count[i]),
            "total_s": int(total_ns[i]) / 1e9,
        }
        for i, row in enumerate(first)
    ]
    return sorted(found, key=lambda row: -float(row["total_s"]))


def gaps_on_path(run: Run, path: CriticalPath) -> dict[str, int]:
    """Return by cause how much of the gaps of a critical path is told by the trace, in ns, longest first."""
    told: Counter[str] = Counter()
    for rank in {piece.rank for piece in path.pieces if piece.kind == GAP}:
        table = run.spans([rank])
        rows = np.flatnonzero(is_one_of(table, "stream", ("idle",)))
        kinds, names = labels(table, "kind")
        start = int64(table, "start_ns")[rows]
        end = start + int64(table, "duration_ns")[rows]
        for piece in path.pieces:
            if piece.rank != rank or piece.kind != GAP:
                continue
            shared = np.minimum(end, piece.end_ns) - np.maximum(start, piece.start_ns)
            for row in np.flatnonzero(shared > 0).tolist():
                told[names[kinds[rows[row]]]] += int(shared[row])
    return dict(told.most_common())
