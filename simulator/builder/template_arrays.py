"""Templates as arrays, and what each waits for outside of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simulator.builder.instances import Message
from simulator.builder.template import DP, Template
from simulator.program import Int64Array, Label


class TemplateArrays:
    """A template as arrays, with labels and messages as numbers."""

    def __init__(self, template: Template, labels: dict[Label, int], messages: dict[Message, int]) -> None:
        tasks = template.tasks
        self.n = len(tasks)
        self.stream = np.array([task.stream for task in tasks], np.int32)
        self.label = np.array([labels.setdefault(task.label, len(labels)) for task in tasks], np.int32)
        self.duration_ns = np.array([task.duration_ns for task in tasks], np.int64)
        self.message = np.array([_number(task.message, messages) for task in tasks], np.int32)
        self.layer = np.array([task.layer for task in tasks], np.int32)
        self.flops = np.array([task.flops for task in tasks], np.int64)
        self.bytes_moved = np.array([task.bytes_moved for task in tasks], np.int64)
        self.memory_bound = np.array([task.memory_bound for task in tasks], np.int32)
        self.part = np.array([task.part for task in tasks], np.int32)
        self.waits = template.waits
        self.waits_outside = any(other < 0 for _, other in template.waits)
        self.tails = template.tails
        self.last_dp = max((at for at, task in enumerate(tasks) if task.stream == DP), default=-1)

    def dependencies(self, outside: Outside) -> tuple[Int64Array, Int64Array]:
        """Return how much each task waits for, and for what, each once, relative to the first task."""
        stands_for = {
            Template.BEFORE: outside.tails,
            Template.GRADIENTS: outside.gradients,
            Template.EARLIER: outside.earlier,
        }
        found = sorted({(task, at) for task, other in self.waits for at in stands_for.get(other, (other,))})
        edges = np.array(found, np.int64).reshape(-1, 2)
        return np.bincount(edges[:, 0], minlength=self.n), edges[:, 1]


class Outside(NamedTuple):
    """What a template may wait for outside of itself: tasks, relative to its first one."""

    tails: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    earlier: tuple[int, ...] = ()


class Behind:
    """What a rank has done so far, as far as the next template may wait for it: numbers of tasks."""

    def __init__(self) -> None:
        self.now = Outside()

    def relative(self, arrays: TemplateArrays, offset: int) -> Outside:
        """Return what *arrays* finds if its first task is number *offset*; nothing if it does not ask."""
        if not arrays.waits_outside:
            return Outside()
        now = self.now
        return Outside(
            tails=tuple([at - offset for at in now.tails]),
            gradients=tuple([at - offset for at in now.gradients]),
            earlier=tuple([at - offset for at in now.earlier]),
        )

    def add(self, arrays: TemplateArrays, offset: int) -> None:
        """Note that *arrays* has been placed at *offset*."""
        before = self.now
        own = tuple([at + offset for at in arrays.tails if at >= 0])
        self.now = Outside(
            tails=own if len(own) == len(arrays.tails) else before.tails + own,
            gradients=(arrays.last_dp + offset,) if arrays.last_dp >= 0 else before.gradients,
            earlier=before.tails,
        )


def gathered(lengths: Sequence[int], which: Sequence[int], sizes: Int64Array) -> Int64Array:
    """Return positions that put parts behind each other, if all distinct parts lie behind each other.

    Args:
        lengths: of each distinct part.
        which: the parts wanted, in order.
        sizes: their lengths.

    >>> gathered([2, 3], [1, 0, 1], np.array([3, 2, 3])).tolist()
    [2, 3, 4, 0, 1, 2, 3, 4]
    """
    begins = np.cumsum(lengths, dtype=np.int64) - np.array(lengths, np.int64)
    shift = (begins[which] if len(which) else begins) - (np.cumsum(sizes) - sizes)
    found: Int64Array = np.arange(int(sizes.sum()), dtype=np.int64) + np.repeat(shift, sizes)
    return found


def _number(message: Message | None, messages: dict[Message, int]) -> int:
    """Return the number of *message*, a new one if it is new, or -1 for none."""
    return -1 if message is None else messages.setdefault(message, len(messages))
