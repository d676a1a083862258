"""Why a program stopped before its end, in one line a person can act on."""

from __future__ import annotations

from typing import Final

import numpy as np

from foretrace.simulator.program import Int64Array, Program

NEVER: Final = -1
"""Start or end of a task that has not started or ended."""


def explain(program: Program, start_ns: Int64Array, end_ns: Int64Array) -> str:
    """Return what a stopped program waits for.

    The communication that was waited for longest is named, with its group, who arrived and who did not;
    where nobody waits in a communication, the cycle of dependencies.

    *start_ns*: start of each task, ``NEVER`` if it never started. *end_ns*: end of each task, ``NEVER`` if it
    never ended.
    """
    # Who waits in a meeting has started and not ended.
    stuck = np.flatnonzero((start_ns >= 0) & (end_ns < 0) & (program.instance >= 0))
    if not len(stuck):
        return "the program cannot run: " + _cycle(program, end_ns)
    first = int(stuck[np.argmin(start_ns[stuck])])
    instance = int(program.instance[first])
    members = np.flatnonzero(program.instance == instance)
    arrived = members[start_ns[members] >= 0]
    ranks = ", ".join(str(rank) for rank in np.unique(program.rank[arrived]))
    # All have come: then only a link can hold up the bytes.
    if len(arrived) == program.instance_participants[instance]:
        return (
            f"the program cannot run: {_communication(program, first)} never ends: all of rank {ranks} "
            f"came by {start_ns[arrived].max()} ns, but a link between them is down and does not recover"
        )
    came = f"{len(arrived)} of {program.instance_participants[instance]} participants came"
    return (
        f"the program cannot run: {_communication(program, first)} waits for ever: "
        f"rank {ranks} arrived first at {start_ns[first]} ns, but {came}; "
        f"{_missing(program, members, start_ns, end_ns)}"
    )


def _communication(program: Program, task: int) -> str:
    label, instance = program.labels[program.label[task]], program.instance[task]
    name = f"{label.kind} {program.instance_sequence[instance]} of group {program.instance_group[instance]}"
    peer = int(program.peer[task])
    return (
        f"{name} ({label.axis})"
        if peer < 0
        else f"{name} ({label.axis}) between rank {program.rank[task]} and {peer}"
    )


def _missing(program: Program, members: Int64Array, start_ns: Int64Array, end_ns: Int64Array) -> str:
    """Return what the participants that did not come are doing."""
    late = members[start_ns[members] < 0]
    if not len(late):
        return "the others have no task in the program"
    task = int(late[0])
    return f"rank {program.rank[task]} stands at {_head(program, task, end_ns)}"


def _head(program: Program, task: int, end_ns: Int64Array) -> str:
    """Return the first task that has not ended on the stream of *task*, in words."""
    lane = (program.rank == program.rank[task]) & (program.stream == program.stream[task])
    return _words(program, int(np.flatnonzero(lane & (end_ns < 0))[0]))


def _words(program: Program, task: int) -> str:
    label = program.labels[program.label[task]]
    stream = program.streams[program.stream[task]]
    return (
        f"task {task} ({label.kind} {label.name}".rstrip() + f", rank {program.rank[task]}, stream {stream})"
    )


def _cycle(program: Program, end_ns: Int64Array) -> str:
    """Return a cycle among the tasks that have not ended, found by walking back until one repeats."""
    seen: list[int] = []
    task = int(np.flatnonzero(end_ns < 0)[0])
    # Every task that has not ended waits for another such, so that the way back repeats in the end.
    while task not in seen:
        seen.append(task)
        task = _blocker(program, task, end_ns)
    loop = [*seen[seen.index(task) :], task]
    return " waits for ".join(_words(program, other) for other in loop)


def _blocker(program: Program, task: int, end_ns: Int64Array) -> int:
    """Return a task that *task* waits for: an earlier one of its stream, else a dependency."""
    lane = (program.rank == program.rank[task]) & (program.stream == program.stream[task])
    # The first of the stream that has not ended holds up all behind it.
    head = int(np.flatnonzero(lane & (end_ns < 0))[0])
    if head != task:
        return head
    deps = program.deps[program.dep_start[task] : program.dep_start[task + 1]]
    return int(deps[end_ns[deps] < 0][0])
