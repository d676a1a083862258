"""Which model trains, on inputs of what shape and how often in a step, as the calls of models tell.

A training may call others beside, or before: a frozen reference, a teacher, a critic, an evaluation of the
model that it trains. What describes it is the largest model that is called with gradients, and of the calls
of that one those with gradients.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from math import prod
from statistics import median_low
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.flows import Flows
from foretrace.tracer.inputs import Sides, input_of, sides_of
from foretrace.tracer.wrapped import whole_shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from foretrace.tracer.groups import Groups
    from foretrace.tracer.guarded import Guards

MOST_SHAPES: Final = 1024  # shapes of inputs that are told apart


class Trained:
    """The calls of one model that is trained.

    Attributes:
        shapes: how often its input had which shape, and whether it was of floating-point numbers.
    """

    def __init__(self, parameters: dict[int, tuple[int, ...]], sides: Sides) -> None:
        self.parameters, self._sides = parameters, sides
        self.shapes: Counter[tuple[tuple[int, ...], bool]] = Counter()
        self.per_step: Counter[int] = Counter()  # in how many steps it was called how often
        self._step, self._calls = -1, 0

    @property
    def size(self) -> int:
        """How many numbers are trained of it."""
        return sum(map(prod, self.parameters.values()))

    def count(self, step: int) -> None:
        """Count a call in *step*."""
        if step != self._step:
            # Counted when the next step calls: the last one may be cut off, and does not count.
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
        # The lower of two in the middle, so that it is a number of calls that has been.
        return median_low(self.per_step.elements()) if self.per_step else 1


class Passes:
    """Watches the calls of models from outside of any other, but for those of a pipeline's stages.

    Attributes:
        summed: told of each communication, in the order of their issue within its group.
    """

    def __init__(self, groups: Groups, guards: Guards, trains: Callable[[Any], None]) -> None:
        self._trains = trains
        self._known: weakref.WeakKeyDictionary[Any, Trained] = weakref.WeakKeyDictionary()
        self._all: list[Trained] = []
        self._main: Trained | None = None
        self._unnoted: Trained | None = None
        flows = Flows(groups, self.trained, lambda: self._main.usual if self._main else 1)
        self.summed = guards.guarded("axes", flows.note)

    def trained(self) -> list[Counter[tuple[int, ...]]]:
        """Return the shapes of what is trained: of the model that is described, and of all."""
        whole = {key: shape for one in self._all for key, shape in one.parameters.items()}
        main = [] if self._main is None else [Counter(self._main.parameters.values())]
        return [*main, Counter(whole.values())]

    def begins(self, model: Any, args: Any, step: int) -> None:
        """*model* is called with *args*, to train, in *step*."""
        one = self._known.get(model)
        if one is None:
            one = self._met(model)
        one.count(step)
        self._unnoted = None if one.note(args) else one

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
        # What is a part of a model that is known trains nothing of its own.
        if parameters and not any(set(parameters) <= set(other.parameters) for other in self._all):
            self._all.append(one)
            if self._main is None or one.size > self._main.size:
                self._main = one
                self._trains(model)
        return one
