"""What hooks learn about a training, recorded or rehearsed: its model, its settings, where it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

from tracer.parallelism import data_parallel
from tracer.process import process_groups
from tracer.records import Block, Position
from tracer.shape import describe_model
from traces.model_parts import joined_models


class _Lane(Protocol):
    """A stack of what runs now."""

    @property
    def block(self) -> Block:
        """The block on its top."""


_AnyLane = TypeVar("_AnyLane", bound=_Lane)


class Training(Generic[_AnyLane]):
    """The part of a session that is the same for a recording and for a rehearsal.

    Args:
        rank: own global rank.
        world_size: number of ranks.

    Attributes:
        position: where in the training the process is.
        lane: whose work runs now; each kind of session makes its own.
        groups: the process groups that it has used.
        model: description of the model, None before one was called.
        job: settings for ``RunInfo.job``.
        n_notes: how often a setting was noted.
        pipeline: the hook of pipelines, None while there is none.
    """

    lane: _AnyLane

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.position = Position()
        self.groups = process_groups(world_size)
        self.model: dict[str, Any] | None = None
        self.job: dict[str, Any] = {}
        self.n_notes = 0
        self.pipeline: Any = None

    def note_job(self, **settings: Any) -> None:
        """Note settings of the training for ``RunInfo.job``."""
        self.job.update(settings)
        self.n_notes += 1

    def met_model(self, model: Any, args: Any) -> None:
        """Learn from a model that is called for the first time; each stage of a pipeline is one."""
        settings, groups = data_parallel(model)
        for group in groups:
            self.groups.name_axis(group, "dp")
        if settings:
            self.note_job(**settings)
        is_first = self.model is None
        if is_first or self.pipeline is not None:
            self.model = joined_models([self.model, describe_model(model)])
        if is_first:
            self.note_input(args)

    @property
    def needs_input(self) -> bool:
        """Whether a model has been called, but not yet with a tensor whose shape could be noted."""
        return "input_shape" in self.job and self.job["input_shape"] is None

    def note_input(self, values: Iterable[Any]) -> None:
        """Note the shape of the first tensor among *values*, the arguments of the model."""
        shape = next((list(value.shape) for value in values if hasattr(value, "shape")), None)
        self.note_job(input_shape=shape)

    def transfer(self, kind: str, tensor: Any) -> tuple[Position, Block]:
        """Return where in the training a p2p transfer belongs, and what it carries."""
        if self.pipeline is None:
            return self.position, self.lane.block
        found: tuple[Position, Block] = self.pipeline.announced(kind, tensor)
        return found
