"""What is training and what is not: where one optimizer step ends and the next begins, and what lies between.

The first step begins with the first forward that is seen. A step ends when the optimizer that ends steps has
stepped, or with the last of several that step in a row, be it the same one with other parameters; the next
one begins there. A training that calls ``foretrace.step()`` ends its steps itself, and optimizers do no more.

The first optimizer that was ever seen to step is the one that ends steps; others end none, as that of a
generator beside its critic. A process may hold several trainings, one after the other, and keep the optimizer
of the first: another one takes its place where it is gone, or where it has been stepping with no other
between and now one steps that was made since, or one steps twice that was there before. Optimizers that step
inside of a backward step in a row when it ends, and one that a ``GradScaler`` skips has stepped.

Between two steps a model may be called without gradients, or in ``eval()``: that is a phase of its own, an
evaluation, which begins where the step has ended and lasts until the next forward that trains. But a teacher,
or a rollout, belongs to the step that follows it: a model that ran so before, or in, the step before, too,
and is not trained, or not in ``eval()``, or where the training tells its steps. Saving a checkpoint is a
phase as well. Behind an optimizer that ends no step a phase is inside of the step, and its spans are not.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from foretrace.tracer import internals
from foretrace.tracer.guarded import Guards, Replacements, between
from foretrace.tracer.optimizing import optimizer_steps
from foretrace.tracer.records import Block, StepWindow
from foretrace.tracer.stamps import Stamp
from foretrace.tracer.wrapped import inside

if TYPE_CHECKING:
    from foretrace.tracer.lane import Lane
    from foretrace.tracer.records import Position
    from foretrace.tracer.sink import Sink


class Watched(Guards, Protocol):
    """What steps need of a recording, or of a rehearsal; attributes as in ``Session``."""

    position: Position
    lane: Lane
    sink: Sink
    steps: Steps

    @property
    def is_pipelined(self) -> bool:
        """Whether its model is that of a pipeline."""

    def step_began(self) -> None:
        """A step begins."""

    def step_ended(self) -> None:
        """A step is over."""


class _Called:
    """What is known of a model that is called.

    Attributes:
        is_shell: it has no parameters, as a loss: its calls tell nothing.
        is_trained: a part of it was called to train, or an optimizer steps parameters of it.
        n_known: how many parts, and optimizers, were known when that was found out.
        ran: the last step in, or before, which it ran without training.
        ran_inside: whether that call belonged to the step.
    """

    __slots__ = ("inner", "is_shell", "is_trained", "n_known", "ran", "ran_inside")

    def __init__(self, model: Any) -> None:
        self.inner = weakref.ref(inside(model))  # the model itself, without what is around it
        self.is_shell = next(model.parameters(), None) is None
        self.is_trained = self.ran_inside = False
        self.n_known, self.ran = (0, 0), -1


class Steps:
    """Counts steps and hands over their windows, and those of the phases between them.

    Attributes:
        made: optimizers that were made since the one that ends steps has last stepped, by identity.
        stepped_inside: optimizers that have stepped inside of the backward pass that runs.
        n_checkpoints: activation checkpoints whose function runs, with gradients that torch has switched off.
        is_inside: whether a model is running, which may have a backward pass of its own.
        is_evaluating: whether what runs is an evaluation.
    """

    def __init__(self, session: Watched) -> None:
        import torch

        self._session = session
        self._grad_mode: Callable[[], bool] = torch.is_grad_enabled
        self._in_backward = internals.is_in_backward()
        self._marker: Callable[[], Any] = _no_optimizer
        self._rival: Callable[[], Any] | None = None  # the last that has stepped since, in work of its own
        self._n_alone = 0  # steps of the marker since another one had work of its own
        self.made: set[int] = set()
        self.stepped_inside: list[Any] = []
        self.n_checkpoints = 0
        self.is_inside: Callable[[], bool] = lambda: False
        self._number = -1  # of the step that runs, or comes next
        self._start: Stamp | None = None
        self._end: Stamp | None = None
        self._is_between = False  # no forward has trained since an optimizer has stepped
        self._aside: Stamp | None = None  # when it did, or a phase since: one that does not end steps
        self.is_evaluating = self._is_saving = False
        self._early: weakref.WeakSet[Any] | None = weakref.WeakSet()  # called before any that trains
        # The first call in `eval()` that had gradients since then, and of which model: a backward may follow.
        self._doubt: tuple[Stamp, Any] | None = None
        self._trains_in_eval = False  # one did
        self._called: weakref.WeakKeyDictionary[Any, _Called] = weakref.WeakKeyDictionary()
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()  # models, and their parts
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._microbatch, self._had_backward = 0, False
        self._stepped: set[int] = set()
        self._is_told = False
        self._began: Stamp = session.lane.stamp()

    def called(self, model: Any, *, has_gradients: bool | None = None) -> bool:
        """*model* is called from outside of any other; return whether it is to train, as far as is known."""
        if self._in_backward():
            return False  # a recomputation
        one = self._called.get(model)
        if one is None:
            one = self._called[model] = _Called(model)
        if one.is_shell:
            if self._start is None:  # perhaps nothing else is called
                self._begin_first()
            elif not self.is_evaluating and model.training and self.has_gradients():
                self.finish()  # whatever comes now, the step before is over
            return False
        if has_gradients is None:
            has_gradients = self.has_gradients()
        inner = one.inner()
        is_in_train = bool((model if inner is None else inner).training)
        if has_gradients and is_in_train and model not in self._trained:
            self._trained.update(model.modules())
        is_known = self._early is None and not self._is_trained(model, one)
        if has_gradients and (is_in_train or self._trains_in_eval or is_known):
            self.begin()
        elif self._early is None and not self._is_between:  # beside the training, in the middle of a step
            one.ran, one.ran_inside = self._number, True
        else:
            self._perhaps_evaluates(model, one, has_gradients=has_gradients, is_in_train=is_in_train)
        if self.is_evaluating or not has_gradients:
            return False
        self._count_pass()
        return True

    def has_gradients(self) -> bool:
        """Whether what is called now has gradients, also where a checkpoint will compute it again."""
        return self._grad_mode() or self.n_checkpoints > 0

    def _perhaps_evaluates(self, model: Any, one: _Called, *, has_gradients: bool, is_in_train: bool) -> None:
        """*model* is called between two steps, or before the first, without gradients or in ``eval()``."""
        opens = self._start is None if self._early is not None else not self.is_evaluating
        if self._early is not None:
            self._begin_first()
            self._early.add(model)
            one.ran, one.ran_inside = 0, True
        else:
            is_again = one.ran >= self._number - 1 and (one.ran_inside or not self.is_evaluating)
            opens_told = self._is_told and self._aside is None
            is_part = is_again and (is_in_train or opens_told or not self._is_trained(model, one))
            one.ran, one.ran_inside = self._number, is_part
            if is_part:
                self.begin()
                return
            if opens:
                self.finish()
                self.is_evaluating, self._session.position.step = True, -1
        if has_gradients and self._doubt is None:
            since = (self._start if self._aside is None else self._aside) if opens else None
            self._doubt = self._session.lane.stamp() if since is None else since, weakref.ref(model)

    def _is_trained(self, model: Any, one: _Called) -> bool:
        n_known = len(self._trained), len(self._optimizers)
        if not one.is_trained and one.n_known != n_known:
            one.n_known = n_known
            groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
            stepped = {id(parameter) for group in groups for parameter in group["params"]}
            one.is_trained = not stepped.isdisjoint(map(id, model.parameters())) or any(
                part in self._trained for part in model.modules()
            )
        return one.is_trained

    def begin(self) -> None:
        """Forward work begins: of the first step, or after the optimizer of the step before."""
        self._begin_first()
        if self._early is not None:
            self._settle_early(self._session.lane.stamp())
        self.finish()
        self._trains()

    def _trains(self) -> None:
        """From now on it is known that the model trains."""
        self._is_between, self._aside, self._doubt = False, None, None

    def _begin_first(self) -> None:
        if self._start is None:
            self._start = self._session.lane.stamp()
            self._number = self._session.position.step = 0
            self._session.step_began()

    def _begin_unseen(self) -> None:
        """The first step began with the recording, for no forward of it was seen."""
        self._begin_first()
        self._start = self._began

    def _settle_early(self, at: Stamp) -> None:
        """It is known that training began *at* a moment: was it evaluated before?"""
        early, self._early = self._early, None
        if any(self._is_trained(model, self._called[model]) for model in early or ()):
            self._phase("evaluation", at)

    def _phase(self, kind: str, at: Stamp) -> None:
        """A phase is over: the next step, or phase, begins *at* that moment, or the present step goes on."""
        is_inside = self._aside is not None
        start = self._aside if is_inside else self._start
        # One and the same stamp: nothing lies between.
        if start is not None and start is not at:
            self._session.sink.put(StepWindow(self._number, start, at, kind, is_inside=is_inside))
        if is_inside:
            self._aside = at
        else:
            self._start = at
        self._session.position.step = self._number

    def finish(self) -> None:
        """Hand over the window of a step whose optimizer is done, or that of an evaluation."""
        if self.is_evaluating:
            self.is_evaluating = False
            self._phase("evaluation", self._session.lane.stamp())
        elif self._start is not None and self._end is not None:
            self._stepped.clear()
            # The number went on when the optimizer had stepped.
            self._session.sink.put(StepWindow(self._number - 1, self._start, self._end))
            self._start, self._end = self._end, None
            self._session.step_ended()

    def told(self) -> None:
        """The training says that a step is over, and will say so of every one."""
        self._is_told, self._early = True, None
        if self.is_evaluating and self._aside is not None:
            self.finish()
        self.is_evaluating, self._doubt = False, None  # a step of nothing else is one, too
        # An optimizer that ends a step has raised the number already.
        step = max(self._number - (self._end is not None), 0)
        now = self._session.lane.stamp()
        start = self._began if self._start is None else self._start  # no module was called
        self._session.sink.put(StepWindow(step, start, now))
        self._start, self._end = now, None
        self._number = self._session.position.step = step + 1
        self._is_between, self._aside = True, None
        self._count_again()
        self._session.step_ended()

    def backward_begins(self) -> None:
        """A backward pass begins from outside of any model: what was doubtful has trained."""
        self.stepped_inside.clear()
        if self._start is None and not self._is_told:
            self._begin_unseen()
        if self.is_evaluating or (self._early is not None and self._start is not None):
            at = self._session.lane.stamp()
            if self._doubt is not None:
                self._trains_in_eval = True
                at, doubtful = self._doubt
                if (model := doubtful()) is not None:
                    self._trained.update(model.modules())
            if self.is_evaluating:
                self.is_evaluating = False
                self._phase("evaluation", at)
            else:
                self._settle_early(at)
            self._trains()
        if not self._session.is_pipelined:
            self._session.position.microbatch = self._microbatch

    def backward_ends(self) -> None:
        """A backward pass is over, and so is the step of the optimizers that have stepped inside of it."""
        self._had_backward = True
        if not self._session.is_pipelined:
            self._session.position.microbatch = -1
        optimizers, self.stepped_inside = self.stepped_inside, []
        for optimizer in optimizers:
            self.optimizer_begins(optimizer)
            self.optimizer_ends(optimizer)

    def _count_pass(self) -> None:
        """A model that trains is called: the first time, or after a backward, with the next micro-batch."""
        if not self._session.is_pipelined:
            self._microbatch += self._had_backward
            self._session.position.microbatch = self._microbatch
        self._had_backward = False

    def _count_again(self) -> None:
        """An optimizer steps: micro-batches begin again behind it."""
        self._microbatch, self._had_backward, self._session.position.microbatch = 0, False, -1

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer begins: it belongs to the step that another one has just ended.

        That which ends steps begins the next one, as one that calls the model itself, again and again, unless
        it goes on with other parameters, as the third stage of ZeRO has it step them, part by part.
        """
        self._count_again()
        if self.is_evaluating:  # without a backward: what ran has trained, as an evolution strategy does
            self.is_evaluating, self._session.position.step = False, self._number
            self._trains()
        elif optimizer is self._marker() and _first_parameter(optimizer) in self._stepped:
            self.finish()
        elif self._end is not None:
            self._number -= 1
            self._session.position.step = self._number

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        self._optimizers.add(optimizer)
        if not self._is_told:
            self._choose(optimizer)
        ends_steps = not self._is_told and optimizer is self._marker()
        if ends_steps:
            self._stepped.add(_first_parameter(optimizer))
            self.made.clear()
        if self._start is not None and (self._end is not None or ends_steps):
            self._end = self._session.lane.stamp()
            # The one that steps next in a row has taken it back when it began, so that a step counts once.
            self._number += 1
            self._session.position.step = self._number
            self._early = self._aside = None
        elif self._start is not None:
            self._aside = self._session.lane.stamp()
        self._is_between, self._doubt = True, None

    def save_begins(self) -> Stamp | None:
        """A checkpoint is being saved; return what ``save_ends`` takes, None if another save does it."""
        if self._is_saving or not self._session.lane.is_own():
            return None
        began = self._session.lane.stamp()
        if self._start is not None and self._is_between:
            self.finish()
            self._session.position.step = -1
        self._is_saving = True
        return began

    def save_ends(self, began: Stamp | None) -> None:
        """A checkpoint has been saved: between two steps, or in the middle of one."""
        if began is None:
            return
        self._is_saving, now = False, self._session.lane.stamp()
        if self._start is not None and self._is_between:
            self._phase("checkpoint", now)
        else:
            is_inside = self._start is not None
            self._session.sink.put(StepWindow(self._number, began, now, "checkpoint", is_inside=is_inside))

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


class OptimizerHook(Replacements):
    """What each ``Optimizer.step`` means, and what a ``GradScaler`` that skips one does."""

    def __init__(self, session: Watched) -> None:
        super().__init__()
        module = import_module("torch.optim.optimizer")  # torch.optim hides it behind its class
        self._session = session
        self._depth = self._n_stepped = 0
        self._in_backward = internals.is_in_backward()
        self._steps = optimizer_steps(module)
        self._steps.begins = session.guarded("modules", self._begins)
        self._steps.ends = session.guarded("modules", self._ends)
        self._steps.made = lambda optimizer: session.steps.made.add(id(optimizer))
        self.replace(import_module("torch.amp.grad_scaler").GradScaler, "step", self._scaled)

    def remove(self) -> None:
        """Listen no more."""
        self._steps.release()
        super().remove()

    def _begins(self, optimizer: Any) -> None:
        session = self._session
        if not self._in_backward():  # else it may step on a thread of autograd, which does not train
            session.steps.optimizer_begins(optimizer)
            session.lane.own()
            if session.lane.depth <= self._depth:  # else it is called inside of another block
                session.lane.pop(0)
        self._depth = session.lane.push("optimizer", Block(type(optimizer).__name__))

    def _ends(self, optimizer: Any) -> None:
        self._session.lane.pop(self._depth)
        self._n_stepped += 1
        if self._in_backward():
            self._session.steps.stepped_inside.append(optimizer)
        else:
            self._session.steps.optimizer_ends(optimizer)

    def _scaled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``GradScaler.step`` that tells of an optimizer which it skips: that is a step, too."""
        skipped = self._session.guarded("modules", self._skipped)

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            n_before = self._n_stepped
            out = original(scaler, optimizer, *args, **kwargs)
            skipped(optimizer, n_before)
            return out

        return step

    def _skipped(self, optimizer: Any, n_before: int) -> None:
        if self._n_stepped == n_before:
            self._session.steps.optimizer_begins(optimizer)
            self._session.steps.optimizer_ends(optimizer)


class SaveHook(Replacements):
    """Sees checkpoints that are saved by public functions of *module*, which have these *names*."""

    def __init__(self, session: Watched, module: Any, *names: str) -> None:
        super().__init__()
        steps = session.steps
        begins, ends = (
            session.guarded("modules", f) for f in (lambda *_, **__: steps.save_begins(), steps.save_ends)
        )
        for name in names:
            self.replace(module, name, between(begins, ends))
