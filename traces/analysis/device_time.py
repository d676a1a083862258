"""What a device did from its first kernel to its last, as unions of intervals, never as sums.

The figures that Holistic Trace Analysis gives as temporal breakdown and overlap: they need no steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.traces.analysis.activity import covered_by
from foretrace.traces.analysis.communications import COMMUNICATION
from foretrace.traces.columns import BoolArray, distinct, flags, int64, is_one_of
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
        start = int64(table, "start_ns")
        end = start + int64(table, "duration_ns")
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
