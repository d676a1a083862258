"""The windows of steps on the ranks of a pipeline, as they are where one step follows another."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from foretrace.simulator.engine.spans import STEP
from foretrace.simulator.program import Int64Array
from foretrace.simulator.rehearsed.figures import steps_of
from foretrace.traces.rehearsal import Rehearsal

TIMES: Final = ("start_ns", "duration_ns")


def closed(spans: pa.Table, rehearsal: Rehearsal) -> pa.Table:
    """Return *spans* with windows that hold what a stage idles between its own work of two steps.

    A stage that is done before others has nothing to do until they are: the next step begins on all of them
    when it does on the first. As in a recording, a step ends on each rank with its own work, and the next one
    begins there, with the idle time behind it. Nothing was simulated before the first step: what comes behind
    it is taken to have come before it, too, by which all times are later. The only step ends when its last
    rank does instead.

    Args:
        spans: of a simulation.
        rehearsal: what was simulated.
    """
    if rehearsal.layout is None or rehearsal.layout.pp < 2:
        return spans
    is_window = np.array([kind == STEP for kind in spans["category"].to_pylist()])
    start, duration = (spans[name].to_numpy().copy() for name in TIMES)
    if len(steps_of(rehearsal)) == 1:
        duration[is_window] = (start + duration).max() - start[is_window]
        return _timed(spans, start, duration)
    first = np.flatnonzero(is_window & (start == 0))
    idle = duration[first].max() - duration[first]
    start += idle.max()
    start[first] -= idle
    duration[first] += idle
    return _timed(spans, start, duration)


def _timed(spans: pa.Table, *times: Int64Array) -> pa.Table:
    """Return *spans* with other starts and durations."""
    for name, values in zip(TIMES, times, strict=True):
        at = spans.schema.get_field_index(name)
        field = spans.schema.field(at)
        spans = spans.set_column(at, field, pa.array(values, field.type))
    return spans
