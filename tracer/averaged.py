"""Finds the groups over which a training sums its gradients by itself, without a wrapper that says so.

In a loop that reduces gradients itself, as torch's tutorial on distributed applications does, no group says
what it is for. But what its all-reduces and reduce-scatters sum up in a step is the gradients of the model,
to the byte, and perhaps a loss or a norm beside them. An optimizer that gives each rank whole parameters to
update fills those of a shape up with zeros to a multiple of the ranks; that, too, follows from shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import ceil, prod
from types import MappingProxyType
from typing import Final, TypeAlias

from foretrace.tracer.groups import GroupInfo, Groups
from foretrace.tracer.records import Communication
from foretrace.traces.layout import AXES

MOST_BESIDE: Final = 0.01
"""What else a group sums up in a step at most, over the gradients: a loss, norms, statistics of a batch."""

WIDTHS: Final = MappingProxyType({"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2})
"""Bytes of a number of each type that gradients are summed in."""

SURE_AFTER: Final = 2
"""Steps in a row after which a group is known: one could be chance."""


SUMMING: Final = ("all_reduce", "reduce_scatter")
"""Collectives after which gradients are summed."""

Shapes: TypeAlias = Mapping[tuple[int, ...], int]
"""How many parameters of each shape are trained."""


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
