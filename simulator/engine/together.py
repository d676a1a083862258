"""Programs in which tasks hold each other up, on numba: shared links, shared GPUs, changes meanwhile.

The rules of ``simulator/engine/event.py`` and ``contended.py`` over arrays, to the same nanosecond: a heap of
what happens next (a task ends, bytes set off or arrive, a link or GPU changes), and the transfers under way
on shared links with what is left of each. Rates are worked out anew whenever a transfer sets off or arrives
or a link changes; what computes, whenever a communication comes to its GPU or leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from math import ceil
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrace.simulator.engine import slowdown
from foretrace.simulator.engine.changes import Throttle
from foretrace.simulator.engine.deadlock import NEVER, explain
from foretrace.simulator.engine.jit import jit, words
from foretrace.simulator.errors import ProgramError
from foretrace.simulator.network.fluid import FULL, ROUNDING_NS
from foretrace.simulator.program import Int32Array, Int64Array, Program

# Max-min fair rates on numba, and what flows at them: simulator.network.fluid over arrays.

Floats = NDArray[np.float64]
Ways = tuple[Int64Array, Int64Array, Floats]
"""Links of each transfer as CSR, and what share of each it fills at full rate."""

RISING: Final = -1.0
"""Rate of a transfer that is not final yet."""


@jit
def share(
    active: Int64Array,
    ways: Ways,
    scratch: tuple[Floats, Floats, Int64Array],
    capacity: Floats,
    rate: Floats,
) -> None:
    """Set the *rate* of every active transfer, between 0 and 1.

    Args:
        active: transfers under way, in the order in which they set off.
        ways: links of every transfer.
        scratch: for every link two floats and an integer, to work with.
        capacity: what is left of the width of every link, as a share.
        rate: rate of every transfer; those of *active* are set.
    """
    start, link, _ = ways
    demand, free, seen = scratch
    # All links of those under way start anew; others are not looked at, however many there are.
    for job in active:
        rate[job] = RISING
        for way in link[start[job] : start[job + 1]]:
            free[way], seen[way] = capacity[way], 0
    rising, level, turn = len(active), 0.0, 0
    while rising:
        step = room_left(active, ways, demand, free, rate)
        if level + step >= 1:
            break
        level += step
        turn += 1
        rising -= fill_links(active, ways, scratch, rate, (step, level, turn))
    for job in active:
        if rate[job] == RISING:
            rate[job] = 1.0


@jit
def room_left(active: Int64Array, ways: Ways, demand: Floats, free: Floats, rate: Floats) -> float:
    """Return how far the rates that still rise can rise together, and set the *demand* of their links."""
    start, link, load = ways
    for job in active:
        if rate[job] == RISING:
            # First all to zero, then add up: several transfers share a link.
            demand[link[start[job] : start[job + 1]]] = 0.0
    for job in active:
        if rate[job] == RISING:
            for edge in range(start[job], start[job + 1]):
                demand[link[edge]] += load[edge]
    step = np.inf
    for job in active:
        if rate[job] == RISING:
            for way in link[start[job] : start[job + 1]]:
                step = min(step, free[way] / demand[way])
    return step


@jit
def fill_links(
    active: Int64Array,
    ways: Ways,
    scratch: tuple[Floats, Floats, Int64Array],
    rate: Floats,
    move: tuple[float, float, int],
) -> int:
    """Let all rates rise by a step to a level, in turn number so-and-so; return how many are final now."""
    start, link, _ = ways
    demand, free, seen = scratch
    step, level, turn = move
    for job in active:
        if rate[job] == RISING:
            for way in link[start[job] : start[job + 1]]:
                # Once for each link, though several transfers are on it.
                if seen[way] < turn:
                    seen[way] = turn
                    free[way] = max(0.0, free[way] - step * demand[way])
    n_final = 0
    for job in active:
        if rate[job] == RISING:
            for way in link[start[job] : start[job + 1]]:
                if free[way] <= FULL * max(demand[way], 1.0):
                    rate[job] = level
                    n_final += 1
                    break
    return n_final


@jit
def next_end(active: Int64Array, left_ns: Floats, rate: Floats, now: int) -> int:
    """Return when the first transfer under way arrives if nothing else happens; -1 if none ever does."""
    soonest = np.inf
    for job in active:
        if left_ns[job] <= ROUNDING_NS * max(rate[job], FULL):
            return now
        if rate[job] > 0:
            soonest = min(soonest, left_ns[job] / rate[job])
    if soonest == np.inf:
        return NEVER
    return now + max(0, ceil(soonest - ROUNDING_NS))


@jit
def move(
    active: Int64Array, n_active: int, elapsed_ns: int, left_ns: Floats, rate: Floats
) -> tuple[int, int]:
    """Let bytes flow; put first in *active* who is still under way, then who has arrived; count both."""
    arrived = np.empty(n_active, np.int64)
    kept = n_arrived = 0
    for at in range(n_active):
        job = active[at]
        left_ns[job] -= elapsed_ns * rate[job]
        if left_ns[job] <= ROUNDING_NS * max(rate[job], FULL):
            arrived[n_arrived] = job
            n_arrived += 1
        else:
            active[kept] = job
            kept += 1
    # Behind those that go on there is room for those that have arrived: no further array is handed on.
    active[kept:n_active] = arrived[:n_arrived]
    return kept, n_arrived


# Who comes before whom: what both compiled passes begin with.


@jit
def previous_of(rank: Int32Array, stream: Int32Array, n_streams: int) -> Int64Array:
    """Return for every task the one before it on its stream, -1 for the first."""
    # An empty array has no maximum.
    last = np.full((rank.max() + 1 if len(rank) else 0) * n_streams, NEVER, np.int64)
    previous = np.empty(len(rank), np.int64)
    for task in range(len(rank)):
        lane = np.int64(rank[task]) * n_streams + stream[task]
        previous[task] = last[lane]
        last[lane] = task
    return previous


@jit
def csr(key: Int64Array, n_keys: int) -> tuple[Int64Array, Int64Array]:
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


@jit
def successors(
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
    start, edges = csr(before, n)
    return waits, start, after[edges]


# What happens next in a program whose tasks hold each other up: a heap of times, in compiled code.

Heap = list[tuple[int, int]]
"""What happens when: a time in ns and a number for what."""


@jit
def plan(at_ns: Int64Array, first: int) -> Heap:
    """Return the heap on which there are only changes, numbered from *first* on."""
    heap = [(int(change_ns), int(first + at)) for at, change_ns in enumerate(at_ns)]
    heap.append((int(np.int64(0)), int(np.int64(0))))  # for its type
    heap.pop()
    heapify(heap)
    return heap


@jit
def due(
    now: int,
    counts: tuple[int, int],
    known: tuple[Int64Array, NDArray[np.int64], Int64Array],
    found: tuple[Int64Array, Int64Array, Int64Array],
    heap: Heap,
) -> tuple[int, int, int, int]:
    """Take all that happens now from the heap, and return how much of each kind.

    Written to *found*: the tasks that end, the communications whose bytes set off on shared links, those
    whose bytes arrive and the changes; the last two in one array, from its two ends.
    """
    n, m = counts
    ways, of_task, end_ns = known
    ended, fresh, others = found
    n_ended = n_fresh = n_met = n_changed = 0
    while heap and heap[0][0] == now:
        code = heappop(heap)[1]
        if code < n:
            # A task whose pace has changed is on the heap several times: only what it was told last counts,
            # and once.
            if of_task[code, DUE] == now and end_ns[code] == NEVER:
                end_ns[code] = now
                ended[n_ended] = code
                n_ended += 1
        elif code >= n + m:
            n_changed += 1
            # From the back, so that one array does for both.
            others[len(others) - n_changed] = code - n - m
        # Nothing on shared links: its bytes have arrived already.
        elif ways[code - n] == ways[code - n + 1]:
            others[n_met] = code - n
            n_met += 1
        else:
            fresh[n_fresh] = code - n
            n_fresh += 1
    return n_ended, n_fresh, n_met, n_changed


# A log of the rates at which communications progress, kept while compiled code runs.

Log = list[tuple[int, int, float]]
"""Entries of time in ns, number of a communication, and the rate that it has from then on."""

Rates = tuple[Int64Array, Int64Array, Floats]
"""The columns of a ``Log``."""


@jit
def no_rates() -> Log:
    """Return a log without entries, of the right type."""
    log = [(int(np.int64(0)), int(np.int64(0)), 0.0)]
    log.pop()
    return log


@jit
def note(now: int, jobs: tuple[Int64Array, Int64Array], rate: Floats, noted: Floats, log: Log) -> None:
    """Add the jobs under way whose rate is not the one *noted* last to *log*, and those that have arrived."""
    active, arrived = jobs
    for job in arrived:
        log.append((now, job, 0.0))
    for job in active:
        if rate[job] != noted[job]:
            noted[job] = rate[job]
            log.append((now, job, rate[job]))


@jit
def columns(log: Log) -> Rates:
    """Return the columns of a *log*."""
    at_ns, job, rate = np.empty(len(log), np.int64), np.empty(len(log), np.int64), np.empty(len(log))
    for row, (when, which, what) in enumerate(log):
        at_ns[row], job[row], rate[row] = when, which, what
    return at_ns, job, rate


# GPUs that compute and communicate at once, or throttle: Gpus of the event engine over arrays. The state
# is kept in few arrays, by column, because numba counts the users of every array that it hands on.

_slowdown: Final[Any] = jit(slowdown.slowdown)
_due: Final[Any] = jit(slowdown.due_ns)
"""The functions of the event engine, compiled."""

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


@jit
def compute(task: int, now: int, duration_ns: int, gpus: Gpus, heap: list[tuple[int, int]]) -> None:
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


@jit
def note_pace(rank: int, now: int, gpus: Gpus, heap: list[tuple[int, int]]) -> None:
    """Work out anew when the tasks that compute on *rank* end."""
    for task in gpus.computing[rank]:
        # What ends now is over, whatever changes at this moment.
        if task == NOBODY or now >= gpus.of_task[task, DUE]:
            continue
        one, progress = gpus.of_task[task], gpus.progress[task]
        progress[LEFT] -= (now - one[SINCE]) / progress[PACE]
        progress[PACE] = gpus.factor[rank] * _slowdown(
            one[BOUND], gpus.taken[rank, PROCESSORS], gpus.taken[rank, MEMORY]
        )
        one[SINCE], one[DUE] = now, _due(now, progress[LEFT], progress[PACE])
        # The old entry stays on the heap: ``due`` passes it over.
        heappush(heap, (one[DUE], task))


@jit
def launch(task: int, meeting: int, now: int, gpus: Gpus, heap: list[tuple[int, int]]) -> None:
    """Let the kernels of communication *meeting* hold processors of the GPU of *task*."""
    if gpus.takes[meeting, PROCESSORS]:
        rank = gpus.of_task[task, RANK]
        gpus.taken[rank, PROCESSORS] += gpus.takes[meeting, PROCESSORS]
        note_pace(rank, now, gpus, heap)


@jit
def start_moving(
    members: Int64Array, meeting: int, now: int, gpus: Gpus, heap: list[tuple[int, int]]
) -> None:
    """Let the bytes of *meeting* take memory bandwidth of all its *members*."""
    if gpus.takes[meeting, MEMORY]:
        for task in members:
            rank = gpus.of_task[task, RANK]
            gpus.taken[rank, MEMORY] += gpus.takes[meeting, MEMORY]
            note_pace(rank, now, gpus, heap)


@jit
def end_kernels(
    ended: Int64Array, instance: Int64Array, now: int, gpus: Gpus, heap: list[tuple[int, int]]
) -> None:
    """Take back what the communications among the tasks *ended* hold of their GPUs."""
    for task in ended:
        meeting = instance[task]
        if meeting >= 0 and (gpus.takes[meeting, PROCESSORS] or gpus.takes[meeting, MEMORY]):
            rank = gpus.of_task[task, RANK]
            gpus.taken[rank, PROCESSORS] -= gpus.takes[meeting, PROCESSORS]
            gpus.taken[rank, MEMORY] -= gpus.takes[meeting, MEMORY]
            note_pace(rank, now, gpus, heap)


@jit
def throttle(rank: int, factor: float, now: int, gpus: Gpus, heap: list[tuple[int, int]]) -> None:
    """Let everything on *rank* take *factor* times as long from now on."""
    gpus.factor[rank] = factor
    note_pace(rank, now, gpus, heap)


Changes = tuple[Int64Array, Int64Array, Floats]
"""When each change happens, to which link (or minus one minus the rank, to its GPU), and what it is then."""


class Together:
    """A program made ready to be run many times, with other durations each time.

    *changes*: when something happens, to which link (or minus one minus the rank: to its GPU), and what is
    left of it then (how many times as long it computes). *ways*: what each communication fills of which
    links; None: links are not shared.
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
        # A change of a link has a number from 0 on, so that this is below 0 and asks for no rank.
        gpus = (-1 - what for _, what, _ in changes)
        self._n_ranks = 1 + max(int(program.rank.max(initial=-1)), *gpus, -1)

    def times(self, duration_ns: Int64Array, transfer_ns: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return start and end of every task. Raises ProgramError if the program cannot run to its end."""
        return self._run(duration_ns, transfer_ns, watched=False)[:2]

    def watched(
        self, duration_ns: Int64Array, transfer_ns: Int64Array
    ) -> tuple[Int64Array, Int64Array, Rates]:
        """Return start and end of every task, and when the rates of communications changed.

        Raises ProgramError if the program cannot run to its end.
        """
        return self._run(duration_ns, transfer_ns, watched=True)

    def _run(
        self, duration_ns: Int64Array, transfer_ns: Int64Array, *, watched: bool
    ) -> tuple[Int64Array, Int64Array, Rates]:
        program = self._program
        # Stragglers and jitter may make a whole time shorter than its latency.
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


# Compiled code counts in 64 bits: mypy tells these from int, numba does not.
_START: Final[Any] = np.int64(0)
_NEVER: Final[Any] = np.int64(NEVER)


# Written into the pass: to hand on all these arrays took as long as what is done with them.
@partial(jit, inline="always")
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
            compute(task, now, duration_ns[task], gpus, heap)
            continue
        if shares:
            launch(task, meeting, now, gpus, heap)
        missing[meeting] -= 1
        if missing[meeting] == 0:
            if shares:
                members = member[member_start[meeting] : member_start[meeting + 1]]
                start_moving(members, meeting, now, gpus, heap)
            due = now + latency_ns[meeting]
            if ways[meeting] == ways[meeting + 1]:
                due += np.int64(wire_ns[meeting])
            heappush(heap, (due, len(instance) + meeting))


@jit
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


@jit
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
            throttle(-1 - what[at], value[at], now, gpus, heap)
        else:
            capacity[what[at]] = value[at]
            links = True
    return links


@jit
def _pass(
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
    waits, next_start, following = successors(previous_of(*lanes), *dependencies)
    member_start, member = csr(instance, m)
    missing = participants.astype(np.int64)
    start_ns, end_ns = np.full(n, NEVER), np.full(n, NEVER)
    scratch = (np.zeros(len(capacity)), np.zeros(len(capacity)), np.zeros(len(capacity), np.int64))
    left_ns, rate, noted = wire_ns.copy(), np.zeros(m), np.zeros(m)
    log = no_rates()
    active, n_active = np.empty(m, np.int64), 0
    free, ended = np.empty(n, np.int64), np.empty(n, np.int64)
    fresh, others = np.empty(m, np.int64), np.empty(m + len(changes[0]), np.int64)
    first = np.flatnonzero(waits == 0)
    free[: len(first)] = first
    n_free = len(first)
    shares: Any = gpus.takes.any()
    heap = plan(changes[0], n + m)
    now, moved_ns, arrival_ns = _START, _START, _NEVER
    while True:
        start_ns[free[:n_free]] = now
        begin(
            free[:n_free],
            now,
            (instance, missing, member_start, member),
            (duration_ns, latency_ns, wire_ns, ways[0]),
            (gpus, heap, shares),
        )
        if not heap and arrival_ns == NEVER:
            return start_ns, end_ns, columns(log)
        now = min(heap[0][0] if heap else arrival_ns, arrival_ns if arrival_ns != NEVER else heap[0][0])
        n_ended, n_fresh, n_met, n_changed = due(
            now, (n, m), (ways[0], gpus.of_task, end_ns), (ended, fresh, others), heap
        )
        rewired = False
        if n_changed:
            # They were written from the back: turned round, they are in order.
            rewired = apply(others[len(others) - n_changed :][::-1], changes, now, capacity, (gpus, heap))
        # Rates change only when something sets off, arrives or is rewired: until then nothing has to be
        # moved.
        if n_fresh or rewired or arrival_ns == now:
            n_active, n_arrived = move(active, n_active, now - moved_ns, left_ns, rate)
            moved_ns = now
            others[n_met : n_met + n_arrived] = active[n_active : n_active + n_arrived]
            n_met += n_arrived
            # After the move: who sets off now has not moved yet.
            active[n_active : n_active + n_fresh] = fresh[:n_fresh]
            n_active += n_fresh
            share(active[:n_active], ways, scratch, capacity, rate)
            if watched:
                note(now, (active[:n_active], others[n_met - n_arrived : n_met]), rate, noted, log)
            arrival_ns = np.int64(next_end(active[:n_active], left_ns, rate, now))
        for job in others[:n_met]:
            members = member[member_start[job] : member_start[job + 1]]
            ended[n_ended : n_ended + len(members)] = members
            n_ended += len(members)
        end_ns[ended[:n_ended]] = now
        if shares:
            end_kernels(ended[:n_ended], instance, now, gpus, heap)
        n_free = release(ended[:n_ended], (next_start, following), waits, free)
