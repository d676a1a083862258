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

from foretrace.traces.analysis.communications import Part, came_last, communications
from foretrace.traces.analysis.windows import extent_ns, windows
from foretrace.traces.columns import BoolArray, Int64Array, bounds, is_one_of, labels
from foretrace.traces.errors import RunError
from foretrace.traces.report.format import called
from foretrace.traces.run import Run

GAP: Final = "gap"  # kind of a piece in which nothing ran that the next one could have waited for


class Piece(NamedTuple):
    """One piece of the path, on one rank; ``kind`` of compute, or operation and axis of a transfer."""

    rank: int
    start_ns: int
    end_ns: int
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The critical path of one step."""

    step: int  # the optimizer step
    pieces: tuple[Piece, ...]  # from the start of the step to its end, without holes

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


class _Ends(NamedTuple):
    """The spans of one rank in one step by their ends; arrays of shape ``(n_spans,)``, times in ns."""

    rows: NDArray[np.intp]  # in the spans of the rank
    start_ns: Int64Array
    end_ns: Int64Array
    begins_ns: Int64Array  # of the part that depends on nothing else: behind the last arrival
    last_rank: Int64Array  # that arrived last, -1 if nothing is waited for
    work_start_ns: Int64Array  # of compute and copies, ascending; shape (n_work,)
    work_row: NDArray[np.intp]  # the span that each of these is


def critical_path(run: Run, step: int) -> CriticalPath:
    """Return the critical path of *step* over the stored ranks.

    Raises RunError: the run has no such step, or nothing happens in it.
    """
    steps = sorted({window.step for window in windows(run)})
    if step not in steps:
        raise RunError(f"no step {step} in {run.path}; it has {', '.join(map(str, steps))}")
    first, length = extent_ns(run, step)
    happening = _Step(run, first, first + length)
    if happening.ends_on is None:
        raise RunError(f"{run.path}: nothing happens in step {step}")
    return CriticalPath(step, tuple(reversed(_walk(happening, happening.ends_on, _slack_ns(run)))))


def _slack_ns(run: Run) -> int:
    """Return how far a span may outlast the start of what follows it: twice the rounding of all clocks.

    A clock that is the reference of the others is exact; only where no clock is, times themselves are
    rounded.
    """
    clocks = [run.info.clock[rank].uncertainty_ns for rank in run.stored_ranks if rank in run.info.clock]
    return 2 * min(clocks, default=0)


def _walk(step: _Step, rank: int, slack_ns: int) -> list[Piece]:
    """Return the pieces of the path, last first; it ends on *rank*."""
    first, now = step.first, step.last
    pieces: list[Piece] = []
    visited: set[tuple[int, int]] = set()
    while now > first:
        ends = step.ends(rank)
        row = _before(ends, now, slack_ns)
        if row < 0:
            pieces.append(Piece(rank, first, now, GAP, "before the first span"))
            break
        end = min(int(ends.end_ns[row]), now)
        if end < now:
            pieces.append(Piece(rank, end, now, GAP, "nothing running"))
        begin = max(int(ends.begins_ns[row]), first)
        other = int(ends.last_rank[row])
        # No jump leads back to where one began: ranks that came at one moment would lead on without end.
        jumps = other >= 0 and other != rank and begin <= end and (other, begin) not in visited
        if not jumps:
            begin = max(int(ends.start_ns[row]), first)
        if end > begin:
            pieces.append(Piece(rank, begin, end, *_said(step.run, rank, int(ends.rows[row]))))
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


class _Step:
    """What happens from *first* to *last*; that of one rank is put in order when the path comes there.

    Attributes:
        run, first, last: whose step it is, and when it begins and ends.
        ends_on: rank on which something ends last, None if nothing happens.
    """

    def __init__(self, run: Run, first: int, last: int) -> None:
        self.run, self.first, self.last = run, first, last
        self._inside: dict[int, BoolArray] = {}
        self._ends: dict[int, _Ends] = {}
        until: dict[int, int] = {}
        for rank in run.stored_ranks:
            like = run.like(rank)
            if like not in self._inside:
                self._inside[like] = _inside(run.spans([like]), first, last)
            until[rank] = until[like] if like in until else self._until_ns(rank)
        latest = max(until.values())
        self.ends_on = next((rank for rank, ns in until.items() if ns == latest > first), None)
        self._joined = communications(run, by_step=True)
        self._came_ns, self._came = came_last(
            self._joined.n_numbers,
            ((part, np.where(self._happens(part), part.number, -1)) for part in self._joined),
        )

    def ends(self, rank: int) -> _Ends:
        """Return what happens on *rank*, by end; ends are cut at that of the step."""
        if rank not in self._ends:
            self._ends[rank] = self._ordered(rank)
        return self._ends[rank]

    def _happens(self, part: Part) -> BoolArray:
        """Return which communications of *part* are in the step."""
        return self._inside[self.run.like(part.rank)][part.rows]

    def _until_ns(self, rank: int) -> int:
        """Return when the last span of *rank* in the step ends; the start of the step if there is none."""
        table, inside = self.run.spans([rank]), self._inside[self.run.like(rank)]
        return min(int(bounds(table)[1][inside].max(initial=self.first)), self.last)

    def _ordered(self, rank: int) -> _Ends:
        table, inside = self.run.spans([rank]), self._inside[self.run.like(rank)]
        start, end = bounds(table)
        end = np.minimum(end, self.last)
        begins, last_rank = start.copy(), np.full(len(start), -1, np.int64)
        part = self._joined.of(rank)
        joins = np.flatnonzero((part.number >= 0) & self._happens(part))
        rows, latest = part.rows[joins], self._came_ns[part.number[joins]]
        # Who had left before the last one came, as a buffered send, has waited for nobody.
        waited = (latest <= end[rows]) & (latest >= start[rows])
        begins[rows] = np.where(waited, latest, start[rows])
        last_rank[rows] = np.where(waited, self._came[part.number[joins]], -1)
        order = np.flatnonzero(inside)
        order = order[np.lexsort((start[order], end[order]))]
        work = np.flatnonzero(is_one_of(table, "category", ("compute", "copy"))[order])
        work = work[np.argsort(start[order][work], kind="stable")]
        return _Ends(
            rows=order,
            start_ns=start[order],
            end_ns=end[order],
            begins_ns=begins[order],
            last_rank=last_rank[order],
            work_start_ns=start[order][work],
            work_row=work,
        )


def _inside(table: pa.Table, first: int, last: int) -> BoolArray:
    """Return which spans of a rank are work or communication between *first* and *last*."""
    start, end = bounds(table)
    happens = is_one_of(table, "category", ("compute", "copy", "collective", "p2p", "host"))
    return happens & (end > first) & (start < last) & (end > start) & ~is_one_of(table, "stream", ("idle",))


def _said(run: Run, rank: int, row: int) -> tuple[str, str]:
    """Return kind and name of a span; communication with its axis."""
    kind, axis, name = (names[codes[row]] for codes, names in run.once(_labels, rank))
    return called(kind, axis), name


def _labels(table: pa.Table) -> list[tuple[NDArray[np.int32], list[str]]]:
    return [labels(table, name) for name in ("kind", "axis", "name")]
