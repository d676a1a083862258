"""What a device did from its first kernel to its last, as unions of intervals, never as sums.

The figures that Holistic Trace Analysis gives as temporal breakdown and overlap: they need no steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from foretrace.traces.analysis.activity import covered_by, states, sweep, window_state
from foretrace.traces.analysis.communications import COMMUNICATION, arrivals
from foretrace.traces.analysis.metrics import breakdown, represented
from foretrace.traces.analysis.windows import windows_of
from foretrace.traces.columns import BoolArray, Int64Array, bounds, distinct, flags, int64, is_one_of, labels
from foretrace.traces.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """Time of one rank's device, in ns."""

    rank: int  # global rank
    window_ns: int  # from the first start to the last end of a span on the device
    idle_ns: int  # nothing runs
    compute_ns: int  # a compute kernel runs, whatever else does
    # a communication runs, waiting included, whatever else does; not those whose times are bounds
    communication_ns: int
    overlap_ns: int  # both run
    other_ns: int  # only copies, or communication without compute: ``window - idle - compute``


def device_times(run: Run) -> list[DeviceTime]:
    """Return the time of each stored rank's device; ranks without device spans are left out."""
    found = []
    for rank in run.stored_ranks:
        table = run.spans([rank])
        of_device = is_one_of(table, "category", ("compute", "copy", *COMMUNICATION))
        of_device &= ~flags(table, "is_bound")
        start, end = bounds(table)
        if not of_device.any():
            continue
        point = distinct(np.concatenate([start[of_device], end[of_device]]))
        lengths = np.diff(point)

        def runs(rows: BoolArray) -> BoolArray:
            return covered_by(point, start[rows], end[rows])  # noqa: B023 - called at once

        busy = runs(of_device)
        compute = runs(is_one_of(table, "category", ("compute",)))
        communication = runs(is_one_of(table, "category", COMMUNICATION) & of_device)
        window = int(point[-1] - point[0])
        idle, computing = int(lengths[~busy].sum()), int(lengths[compute].sum())
        found.append(
            DeviceTime(
                rank=rank,
                window_ns=window,
                idle_ns=idle,
                compute_ns=computing,
                communication_ns=int(lengths[communication].sum()),
                overlap_ns=int(lengths[compute & communication].sum()),
                other_ns=window - idle - computing,
            )
        )
    return found


# What a host launches and what its device holds: how long devices wait for launches, and peaks of memory.

HELD: Final = {"total": "peak_bytes", "reserved": "reserved_bytes"}
"""Categories of memory over time that are sums, and what their peaks are called."""

LAUNCH: Final = "launch"
"""Kind of the spans in which a host launches; a simulated one has them where its device is faster."""


def launches(run: Run) -> dict[str, Any]:
    """Return by rank how its host launches, as the reader of its trace noted it; empty if nobody did."""
    said = (run.info.job or {}).get("launches")
    return dict(said) if isinstance(said, Mapping) else {}


def held_memory(run: Run) -> list[dict[str, Any]]:
    """Return by stored rank the most that its device held in total, and reserved, in bytes, and when, in s.

    Empty where the run does not say; what it does not say of a rank is None.
    """
    table = run.memory()
    names, labelled = labels(table, "category") if table.num_rows else (np.zeros(0, np.int32), [])
    rank, held, t_ns = (int64(table, name) for name in ("rank", "bytes", "t_ns"))
    limit = ((run.info.cluster or {}).get("device") or {}).get("memory_bytes")
    found: dict[int, dict[str, Any]] = {}
    for code, name in enumerate(labelled):
        if name not in HELD:
            continue
        for one in np.unique(rank[names == code]).tolist():
            own = np.flatnonzero((names == code) & (rank == one))
            most = own[held[own].argmax()]
            row = found.setdefault(one, {"rank": one, "limit_bytes": limit, **dict.fromkeys(HELD.values())})
            row[HELD[name]] = int(held[most])
            if name == "total":
                row["at_s"] = int(t_ns[most]) / 1e9
    return [found[one] for one in sorted(found)]


def launching_share(run: Run) -> float:
    """Return the share of the steps in which nothing is under way on a rank but launches, over all ranks.

    Only of runs with spans of launches: why devices of a recorded run were idle is what ``gaps`` says. The
    run has a step with a length.
    """
    rows = breakdown(run)
    stands_for = represented(run)
    total_ns = sum(row.window_ns * row.represents for row in rows)
    like = arrivals(run).like
    own_ns = {rank: _launching_ns(run, rank) for rank in set(like.values())}
    found_ns = sum(stands_for[rank] * own_ns[like[rank]] for rank in run.stored_ranks)
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
    swept, other, found_ns = sweep(run, rank), states(run).index("other"), 0
    launched_ns = np.diff(_until(swept.point_ns, start, end))
    for window in windows_of(run, rank):
        is_other = window_state(run, swept, window) == other
        found_ns += int(launched_ns[swept.inside(window)][is_other].sum())
    return found_ns


def _until(point: Int64Array, start: Int64Array, end: Int64Array) -> Int64Array:
    """Return the time before each *point* in spans from *start* to *end*, which do not overlap, in ns."""
    before = np.concatenate([[0], np.cumsum(end - start)])
    begun = np.searchsorted(start, point)  # spans that begin before it
    # What the last span that has begun still lasts behind the point.
    beyond = np.maximum(np.where(begun > 0, end[begun - 1] - point, 0), 0)
    return np.asarray(before[begun] - beyond, np.int64)
