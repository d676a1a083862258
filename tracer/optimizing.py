"""Tells of the steps of all optimizers of a process.

Torch's global hooks on optimizers must not be added or taken away while a step calls them: it walks over the
dict that holds them, and the step would fail. So each process gets one pair of them, which calls whoever
listens at the time, and goes when nobody does and no step is under way.

A step inside of another one is part of it: ``ZeroRedundancyOptimizer`` has an optimizer for its shard, others
have several and step all of them. torch does not tell of a step that has failed, and nothing is inside of it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

Listener = Callable[[Any], Any]
"""Called with an optimizer; must not raise."""


class _Stepping(NamedTuple):
    """A step that runs, or has failed; neither its optimizer nor its frame is kept alive.

    Attributes:
        optimizer: whose step.
        frame: number of the frame that calls the hooks, which it keeps for as long as it runs.
        thread: on which thread.
    """

    optimizer: Callable[[], Any]
    frame: int
    thread: int

    def is_around(self, frame: FrameType | None) -> bool:
        """Whether what runs in *frame* is inside of this step; on another thread that is not known."""
        if self.thread != threading.get_ident():
            return True
        while frame is not None and id(frame) != self.frame:
            frame = frame.f_back
        return frame is not None


class OptimizerSteps:
    """The hooks of this process; made once, while no optimizer steps.

    Args:
        module: ``torch.optim.optimizer``.

    Attributes:
        first: called once, before the next step; None if nobody waits for it.
        begins: called before each step that is not inside of another.
        ends: called after each such step.
    """

    def __init__(self, module: Any) -> None:
        self.first: Callable[[], None] | None = None
        self.begins: Listener | None = None
        self.ends: Listener | None = None
        self._stepping: _Stepping | None = None
        self._handles = [
            module.register_optimizer_step_pre_hook(self._before),
            module.register_optimizer_step_post_hook(self._after),
        ]

    def release(self) -> None:
        """Listen no more."""
        self.begins = self.ends = None
        if self._stepping is None and self.first is None:
            _made.clear()
            for handle in self._handles:
                handle.remove()

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        caller = sys._getframe(1)  # noqa: SLF001 - that of `Optimizer.step`
        if self._stepping is not None and self._stepping.is_around(caller.f_back):
            return
        self._stepping = _Stepping(weakref.ref(optimizer), id(caller), threading.get_ident())
        first, self.first = self.first, None
        if first is not None:
            first()
        if self.begins is not None:
            self.begins(optimizer)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stepping is not None and self._stepping.frame == id(sys._getframe(1)):  # noqa: SLF001
            if self.ends is not None:
                self.ends(optimizer)
            self._stepping = None


_made: list[OptimizerSteps] = []


def optimizer_steps(module: Any) -> OptimizerSteps:
    """Return the hooks of this process; *module* is ``torch.optim.optimizer``."""
    if not _made:
        _made.append(OptimizerSteps(module))
    return _made[0]
