"""Tasks that follow one another as one task each, for whoever asks for times and sums alone.

A phase of a layer waits for all of the one before it, on whatever stream. Nothing can come between, so that
its times, from its start on, are the same wherever it stands. A program with one task for each such chain
runs to the same nanosecond, and has a small part of the tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from foretrace.simulator.builder.instances import Message
from foretrace.simulator.builder.program_builder import COMPUTE, MOST, STREAMS, Task, Template
from foretrace.simulator.program import AXES, STATES, Inside, Int64Array, Label
from foretrace.traces.analysis.activity import PASSES

MAIN: Final = frozenset({COMPUTE, *map(STREAMS.index, AXES)})
"""Streams of the main line. A chain may use all of them only if whatever else does comes before or after."""

TakesNs = Callable[[Message], int]
"""How long a communication takes in which a rank of the program meets nobody else."""


class NotSerialError(Exception):
    """Something of a main line can run beside what does not belong to it, or it is too long to be counted."""


def merged(template: Template, takes_ns: TakesNs) -> Template:
    """Return *template* with one task for every chain; it waits for the same, and so does what follows.

    Raises NotSerialError unless every task of the main line waits for the one before it.
    """
    waits: list[list[int]] = [[] for _ in template.tasks]
    n_awaiting = [0] * len(template.tasks)
    for waiter, other in template.waits:
        waits[waiter].append(other)
        if other >= 0:
            n_awaiting[other] += 1
    chains = _chains(template, waits, n_awaiting)
    chain_of = {chain[0]: chain for chain in chains}
    found, number = Template(), dict[int, int]()
    for at in range(len(template.tasks)):
        if at not in number:
            chain = chain_of.get(at, [at])
            number.update(dict.fromkeys(chain, len(found.tasks)))
            found.tasks.append(in_a_row([template.tasks[one] for one in chain], takes_ns))
    found.waits = [
        (number[waiter], number.get(other, other))
        for waiter, other in template.waits
        if other < 0 or number[waiter] != number[other]
    ]
    found.tails = tuple(number.get(at, at) for at in template.tails)
    return found


def _chains(template: Template, waits: Sequence[Sequence[int]], n_awaiting: Sequence[int]) -> list[list[int]]:
    """Return the tasks of the main line by chain. Raises NotSerialError as ``merged`` does."""
    # Behind how many tasks of the main line each task certainly comes; -1: perhaps not behind the template.
    behind: list[int] = []
    chains: list[list[int]] = []
    n_main, last = 0, -1

    def ended(others: Collection[int]) -> int:
        return max(
            (behind[at] if at >= 0 else -(at != Template.BEFORE) for at in others),
            default=-1,
        )

    for at, task in enumerate(template.tasks):
        after = ended(waits[at])
        if task.stream in MAIN:
            if after != n_main:
                raise NotSerialError
            after = n_main = n_main + 1
            alone = last >= 0 and waits[at] == [last] and n_awaiting[last] == 1
            if alone and last not in template.tails and merges(task) and merges(template.tasks[last]):
                chains[-1].append(at)
            else:
                chains.append([at])
            last = at
        behind.append(after)
    if ended(template.tails) != n_main:
        raise NotSerialError
    return chains


def merges(task: Task) -> bool:
    """Return whether *task* may be part of a chain: it computes, or communicates along one of ``AXES``."""
    if task.message is None:
        return task.label.category == "compute"
    return task.label.axis in AXES


def in_a_row(tasks: Sequence[Task], takes_ns: TakesNs) -> Task:
    """Return one task for *tasks*, each of which waits for the one before it. Raises as ``whole`` does."""
    return tasks[0] if len(tasks) == 1 else whole(tasks, [(at - 1,) for at in range(len(tasks))], takes_ns)


def whole(tasks: Sequence[Task], waits: Sequence[Sequence[int]], takes_ns: TakesNs) -> Task:
    """Return one task for *tasks*, each of which waits for others of them, or for what is before them, -1.

    Raises NotSerialError if it is beyond what a timeline counts.
    """
    free: dict[int, int] = {}
    spans: list[tuple[int, int]] = []
    for task, others in zip(tasks, waits, strict=True):
        start_ns = max(free.get(task.stream, 0), *(spans[at][1] if at >= 0 else 0 for at in others))
        took_ns = task.duration_ns if task.message is None else takes_ns(task.message)
        free[task.stream] = start_ns + took_ns
        spans.append((start_ns, start_ns + took_ns))
    end_ns = max(free.values())
    computes = [task for task in tasks if task.message is None]
    flops, moved = sum(task.flops for task in tasks), sum(task.bytes_moved for task in tasks)
    if end_ns > MOST["ns"] or flops > MOST["FLOPs"] or moved > MOST["bytes"]:
        raise NotSerialError
    kinds = [task.label.kind for task in computes]
    first = next((kind for kind in kinds if kind in PASSES), kinds[0] if kinds else "")
    inside = Inside(
        sum(task.inside.n_tasks if task.inside else 1 for task in tasks),
        *_communicates(tasks, spans),
        sum(task.inside.computes_ns if task.inside else task.duration_ns for task in computes),
        sum(task.inside.bound if task.inside else task.duration_ns * task.memory_bound for task in computes),
    )
    return Task(
        COMPUTE,
        Label("compute", first, "in a row"),
        end_ns,
        flops=flops,
        bytes_moved=moved,
        inside=inside,
    )


def _communicates(
    tasks: Sequence[Task], spans: Sequence[tuple[int, int]]
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return start, end and state of what communicates in *tasks*, which run from and to *spans*."""
    if all(task.inside is None for task in tasks):
        rows = np.array([*_states(tasks, spans)], np.int64).reshape(-1, 3)
        return rows[:, 0], rows[:, 1], rows[:, 2]
    columns: tuple[list[Int64Array], ...] = ([], [], [])
    for task, (start_ns, end_ns) in zip(tasks, spans, strict=True):  # one after the other
        if task.inside is not None:
            found = [task.inside.start_ns + start_ns, task.inside.end_ns + start_ns, task.inside.state]
        elif task.message is not None:
            found = [np.array([at]) for at in (start_ns, end_ns, STATES.index((task.label.axis, "")))]
        else:
            continue
        for column, values in zip(columns, found, strict=True):
            column.append(values)
    start, end, state = (np.concatenate([np.empty(0, np.int64), *column]) for column in columns)
    return start, end, state


def _states(tasks: Sequence[Task], spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield when each axis communicates, and the number of its state, between any two times of *spans*."""
    points = sorted({edge for span in spans for edge in span})
    axes = [task.label.axis for task in tasks]
    for start_ns, end_ns in pairwise(points):
        running = {axis for axis, (a, b) in zip(axes, spans, strict=True) if a <= start_ns and end_ns <= b}
        first = next((axis for axis in AXES if axis in running), "")
        for axis in running - {""}:
            behind = "compute" if "" in running else first if axis != first else ""
            yield start_ns, end_ns, STATES.index((axis, behind))
