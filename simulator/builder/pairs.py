"""A forward and a backward that a schedule pairs: one template, in which each computes while the other waits.

DualPipe's authors write the kernels of both into one order by hand, so that the all-to-all of one micro-batch
hides behind the computing of another. Both receive before it, and both send after it. Reference: DeepSeek-V3,
arXiv:2412.19437, section 3.2.1 and figure 4; github.com/deepseek-ai/DualPipe, ``_forward_backward_chunk``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from foretrace.simulator.builder.program_builder import STREAMS, Template

BLOCKING: Final = tuple(STREAMS.index(axis) for axis in ("tp", "cp", "ep"))
"""Streams of communication that the main line of an action waits for."""


def write_both(template: Template, forward: Template, backward: Template) -> None:
    """Append two main lines to *template*, whose tails both of them follow.

    They take turns: after every communication that it waits for, one leaves the device to the other.

    Args:
        template: what to append to; its tails become those of both.
        forward: main line of the one, on its own.
        backward: that of the other.
    """
    before = template.tails
    tails: list[int] = []
    lines: list[tuple[Template, Iterator[range], dict[int, int]]] = [
        (line, _turns(line), {}) for line in (forward, backward)
    ]
    waits: list[list[list[int]]] = [[[] for _ in line.tasks] for line, _, _ in lines]
    for (line, _, _), own in zip(lines, waits, strict=True):
        for task, other in line.waits:
            own[task].append(other)
    going = [0, 1]
    while going:
        for which in tuple(going):
            line, turns, numbers = lines[which]
            turn = next(turns, None)
            if turn is None:
                going.remove(which)
                continue
            for at in turn:
                after = [a for other in waits[which][at] for a in _placed(other, before, numbers)]
                numbers[at] = template.add(line.tasks[at]._replace(part=which), after)
    for line, _, numbers in lines:
        tails += [a for other in line.tails for a in _placed(other, before, numbers)]
    template.tails = tuple(dict.fromkeys(tails))


def _placed(other: int, before: tuple[int, ...], numbers: dict[int, int]) -> tuple[int, ...]:
    """Return what a task of one main line stands for in the template of both."""
    if other == Template.BEFORE:
        return before
    return (numbers[other],) if other >= 0 else (other,)


def _turns(line: Template) -> Iterator[range]:
    """Yield the tasks of *line* in runs that end with a communication that it waits for."""
    start = 0
    for at, task in enumerate(line.tasks):
        if task.message is not None and task.stream in BLOCKING:
            yield range(start, at + 1)
            start = at + 1
    if start < len(line.tasks):
        yield range(start, len(line.tasks))
