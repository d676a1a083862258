"""The chain of work and transfers that a step could not have ended before, across ranks.

It is walked backwards from the last end of the step. A span follows what ended last before it on its rank; a
communication follows the rank that arrived last. What lies between is a gap. The pieces cover the step from
its start to its end, each moment once: their lengths add up to the makespan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.analysis.arrivals import COMMUNICATION
from foretrace.traces.analysis.windows import windows
from foretrace.traces.columns import BoolArray, Int64Array, int64, is_one_of
from foretrace.traces.errors import RunError
from foretrace.traces.replay.work import instances
from foretrace.traces.run import Run

GAP: Final = "gap"
"""Kind of a piece in which nothing ran that the next one could have waited for."""


class Piece(NamedTuple):
    """One piece of the path, on one rank; ``kind`` of compute, or operation and axis of a transfer."""

    rank: int
    start_ns: int
    end_ns: int
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The critical path of one step.

    Attributes:
        step: the optimizer step.
        pieces: from the start of the step to its end, without holes.
    """

    step: int
    pieces: tuple[Piece, ...]

    @property
    def length_ns(self) -> int:
        """Length of the path, which is the makespan of the step."""
        return sum(piece.end_ns - piece.start_ns for piece in self.pieces)

    def by_kind(self) -> dict[str, int]:
        """Return how much of the path each kind makes, in ns, largest first."""
        total: Counter[str] = Counter()
        for piece in self.pieces:
            total[piece.kind] += piece.end_ns - piece.start_ns
        return dict(total.most_common())

    def by_rank(self) -> dict[int, int]:
        """Return how much of the path lies on each rank, in ns, largest first."""
        total: Counter[int] = Counter()
        for piece in self.pieces:
            total[piece.rank] += piece.end_ns - piece.start_ns
        return dict(total.most_common())

    def scaled_ns(self, factors: Mapping[str, float]) -> float:
        """Return the length if pieces of some kinds took *factor* times as long, in ns.

        A lower bound of the step time for factors below 1: another chain may then be the longest.
        """
        return sum((p.end_ns - p.start_ns) * factors.get(p.kind, 1.0) for p in self.pieces)


@dataclass(frozen=True, slots=True)
class _Ends:
    """The spans of one rank in one step by their ends; arrays of shape ``(n_spans,)``, times in ns."""

    start_ns: Int64Array
    end_ns: Int64Array
    begins_ns: Int64Array  # of the part that depends on nothing else: behind the last arrival
    last_rank: Int64Array  # that arrived last, -1 if nothing is waited for
    work_start_ns: Int64Array  # of compute and copies, ascending; shape (n_work,)
    work_row: NDArray[np.intp]  # the span that each of these is
    table: pa.Table


def critical_path(run: Run, step: int) -> CriticalPath:
    """Return the critical path of *step* over the stored ranks.

    Raises:
        RunError: the run has no such step, or nothing happens in it.
    """
    extent = [(w.start_ns, w.end_ns) for w in windows(run) if w.step == step]
    if not extent:
        raise RunError(f"no step {step} in {run.path}; it has {', '.join(map(str, _steps(run)))}")
    first, last = min(a for a, _ in extent), max(b for _, b in extent)
    ranks = _by_rank(run, first, last)
    if not ranks:
        raise RunError(f"{run.path}: nothing happens in step {step}")
    return CriticalPath(step, tuple(reversed(_walk(ranks, first, last, _slack_ns(run)))))


def _slack_ns(run: Run) -> int:
    """Return how far a span may outlast the start of what follows it: twice the rounding of all clocks.

    A clock that is the reference of the others is exact; only where no clock is, times themselves are
    rounded.
    """
    clocks = [run.info.clock[rank].uncertainty_ns for rank in run.stored_ranks if rank in run.info.clock]
    return 2 * min(clocks, default=0)


def _walk(ranks: dict[int, _Ends], first: int, last: int, slack_ns: int) -> list[Piece]:
    """Return the pieces of the path, last first."""
    rank = max(ranks, key=lambda r: int(ranks[r].end_ns[-1]))
    now = last
    pieces: list[Piece] = []
    visited: set[tuple[int, int]] = set()
    while now > first:
        ends = ranks[rank]
        row = _before(ends, now, slack_ns)
        if row < 0:
            pieces.append(Piece(rank, first, now, GAP, "before the first span"))
            break
        end = min(int(ends.end_ns[row]), now)
        if end < now:
            pieces.append(Piece(rank, end, now, GAP, "nothing running"))
        begin = max(int(ends.begins_ns[row]), first)
        other = int(ends.last_rank[row])
        jumps = other in ranks and other != rank and begin <= end and (other, begin) not in visited
        if not jumps:
            begin = max(int(ends.start_ns[row]), first)
        if end > begin:
            pieces.append(Piece(rank, begin, end, *_said(ends.table, row)))
        if jumps:
            visited.add((rank, end))
            rank = other
        now = begin
    return pieces


def _before(ends: _Ends, now: int, slack_ns: int) -> int:
    """Return the row of the span that ends last, at *now* or before, having begun before; -1 if none.

    Where nothing ends at *now* but work that began later still runs, it is that work: what comes next was
    issued by it, as a collective out of the middle of a backward pass.
    """
    row = int(np.searchsorted(ends.end_ns, now + slack_ns, side="right")) - 1
    while row >= 0 and ends.start_ns[row] >= now:
        row -= 1
    ended = int(ends.end_ns[row]) if row >= 0 else -1
    at = int(np.searchsorted(ends.work_start_ns, now, side="left")) - 1
    if at >= 0 and ended < now:  # not a gap if work is running that issues what comes next
        running = int(ends.work_row[at])
        if ends.end_ns[running] > now and ends.start_ns[running] >= ended:
            return running
    return row


def _by_rank(run: Run, first: int, last: int) -> dict[int, _Ends]:
    """Return what happens on each rank between *first* and *last*, by end; ends are cut at *last*."""
    whole = run.spans()
    category: BoolArray = is_one_of(whole, "category", ("compute", "copy", "collective", "p2p", "host"))
    start = int64(whole, "start_ns")
    end = start + int64(whole, "duration_ns")
    inside = (
        category & (end > first) & (start < last) & (end > start) & ~is_one_of(whole, "stream", ("idle",))
    )
    table = whole.take(np.flatnonzero(inside))
    start, end, rank = start[inside], np.minimum(end[inside], last), int64(table, "rank")
    begins, last_rank = _arrivals(table, start, end, rank)
    is_work = is_one_of(table, "category", ("compute", "copy"))
    found = {}
    for number in np.unique(rank).tolist():
        rows: NDArray[np.intp] = np.flatnonzero(rank == number)
        rows = rows[np.lexsort((start[rows], end[rows]))]
        work = np.flatnonzero(is_work[rows])
        work = work[np.argsort(start[rows][work], kind="stable")]
        found[int(number)] = _Ends(
            start_ns=start[rows],
            end_ns=end[rows],
            begins_ns=begins[rows],
            last_rank=last_rank[rows],
            work_start_ns=start[rows][work],
            work_row=work,
            table=table.take(rows),
        )
    return found


def _arrivals(
    table: pa.Table, start: Int64Array, end: Int64Array, rank: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return when the last participant of each communication came, and which; own start and -1 elsewhere."""
    begins, last_rank = start.copy(), np.full(len(start), -1, np.int64)
    communication = is_one_of(table, "category", COMMUNICATION)
    instance = np.where(communication, instances(table), -1)
    rows = np.flatnonzero(instance >= 0)
    if not len(rows):
        return begins, last_rank
    order = rows[np.lexsort((start[rows], instance[rows]))]
    final = np.append(np.flatnonzero(np.diff(instance[order])), len(order) - 1)
    came = dict(zip(instance[order[final]].tolist(), order[final].tolist(), strict=True))
    latest = np.array([came[number] for number in instance[rows].tolist()], np.int64)
    waited = (start[latest] <= end[rows]) & (start[latest] >= start[rows])
    begins[rows] = np.where(waited, start[latest], start[rows])
    last_rank[rows] = np.where(waited, rank[latest], -1)
    return begins, last_rank


def _said(table: pa.Table, row: int) -> tuple[str, str]:
    """Return kind and name of a span; communication with its axis."""
    kind, axis, name = (str(table[column][row].as_py()) for column in ("kind", "axis", "name"))
    return f"{kind} {axis}".strip(), name


def _steps(run: Run) -> list[int]:
    return sorted({window.step for window in windows(run)})
