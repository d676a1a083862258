"""Finds what groups are for that nobody has named, by what flows over them in a step.

In a loop that reduces gradients itself, as torch's tutorial on distributed applications does, no group says
what it is for. But what its all-reduces and reduce-scatters sum up in a step is the gradients of the model,
to the byte, and perhaps a loss or a norm beside them. An optimizer that gives each rank whole parameters to
update fills those of a shape up with zeros to a multiple of the ranks; that, too, follows from shapes.

Activations that are summed or gathered within the model, forward and backward, and nothing else of size, are
those of tensor parallelism. Uneven exchanges in both directions are those of tokens among experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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

SURE_AFTER: Final = 2  # steps in a row after which a group is known: one could be chance


SUMMING: Final = ("all_reduce", "reduce_scatter")  # collectives after which gradients are summed
FEW: Final = 16  # numbers of a collective that are neither activations nor gradients: a loss, a norm

PASSES: Final = frozenset({"forward", "backward"})
"""Phases of a step in which activations and their gradients flow."""

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
    # Less than nothing beside them: there are parameters that no collective has summed.
    return n_trained > 0 and 0 <= beside <= n_trained * MOST_BESIDE


@dataclass(slots=True)
class _Flow:
    """What one group has carried in a step."""

    step: int  # the step
    # how many collectives there are of a kind and of so many numbers, of ``SUMMING``
    summed: Counter[tuple[str, int]] = field(default_factory=Counter)
    # phases in which so many numbers were summed or gathered; ``""`` outside of the passes
    phases: set[tuple[int, str]] = field(default_factory=set)
    # phases in which tensors were exchanged, and ``"tokens"`` if an exchange was uneven, or of whole numbers,
    # as the counts that tell others how many tokens come
    exchanges: set[str] = field(default_factory=set)


class Flows:
    """Watches what flows in each step over groups of which nobody has said what they are for.

    Not for several threads: the one that writes uses it.

    Args:
        groups: the process groups, which are told what is found.
        params: returns the shapes of what is trained; several answers may be right.
        passes: returns how often the model is called in a step: who reduces after each pass does so as often.
        places: returns the rows, or tokens, of an input of the model: activations have a vector for each.
    """

    def __init__(
        self,
        groups: Groups,
        params: Callable[[], Iterable[Shapes]],
        passes: Callable[[], int],
        places: Callable[[], int] = lambda: 0,
    ) -> None:
        self._groups, self._params, self._passes, self._places = groups, params, passes, places
        self._flows: dict[GroupInfo, _Flow] = {}
        self._found: dict[GroupInfo, tuple[str, int]] = {}  # the axis, and in how many steps in a row

    def note(self, one: Communication) -> None:
        """Count a communication, in the order of their issue within its group."""
        self.count(one.kind, one.group, one.size_bytes, one.dtype, one.position[0])

    def count(
        self,
        kind: str,
        group: GroupInfo,
        size_bytes: int,
        dtype: str,
        step: int,
        *,
        phase: str | None = None,
        is_uneven: bool = False,
    ) -> None:
        """Count a communication of *size_bytes* over the whole *group*.

        Args:
            kind: of the communication.
            group: its group.
            size_bytes: of the whole array.
            dtype: of its numbers.
            step: in which it was issued.
            phase: ``"forward"`` or ``"backward"`` within the model or its loss, ``""`` elsewhere; None if
                nobody knows.
            is_uneven: whether an exchange sends more to some ranks than to others.
        """
        if group.axis in AXES or step < 0:
            return
        flow = self._flows.get(group)
        if flow is None or flow.step != step:
            if flow is not None:
                self._is_over(group)
            flow = self._flows[group] = _Flow(step)
        if kind == "all_to_all" and phase:
            flow.exchanges.add(phase if dtype in WIDTHS else "tokens")
            flow.exchanges.update({"tokens"} if is_uneven else ())
        if dtype not in WIDTHS:
            return
        n = size_bytes // WIDTHS[dtype]
        if kind in SUMMING:
            flow.summed[kind, n] += 1
        if kind in {*SUMMING, "all_gather"}:
            flow.phases.add((n, "unknown" if phase is None else phase))

    def settle(self, step: int) -> None:
        """Name the groups by what they carried in *step*, which is over: no other step follows."""
        for group in [group for group, flow in self._flows.items() if flow.step == step]:
            if axis := self._axis(group):
                self._groups.name_known(group, axis)

    def _is_over(self, group: GroupInfo) -> None:
        """All that *group* carries in a step is known."""
        axis, (before, n) = self._axis(group), self._found.get(group, ("", 0))
        self._found[group] = axis, n + 1 if axis == before else 1
        if axis and self._found[group][1] >= SURE_AFTER:
            self._groups.name_known(group, axis)

    def _axis(self, group: GroupInfo) -> str:
        """Return the axis that *group* has served in its last step, empty if that is not certain."""
        flow, params = self._flows[group], [*self._params()]
        times, n_ranks = {1, max(self._passes(), 1)}, len(group.ranks)
        if any(are_gradients(flow.summed, one, n_ranks, n) for one in params for n in times):
            return "dp"
        if flow.exchanges >= {*PASSES, "tokens"}:
            return "ep"
        return "tp" if self._are_activations(group, flow, params) else ""

    def _are_activations(self, group: GroupInfo, flow: _Flow, params: Iterable[Shapes]) -> bool:
        """Whether *group* has summed or gathered activations forward and backward, and nothing else of size.

        What has the size of parameters, whole or cut over the ranks, may be these. Ranks whose gradients are
        summed over another group have copies of the model, not parts.
        """
        n_ranks, places = len(group.ranks), self._places()
        held = {prod(shape) for one in params for shape in one} | {_total(one) for one in params}
        large = {(n, phase) for n, phase in flow.phases if n > FEW}
        copies = (other.ranks for other in self._groups.known() if other.axis == "dp")
        return (
            places > 0
            and {phase for _, phase in large} == PASSES
            and all(n % places == 0 and not {n, n // n_ranks} & held for n, _ in large)
            and not any(len({*group.ranks} & {*ranks}) > 1 for ranks in copies)
        )


def _total(shapes: Shapes) -> int:
    return sum(prod(shape) * n for shape, n in shapes.items())
