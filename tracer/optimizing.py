"""Tells of the steps of all optimizers of a process.

Torch's global hooks on optimizers must not be added or taken away while a step calls them: it walks over the
dict that holds them, and the step would fail. So each process gets one pair of them, which calls whoever
listens at the time, and goes when nobody does and no step is under way.

A step inside of another one is part of it: ``ZeroRedundancyOptimizer`` has an optimizer for its shard, others
have several and step all of them. torch does not tell of a step that has failed, and nothing is inside of it.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

Listener = Callable[[Any], Any]  # called with an optimizer; must not raise


class _Stepping(NamedTuple):
    """A step that runs, or has failed; neither its optimizer nor its frame is kept alive."""

    optimizer: Callable[[], Any]  # whose step
    frame: int  # number of the frame that calls the hooks, which it keeps for as long as it runs
    code: CodeType  # what that frame runs, for another one may have its number by now
    thread: int  # on which thread

    def is_around(self, frame: FrameType | None) -> bool:
        """Whether what runs in *frame* is inside of this step, or beside it while it runs on its thread."""
        if self.thread != threading.get_ident():
            frame = sys._current_frames().get(self.thread)  # noqa: SLF001 - None where the thread has ended
        while frame is not None and not (id(frame) == self.frame and frame.f_code is self.code):
            frame = frame.f_back
        return frame is not None


class OptimizerSteps:
    """The hooks of this process; made once, while no optimizer steps.

    Attributes:
        first: called once, before the next step; None if nobody waits for it.
    """

    def __init__(self, module: Any) -> None:
        self.first: Callable[[], None] | None = None
        self.begins: Listener | None = None  # called before each step that is not inside of another
        self.ends: Listener | None = None  # called after each such step
        self.made: Listener | None = None  # called with each optimizer that is made
        self._kind, self._init = module.Optimizer, module.Optimizer.__init__
        self._kind.__init__ = self._told_init = self._telling()
        self._stepping: _Stepping | None = None
        self._handles = [
            module.register_optimizer_step_pre_hook(self._before),
            module.register_optimizer_step_post_hook(self._after),
        ]

    def release(self) -> None:
        """Listen no more."""
        self.begins = self.ends = self.made = None
        if self._stepping is None and self.first is None:
            _made.clear()
            if self._kind.__init__ is self._told_init:  # else somebody has wrapped it: it does nothing more
                self._kind.__init__ = self._init
            for handle in self._handles:
                handle.remove()

    def _telling(self) -> Callable[..., None]:
        """Return what makes optimizers as ever, and tells of them."""
        init = self._init

        @functools.wraps(init)
        def telling(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            if self.made is not None:
                self.made(optimizer)
            init(optimizer, *args, **kwargs)

        return telling

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        caller = sys._getframe(1)  # noqa: SLF001 - that of `Optimizer.step`
        if self._stepping is not None and self._stepping.is_around(caller.f_back):
            return
        self._stepping = _Stepping(weakref.ref(optimizer), id(caller), caller.f_code, threading.get_ident())
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
