"""Runtime calls of the host: which of them launched a kernel, and when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.tracer.ingest.events import all_to_ns
from foretrace.traces.columns import Int64Array, labels


@dataclass(frozen=True, slots=True)
class Launches:
    """Runtime calls, sorted by correlation number; times in ns, arrays of shape ``(n_calls,)``.

    Attributes:
        correlation: number that kernel and launch share.
        tid: thread of the call.
        start_ns: when it began.
        end_ns: when it returned.
        code: index of its name in ``names``.
        names: names of runtime functions.
    """

    correlation: Int64Array
    tid: Int64Array
    start_ns: Int64Array
    end_ns: Int64Array
    code: Int64Array
    names: list[str]

    def find(self, correlation: Int64Array) -> NDArray[np.intp]:
        """Return the row of the call with each correlation number, -1 where there is none."""
        if not len(self.correlation):
            return np.full(len(correlation), -1, np.intp)
        at = np.searchsorted(self.correlation, correlation)
        at[at == len(self.correlation)] = 0
        return np.where((self.correlation[at] == correlation) & (correlation > 0), at, -1)


def launches_of(table: pa.Table, base_ns: int) -> Launches:
    """Return the runtime calls in *table* (columns ``tracer.ingest.events.LAUNCH``)."""
    table = table.drop_null().combine_chunks() if table.num_rows else table
    ts, dur = table["ts"].to_numpy(), table["dur"].to_numpy()
    sane = (np.abs(ts) < 4e15) & (dur >= 0) & (dur < 4e15)
    table = table.filter(pa.array(sane)).combine_chunks()
    start = base_ns + all_to_ns(ts[sane])
    correlation = table["correlation"].to_numpy()
    order = np.argsort(correlation, kind="stable")
    codes, names = labels(table, "name") if table.num_rows else (np.zeros(0, np.int32), [])
    return Launches(
        correlation[order].astype(np.int64),
        table["tid"].to_numpy()[order].astype(np.int64),
        start[order],
        (start + all_to_ns(dur[sane]))[order],
        codes[order].astype(np.int64),
        names,
    )
