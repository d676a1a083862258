"""The contended engine on numba: links shared max-min fairly, for programs of many transfers.

The same rules as ``simulator/engine/contended.py`` and ``simulator/fluid.py``, over arrays: a heap of what
ends or sets off next, and the transfers under way with what is left of each. Rates are worked out anew
whenever a transfer sets off or arrives. Links do not change here; a program with such changes is for the
event engine.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import ceil
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numba import njit

from simulator.engine.compiled import NEVER, grouped, previous_on_stream, successors_of
from simulator.engine.deadlock import explain
from simulator.engine.event import transfer_ns
from simulator.engine.fair import Floats, Ways
from simulator.engine.fair import share as _share
from simulator.engine.spans import spans
from simulator.errors import ProgramError
from simulator.fluid import FULL, ROUNDING_NS
from simulator.program import Int32Array, Int64Array, Program

NAME: Final = "contended-compiled"
"""Name of this engine in summaries."""

WAYS: Final = 4
"""Links of a rank: near and far, in and out."""


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
    return Clock(program).times()


class Clock:
    """A program made ready to be run many times, with other durations each time.

    Args:
        program: what to run.

    Attributes:
        duration_ns: compute time of each task in the program itself; shape ``(n_tasks,)``.
        transfer_ns: time of each communication there, if alone; shape ``(n_instances,)``.
    """

    def __init__(self, program: Program) -> None:
        latency_ns = np.array([transfer.latency_ns for transfer in program.transfers], np.int64)
        self._program = program
        self._latency_ns = latency_ns[program.instance_transfer]
        self._ways = loads(program)
        self.duration_ns = program.duration_ns
        self.transfer_ns = transfer_ns(program)

    def times(
        self, duration_ns: Int64Array | None = None, transfer_ns: Int64Array | None = None
    ) -> tuple[Int64Array, Int64Array]:
        """Return start and end of every task; durations that are left out are those of the program.

        Raises:
            ProgramError: the program cannot run to its end: a cycle, or a participant that never arrives.
        """
        program, total_ns = self._program, self.transfer_ns if transfer_ns is None else transfer_ns
        latency_ns = np.minimum(self._latency_ns, total_ns)
        start_ns, end_ns = _pass(
            (program.rank, program.stream, len(program.streams)),
            (program.dep_start, program.deps),
            (program.instance, program.instance_participants),
            self.duration_ns if duration_ns is None else duration_ns,
            (latency_ns, (total_ns - latency_ns).astype(np.float64), self._ways),
        )
        if program.n_tasks and end_ns.min() == NEVER:
            raise ProgramError(explain(program, start_ns, end_ns))
        return start_ns, end_ns


def is_compiled() -> bool:
    """Return whether a compiled version of this file is on disk already."""
    source = Path(__file__)
    kept = Path(_pass.stats.cache_path).glob(f"{source.stem}.*.nbi")
    return any(index.stat().st_mtime >= source.stat().st_mtime for index in kept)


def loads(program: Program) -> Ways:
    """Return what each communication fills of which links, as CSR over communications.

    A link is ``WAYS * rank`` plus 0 for near in, 1 near out, 2 far in, 3 far out. Sending uses the ways out,
    receiving the ways in, a collective both.
    """
    kinds = [label.kind for label in program.labels]
    tasks = np.flatnonzero(program.instance >= 0)
    tasks = tasks[np.argsort(program.instance[tasks], kind="stable")]
    is_in = np.array([kind != "send" for kind in kinds], np.bool_)[program.label[tasks]]
    is_out = np.array([kind != "recv" for kind in kinds], np.bool_)[program.label[tasks]]
    shares = np.array([(t.near, t.far) for t in program.transfers], np.float64).reshape(-1, 2)
    share = shares[program.instance_transfer[program.instance[tasks]]]
    load = np.stack([share[:, 0] * is_in, share[:, 0] * is_out, share[:, 1] * is_in, share[:, 1] * is_out], 1)
    link = program.rank[tasks].astype(np.int64)[:, None] * WAYS + np.arange(WAYS)
    used = load > 0
    counts = np.zeros(program.n_instances, np.int64)
    np.add.at(counts, program.instance[tasks], used.sum(axis=1))
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]), link[used], load[used]


def next_end(active: Int64Array, left_ns: Floats, rate: Floats, now: int) -> int:
    """Return when the first transfer under way arrives if nothing else happens; -1 if none ever does."""
    soonest = np.inf
    for job in active:
        if rate[job] > 0:
            soonest = min(soonest, left_ns[job] / rate[job])
    if soonest == np.inf:
        return NEVER
    return now + max(0, ceil(soonest - ROUNDING_NS))


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
    active[kept:n_active] = arrived[:n_arrived]
    return kept, n_arrived


def begin(
    tasks: Int64Array,
    now: int,
    meetings: tuple[Int64Array, Int64Array],
    costs: tuple[Int64Array, Int64Array],
    heap: list[tuple[int, int]],
) -> None:
    """Start *tasks*: put on the heap when those that compute end, and when bytes of full meetings set off."""
    instance, missing = meetings
    duration_ns, latency_ns = costs
    for task in tasks:
        meeting = instance[task]
        if meeting < 0:
            heappush(heap, (now + duration_ns[task], task))
            continue
        missing[meeting] -= 1
        if missing[meeting] == 0:
            heappush(heap, (now + latency_ns[meeting], len(instance) + meeting))


def release(
    ended: Int64Array, successors: tuple[Int64Array, Int64Array], waits: Int64Array, free: Int64Array
) -> int:
    """Write those who waited for *ended* last to *free*, and return how many they are."""
    start, following = successors
    n_free = 0
    for task in ended:
        for waiter in following[start[task] : start[task + 1]]:
            waits[waiter] -= 1
            if waits[waiter] == 0:
                free[n_free] = waiter
                n_free += 1
    return n_free


def _clock(
    lanes: tuple[Int32Array, Int32Array, int],
    dependencies: tuple[Int64Array, Int64Array],
    meetings: tuple[Int64Array, Int32Array],
    duration_ns: Int64Array,
    wires: tuple[Int64Array, Floats, Ways],
) -> tuple[Int64Array, Int64Array]:
    """Return start and end of every task; -1 where it is never reached.

    The heap holds ends of computations (their task) and moments at which bytes set off (the number of tasks
    plus the communication). Bytes move only when some set off or arrive, as in the event engine.
    """
    instance, participants = meetings
    latency_ns, wire_ns, ways = wires
    n = len(instance)
    waits, next_start, following = _successors(_previous(*lanes), *dependencies)
    member_start, member = _csr(instance, len(participants))
    missing = participants.astype(np.int64)
    start_ns, end_ns = np.full(n, NEVER), np.full(n, NEVER)
    n_links = (lanes[0].max() + 1 if n else 0) * WAYS
    scratch = (np.zeros(n_links), np.zeros(n_links), np.zeros(n_links, np.int64))
    left_ns, rate = wire_ns.copy(), np.zeros(len(participants))
    active, n_active = np.empty(len(participants), np.int64), 0
    fresh = np.empty(len(participants), np.int64)  # whose bytes set off now
    free, ended = np.empty(n, np.int64), np.empty(n, np.int64)
    first = np.flatnonzero(waits == 0)
    free[: len(first)] = first
    n_free = len(first)
    heap = [(np.int64(0), np.int64(0))]
    heap.pop()
    now, moved_ns, arrival_ns = np.int64(0), np.int64(0), np.int64(NEVER)
    while True:
        start_ns[free[:n_free]] = now
        _begin(free[:n_free], now, (instance, missing), (duration_ns, latency_ns), heap)
        if not heap and arrival_ns == NEVER:
            return start_ns, end_ns
        now = min(heap[0][0] if heap else arrival_ns, arrival_ns if arrival_ns != NEVER else heap[0][0])
        n_ended = setting_off = 0
        while heap and heap[0][0] == now:
            code = heappop(heap)[1]
            if code < n:
                ended[n_ended] = code
                n_ended += 1
            else:
                fresh[setting_off] = code - n
                setting_off += 1
        if setting_off or arrival_ns == now:
            n_active, n_arrived = _move(active, n_active, now - moved_ns, left_ns, rate)
            moved_ns = now
            for job in active[n_active : n_active + n_arrived].copy():
                members = member[member_start[job] : member_start[job + 1]]
                ended[n_ended : n_ended + len(members)] = members
                n_ended += len(members)
            active[n_active : n_active + setting_off] = fresh[:setting_off]
            n_active += setting_off
            _share(active[:n_active], ways, scratch, rate)
            arrival_ns = np.int64(_next_end(active[:n_active], left_ns, rate, now))
        end_ns[ended[:n_ended]] = now
        n_free = _release(ended[:n_ended], (next_start, following), waits, free)


_jit: Final[Any] = njit(cache=True)
_previous: Final[Any] = _jit(previous_on_stream)
_csr: Final[Any] = _jit(grouped)
_successors: Final[Any] = _jit(successors_of)
_next_end: Final[Any] = _jit(next_end)
_move: Final[Any] = _jit(move)
_begin: Final[Any] = _jit(begin)
_release: Final[Any] = _jit(release)
_pass: Final[Any] = _jit(_clock)
