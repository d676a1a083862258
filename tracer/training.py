"""What hooks learn about a training, recorded or rehearsed: its model, its settings, where it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, Protocol, TypeVar

from foretrace.tracer.groups import GroupInfo, Groups
from foretrace.tracer.inputs import input_of
from foretrace.tracer.parallelism import cutting, data_parallel, tensor_parallel
from foretrace.tracer.records import Block, Position
from foretrace.tracer.shape import Precision, describe_model
from foretrace.tracer.steps import Steps
from foretrace.tracer.wrapped import cutting_sequences
from foretrace.traces.info import joined_models
from foretrace.traces.layout import AXES

WHOLE: Final = {*AXES, "world"} - {"tp", "ep"}
"""Axes over whose groups a model is not built in parts that have the same layers."""

UNNAMED: Final = (
    "matrices are cut by columns over a mesh whose dimensions have no names: its ranks are taken for those "
    "of tensor parallelism"
)
"""What to say where the axis of a group follows from how parameters are cut."""


class _Lane(Protocol):
    """A stack of what runs now."""

    @property
    def block(self) -> Block:
        """The block on its top."""


_AnyLane = TypeVar("_AnyLane", bound=_Lane)


class Training(Generic[_AnyLane]):
    """The part of a session that is the same for a recording and for a rehearsal."""

    lane: _AnyLane  # whose work runs now; each kind of session makes its own
    steps: Steps
    warn: Callable[[str], None]

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.position = Position()  # where in the training the process is
        self.groups = Groups(world_size)  # the process groups that it has used
        self.model: dict[str, Any] | None = None  # description of the model, None before one was called
        self._cut = set[GroupInfo]()  # groups over which distributed parameters are cut
        self.job: dict[str, Any] = {}  # settings for ``RunInfo.job``
        self.n_notes = 0  # how often a setting was noted
        self.precision = Precision(self._computes_in)  # tells in what type the model computes
        self.pipeline: Any = None  # the hook of pipelines, None while there is none

    def note_job(self, **settings: Any) -> None:
        """Note settings of the training for ``RunInfo.job``."""
        self.job.update(settings)
        self.n_notes += 1

    def whole_model(self) -> dict[str, Any] | None:
        """Return the description of the model; ``n_params`` is None where a rank may hold parts of it.

        That is so if groups of tensor or expert parallelism, or groups of which nothing tells the axis, are
        in use, and no distributed parameter is cut over them: the model was built in parts, and only its
        author knows of which matrices.
        """
        known = {group.axis for group in self._cut}
        used = {one.axis for one in self.groups.known() if one.n_collectives and len(one.ranks) > 1}
        if self.model is None or used - known <= WHOLE:
            return self.model
        return {**self.model, "n_params": None}

    @property
    def is_pipelined(self) -> bool:
        """Whether models that are called are stages of a pipeline."""
        return self.pipeline is not None and self.pipeline.has_stages

    def met_model(self, model: Any, args: Any) -> dict[str, Any]:
        """Learn from a model that is called for the first time; each stage of a pipeline is one.

        Returns:
            How it is sharded, as ``data_parallel`` has it.
        """
        settings, groups = data_parallel(model)
        for group in cutting_sequences(model):
            self.groups.name_axis(group, "cp")
        for group in groups:
            self.groups.name_axis(group, "dp")
        self._name_tensor_parallel(model)
        self._cut.update(cutting(self.groups, model))
        is_first = self.model is None
        if is_first or self.is_pipelined:
            self.note_job(**settings)
            stage = self.pipeline.stage_of(model) if self.is_pipelined else None
            own = {} if stage is None else {"stages": [stage]}
            self.model = joined_models([self.model, describe_model(model) | own])
        if is_first:
            self.note_input(args)
        return settings

    def _name_tensor_parallel(self, model: Any) -> None:
        """Name the groups of tensor parallelism that no mesh names; those of data parallelism have a name."""
        for group in tensor_parallel(model):
            if self.groups.of(group).axis not in AXES:
                self.groups.name_axis(group, "tp")
                self.warn(UNNAMED)

    def _computes_in(self, dtype: str) -> None:
        """The products of the model that is described are of *dtype*."""
        if self.model is not None:
            self.model = self.model | {"dtype": dtype}

    @property
    def needs_input(self) -> bool:
        """Whether a model has been called, but not yet with a tensor whose shape could be noted."""
        return "input_shape" in self.job and self.job["input_shape"] is None

    def called(self, model: Any, args: Any) -> bool:
        """*model* is called from outside of any other, with *args*; return whether it is to train."""
        if self.position.stage >= 0:
            return False  # a stage of a pipeline, which tells of its actions
        return self.steps.called(model)

    def called_with(self, values: Iterable[Any]) -> None:
        """The call of a model is over, which had *values* by name."""
        if self.needs_input:
            self.note_input(values)

    def note_input(self, values: Iterable[Any]) -> None:
        """Note the shape of the input among *values*, the arguments of the model, batches included."""
        self.note_job(**self.input_job(values))

    def input_job(self, values: Iterable[Any]) -> dict[str, Any]:
        """Return what ``RunInfo.job`` has of the input among *values*: a shape, None where none has one.

        Of rows of many lengths that lie one behind the other, it is that of one row of them all.
        """
        tensor = input_of(values)
        is_nested = getattr(tensor, "is_nested", False)
        shape = None if tensor is None else [1, *tensor.values().shape] if is_nested else list(tensor.shape)
        return {"input_shape": shape}

    def transfer(self, kind: str, tensor: Any) -> tuple[Position, Block]:
        """Return where in the training a p2p transfer belongs, and what it carries."""
        if self.pipeline is None:
            return self.position, self.lane.block
        found: tuple[Position, Block] = self.pipeline.announced(kind, tensor)
        return found
