"""The contended engine on numba: links shared max-min fairly, for programs of many transfers.

The same rules as ``simulator/engine/contended.py`` and ``simulator/network/fluid.py``, to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from foretrace.simulator.engine import clock
from foretrace.simulator.engine.changes import Above, Change, Throttle, of_gpus, of_links
from foretrace.simulator.engine.filled import Filled, loads, of_rates
from foretrace.simulator.engine.spans import spans
from foretrace.simulator.engine.together import Together, compiling, numbered
from foretrace.simulator.program import Int64Array, Program

__all__ = ["NAME", "Clock", "compiling", "run", "times", "watched"]

NAME = "contended-compiled"
"""Name of this engine in summaries."""


class Clock(clock.Clock):
    """See ``clock.Clock``; on numba, with shared links."""

    def _prepare(self, program: Program, changes: Sequence[Change | Throttle], above: Above | None) -> None:
        self.ways, self.names = loads(program, changes, above)
        number = {way: at for at, way in enumerate(self.names)}
        links = [(change.at_ns, number[change.way], change.capacity) for change in of_links(changes)]
        changed = [*links, *numbered(of_gpus(changes))]
        self.together = Together(program, changed, self.ways, len(self.names))

    def _run(self, duration_ns: Int64Array, transfer_ns: Int64Array) -> clock.Times:
        return self.together.times(duration_ns, transfer_ns)


run, times = clock.entries(Clock)


def watched(
    program: Program, changes: Sequence[Change | Throttle] = (), above: Above | None = None
) -> tuple[pa.Table, Filled]:
    """Return the timeline and how full links were over time: ``simulator.engine.contended.watched``."""
    made = Clock(program, changes, above)
    start_ns, end_ns, log = made.together.watched(made.duration_ns, made.transfer_ns)
    return spans(program, start_ns, end_ns), of_rates(log, made.ways, made.names)
