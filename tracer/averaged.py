"""Finds the groups over which a training sums its gradients by itself, without a wrapper that says so.

In a loop that reduces gradients itself, as torch's tutorial on distributed applications does, no group says
what it is for. But what its all-reduces sum up in a step is the gradients of the model, to the byte, and
perhaps a loss or a norm beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import MappingProxyType
from typing import Final

from tracer.groups import GroupInfo, Groups
from tracer.records import Communication
from traces.layout import AXES

MOST_BESIDE: Final = 0.01
"""What else a group sums up in a step at most, over the gradients: a loss, norms, statistics of a batch."""

WIDTHS: Final = MappingProxyType({"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2})
"""Bytes of a number of each type that gradients are summed in."""

SURE_AFTER: Final = 2
"""Steps in a row after which a group is known: one could be chance."""


class Averaged:
    """Counts what is summed in each step over groups of which nobody has said what they are for.

    Not for several threads: the one that writes uses it.

    Args:
        groups: the process groups, which are told what is found.
        params: returns how many numbers are trained; several answers may be right.
        passes: returns how often the model is called in a step: who reduces after each pass does so as often.
    """

    def __init__(self, groups: Groups, params: Callable[[], set[int]], passes: Callable[[], int]) -> None:
        self._groups, self._params, self._passes = groups, params, passes
        self._summed: Counter[GroupInfo] = Counter()
        self._steps: dict[GroupInfo, int] = {}
        self._found: Counter[GroupInfo] = Counter()

    def note(self, one: Communication) -> None:
        """Count a communication, in the order of their issue within its group."""
        group, step = one.group, one.position[0]
        if one.kind != "all_reduce" or group.axis in AXES or step < 0:
            return
        if (before := self._steps.get(group)) != step:
            if before is not None:
                self._is_over(group)
            self._steps[group], self._summed[group] = step, 0
        if one.dtype in WIDTHS:
            self._summed[group] += one.size_bytes // WIDTHS[one.dtype]

    def _is_over(self, group: GroupInfo) -> None:
        """All that *group* has summed in a step is known."""
        whole = {size * n for size in self._params() for n in (1, self._passes())} - {0}
        is_whole = any(size <= self._summed[group] <= size * (1 + MOST_BESIDE) for size in whole)
        self._found[group] = self._found[group] + 1 if is_whole else 0
        if self._found[group] >= SURE_AFTER:
            self._groups.name_known(group, "dp")
