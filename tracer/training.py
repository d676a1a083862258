"""What hooks learn about a training, recorded or rehearsed: its model, its settings, where it is."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import ceil, prod
from statistics import median_low
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeAlias, TypeVar

from foretrace.tracer.groups import GroupInfo, Groups
from foretrace.tracer.inputs import Sides, input_of, sides_of
from foretrace.tracer.parallelism import data_parallel, tensor_parallel
from foretrace.tracer.records import Block, Communication, Position
from foretrace.tracer.shape import Precision, describe_model
from foretrace.tracer.steps import Steps
from foretrace.tracer.wrapped import cutting_sequences, whole_shape
from foretrace.traces.layout import AXES
from foretrace.traces.model_parts import joined_models

if TYPE_CHECKING:
    from foretrace.tracer.session import Session

# A loop that reduces gradients itself says of no group what it is for. But what its all-reduces and reduce-
# scatters sum up in a step is the gradients of the model, to the byte, and perhaps a loss or a norm. An
# optimizer that gives each rank whole parameters to update fills those of a shape up with zeros to a
# multiple of the ranks; that, too, follows from shapes.

MOST_BESIDE: Final = 0.01
"""What else a group sums up in a step at most, over the gradients: a loss, norms, statistics of a batch."""

WIDTHS: Final = MappingProxyType({"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2})
"""Bytes of a number of each type that gradients are summed in."""

SURE_AFTER: Final = 2  # steps in a row after which a group is known: one could be chance

SUMMING: Final = ("all_reduce", "reduce_scatter")  # collectives after which gradients are summed
Shapes: TypeAlias = Mapping[tuple[int, ...], int]  # how many parameters of each shape are trained


def are_gradients(summed: Counter[tuple[str, int]], shapes: Shapes, n_ranks: int, n_passes: int = 1) -> bool:
    """Whether what a group sums up in a step is the gradients of parameters, and little else.

    Parameters of a shape go one by one or, in reduce-scatters and filled up to a multiple of the ranks, as
    many at a time as there are ranks, or all in one. What goes otherwise, as in buckets, counts by its size.

    Args:
        summed: how many collectives there are of a kind and of so many numbers, over the whole group.
        shapes: the parameters.
        n_ranks: ranks of the group.
        n_passes: how often the gradients are summed in a step.
    """
    left, missing, n_trained = Counter(summed), 0, 0
    for shape, n in shapes.items():
        size, rounds = prod(shape), ceil(n / n_ranks)
        n_trained += n * size * n_passes
        ways = (
            *((kind, size, n) for kind in SUMMING),
            ("reduce_scatter", size * n_ranks, rounds),
            ("reduce_scatter", size * n_ranks * rounds, 1),
        )
        for kind, each, times in ways:
            if left[kind, each] >= times * n_passes:
                left[kind, each] -= times * n_passes
                break
        else:
            missing += n * size * n_passes
    beside = sum(size * n for (_, size), n in left.items()) - missing
    return n_trained > 0 and 0 <= beside <= n_trained * MOST_BESIDE


class Averaged:
    """Counts what is summed in each step over groups of which nobody has said what they are for.

    Not for several threads: the one that writes uses it.

    Args:
        groups: the process groups, which are told what is found.
        params: returns the shapes of what is trained; several answers may be right.
        passes: returns how often the model is called in a step: who reduces after each pass does so as often.
    """

    def __init__(
        self, groups: Groups, params: Callable[[], Iterable[Shapes]], passes: Callable[[], int]
    ) -> None:
        self._groups, self._params, self._passes = groups, params, passes
        self._summed: dict[GroupInfo, Counter[tuple[str, int]]] = {}
        self._steps: dict[GroupInfo, int] = {}
        self._found: Counter[GroupInfo] = Counter()

    def note(self, one: Communication) -> None:
        """Count a communication, in the order of their issue within its group."""
        self.count(one.kind, one.group, one.size_bytes, one.dtype, one.position[0])

    def count(self, kind: str, group: GroupInfo, size_bytes: int, dtype: str, step: int) -> None:
        """Count a communication of *size_bytes* over the whole *group*."""
        if kind not in SUMMING or group.axis in AXES or step < 0:
            return
        if (before := self._steps.get(group)) != step:
            if before is not None:
                self._is_over(group)
            self._steps[group], self._summed[group] = step, Counter()
        if dtype in WIDTHS:
            self._summed[group][kind, size_bytes // WIDTHS[dtype]] += 1

    def settle(self, step: int) -> None:
        """Name the groups whose sums in *step*, which is over, are gradients: no other step follows."""
        for group in [group for group, last in self._steps.items() if last == step]:
            if self._is_whole(group):
                self._groups.name_known(group, "dp")

    def _is_over(self, group: GroupInfo) -> None:
        """All that *group* has summed in a step is known."""
        self._found[group] = self._found[group] + 1 if self._is_whole(group) else 0
        if self._found[group] >= SURE_AFTER:
            self._groups.name_known(group, "dp")

    def _is_whole(self, group: GroupInfo) -> bool:
        """Whether what *group* has summed in its last step is all gradients."""
        times, n_ranks = {1, max(self._passes(), 1)}, len(group.ranks)
        summed = self._summed[group]
        return any(are_gradients(summed, one, n_ranks, n) for one in self._params() for n in times)


# A training may call others beside, or before: a frozen reference, a teacher, a critic, an evaluation of
# the model that it trains. What describes it is the largest model that is called with gradients, and of the
# calls of that one those with gradients.

MOST_SHAPES: Final = 1024  # shapes of inputs that are told apart


class Trained:
    """The calls of one model that is trained.

    Args:
        parameters: what is trained of it: the shape of each, by its identity.
        sides: what its layers expect of an input.

    Attributes:
        shapes: how often its input had which shape, and whether it was of floating-point numbers.
        per_step: in how many steps it was called how often.
    """

    def __init__(self, parameters: dict[int, tuple[int, ...]], sides: Sides) -> None:
        self.parameters, self._sides = parameters, sides
        self.shapes: Counter[tuple[tuple[int, ...], bool]] = Counter()
        self.per_step: Counter[int] = Counter()
        self._step, self._calls = -1, 0

    @property
    def size(self) -> int:
        """How many numbers are trained of it."""
        return sum(map(prod, self.parameters.values()))

    def count(self, step: int) -> None:
        """Count a call in *step*."""
        if step != self._step:
            if self._step >= 0:
                self.per_step[self._calls] += 1
            self._step, self._calls = step, 0
        self._calls += 1

    def note(self, values: Iterable[Any]) -> bool:
        """Note the input among *values*, the arguments of a call; return whether there is one.

        Where a model is traced or exported, sizes are no numbers but part of the graph: those do not count.
        """
        value = input_of(values)
        if value is None or not all(type(n) is int for n in value.shape):
            return False
        key = tuple(value.shape), bool(value.is_floating_point())
        if key in self.shapes or len(self.shapes) < MOST_SHAPES:
            self.shapes[key] += 1
        return True

    def describe(self) -> dict[str, Any]:
        """Return settings for ``RunInfo.job``: the usual input, how many others there are, calls per step."""
        found: dict[str, Any] = {}
        if self.shapes:
            (shape, is_float), _ = self.shapes.most_common(1)[0]
            is_embedded = is_float and not self._sides.are_channels(shape)
            found |= {"input_shape": list(shape), "input_is_embedded": is_embedded}
            if len(self.shapes) > 1:
                found["input_shapes"] = len(self.shapes)
        if self.per_step:
            found["forwards_per_step"] = self.usual
        return found

    @property
    def usual(self) -> int:
        """How often it is called in a step, as a rule."""
        return median_low(self.per_step.elements()) if self.per_step else 1


class Passes:
    """Watches the calls of models from outside of any other, but for those of a pipeline's stages.

    Args:
        session: the recording.

    Attributes:
        summed: told of each communication, in the order of their issue within its group.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: weakref.WeakKeyDictionary[Any, Trained] = weakref.WeakKeyDictionary()
        self._all: list[Trained] = []
        self._main: Trained | None = None
        self._unnoted: Trained | None = None
        averaged = Averaged(session.groups, self.trained, lambda: self._main.usual if self._main else 1)
        self.summed = session.guarded("axes", averaged.note)

    def trained(self) -> list[Counter[tuple[int, ...]]]:
        """Return the shapes of what is trained: of the model that is described, and of all."""
        whole = {key: shape for one in self._all for key, shape in one.parameters.items()}
        main = [] if self._main is None else [Counter(self._main.parameters.values())]
        return [*main, Counter(whole.values())]

    def begins(self, model: Any, args: Any, *, trains: bool) -> None:
        """*model* is called with *args*, to train or not."""
        self._unnoted = None
        if not trains or self._session.is_pipelined:
            return
        one = self._known.get(model)
        if one is None:
            one = self._met(model)
        one.count(self._session.position.step)
        if not one.note(args):
            self._unnoted = one

    def called_with(self, values: Iterable[Any]) -> None:
        """The model whose call is over was called with *values* by name."""
        if self._unnoted is not None:
            self._unnoted.note(values)
            self._unnoted = None

    def describe(self) -> dict[str, Any]:
        """Return what the calls tell of the training, for ``RunInfo.job``.

        ``beside_params`` is the number of parameters that are trained in other models than the one described.
        """
        if self._main is None:
            return {}
        known = set(self._main.parameters)
        others = {
            key: shape for one in self._all for key, shape in one.parameters.items() if key not in known
        }
        beside = {"beside_params": sum(map(prod, others.values()))} if others else {}
        return {**self._main.describe(), **beside}

    def _met(self, model: Any) -> Trained:
        """Learn a model that is called with gradients for the first time."""
        parameters = {id(one): tuple(whole_shape(one)) for one in model.parameters() if one.requires_grad}
        one = self._known[model] = Trained(parameters, sides_of(model))
        if parameters and not any(set(parameters) <= set(other.parameters) for other in self._all):
            self._all.append(one)
            if self._main is None or one.size > self._main.size:
                self._main = one
                self._session.trains(model)
        return one


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
        precision: tells in what type the model computes.
        pipeline: the hook of pipelines, None while there is none.
    """

    lane: _AnyLane
    steps: Steps
    warn: Callable[[str], None]

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.position = Position()
        self.groups = Groups(world_size)
        self.model: dict[str, Any] | None = None
        self.job: dict[str, Any] = {}
        self.n_notes = 0
        self.precision = Precision(self._computes_in)
        self.pipeline: Any = None

    def note_job(self, **settings: Any) -> None:
        """Note settings of the training for ``RunInfo.job``."""
        self.job.update(settings)
        self.n_notes += 1

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
