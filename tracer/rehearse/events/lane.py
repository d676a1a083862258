"""Whose work is being issued: the owner on top of a stack, as the recorder's lane, without a clock."""

from __future__ import annotations

import threading
from typing import Any, Final

from foretrace.tracer.lane import NOBODY
from foretrace.tracer.records import Block
from foretrace.tracer.stamps import Stamp
from foretrace.traces.rehearsal import OUTSIDE

SETUP: Final = "setup"
"""Kind of what is issued before the training begins."""

LOSS, INPUT, GRADIENTS = map(Block, OUTSIDE)

BETWEEN: Final = {"forward": ("forward", LOSS), "optimizer": ("forward", INPUT)}
"""Who issues what comes after a forward, or after an optimizer, outside of both."""

AFTER_BACKWARD: Final = ("optimizer", GRADIENTS)
"""Who issues what comes after a backward: mostly clipping."""


class IssueLane(threading.local):
    """A stack of blocks with the interface of ``tracer.lane.Lane``; remembers no time. Each thread has one.

    Attributes:
        owner: kind and block of the top.
        trains: whether this is not a pass of a model without gradients, as in an evaluation.
        stream: CUDA stream on which things are issued now.
        n_backwards: backward passes that run, one inside the other.
        modules: those that are called, the outermost first.
        applies: whether the function of autograd that runs is differentiated, None outside of any.
    """

    device: Any = None
    _trainer: threading.Thread | None = None
    """The thread whose calls of modules count, of all lanes: the first one, or the first that called one."""

    def move_to(self, device: object) -> None:
        """Do nothing: ``gpu.streams`` says which stream is the current one."""

    def __init__(self) -> None:
        self._stack: list[tuple[str, Block]] = []
        self.owner: tuple[str, Block] = (SETUP, NOBODY)
        self.trains = True
        self.stream = self.n_backwards = 0
        self.modules: list[Any] = []
        self.applies: bool | None = None

    @property
    def depth(self) -> int:
        """How many owners are on the stack."""
        return len(self._stack)

    @property
    def block(self) -> Block:
        """The block that issues now."""
        return self.owner[1]

    def own(self) -> None:
        """A backward pass begins; it may be in another thread than the forward, beside it."""

    def is_own(self) -> bool:
        """Whether this thread trains: the first one does, and another where that one calls no model."""
        me = threading.current_thread()
        trainer = IssueLane._trainer
        if me is not trainer and (trainer is None or not trainer.is_alive() or me is threading.main_thread()):
            IssueLane._trainer = trainer = me
        return me is trainer

    def push(self, kind: str, block: Block) -> int:
        """Let *block* issue from now on; return what ``pop`` takes to undo it."""
        self._stack.append((kind, block))
        self.owner = (kind, block)
        return len(self._stack) - 1

    def pop(self, depth: int) -> None:
        """Give the turn back to who had it before the ``push`` that returned *depth*."""
        if depth < len(self._stack):
            kind = self._stack[depth][0]
            del self._stack[depth:]
            self.owner = self._stack[-1] if self._stack else BETWEEN.get(kind, AFTER_BACKWARD)

    def replace(self, kind: str, block: Block) -> None:
        """Let *block* issue in place of the present owner."""
        if self._stack:
            self._stack[-1] = self.owner = (kind, block)

    def follow(self) -> None:
        """The model is called from outside: there is no clock that would have to follow its stream."""

    def stamp(self) -> Stamp:
        """Return a moment; there is only one."""
        return 0

    def pause(self) -> bool:
        """Say that nothing is paused: waiting is written down as such."""
        return False

    def resume(self, is_paused: bool | None) -> None:  # noqa: FBT001 - what pause has returned
        """Undo ``pause``."""
