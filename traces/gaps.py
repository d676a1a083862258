"""Why a device was idle: what the host was doing before the launch that ended each pause.

A trace that knows launches says so itself, in spans of stream ``idle``: ``host`` (not launched yet, and what
the host was doing), ``launch`` (from the launch to the start), ``queued`` (launched before, held back on the
device).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from traces.columns import factorized, int64, is_one_of, labels
from traces.run import Run
from traces.windows import windows


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
    duration = int64(table, "duration_ns")
    _, first, count = np.unique(key, return_index=True, return_counts=True)
    total = np.zeros(len(count), np.int64)
    np.add.at(total, key, duration)
    found = [
        {
            "cause": kind_names[kinds[row]],
            "doing": names[codes[row]],
            "count": int(count[i]),
            "total_s": int(total[i]) / 1e9,
        }
        for i, row in enumerate(first)
    ]
    return sorted(found, key=lambda row: -float(row["total_s"]))
