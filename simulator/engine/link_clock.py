"""What the two engines with shared links have in common: a program made ready, run with other durations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from foretrace.simulator.engine.changes import Above, Change, Throttle
from foretrace.simulator.program import Int64Array, Program, transfer_ns


class LinkClock(ABC):
    """A program made ready to be run many times, with other durations each time.

    Args:
        program: what to run.
        changes: what happens to links and GPUs meanwhile.
        above: what each communication fills of further links, those between switches.

    Attributes:
        duration_ns: compute time of each task in the program itself; shape ``(n_tasks,)``.
        transfer_ns: time of each communication there, if alone; shape ``(n_instances,)``.
    """

    def __init__(
        self, program: Program, changes: Sequence[Change | Throttle] = (), above: Above | None = None
    ) -> None:
        self.duration_ns = program.duration_ns
        self.transfer_ns = transfer_ns(program)
        self._prepare(program, changes, above)

    def times(
        self, duration_ns: Int64Array | None = None, transfer_ns: Int64Array | None = None
    ) -> tuple[Int64Array, Int64Array]:
        """Return start and end of every task; durations that are left out are those of the program.

        Raises:
            ProgramError: the program cannot run to its end.
        """
        return self._run(
            self.duration_ns if duration_ns is None else duration_ns,
            self.transfer_ns if transfer_ns is None else transfer_ns,
        )

    @abstractmethod
    def _prepare(self, program: Program, changes: Sequence[Change | Throttle], above: Above | None) -> None:
        """Keep what a run needs."""

    @abstractmethod
    def _run(self, duration_ns: Int64Array, transfer_ns: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return start and end of every task with these durations."""
