"""GPUs that compute and communicate at once, or throttle, on numba: ``gpus.py`` over arrays.

The state is kept in few arrays, by column, because numba counts the users of every array that it hands on.
"""

from __future__ import annotations

from heapq import heappush
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrace.simulator.engine import slowdown
from foretrace.simulator.engine.jit import jit
from foretrace.simulator.program import Int64Array, Program

RANK, STREAM, BOUND, SINCE, DUE = range(5)
"""Columns of ``Gpus.of_task``."""

LEFT, PACE = range(2)
"""Columns of ``Gpus.progress``."""

PROCESSORS, MEMORY = range(2)
"""Columns of ``Gpus.takes`` and ``Gpus.taken``."""

NOBODY: Final = -1
"""Stands where no task computes."""


class Gpus(NamedTuple):
    """State of all GPUs, and of the tasks that compute on them.

    Attributes:
        of_task: rank, stream, share of its time that is bound by memory in parts per million (-1 if nothing
            slows it), when its pace changed last, when it ends as far as is known; shape ``(n_tasks, 5)``.
        progress: what was left of it alone in ns when its pace changed last, and how many times as long it
            takes since then; shape ``(n_tasks, 2)``.
        takes: what each communication takes of a GPU's processors and memory bandwidth, in parts per million;
            shape ``(n_instances, 2)``.
        taken: the same of all that are on a GPU; shape ``(n_ranks, 2)``.
        factor: how many times as long everything takes on a rank; shape ``(n_ranks,)``.
        computing: the task that computes, or ``NOBODY``; shape ``(n_ranks, n_streams)``.
    """

    of_task: NDArray[np.int64]
    progress: NDArray[np.float64]
    takes: NDArray[np.int64]
    taken: NDArray[np.int64]
    factor: NDArray[np.float64]
    computing: NDArray[np.int64]


def gpus_of(program: Program, n_ranks: int) -> Gpus:
    """Return the GPUs of *program* before it runs."""
    zeros = np.zeros(program.n_tasks, np.int64)
    takes = np.array([(t.processors, t.memory) for t in program.transfers], np.int64).reshape(-1, 2)
    return Gpus(
        of_task=np.stack([program.rank, program.stream, program.slowed, zeros, zeros], axis=1).astype(
            np.int64
        ),
        progress=np.zeros((program.n_tasks, 2)),
        takes=takes[program.instance_transfer],
        taken=np.zeros((n_ranks, 2), np.int64),
        factor=np.ones(n_ranks),
        computing=np.full((n_ranks, len(program.streams)), NOBODY, np.int64),
    )


def begin_computing(task: int, now: int, duration_ns: int, gpus: Gpus, heap: list[tuple[int, int]]) -> None:
    """Let *task* compute, which takes *duration_ns* on a GPU that does nothing else."""
    one = gpus.of_task[task]
    one[DUE] = now + duration_ns
    if one[BOUND] >= 0 and duration_ns > 0:
        rank = one[RANK]
        pace = gpus.factor[rank] * _slowdown(
            one[BOUND], gpus.taken[rank, PROCESSORS], gpus.taken[rank, MEMORY]
        )
        gpus.progress[task, LEFT], gpus.progress[task, PACE] = duration_ns, pace
        one[SINCE], one[DUE] = now, _due(now, float(duration_ns), pace)
        gpus.computing[rank, one[STREAM]] = task
    heappush(heap, (one[DUE], task))


def note(rank: int, now: int, gpus: Gpus, heap: list[tuple[int, int]]) -> None:
    """Work out anew when the tasks that compute on *rank* end."""
    for task in gpus.computing[rank]:
        if task == NOBODY or now >= gpus.of_task[task, DUE]:
            continue
        one, progress = gpus.of_task[task], gpus.progress[task]
        progress[LEFT] -= (now - one[SINCE]) / progress[PACE]
        progress[PACE] = gpus.factor[rank] * _slowdown(
            one[BOUND], gpus.taken[rank, PROCESSORS], gpus.taken[rank, MEMORY]
        )
        one[SINCE], one[DUE] = now, _due(now, progress[LEFT], progress[PACE])
        heappush(heap, (one[DUE], task))


def hold_processors(task: int, meeting: int, now: int, gpus: Gpus, heap: list[tuple[int, int]]) -> None:
    """Let the kernels of communication *meeting* hold processors of the GPU of *task*."""
    if gpus.takes[meeting, PROCESSORS]:
        rank = gpus.of_task[task, RANK]
        gpus.taken[rank, PROCESSORS] += gpus.takes[meeting, PROCESSORS]
        _note(rank, now, gpus, heap)


def take_memory(members: Int64Array, meeting: int, now: int, gpus: Gpus, heap: list[tuple[int, int]]) -> None:
    """Let the bytes of *meeting* take memory bandwidth of all its *members*."""
    if gpus.takes[meeting, MEMORY]:
        for task in members:
            rank = gpus.of_task[task, RANK]
            gpus.taken[rank, MEMORY] += gpus.takes[meeting, MEMORY]
            _note(rank, now, gpus, heap)


def give_back(
    ended: Int64Array, instance: Int64Array, now: int, gpus: Gpus, heap: list[tuple[int, int]]
) -> None:
    """Take back what the communications among the tasks *ended* hold of their GPUs."""
    for task in ended:
        meeting = instance[task]
        if meeting >= 0 and (gpus.takes[meeting, PROCESSORS] or gpus.takes[meeting, MEMORY]):
            rank = gpus.of_task[task, RANK]
            gpus.taken[rank, PROCESSORS] -= gpus.takes[meeting, PROCESSORS]
            gpus.taken[rank, MEMORY] -= gpus.takes[meeting, MEMORY]
            _note(rank, now, gpus, heap)


def set_factor(rank: int, factor: float, now: int, gpus: Gpus, heap: list[tuple[int, int]]) -> None:
    """Let everything on *rank* take *factor* times as long from now on."""
    gpus.factor[rank] = factor
    _note(rank, now, gpus, heap)


_slowdown: Final[Any] = jit(slowdown.slowdown)
_due: Final[Any] = jit(slowdown.due_ns)
_note: Final[Any] = jit(note)
compute: Final[Any] = jit(begin_computing)
launch: Final[Any] = jit(hold_processors)
start_moving: Final[Any] = jit(take_memory)
end_kernels: Final[Any] = jit(give_back)
throttle: Final[Any] = jit(set_factor)
"""The functions above, compiled."""
