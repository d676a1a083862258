"""Where one optimizer step ends and the next begins.

The first step begins with the first forward that is seen. A step ends when the optimizer that ends steps has
stepped, or with the last of several that step in a row, be it the same one with other parameters; the next
one begins there. A training that calls ``foretrace.step()`` ends its steps itself, and optimizers do no more.

The first optimizer that was ever seen to step is the one that ends steps; others end none, as that of a
generator beside its critic. A process may hold several trainings, one after the other, and keep the optimizer
of the first: another one takes its place where it is gone, or where it has been stepping with no other
between and now one steps that was made since, or one steps twice that was there before.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from foretrace.tracer.optimizing import optimizer_steps
from foretrace.tracer.records import Block, StepWindow
from foretrace.tracer.stamps import Stamp

if TYPE_CHECKING:
    from foretrace.tracer.session import Session


class Steps:
    """Counts steps and hands over their windows.

    Args:
        session: the recording.

    Attributes:
        made: optimizers that were made since the one that ends steps has last stepped, by identity.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._marker: Callable[[], Any] = _no_optimizer
        self._rival: Callable[[], Any] | None = None  # the last that has stepped since, in work of its own
        self._n_alone = 0  # steps of the marker since another one had work of its own
        self.made: set[int] = set()
        self._start: Stamp | None = None
        self._end: Stamp | None = None
        self._stepped: set[int] = set()
        self._is_told = False
        self._began: Stamp = session.lane.stamp()

    def begin(self) -> None:
        """Forward work begins: of the first step, or after the optimizer of the step before."""
        if self._start is None:
            self._start = self._session.lane.stamp()
            self._session.position.step = 0
            self._session.step_began()
        else:
            self.finish()

    def finish(self) -> None:
        """Hand over the window of a step whose optimizer is done."""
        if self._start is not None and self._end is not None:
            step = self._session.position.step - 1
            self._stepped.clear()
            self._session.sink.put(StepWindow(step, self._start, self._end))
            self._start, self._end = self._end, None
            self._session.step_ended()

    def told(self) -> None:
        """The training says that a step is over, and will say so of every one."""
        self._is_told = True
        step = self._session.position.step - (self._end is not None)
        now = self._session.lane.stamp()
        start = self._began if self._start is None else self._start  # no module was called
        self._session.sink.put(StepWindow(max(step, 0), start, now))
        self._start, self._end = now, None
        self._session.position.step = max(step, 0) + 1
        self._session.step_ended()

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer begins: it belongs to the step that another one has just ended.

        That which ends steps begins the next one, as one that calls the model itself, again and again, unless
        it goes on with other parameters, as the third stage of ZeRO has it step them, part by part.
        """
        if optimizer is self._marker() and _first_parameter(optimizer) in self._stepped:
            self.finish()
        elif self._end is not None:
            self._session.position.step -= 1

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        if self._is_told:
            return
        self._choose(optimizer)
        if optimizer is self._marker():
            self._stepped.add(_first_parameter(optimizer))
            self.made.clear()
        if self._start is not None and (self._end is not None or optimizer is self._marker()):
            self._end = self._session.lane.stamp()
            self._session.position.step += 1

    def _choose(self, optimizer: Any) -> None:
        """Let *optimizer*, which has stepped, be the one that ends steps if none is, or if it takes over."""
        marker = self._marker()
        if marker is optimizer:
            self._n_alone = self._n_alone + 1 if self._rival is None else 0
            self._rival = None
        elif marker is None:  # the first ever, or since the one before was thrown away
            is_new = self._marker is _no_optimizer or id(optimizer) in self.made
            self._marker, self._rival, self._n_alone = weakref.ref(optimizer), None, int(is_new)
        elif self._end is None:  # not in a row
            is_again = self._rival is not None and self._rival() is optimizer
            if self._n_alone >= (1 if id(optimizer) in self.made else 2 if is_again else math.inf):
                self._marker, self._rival, self._n_alone = weakref.ref(optimizer), None, 1
            else:
                self._rival = weakref.ref(optimizer)


def _no_optimizer() -> None:
    """Stand for the one that ends steps before any has stepped."""


def _first_parameter(optimizer: Any) -> int:
    """Return the identity of the first parameter that *optimizer* is to step now, 0 if it has none."""
    return next((id(one) for group in optimizer.param_groups for one in group["params"]), 0)


class OptimizerHook:
    """What each ``Optimizer.step`` means.

    Args:
        session: the recording.
    """

    def __init__(self, session: Session) -> None:
        module = import_module("torch.optim.optimizer")  # torch.optim hides it behind its class
        self._session = session
        self._depth = 0
        self._steps = optimizer_steps(module)
        self._steps.begins = session.guarded("modules", self._begins)
        self._steps.ends = session.guarded("modules", self._ends)
        self._steps.made = lambda optimizer: session.steps.made.add(id(optimizer))

    def remove(self) -> None:
        """Listen no more."""
        self._steps.release()

    def _begins(self, optimizer: Any) -> None:
        session = self._session
        session.steps.optimizer_begins(optimizer)
        session.lane.own()
        if session.lane.depth <= self._depth:  # else it is called inside of another block
            session.lane.pop(0)
        self._depth = session.lane.push("optimizer", Block(type(optimizer).__name__))

    def _ends(self, optimizer: Any) -> None:
        self._session.lane.pop(self._depth)
        self._session.steps.optimizer_ends(optimizer)
