"""The rehearsal of one rank, in one process: the state that its hooks share.

The hooks are the recorder's own. So blocks, phases, steps, pipeline actions, groups and the description of
the model are the same as in a recording of the real run, and the two can be compared span by span.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from foretrace.tracer import internals
from foretrace.tracer.inputs import Sides, input_of, sides_of, tensors_inside
from foretrace.tracer.parallelism import MeshHook, data_parallel
from foretrace.tracer.rehearse.data.learning import Learning
from foretrace.tracer.rehearse.data.stated import Stated
from foretrace.tracer.rehearse.data.trainings import Trainings
from foretrace.tracer.rehearse.device.host import Host
from foretrace.tracer.rehearse.device.installing import Device
from foretrace.tracer.rehearse.device.threads import passes_of_threads
from foretrace.tracer.rehearse.errors import Finished, RehearsalError
from foretrace.tracer.rehearse.replacing import when_imported
from foretrace.tracer.rehearse.state import State
from foretrace.tracer.rehearse.tape.calls import is_wrapped, parts_of
from foretrace.tracer.rehearse.tape.fused import Fused
from foretrace.tracer.rehearse.tape.own_bodies import OwnBodies
from foretrace.tracer.rehearse.tape.steps import Kept, OwnSteps, Rounds
from foretrace.tracer.rehearse.tape.tape import Streams
from foretrace.tracer.rehearse.words import ELSEWHERE, Failures
from foretrace.tracer.rehearse.world.reducer import Apart
from foretrace.tracer.rehearse.world.world import Backends
from foretrace.tracer.wrapped import inside

# Facts about a model call that no operator shows: its parameters, and whether it has gradients.


def watch_functions(session: RehearsalSession) -> None:
    """Remember whether an autograd function has gradients: inside it, gradients are turned off."""
    import torch

    kind, lane = torch.autograd.Function, session.lane
    original = inspect.getattr_static(kind, "apply")  # in C since torch 2.15

    def apply(own: Any, /, *args: Any, **kwargs: Any) -> Any:
        before, lane.applies = lane.applies, session.has_gradients()
        try:
            return original.__get__(None, own)(*args, **kwargs)
        finally:
            lane.applies = before

    kind.apply = classmethod(apply)


def count_parameters(session: RehearsalSession, model: Any) -> None:
    """Count the parameters and buffers of *model*: no operator has made those that were copied."""
    for one in (*model.parameters(), *inside(model).buffers()):
        for part in parts_of(one):
            memory = session.host.memory if session.host.holds(part) else session.memory
            memory.add(part.untyped_storage(), "parameters")


EVALUATES: Final = (
    "passes between steps that do not train, as in an evaluation, are in no step: they count in memory, not "
    "in time, rows and MFU"
)
"""What to say where a phase that is no training was run."""

_Result = TypeVar("_Result")


class RehearsalSession(State):
    """What ``tracer.session.Session`` is to a recording.

    Args:
        rank: the rank that is rehearsed.
        world_size: number of ranks of the world.
        device: the GPUs that the process has.
        warmup: steps before those that are kept.
        steps: steps to keep.
        stated: decides what the script gets for numbers that are unknown.
        tell: called with progress, in a few words.

    Attributes:
        disabled: hooks that are off: always empty, because an error in a hook ends the rehearsal.
        files: keeps files from before the rehearsal, and removes those that the script has saved.
        fakes: by operator, what registers its description by a stub once the operator exists.
    """

    kept: Kept  # decides which steps are kept
    learning: Learning
    trainings: Trainings
    apart: Apart
    host: Host

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: Device,
        *,
        warmup: int = 1,
        steps: int = 1,
        stated: Stated,
        tell: Callable[[str], None] = lambda words: None,
    ) -> None:
        super().__init__(rank, world_size, stated)
        self.kept, self.tell, self._process = Kept(self, warmup, steps), tell, os.getpid()
        self.host, self.fused = Host(self, device), Fused(self)
        device.driver.meter = self.meter
        self.streams = Streams(self.tape, self.lane, device.driver)
        self.tape.follow = self.streams.follow
        self.backends, self.trainings, self.apart = Backends(self), Trainings(self), Apart(self)
        self.rounds, self.learning = Rounds(self), Learning(self)
        self.failures = Failures(self)
        self.fakes: dict[str, Callable[[], Any]] = {}
        self.bodies = OwnBodies()
        self.sink = SimpleNamespace(put=lambda record: None)  # windows of steps, which have no time here
        self.disabled = set[str]()
        self.files: Any = None
        self.steps = OwnSteps(self)
        self.shapes: Any = None
        self.completions = None
        self._model_is = (False, False)
        self._model: Any = None  # of this step, a weak reference; its number is that of ``learning``
        self._number = -1
        self._sides = Sides(frozenset(), frozenset())
        self._shared: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        stated.finish = self.steps.finish
        stated.choices.inside = lambda: self.lane.modules[-1] if self.lane.modules else None
        self._install()

    def expect_pipeline(self, *, repeats: bool) -> None:
        """Install the hooks of pipelines once the pipeline module is imported."""

        def install(_: Any) -> None:
            from foretrace.tracer.rehearse.tape.repeating import Repeats
            from foretrace.tracer.rehearse.world.pipeline import RehearsedPipeline, StageShapes

            self.pipeline = RehearsedPipeline(self)  # type: ignore[arg-type]  # that of a rehearsal
            self.shapes = StageShapes(self)
            self.shapes.install()
            if repeats:
                Repeats(self).install()

        when_imported(internals.PIPELINING, install)

    def guarded(self, _: str, function: Callable[..., _Result]) -> Callable[..., _Result]:
        """Return *function* unchanged: in a rehearsal an error of a hook is not caught."""
        return function

    def disable(self, name: str, error: Exception) -> None:
        """Raise the *error* of a hook, for the same reason."""
        raise error

    def met_model(self, model: Any, args: Any) -> dict[str, Any]:
        """Learn about a model at its first call; inside ``torch.func`` its parameters are not read."""
        if not any(map(is_wrapped, model.parameters())):
            count_parameters(self, model)
        self.trainings.meet(model)
        return super().met_model(model, args)

    def sweep(self) -> None:
        """Do nothing: no communication is pending, as it may be in a recording."""

    def step_began(self) -> None:
        """The first step begins: everything before was building the model."""
        self.tell("step 0")
        self.kept.begin()

    def step_ended(self) -> None:
        """A step is over: forget it if it is a warm-up step; end the rehearsal if it is the last one.

        Raises RehearsalError in a process that the script has started and that is no rank.
        """
        if os.getpid() != self._process:
            raise RehearsalError(ELSEWHERE)
        self.failures.step_ended()
        self.trainings.loaded.used(self.position.step - 1, is_over=True)
        # In each step, because a script may destroy its groups before it ends.
        self.trainings.gathered()
        self.rounds.step_ended()
        n_unused = self.learning.step_ended(None if self._model is None else self._model())
        self.by_step[self.position.step - 1] = self.forwards - n_unused
        self.kept.settle()
        self.apart.step_ended(is_kept=self.position.step > self.kept.warmup or self.is_over)
        if self.kept.are_done():
            self.memory.look_no_more()
            raise Finished
        self.tell(f"step {self.position.step}")
        self.forwards, self._model = 0, None
        # Last: until here the events of the step were read.
        self.kept.forget()

    def input_job(self, values: Iterable[Any]) -> dict[str, Any]:
        """Return shape and dtype of the input among *values*, as ``RunInfo.job`` has them."""
        import torch

        tensors = [value for value in tensors_inside(values) if isinstance(value, torch.Tensor)]
        found = super().input_job(tensors)
        if tensors:
            is_float, shape = input_of(tensors).is_floating_point(), found["input_shape"]
            found["input_is_embedded"] = is_float and not self._sides.are_channels(shape)
        return found

    def called_with(self, values: Iterable[Any]) -> None:
        """The call of a model is over; *values* are its keyword arguments."""
        super().called_with(values)
        self.learning.note_input(self.input_job(values), values)

    def entered(self, module: Any, args: Sequence[Any] = ()) -> None:
        """A module is called with *args*. The stack of modules also tells where an error happened."""
        modules = self.lane.modules
        from_outside = not self._is_inside() and self.backward.forward_kind == "forward"  # parts recompute
        if from_outside and self.lane.is_own():
            self.lane.trains = self.has_gradients()
            if self.steps.is_evaluating:
                self.warn(EVALUATES)
                self.trainings.loaded.left_out()
            elif _has_parameters(module):
                self.trainings.loaded.used(self.position.step)
                self._sides = sides_of(module)
                self.learning.begin(module, trains=self.lane.trains)
                self.learning.note_input(self.input_job(args), args)
                self._count(module, args)
        modules.append(module)
        if self.fused.is_used:
            self.fused.entered(module)

    def _is_inside(self) -> bool:
        """Whether a model is running: a loss, which has no parameters, may be what calls it."""
        return any(map(_has_parameters, self.lane.modules))

    def has_gradients(self) -> bool:
        """Whether the present call has gradients, also inside an autograd function."""
        import torch

        return torch.is_grad_enabled() if self.lane.applies is None else self.lane.applies

    def _count(self, module: Any, args: Sequence[Any]) -> None:
        """Count a pass of the model of this step: the first that is called, unless another has precedence.

        A model that trains has precedence over one that does not. Then a model that other ranks have too, as
        copies or shards, has precedence over one of this rank alone, such as embedding tables that are spread
        over ranks: the rows of the latter come from all ranks.
        """
        trains = self.lane.trains
        if trains:
            self.trainings.call(module)
        if self._model is not None and trains != self._model_is[0] and self.position.step >= self.kept.warmup:
            self.warn("passes without gradients, as in an evaluation, are in the time, not in rows and MFU")
        if module not in self._shared:
            self._shared[module] = bool(data_parallel(module)[0])
        found = (trains, self._shared[module])
        # As pairs of truths: whether it trains comes before whether other ranks have it.
        # With what is around it, as DistributedDataParallel, or without: it is one model.
        number = self.learning.number_of(module)
        is_same = self._model is not None and (number, trains) == (self._number, self._model_is[0])
        if self._model is None or found > self._model_is:
            self._model, self._model_is, self._number = weakref.ref(module), found, number
            self.forwards, is_same = self.forwards if is_same else 0, True
            self.trainings.count(module, trains=trains)
            if "schedule" not in self.job:
                self.note_input(args)
        self.forwards += is_same

    def classes(self) -> list[str]:
        """Return the class names of the running modules, the outermost first."""
        return [type(module).__name__ for module in self.lane.modules]

    def left(self, module: Any, out: Any) -> None:
        """A module has returned *out*."""
        modules = self.lane.modules
        while modules:
            last = modules.pop()
            if self.fused.is_used:
                self.fused.left(last, out if last is module else None)
            if last is module:
                break
        if not self._is_inside():
            self.learning.end(module, out)
            self.lane.trains = True

    def _install(self) -> None:
        """Install all hooks; torch must have been imported."""
        import torch
        from torch.nn.modules import module as hooks

        from foretrace.tracer.backward import BackwardHook, CheckpointHook
        from foretrace.tracer.modules import ModuleHook
        from foretrace.tracer.steps import OptimizerHook

        session: Any = self
        is_compiling = torch.compiler.is_compiling
        self.backward = passes_of_threads(BackwardHook)(session)
        ModuleHook(session)
        CheckpointHook(session)
        OptimizerHook(session)
        MeshHook(self.groups, self)
        hooks.register_module_forward_pre_hook(
            lambda module, args: None if is_compiling() else self.entered(module, args)
        )
        hooks.register_module_forward_hook(lambda module, args, out: self.left(module, out), always_call=True)
        watch_functions(self)


def _has_parameters(module: Any) -> bool:
    """Whether *module* is a model or a part of one; a loss has no parameters."""
    return next(module.parameters(), None) is not None
