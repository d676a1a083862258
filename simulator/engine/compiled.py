"""The compiled engine, on numba: the contract of the event engine over arrays, for millions of tasks.

Streams work in order and nobody competes for anything, so a task starts at the latest end of what it waits
for, in whatever order one works that out. One pass over tasks and dependencies does: no queue of events.
Compilation takes a few seconds once; numba keeps the result on disk, beside this file or in the user's cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numba import njit

from simulator.engine.deadlock import explain
from simulator.engine.spans import spans
from simulator.errors import ProgramError
from simulator.program import Int32Array, Int64Array, Program

NAME: Final = "compiled"
"""Name of this engine in summaries."""

NEVER: Final = -1
"""Start or end of a task that has not started or ended."""


def run(program: Program) -> pa.Table:
    """Return the timeline of *program*: one row per task, and one per rank and step.

    Raises:
        ProgramError: the program cannot run to its end: a cycle, or a participant that never arrives.
    """
    start_ns, end_ns = times(program)
    return spans(program, start_ns, end_ns)


def times(program: Program) -> tuple[Int64Array, Int64Array]:
    """Return when each task of *program* starts (a communication: arrives) and ends, in ns.

    Raises:
        ProgramError: the program cannot run to its end: a cycle, or a participant that never arrives.
    """
    return _first_pass(program)[:2]


class Clock:
    """A program made ready to be run many times, with other durations each time.

    Args:
        program: what to run.

    Attributes:
        duration_ns: compute time of each task in the program itself; shape ``(n_tasks,)``.
        transfer_ns: time of each communication there, once everybody has arrived; shape ``(n_instances,)``.

    Raises:
        ProgramError: the program cannot run to its end; durations play no part in that.
    """

    def __init__(self, program: Program) -> None:
        self.duration_ns = program.duration_ns
        self.transfer_ns = _transfer_ns(program)
        _, _, order, previous = _first_pass(program)
        self._order = order
        self._waits = _together(previous, program.dep_start, program.deps)
        self._meetings = (program.instance, program.instance_participants.astype(np.int64))

    def times(
        self, duration_ns: Int64Array | None = None, transfer_ns: Int64Array | None = None
    ) -> tuple[Int64Array, Int64Array]:
        """Return start and end of every task; durations that are left out are those of the program."""
        duration_ns = self.duration_ns if duration_ns is None else duration_ns
        transfer_ns = self.transfer_ns if transfer_ns is None else transfer_ns
        found: tuple[Int64Array, Int64Array] = _again(
            self._order, self._waits, self._meetings, duration_ns, transfer_ns
        )
        return found


def _first_pass(program: Program) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Return start and end of every task, an order in which they can be worked off, and who is before whom.

    Raises:
        ProgramError: the program cannot run to its end: a cycle, or a participant that never arrives.
    """
    start_ns, end_ns, order, previous = _pass(
        (program.rank, program.stream, len(program.streams)),
        (program.dep_start, program.deps),
        (program.instance, program.instance_participants, _transfer_ns(program)),
        program.duration_ns,
    )
    if program.n_tasks and end_ns.min() == NEVER:
        raise ProgramError(explain(program, start_ns, end_ns))
    return start_ns, end_ns, order, previous


def _transfer_ns(program: Program) -> Int64Array:
    """Return how long each communication takes once everybody has arrived."""
    cost = np.array([t.latency_ns + t.wire_ns for t in program.transfers], np.int64)
    return cost[program.instance_transfer] if program.n_instances else np.empty(0, np.int64)


def is_compiled() -> bool:
    """Return whether a compiled version of this file is on disk already."""
    source = Path(__file__)
    kept = Path(_pass.stats.cache_path).glob(f"{source.stem}.*.nbi")
    return any(index.stat().st_mtime >= source.stat().st_mtime for index in kept)


def previous_on_stream(rank: Int32Array, stream: Int32Array, n_streams: int) -> Int64Array:
    """Return for every task the one before it on its stream, -1 for the first."""
    last = np.full((rank.max() + 1 if len(rank) else 0) * n_streams, NEVER, np.int64)
    previous = np.empty(len(rank), np.int64)
    for task in range(len(rank)):
        lane = np.int64(rank[task]) * n_streams + stream[task]
        previous[task] = last[lane]
        last[lane] = task
    return previous


def grouped(key: Int64Array, n_keys: int) -> tuple[Int64Array, Int64Array]:
    """Return the positions of each key as CSR: those of key *k* are ``at[start[k]:start[k + 1]]``."""
    start = np.zeros(n_keys + 1, np.int64)
    for k in key:
        if k >= 0:
            start[k + 1] += 1
    for k in range(n_keys):
        start[k + 1] += start[k]
    at = np.empty(start[n_keys], np.int64)
    fill = start[:-1].copy()
    for position in range(len(key)):
        k = key[position]
        if k >= 0:
            at[fill[k]] = position
            fill[k] += 1
    return start, at


def successors_of(
    previous: Int64Array, dep_start: Int64Array, deps: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return how much each task waits for, and who waits for it, as CSR: ``at[start[i]:start[i + 1]]``."""
    n = len(previous)
    waits = dep_start[1:] - dep_start[:-1] + (previous >= 0)
    before = np.empty(n + len(deps), np.int64)  # for every edge, its beginning
    after = np.empty(n + len(deps), np.int64)  # and its end
    before[:n] = previous
    before[n:] = deps
    for task in range(n):
        after[task] = task
        after[n + dep_start[task] : n + dep_start[task + 1]] = task
    start, edges = _csr(before, n)
    return waits, start, after[edges]


def _clock(
    lanes: tuple[Int32Array, Int32Array, int],
    dependencies: tuple[Int64Array, Int64Array],
    meetings: tuple[Int64Array, Int32Array, Int64Array],
    duration_ns: Int64Array,
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Return start and end of every task, -1 where it is never reached; their order; who is before whom.

    A task is *free* when its stream and its dependencies let it start. Free tasks are worked off one by one:
    one that computes ends after its duration, one that communicates ends with its meeting when the last
    participant is free. What has ended frees the tasks that wait for it.
    """
    instance, participants, transfer_ns = meetings
    n = len(instance)
    previous = _previous(*lanes)
    waits, next_start, following = _successors(previous, *dependencies)
    member_start, member = _csr(instance, len(participants))
    missing = participants.astype(np.int64)
    start_ns, end_ns, ready_ns = np.full(n, NEVER), np.full(n, NEVER), np.zeros(n, np.int64)
    free, order = np.empty(n, np.int64), np.empty(n, np.int64)
    first = np.flatnonzero(waits == 0)
    free[: len(first)] = first
    n_free, n_started = len(first), 0
    alone = np.empty(1, np.int64)
    while n_free:
        n_free -= 1
        task = free[n_free]
        start_ns[task] = ready_ns[task]
        order[n_started] = task
        n_started += 1
        meeting = instance[task]
        if meeting < 0:
            alone[0] = task
            ended, at_ns = alone, start_ns[task] + duration_ns[task]
        else:
            missing[meeting] -= 1
            if missing[meeting]:
                continue
            ended = member[member_start[meeting] : member_start[meeting + 1]]
            at_ns = transfer_ns[meeting] + start_ns[ended].max()
        for other in ended:
            end_ns[other] = at_ns
            for waiter in following[next_start[other] : next_start[other + 1]]:
                ready_ns[waiter] = max(ready_ns[waiter], at_ns)
                waits[waiter] -= 1
                if waits[waiter] == 0:
                    free[n_free] = waiter
                    n_free += 1
    return start_ns, end_ns, order, previous


def _waits_of(previous: Int64Array, dep_start: Int64Array, deps: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return all that each task waits for as CSR: the one before it on its stream, and its dependencies."""
    n = len(previous)
    start = np.zeros(n + 1, np.int64)
    at = np.empty(n + len(deps), np.int64)
    fill = 0
    for task in range(n):
        if previous[task] >= 0:
            at[fill] = previous[task]
            fill += 1
        for edge in range(dep_start[task], dep_start[task + 1]):
            at[fill] = deps[edge]
            fill += 1
        start[task + 1] = fill
    return start, at[:fill]


def _rerun(
    order: Int64Array,
    waits: tuple[Int64Array, Int64Array],
    meetings: tuple[Int64Array, Int64Array],
    duration_ns: Int64Array,
    transfer_ns: Int64Array,
) -> tuple[Int64Array, Int64Array]:
    """Return start and end of every task, worked off in an *order* that is known to be possible.

    A participant's end is that of its meeting, known once the last one has arrived: what waits for it comes
    later in *order*.
    """
    wait_start, wait = waits
    instance, participants = meetings
    missing = participants.copy()
    met_ns = np.zeros(len(participants), np.int64)
    start_ns, end_ns = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    for task in order:
        at_ns = np.int64(0)
        for edge in range(wait_start[task], wait_start[task + 1]):
            other = wait[edge]
            meeting = instance[other]
            at_ns = max(at_ns, end_ns[other] if meeting < 0 else met_ns[meeting])
        start_ns[task] = at_ns
        meeting = instance[task]
        if meeting < 0:
            end_ns[task] = at_ns + duration_ns[task]
        else:
            met_ns[meeting] = max(met_ns[meeting], at_ns)
            missing[meeting] -= 1
            if missing[meeting] == 0:
                met_ns[meeting] += transfer_ns[meeting]
    for task in order:
        if instance[task] >= 0:
            end_ns[task] = met_ns[instance[task]]
    return start_ns, end_ns


_jit: Final[Any] = njit(cache=True)
_previous: Final[Any] = _jit(previous_on_stream)
_csr: Final[Any] = _jit(grouped)
_successors: Final[Any] = _jit(successors_of)
_pass: Final[Any] = _jit(_clock)
_together: Final[Any] = _jit(_waits_of)
_again: Final[Any] = _jit(_rerun)
