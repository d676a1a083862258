"""Templates as arrays, and the tasks outside of a template that it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from foretrace.simulator.builder.instances import Message
from foretrace.simulator.builder.template import DP, DP_COPIES, Task, Template
from foretrace.simulator.errors import JobError
from foretrace.simulator.program import Int64Array, Label

MOST: Final = {"ns": 2**53, "FLOPs": 2**62, "bytes": 2**62}
"""Most of a unit in one operation: 64 bits hold it, and the times of a thousand in a row."""


class TemplateArrays:
    """A template as arrays, with labels and messages as numbers."""

    def __init__(self, template: Template, labels: dict[Label, int], messages: dict[Message, int]) -> None:
        tasks = template.tasks
        self.n = len(tasks)
        self.stream = np.array([task.stream for task in tasks], np.int32)
        self.label = np.array([labels.setdefault(task.label, len(labels)) for task in tasks], np.int32)
        self.duration_ns = _in_64_bits("ns", [task.duration_ns for task in tasks])
        self.message = np.array([_number(task.message, messages) for task in tasks], np.int32)
        self.layer = np.array([task.layer for task in tasks], np.int32)
        self.flops = _in_64_bits("FLOPs", [task.flops for task in tasks])
        self.bytes_moved = _in_64_bits("bytes", [task.bytes_moved for task in tasks])
        self.memory_bound = np.array([task.memory_bound for task in tasks], np.int32)
        self.part = np.array([task.part for task in tasks], np.int32)
        self.waits = template.waits
        self.waits_outside = any(other < 0 for _, other in template.waits)
        self.tails = template.tails
        self.last_dp, self.last_copies = (_last(tasks, stream) for stream in (DP, DP_COPIES))

    def dependencies(self, outside: Outside) -> tuple[Int64Array, Int64Array]:
        """Return how many others each task waits for, and which, each once and relative to the first task."""
        stands_for = {
            Template.BEFORE: outside.tails,
            Template.GRADIENTS: outside.gradients + outside.copies,
            Template.EARLIER: outside.earlier,
        }
        found = sorted({(task, at) for task, other in self.waits for at in stands_for.get(other, (other,))})
        edges = np.array(found, np.int64).reshape(-1, 2)
        return np.bincount(edges[:, 0], minlength=self.n), edges[:, 1]


class Outside(NamedTuple):
    """The tasks before a template that it may wait for, numbered relative to its first task."""

    tails: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    earlier: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()

    def further(self, n: int) -> Outside:
        """Return the same tasks as seen from *n* tasks further on."""
        return Outside(*(tuple([at - n for at in found]) for found in self))

    def after(self, arrays: TemplateArrays) -> Outside:
        """Return the ``Outside`` of the template that follows *arrays*, whose own is this one."""
        moved = self.further(arrays.n)
        own = tuple([at - arrays.n for at in arrays.tails if at >= 0])
        return Outside(
            tails=own if len(own) == len(arrays.tails) else moved.tails + own,
            gradients=(arrays.last_dp - arrays.n,) if arrays.last_dp >= 0 else moved.gradients,
            earlier=moved.tails,
            copies=(arrays.last_copies - arrays.n,) if arrays.last_copies >= 0 else moved.copies,
        )


class Waits:
    """What a sequence of templates waits for; equal cases are worked out once and shared.

    Attributes:
        found: for each different case, as ``TemplateArrays.dependencies`` has it.
    """

    def __init__(self) -> None:
        self.found: list[tuple[Int64Array, Int64Array]] = []
        self._cases: dict[tuple[int, Outside], int] = {}
        self._outsides: list[Outside] = [Outside()]
        self._numbers: dict[Outside, int] = {Outside(): 0}
        self._steps: dict[tuple[int, int], tuple[int, int]] = {}
        self._behind: dict[int, tuple[int, int]] = {}

    def case(self, arrays: TemplateArrays, rank: int, offset: int) -> int:
        """Return the place in ``found`` of *arrays*, the next template of *rank*, from task *offset* on."""
        outside, end = self._behind.get(rank, (0, offset))
        if end != offset:
            outside = self._number(self._outsides[outside].further(offset - end))
        step = (id(arrays), outside)
        if step not in self._steps:
            self._steps[step] = (
                self._case(arrays, outside),
                self._number(self._outsides[outside].after(arrays)),
            )
        case, behind = self._steps[step]
        self._behind[rank] = (behind, offset + arrays.n)
        return case

    def _case(self, arrays: TemplateArrays, outside: int) -> int:
        key = (id(arrays), self._outsides[outside] if arrays.waits_outside else Outside())
        if key not in self._cases:
            self._cases[key] = len(self.found)
            self.found.append(arrays.dependencies(key[1]))
        return self._cases[key]

    def _number(self, outside: Outside) -> int:
        if outside not in self._numbers:
            self._numbers[outside] = len(self._outsides)
            self._outsides.append(outside)
        return self._numbers[outside]


def gathered(lengths: Sequence[int], which: Sequence[int], sizes: Int64Array) -> Int64Array:
    """Return the positions of a sequence of parts within the array that holds each distinct part once.

    Args:
        lengths: length of each distinct part.
        which: the parts of the sequence, in order.
        sizes: the lengths of these.

    >>> gathered([2, 3], [1, 0, 1], np.array([3, 2, 3])).tolist()
    [2, 3, 4, 0, 1, 2, 3, 4]
    """
    begins = np.cumsum(lengths, dtype=np.int64) - np.array(lengths, np.int64)
    shift = (begins[which] if len(which) else begins) - (np.cumsum(sizes) - sizes)
    found: Int64Array = np.arange(int(sizes.sum()), dtype=np.int64) + np.repeat(shift, sizes)
    return found


def _last(tasks: Sequence[Task], stream: int) -> int:
    """Return the place of the last of *tasks* on *stream*, -1 if there is none."""
    return max((at for at, task in enumerate(tasks) if task.stream == stream), default=-1)


def _number(message: Message | None, messages: dict[Message, int]) -> int:
    """Return the number of *message*, a new one if it is new, or -1 for none."""
    return -1 if message is None else messages.setdefault(message, len(messages))


def _in_64_bits(unit: str, values: Sequence[int]) -> Int64Array:
    """Return *values* as an array. Raises JobError if one is beyond what a timeline counts."""
    if (most := max(values, default=0)) > MOST[unit]:
        raise JobError(
            f"an operation of {most:.2g} {unit} is beyond what a timeline counts: a shorter seq_len, a "
            "smaller micro_batch or more ranks would work"
        )
    return np.array(values, np.int64)
