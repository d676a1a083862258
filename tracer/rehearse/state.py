"""What a rank issues and holds, and what its script was told: what the parts of a session share.

The parts know this much of a session, which is made of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from foretrace.tracer.rehearse.data.stated import Stated
from foretrace.tracer.rehearse.device.memory import Memory, Meter
from foretrace.tracer.rehearse.tape.tape import IssueLane, Tape
from foretrace.tracer.training import Training


class State(Training[IssueLane]):
    """The state of a rehearsal.

    Args:
        rank: the rank that is rehearsed.
        world_size: number of ranks of the world.
        stated: decides what the script gets for numbers that are unknown.

    Attributes:
        notes: differences from the real run.
        memory: what its tensors take on the device.
        letters: what other ranks have sent.
        forwards: calls of models from outside, in the present step.
        by_step: the same of each step that is over.
        is_over: whether the script has ended.
        asides: threads whose operators are not recorded now, once per nested ``aside``.
    """

    steps: Any
    kept: Any
    learning: Any
    trainings: Any
    apart: Any
    host: Any
    backends: Any

    def __init__(self, rank: int, world_size: int, stated: Stated) -> None:
        super().__init__(rank, world_size)
        self.lane, self.notes = IssueLane(), list[str]()
        self.tape = Tape(self.lane, self.position)  # what the rank has issued
        self.memory = Memory(self._allocated, stream=lambda: self.lane.stream)
        self.meter = Meter(self._empty_cache)  # what the script is told of that
        self.stated, self.letters = stated, stated.letters
        self.group_infos: dict[int, Any] = {}  # groups that have communicated, by number
        self.forwards, self.is_over = 0, False
        self.asides, self.by_step = list[int](), dict[int, int]()

    def warn(self, warning: str) -> None:
        """Note a difference from the real run, once."""
        if warning not in self.notes:
            self.notes.append(warning)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside this context, do not record operators of this thread: torch runs them for itself."""
        self.asides.append(get_ident())
        try:
            yield
        finally:
            self.asides.remove(get_ident())

    def _allocated(self, n_bytes: int) -> None:
        self.tape.allocated_bytes = n_bytes
        self.meter.changed(n_bytes, self.memory.reserved_bytes)

    def _empty_cache(self) -> int:
        self.memory.empty_cache()
        return self.memory.reserved_bytes
