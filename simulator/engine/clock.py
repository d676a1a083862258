"""What all engines have in common: a program made ready, run with other durations, and its timeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import pyarrow as pa

from foretrace.simulator.engine.changes import Above, Change, Throttle
from foretrace.simulator.engine.spans import spans
from foretrace.simulator.program import Int64Array, Program, transfer_ns

Times = tuple[Int64Array, Int64Array]
"""When each task starts (a communication: arrives) and ends, in ns; shape ``(n_tasks,)`` each."""


class Clock(ABC):
    """A program made ready to be run many times, with other durations each time.

    *changes* happen to links and GPUs meanwhile; *above* is what each communication fills of further links,
    those between switches, for engines in which links are shared.

    *duration_ns*: compute time of each task in the program itself; shape ``(n_tasks,)``. *transfer_ns*: time
    of each communication there, if alone; shape ``(n_instances,)``.
    """

    def __init__(
        self, program: Program, changes: Sequence[Change | Throttle] = (), above: Above | None = None
    ) -> None:
        self.duration_ns = program.duration_ns
        self.transfer_ns = transfer_ns(program)
        self._prepare(program, changes, above)

    def times(self, duration_ns: Int64Array | None = None, transfer_ns: Int64Array | None = None) -> Times:
        """Return start and end of every task; durations that are left out are those of the program.

        Raises ProgramError if the program cannot run to its end: a cycle, a participant that never arrives,
        or a link that is down for good.
        """
        return self._run(
            self.duration_ns if duration_ns is None else duration_ns,
            self.transfer_ns if transfer_ns is None else transfer_ns,
        )

    @abstractmethod
    def _prepare(self, program: Program, changes: Sequence[Change | Throttle], above: Above | None) -> None:
        """Keep what a run needs. Raises EngineError if the engine does not know of a change or of *above*."""

    @abstractmethod
    def _run(self, duration_ns: Int64Array, transfer_ns: Int64Array) -> Times:
        """Return start and end of every task with these durations."""


def entries(clock: type[Clock]) -> tuple[Callable[..., pa.Table], Callable[..., Times]]:
    """Return ``run`` and ``times`` of an engine: the timeline of a program, and the times of its tasks.

    Both take what ``Clock`` takes.
    """

    def times(
        program: Program, changes: Sequence[Change | Throttle] = (), above: Above | None = None
    ) -> Times:
        """Return start and end of every task.

        Raises ProgramError if the program cannot run to its end, and EngineError if the engine does not know
        of a change or of *above*.
        """
        return clock(program, changes, above).times()

    def run(
        program: Program, changes: Sequence[Change | Throttle] = (), above: Above | None = None
    ) -> pa.Table:
        """Return the timeline: a row per task, and one per rank and step. Raises what ``times`` raises."""
        return spans(program, *times(program, changes, above))

    return run, times
