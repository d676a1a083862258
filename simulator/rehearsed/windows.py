"""The window of a step on every rank of a pipeline, as it is where one step follows another."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from simulator.engine.spans import STEP
from simulator.rehearsed.figures import steps_of
from traces.rehearsal import Rehearsal


def closed(spans: pa.Table, rehearsal: Rehearsal) -> pa.Table:
    """Return *spans* with windows of the only step that end when its last rank does.

    A stage that is done before others has nothing to do until they are: the next step begins on all of them
    when it does on the first. One step alone would end on each with its last task, and the stage's idle time
    behind that would be in none of its shares.

    Args:
        spans: of a simulation.
        rehearsal: what was simulated; of several steps, each but the first begins with that idle time.
    """
    if rehearsal.layout is None or rehearsal.layout.pp < 2 or len(steps_of(rehearsal)) != 1:
        return spans
    is_window = np.array([kind == STEP for kind in spans["category"].to_pylist()])
    start, duration = (spans[name].to_numpy() for name in ("start_ns", "duration_ns"))
    last = int((start + duration).max())
    at = spans.schema.get_field_index("duration_ns")
    longer = pa.array(np.where(is_window, last - start, duration), spans.schema.field(at).type)
    return spans.set_column(at, spans.schema.field(at), longer)
