"""GPUs that compute and communicate at once, or throttle, on numba: ``gpus.py`` over arrays."""

from __future__ import annotations

from heapq import heappush
from typing import Any, Final, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simulator.engine import slowdown
from simulator.engine.fair import Floats
from simulator.program import Int32Array, Int64Array, Program

NOBODY: Final = -1
"""Stands where no task computes."""


class Gpus(NamedTuple):
    """State of all GPUs, and of the tasks that compute on them.

    Attributes:
        rank, stream: of each task.
        bound: share of its time that is bound by memory, in parts per million; -1 if nothing slows it.
        processors, memory: what each communication takes of a GPU, in parts per million.
        taken: by rank, what communications take of its processors and memory; shape ``(n_ranks, 2)``.
        factor: by rank, how many times as long everything takes there.
        computing: by rank and stream, the task that computes, or ``NOBODY``.
        left_ns, since_ns, pace: of a task that computes, what was left of it alone, when, and how many times
            as long it takes since then.
        due_ns: when each task ends as far as is known.
    """

    rank: Int32Array
    stream: Int32Array
    bound: Int32Array
    processors: Int64Array
    memory: Int64Array
    taken: NDArray[np.int64]
    factor: Floats
    computing: NDArray[np.int64]
    left_ns: Floats
    since_ns: Int64Array
    pace: Floats
    due_ns: Int64Array


def gpus_of(program: Program, n_ranks: int) -> Gpus:
    """Return the GPUs of *program* before it runs."""
    n = program.n_tasks
    taken = np.array([(t.processors, t.memory) for t in program.transfers], np.int64).reshape(-1, 2)
    of_instance = taken[program.instance_transfer]
    return Gpus(
        rank=program.rank,
        stream=program.stream,
        bound=program.slowed,
        processors=of_instance[:, 0].copy(),
        memory=of_instance[:, 1].copy(),
        taken=np.zeros((n_ranks, 2), np.int64),
        factor=np.ones(n_ranks),
        computing=np.full((n_ranks, len(program.streams)), NOBODY, np.int64),
        left_ns=np.zeros(n),
        since_ns=np.zeros(n, np.int64),
        pace=np.ones(n),
        due_ns=np.zeros(n, np.int64),
    )


def begin_computing(task: int, now: int, duration_ns: int, gpus: Gpus, heap: list[tuple[int, int]]) -> None:
    """Let *task* compute, which takes *duration_ns* on a GPU that does nothing else."""
    rank, bound = gpus.rank[task], gpus.bound[task]
    gpus.due_ns[task] = now + duration_ns
    if bound >= 0 and duration_ns > 0:
        pace = gpus.factor[rank] * _slowdown(bound, gpus.taken[rank, 0], gpus.taken[rank, 1])
        gpus.left_ns[task], gpus.since_ns[task], gpus.pace[task] = duration_ns, now, pace
        gpus.due_ns[task] = _due(now, float(duration_ns), pace)
        gpus.computing[rank, gpus.stream[task]] = task
    heappush(heap, (gpus.due_ns[task], task))


def note(rank: int, now: int, gpus: Gpus, heap: list[tuple[int, int]]) -> None:
    """Work out anew when the tasks that compute on *rank* end."""
    for task in gpus.computing[rank]:
        if task == NOBODY or now >= gpus.due_ns[task]:
            continue
        gpus.left_ns[task] -= (now - gpus.since_ns[task]) / gpus.pace[task]
        pace = gpus.factor[rank] * _slowdown(gpus.bound[task], gpus.taken[rank, 0], gpus.taken[rank, 1])
        gpus.since_ns[task], gpus.pace[task] = now, pace
        gpus.due_ns[task] = _due(now, gpus.left_ns[task], pace)
        heappush(heap, (gpus.due_ns[task], task))


def hold_processors(task: int, meeting: int, now: int, gpus: Gpus, heap: list[tuple[int, int]]) -> None:
    """Let the kernels of communication *meeting* hold processors of the GPU of *task*."""
    if gpus.processors[meeting]:
        gpus.taken[gpus.rank[task], 0] += gpus.processors[meeting]
        _note(gpus.rank[task], now, gpus, heap)


def take_memory(members: Int64Array, meeting: int, now: int, gpus: Gpus, heap: list[tuple[int, int]]) -> None:
    """Let the bytes of *meeting* take memory bandwidth of all its *members*."""
    if gpus.memory[meeting]:
        for task in members:
            gpus.taken[gpus.rank[task], 1] += gpus.memory[meeting]
            _note(gpus.rank[task], now, gpus, heap)


def give_back(
    ended: Int64Array, instance: Int64Array, now: int, gpus: Gpus, heap: list[tuple[int, int]]
) -> None:
    """Take back what the communications among the tasks *ended* hold of their GPUs."""
    for task in ended:
        meeting = instance[task]
        if meeting >= 0 and (gpus.processors[meeting] or gpus.memory[meeting]):
            gpus.taken[gpus.rank[task], 0] -= gpus.processors[meeting]
            gpus.taken[gpus.rank[task], 1] -= gpus.memory[meeting]
            _note(gpus.rank[task], now, gpus, heap)


def set_factor(rank: int, factor: float, now: int, gpus: Gpus, heap: list[tuple[int, int]]) -> None:
    """Let everything on *rank* take *factor* times as long from now on."""
    gpus.factor[rank] = factor
    _note(rank, now, gpus, heap)


_jit: Final[Any] = njit(cache=True)
_slowdown: Final[Any] = _jit(slowdown.slowdown)
_due: Final[Any] = _jit(slowdown.due_ns)
_note: Final[Any] = _jit(note)
compute: Final[Any] = _jit(begin_computing)
launch: Final[Any] = _jit(hold_processors)
start_moving: Final[Any] = _jit(take_memory)
end_kernels: Final[Any] = _jit(give_back)
throttle: Final[Any] = _jit(set_factor)
"""The functions above, compiled."""
