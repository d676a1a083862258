"""Why devices were idle: every nanosecond of a step in which nothing runs on a device has one cause.

A trace that knows launches says so itself, in spans of stream ``idle`` whose kinds are ``causes``; what they
leave of the idle time are pauses between kernels that are too short to have a span.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from foretrace.door import own_table
from foretrace.traces.analysis.activity import covered_by
from foretrace.traces.analysis.communications import COMMUNICATION
from foretrace.traces.analysis.critical_path import GAP, CriticalPath
from foretrace.traces.analysis.metrics import averaged_steps, represented
from foretrace.traces.analysis.windows import windows_of
from foretrace.traces.columns import bounds, distinct, is_one_of, labels
from foretrace.traces.run import Run


class Cause(NamedTuple):
    """Why a device is idle: in few words, in a sentence, and what to do about it."""

    short: str
    text: str
    advice: str


@cache
def causes() -> Mapping[str, Cause]:
    """Return the causes by the kinds of the spans, as ``causes.toml`` has them; ``short`` has no spans."""
    found = own_table("traces/analysis/causes.toml")
    return MappingProxyType({kind: Cause(**said) for kind, said in found.items()})


ON_ITS_WAY: Final = "from the launch to the start"
HELD_BACK: Final = "held back on the device"
UNNAMED: Final = "host"
"""What a span of ``launch`` and of ``queued`` is called, and one in which nothing in the file names what the
host does."""


def gaps(run: Run) -> list[dict[str, Any]]:
    """Return why devices were idle in the averaged steps, over all ranks, longest first; empty if unknown.

    ``total_s`` adds up to the idle time of the devices exactly, ``share`` to that of the steps.
    """
    averaged = set(averaged_steps(run))
    weights = represented(run)
    total: Counter[tuple[str, str]] = Counter()
    count: Counter[tuple[str, str]] = Counter()
    window_ns = 0
    for rank, weight in weights.items():
        if not run.once(_has_idle, rank):
            continue
        table = run.spans([rank])
        start, end = bounds(table)
        idle = np.flatnonzero(is_one_of(table, "stream", ("idle",)))
        idle = idle[np.argsort(start[idle], kind="stable")]
        begun, until = start[idle], np.maximum.accumulate(end[idle])
        own = [window for window in windows_of(run, rank) if window.step in averaged]
        of_device = is_one_of(table, "category", ("compute", "copy", *COMMUNICATION))
        kinds, kind_names = labels(table, "kind")
        codes, names = labels(table, "name")
        edges = np.array([edge for window in own for edge in (window.start_ns, window.end_ns)], np.int64)
        point = distinct(np.concatenate([start[of_device], end[of_device], edges]))
        lengths = np.diff(point)
        # From here on only intervals in which nothing runs have a length.
        lengths[covered_by(point, start[of_device], end[of_device])] = 0
        for window in own:
            first, last = np.searchsorted(point, (window.start_ns, window.end_ns))
            short = lengths[first:last]
            left, pauses = int(short.sum()), int((short > 0).sum())
            # Spans that end before the window begins are skipped; *until* never falls.
            low = np.searchsorted(until, window.start_ns, side="right")
            rows = idle[low : np.searchsorted(begun, window.end_ns)]
            rows = rows[end[rows] > window.start_ns]
            inside = np.minimum(end[rows], window.end_ns) - np.maximum(start[rows], window.start_ns)
            for row, ns in zip(rows.tolist(), inside.tolist(), strict=True):
                key = kind_names[kinds[row]], names[codes[row]]
                total[key] += ns * weight
                count[key] += weight
                left -= ns
            total["short", ""] += left * weight
            count["short", ""] += max(pauses - len(rows), 0) * weight
            window_ns += window.duration_ns * weight
    return [
        {
            "cause": cause,
            "doing": doing,
            "count": count[cause, doing],
            "total_s": ns / 1e9,
            "share": ns / window_ns,
        }
        for (cause, doing), ns in total.most_common()
        if ns
    ]


def has_idle(run: Run) -> bool:
    """Whether the run says of any rank when its device was idle, and why: a trace of a device does."""
    return any(run.once(_has_idle, rank) for rank in run.stored_ranks)


def _has_idle(table: pa.Table) -> bool:
    return bool(is_one_of(table, "stream", ("idle",)).any())


def gaps_on_path(run: Run, path: CriticalPath) -> dict[str, int]:
    """Return by cause how much of the gaps of a critical path is told by the trace, in ns, longest first."""
    told: Counter[str] = Counter()
    for rank in {piece.rank for piece in path.pieces if piece.kind == GAP}:
        table = run.spans([rank])
        rows = np.flatnonzero(is_one_of(table, "stream", ("idle",)))
        kinds, names = labels(table, "kind")
        start, end = (edge[rows] for edge in bounds(table))
        for piece in path.pieces:
            if piece.rank != rank or piece.kind != GAP:
                continue
            shared = np.minimum(end, piece.end_ns) - np.maximum(start, piece.start_ns)
            for row in np.flatnonzero(shared > 0).tolist():
                told[names[kinds[rows[row]]]] += int(shared[row])
    return dict(told.most_common())
