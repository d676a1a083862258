"""Programs in which tasks hold each other up, on numba: shared links, shared GPUs, changes meanwhile.

The rules of ``simulator/engine/event.py``, ``contended.py`` and ``gpus.py`` over arrays, to the same
nanosecond: a heap of what happens next (a task ends, bytes set off or arrive, a link or GPU changes), and the
transfers under way on shared links with what is left of each. Rates are worked out anew whenever a transfer
sets off or arrives or a link changes; what computes, whenever a communication comes to its GPU or leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappush
from typing import Any, Final

import numpy as np

from foretrace.simulator.engine.agenda import Heap
from foretrace.simulator.engine.agenda import due as _due_now
from foretrace.simulator.engine.agenda import plan as _planned
from foretrace.simulator.engine.arrays import csr as _csr
from foretrace.simulator.engine.arrays import previous as _previous
from foretrace.simulator.engine.arrays import successors as _successors
from foretrace.simulator.engine.changes import Throttle
from foretrace.simulator.engine.deadlock import NEVER, explain
from foretrace.simulator.engine.fair import Floats, Ways
from foretrace.simulator.engine.fair import move as _move
from foretrace.simulator.engine.fair import next_end as _next_end
from foretrace.simulator.engine.fair import share as _share
from foretrace.simulator.engine.jit import jit, words
from foretrace.simulator.engine.rates import Rates
from foretrace.simulator.engine.rates import columns as _columns
from foretrace.simulator.engine.rates import no_rates as _no_rates
from foretrace.simulator.engine.rates import note as _note
from foretrace.simulator.engine.shared_gpus import Gpus, gpus_of
from foretrace.simulator.engine.shared_gpus import compute as _compute
from foretrace.simulator.engine.shared_gpus import end_kernels as _end_kernels
from foretrace.simulator.engine.shared_gpus import launch as _launch
from foretrace.simulator.engine.shared_gpus import start_moving as _start_moving
from foretrace.simulator.engine.shared_gpus import throttle as _throttle
from foretrace.simulator.errors import ProgramError
from foretrace.simulator.program import Int32Array, Int64Array, Program

Changes = tuple[Int64Array, Int64Array, Floats]
"""When each change happens, to which link (or minus one minus the rank, to its GPU), and what it is then."""


class Together:
    """A program made ready to be run many times, with other durations each time.

    Args:
        program: what to run.
        changes: when something happens, to which link (or minus one minus the rank: to its GPU), and what is
            left of it then (how many times as long it computes).
        ways: what each communication fills of which links; None: links are not shared.
        n_links: how many links there are.
    """

    def __init__(
        self,
        program: Program,
        changes: Sequence[tuple[int, int, float]] = (),
        ways: Ways | None = None,
        n_links: int = 0,
    ) -> None:
        latency_ns = np.array([transfer.latency_ns for transfer in program.transfers], np.int64)
        nothing = np.zeros(program.n_instances + 1, np.int64), np.zeros(0, np.int64), np.zeros(0)
        self._program = program
        self._latency_ns = latency_ns[program.instance_transfer]
        self._ways = nothing if ways is None else ways
        self._changes = _as_arrays(changes)
        self._n_links = n_links
        gpus = (-1 - what for _, what, _ in changes)
        self._n_ranks = 1 + max(int(program.rank.max(initial=-1)), *gpus, -1)

    def times(self, duration_ns: Int64Array, transfer_ns: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return start and end of every task.

        Raises:
            ProgramError: the program cannot run to its end.
        """
        return self._run(duration_ns, transfer_ns, watched=False)[:2]

    def watched(
        self, duration_ns: Int64Array, transfer_ns: Int64Array
    ) -> tuple[Int64Array, Int64Array, Rates]:
        """Return start and end of every task, and when the rates of communications changed.

        Raises:
            ProgramError: the program cannot run to its end.
        """
        return self._run(duration_ns, transfer_ns, watched=True)

    def _run(
        self, duration_ns: Int64Array, transfer_ns: Int64Array, *, watched: bool
    ) -> tuple[Int64Array, Int64Array, Rates]:
        program = self._program
        latency_ns = np.minimum(self._latency_ns, transfer_ns)
        start_ns, end_ns, log = _pass(
            ((program.rank, program.stream, len(program.streams)), (program.dep_start, program.deps)),
            (program.instance, program.instance_participants),
            (duration_ns, latency_ns, (transfer_ns - latency_ns).astype(np.float64)),
            (self._ways, np.ones(self._n_links), self._changes, watched),
            gpus_of(program, self._n_ranks),
        )
        if program.n_tasks and end_ns.min() == NEVER:
            raise ProgramError(explain(program, start_ns, end_ns))
        return start_ns, end_ns, log


def numbered(throttles: Sequence[Throttle]) -> list[tuple[int, int, float]]:
    """Return what happens to GPUs as ``Together`` takes it."""
    return [(throttle.at_ns, -1 - throttle.rank, throttle.factor) for throttle in throttles]


def _as_arrays(changes: Sequence[tuple[int, int, float]]) -> Changes:
    at_ns, what = (np.array([change[at] for change in changes], np.int64) for at in (0, 1))
    return at_ns, what, np.array([change[2] for change in changes], np.float64)


def compiling() -> str:
    """Return what there is to tell because this file has to be compiled first; empty if it has not."""
    return words(_pass, __file__)


def begin(
    tasks: Int64Array,
    now: int,
    meetings: tuple[Int64Array, Int64Array, Int64Array, Int64Array],
    costs: tuple[Int64Array, Int64Array, Floats, Int64Array],
    on: tuple[Gpus, Heap, bool],
) -> None:
    """Start *tasks*: put on the heap when those that compute end, and when bytes of full meetings set off.

    Bytes that fill no shared link arrive then and there: the whole time of their transfer goes on the heap.
    """
    instance, missing, member_start, member = meetings
    duration_ns, latency_ns, wire_ns, ways = costs
    gpus, heap, shares = on
    for task in tasks:
        meeting = instance[task]
        if meeting < 0:
            _compute(task, now, duration_ns[task], gpus, heap)
            continue
        if shares:
            _launch(task, meeting, now, gpus, heap)
        missing[meeting] -= 1
        if missing[meeting] == 0:
            if shares:
                members = member[member_start[meeting] : member_start[meeting + 1]]
                _start_moving(members, meeting, now, gpus, heap)
            due = now + latency_ns[meeting]
            if ways[meeting] == ways[meeting + 1]:
                due += np.int64(wire_ns[meeting])
            heappush(heap, (due, len(instance) + meeting))


def release(
    ended: Int64Array, followers: tuple[Int64Array, Int64Array], waits: Int64Array, free: Int64Array
) -> int:
    """Write those who waited for *ended* last to *free*, and return how many they are."""
    start, following = followers
    n_free = 0
    for task in ended:
        for waiter in following[start[task] : start[task + 1]]:
            waits[waiter] -= 1
            if waits[waiter] == 0:
                free[n_free] = waiter
                n_free += 1
    return n_free


def apply(
    changed: Int64Array,
    changes: Changes,
    now: int,
    capacity: Floats,
    on: tuple[Gpus, Heap],
) -> bool:
    """Let links and GPUs change, the earliest in the list first; return whether a link was among them."""
    _, what, value = changes
    gpus, heap = on
    links = False
    for at in changed:
        if what[at] < 0:
            _throttle(-1 - what[at], value[at], now, gpus, heap)
        else:
            capacity[what[at]] = value[at]
            links = True
    return links


def _clock(
    order: tuple[tuple[Int32Array, Int32Array, int], tuple[Int64Array, Int64Array]],
    meetings: tuple[Int64Array, Int32Array],
    costs: tuple[Int64Array, Int64Array, Floats],
    links: tuple[Ways, Floats, Changes, bool],
    gpus: Gpus,
) -> tuple[Int64Array, Int64Array, Rates]:
    """Return start and end of every task, -1 where it is never reached, and the rates if they are watched.

    The heap holds ends of computations (their task), moments at which bytes set off or, without shared
    links, arrive (the number of tasks plus the communication), and changes (behind these). A computation
    that goes slower or faster is put on the heap again; what it says there before does not count any more.
    """
    lanes, dependencies = order
    instance, participants = meetings
    duration_ns, latency_ns, wire_ns = costs
    ways, capacity, changes, watched = links
    n, m = len(instance), len(participants)
    waits, next_start, following = _successors(_previous(*lanes), *dependencies)
    member_start, member = _csr(instance, m)
    missing = participants.astype(np.int64)
    start_ns, end_ns = np.full(n, NEVER), np.full(n, NEVER)
    scratch = (np.zeros(len(capacity)), np.zeros(len(capacity)), np.zeros(len(capacity), np.int64))
    left_ns, rate, noted = wire_ns.copy(), np.zeros(m), np.zeros(m)
    log = _no_rates()
    active, n_active = np.empty(m, np.int64), 0
    free, ended = np.empty(n, np.int64), np.empty(n, np.int64)
    fresh, others = np.empty(m, np.int64), np.empty(m + len(changes[0]), np.int64)
    first = np.flatnonzero(waits == 0)
    free[: len(first)] = first
    n_free = len(first)
    shares = gpus.takes.any()
    heap = _planned(changes[0], n + m)
    now, moved_ns, arrival_ns = np.int64(0), np.int64(0), np.int64(NEVER)
    while True:
        start_ns[free[:n_free]] = now
        _begin(
            free[:n_free],
            now,
            (instance, missing, member_start, member),
            (duration_ns, latency_ns, wire_ns, ways[0]),
            (gpus, heap, shares),
        )
        if not heap and arrival_ns == NEVER:
            return start_ns, end_ns, _columns(log)
        now = min(heap[0][0] if heap else arrival_ns, arrival_ns if arrival_ns != NEVER else heap[0][0])
        n_ended, n_fresh, n_met, n_changed = _due_now(
            now, (n, m), (ways[0], gpus.of_task, end_ns), (ended, fresh, others), heap
        )
        rewired = False
        if n_changed:
            rewired = _apply(others[len(others) - n_changed :][::-1], changes, now, capacity, (gpus, heap))
        if n_fresh or rewired or arrival_ns == now:
            n_active, n_arrived = _move(active, n_active, now - moved_ns, left_ns, rate)
            moved_ns = now
            others[n_met : n_met + n_arrived] = active[n_active : n_active + n_arrived]
            n_met += n_arrived
            active[n_active : n_active + n_fresh] = fresh[:n_fresh]
            n_active += n_fresh
            _share(active[:n_active], ways, scratch, capacity, rate)
            if watched:
                _note(now, (active[:n_active], others[n_met - n_arrived : n_met]), rate, noted, log)
            arrival_ns = np.int64(_next_end(active[:n_active], left_ns, rate, now))
        for job in others[:n_met]:
            members = member[member_start[job] : member_start[job + 1]]
            ended[n_ended : n_ended + len(members)] = members
            n_ended += len(members)
        end_ns[ended[:n_ended]] = now
        if shares:
            _end_kernels(ended[:n_ended], instance, now, gpus, heap)
        n_free = _release(ended[:n_ended], (next_start, following), waits, free)


_begin: Final[Any] = jit(begin, inline="always")
"""``begin``, written into the pass: to hand on all these arrays took as long as what is done with them."""
_release: Final[Any] = jit(release)
_apply: Final[Any] = jit(apply)
_pass: Final[Any] = jit(_clock)
