"""The compiled engine, on numba: the contract of the event engine over arrays, for millions of tasks.

Streams work in order and nobody competes for anything, so a task starts at the latest end of what it waits
for, in whatever order one works that out. One pass over tasks and dependencies does: no queue of events.
Only where communications take part of the GPUs, or GPUs throttle, does it need one: ``together.py``.
Compilation takes a few seconds once; numba keeps the result on disk, beside this file or in the user's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from foretrace.simulator.engine import clock
from foretrace.simulator.engine.changes import Above, Change, Throttle, without_links
from foretrace.simulator.engine.deadlock import NEVER, explain
from foretrace.simulator.engine.jit import jit, words
from foretrace.simulator.engine.together import Together, csr, numbered, previous_of, successors
from foretrace.simulator.errors import ProgramError
from foretrace.simulator.program import Int32Array, Int64Array, Program, transfer_ns

NAME: Final = "compiled"
"""Name of this engine in summaries."""


class Clock(clock.Clock):
    """See ``clock.Clock``; on numba. Durations play no part in whether a program can run to its end."""

    def _prepare(self, program: Program, changes: Sequence[Change | Throttle], above: Above | None) -> None:
        throttles = without_links(NAME, changes, above)
        self._together = Together(program, numbered(throttles)) if throttles or program.shares_gpus else None
        if self._together is None:
            self._program, self._first = program, _first_pass(program)
            self._waits: tuple[Int64Array, Int64Array] | None = None

    def _run(self, duration_ns: Int64Array, transfer_ns: Int64Array) -> clock.Times:
        if self._together is not None:
            return self._together.times(duration_ns, transfer_ns)
        program, (start_ns, end_ns, order, previous) = self._program, self._first
        # By identity: only these very arrays are those that the first pass ran with.
        if duration_ns is self.duration_ns and transfer_ns is self.transfer_ns:
            return start_ns, end_ns  # the first pass has them: most programs are run once
        # Made for a second run only, which most programs never have.
        if self._waits is None:
            self._waits = _waits_of(previous, program.dep_start, program.deps)
        meetings = (program.instance, program.instance_participants.astype(np.int64))
        return _rerun(order, self._waits, meetings, duration_ns, transfer_ns)


run, times = clock.entries(Clock)


class Makespan:
    """A program made ready to be asked, with many durations, for nothing but its end.

    Nothing shares GPUs in it. Tasks are numbered in an order in which they can be worked off, so that memory
    is read from front to back. Raises ProgramError if the program cannot run to its end.
    """

    def __init__(self, program: Program) -> None:
        _, _, order, previous = _first_pass(program)
        start, wait = _waits_of(previous, program.dep_start, program.deps)
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        meeting = program.instance[wait]
        # What computes is waited for by its place, what communicates by its meeting, told apart by the sign.
        coded = np.where(meeting < 0, place[wait], -1 - meeting)
        counts = np.diff(start)[order]
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        # Rows of the CSR in the new order: for each edge its old position, less where its row began, plus
        # where it begins now.
        moved = np.repeat(start[:-1][order] - first[:-1], counts) + np.arange(len(coded))
        self._order = order
        self._waits = (first, coded[moved])
        self._meetings = (program.instance[order], program.instance_participants.astype(np.int64))

    def last_ns(self, duration_ns: Int64Array, transfer_ns: Int64Array) -> int:
        """Return when the last task ends."""
        return int(_last_end(self._order, self._waits, self._meetings, duration_ns, transfer_ns))


def _first_pass(program: Program) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Return start and end of every task, an order in which they can be worked off, and who is before whom.

    Raises ProgramError if the program cannot run to its end: a cycle, or a participant that never arrives.
    """
    start_ns, end_ns, order, previous = _clock(
        (program.rank, program.stream, len(program.streams)),
        (program.dep_start, program.deps),
        (program.instance, program.instance_participants, transfer_ns(program)),
        program.duration_ns,
    )
    if program.n_tasks and end_ns.min() == NEVER:
        raise ProgramError(explain(program, start_ns, end_ns))
    return start_ns, end_ns, order, previous


def compiling() -> str:
    """Return what there is to tell because this file has to be compiled first; empty if it has not."""
    return words(_clock, __file__)


@jit
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
    previous = previous_of(*lanes)
    waits, next_start, following = successors(previous, *dependencies)
    member_start, member = csr(instance, len(participants))
    missing = participants.astype(np.int64)
    start_ns, end_ns, ready_ns = np.full(n, NEVER), np.full(n, NEVER), np.zeros(n, np.int64)
    free, order = np.empty(n, np.int64), np.empty(n, np.int64)
    first = np.flatnonzero(waits == 0)
    free[: len(first)] = first
    n_free, n_started = len(first), 0
    # One array, used again for every task that ends alone.
    alone = np.empty(1, np.int64)
    while n_free:
        # A stack: in which order free tasks are worked off changes no time, as nobody competes.
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
            # The meeting goes on when its last participant comes; until then this task is open.
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


@jit
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


@jit
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
    # A copy: the counts are used up below, and wanted again in the next run.
    missing = participants.copy()
    met_ns = np.zeros(len(participants), np.int64)
    start_ns, end_ns = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    for task in order:
        at_ns = np.int64(0)
        for edge in range(wait_start[task], wait_start[task + 1]):
            other = wait[edge]
            meeting = instance[other]
            # Ends of participants are filled in below, too late for this: what waits for them asks the
            # meeting.
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
    # Now that all meetings are over, their participants end with them.
    for task in order:
        if instance[task] >= 0:
            end_ns[task] = met_ns[instance[task]]
    return start_ns, end_ns


@jit
def _last_end(
    order: Int64Array,
    waits: tuple[Int64Array, Int64Array],
    meetings: tuple[Int64Array, Int64Array],
    duration_ns: Int64Array,
    transfer_ns: Int64Array,
) -> int:
    """Return when the last task ends; what is waited for is a place in *order*, or -1 less a meeting."""
    first, wait = waits
    instance, participants = meetings
    missing = participants.copy()
    met_ns = np.zeros(len(participants), np.int64)
    end_ns = np.empty(len(order), np.int64)
    last_ns = np.int64(0)
    for at in range(len(order)):
        now = np.int64(0)
        for other in wait[first[at] : first[at + 1]]:
            now = max(now, end_ns[other] if other >= 0 else met_ns[-1 - other])
        meeting = instance[at]
        if meeting < 0:
            end_ns[at] = now + duration_ns[order[at]]
            last_ns = max(last_ns, end_ns[at])
        else:
            met_ns[meeting] = max(met_ns[meeting], now)
            missing[meeting] -= 1
            if missing[meeting] == 0:
                met_ns[meeting] += transfer_ns[meeting]
                last_ns = max(last_ns, met_ns[meeting])
    return int(last_ns)
