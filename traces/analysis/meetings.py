"""The waits of ranks for one another, with what each of the two did since they last met.

Only waiting counts in which a rank neither computes nor moves data. Of several communications that it waits
for at once, the one that lets it go last has the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.analysis.activity import UNNAMED_AXIS, states, sweep, window_state
from foretrace.traces.analysis.arrivals import arrivals
from foretrace.traces.analysis.metrics import averaged_steps, breakdown, step_times_ns
from foretrace.traces.analysis.windows import windows
from foretrace.traces.columns import Int64Array, int64, is_one_of, labels
from foretrace.traces.replay.work import instances
from foretrace.traces.run import Run

CAUSES: Final = ("compute", "transfer", "other")
"""What a rank can have done longer than those that wait for it; ``other`` is host work and launches."""


class Did(NamedTuple):
    """What one rank did: times at which that changes, and before each the ns of ``CAUSES`` and of waiting."""

    point_ns: Int64Array
    before_ns: Int64Array

    def between(self, since: Int64Array, until: Int64Array) -> Int64Array:
        """Return the ns of each cause and of waiting between pairs of moments; shape ``(n, 4)``."""
        low, high = (np.searchsorted(self.point_ns, t) for t in (since, np.maximum(until, since)))
        return self.before_ns[np.minimum(high, len(self.before_ns) - 1)] - self.before_ns[low]


class Waits(NamedTuple):
    """Waits of one rank for another, by the time at which they end; shape ``(n_waits,)``.

    ``since_ns`` and ``late_since_ns`` are when each of the two left their last meeting before.
    """

    rank: Int64Array
    late: Int64Array
    axis: Int64Array
    until_ns: Int64Array
    waited_ns: Int64Array
    since_ns: Int64Array
    late_since_ns: Int64Array


def followed(run: Run, names: Sequence[str]) -> tuple[dict[int, Did], Waits]:
    """Return what each rank did, and its waits, along which of the axes *names*, and since when."""
    did: dict[int, Did] = {}
    whole = run.spans()
    instance, rank_of = instances(whole), int64(whole, "rank")
    start = int64(whole, "start_ns")
    end = start + int64(whole, "duration_ns")
    blocked_ns = np.zeros(len(start), np.int64)
    last = start.copy()
    for rank in run.stored_ranks:
        rows = np.flatnonzero(rank_of == rank)
        last[rows] = arrivals(run).last_ns[rank]
        did[rank], blocked_ns[rows] = _rank(run, rank, last[rows])
    rows = np.flatnonzero(instance >= 0)
    rows = rows[np.lexsort((start[rows], instance[rows]))]
    found = _met(run, rows, instance[rows], _Spans(start, end, rank_of, blocked_ns))
    found = found[np.lexsort((start[found[:, 0]], start[found[:, 1]]))]
    row, late_row = found[:, 0], found[:, 1]
    return did, Waits(
        rank=rank_of[row],
        late=rank_of[late_row],
        axis=_axes(whole, names)[row],
        until_ns=start[late_row],
        waited_ns=blocked_ns[row],
        since_ns=found[:, 2],
        late_since_ns=found[:, 3],
    )


class _Spans(NamedTuple):
    """Columns of all spans; ``blocked_ns`` is how long the rank waits for it and does nothing else."""

    start_ns: Int64Array
    end_ns: Int64Array
    rank: Int64Array
    blocked_ns: Int64Array


def _met(run: Run, rows: NDArray[np.intp], instance: Int64Array, spans: _Spans) -> Int64Array:
    """Return the waits: row, row of the late one, and when each left their last meeting; shape ``(n, 4)``.

    *rows* are those of each communication, one after the other by *instance*, each by arrival.
    """
    stored = np.array(run.stored_ranks)
    order = np.argsort(stored)
    place = order[np.searchsorted(stored[order], spans.rank[rows])]
    edges = np.append(np.flatnonzero(np.diff(instance, prepend=-1)), len(rows))
    last = np.repeat(edges[1:] - 1, np.diff(edges))  # of each row's communication
    asked = np.flatnonzero((spans.blocked_ns[rows] > 0) & (place != place[last]))
    asked = asked[np.argsort(spans.start_ns[rows[asked]], kind="stable")]
    pairs = np.stack([asked, last[asked]])
    left = _left(run, edges, place, spans.end_ns[rows], place[pairs], arrived_ns=spans.start_ns[rows[asked]])
    return np.stack([*rows[pairs], *left], axis=1)


def _left(
    run: Run,
    edges: NDArray[np.intp],
    place: NDArray[np.intp],
    end_ns: Int64Array,
    pairs: NDArray[np.intp],
    *,
    arrived_ns: Int64Array,
) -> Int64Array:
    """Return when each of the *pairs* of places left the last meeting of both; shape ``(2, n_pairs)``.

    A meeting, the rows between two *edges*, counts if it was over when the first of a pair arrived; pairs
    come in that order. Before the first meeting, the two met at the start of their first step.
    """
    over = np.maximum.reduceat(end_ns, edges[:-1]) if len(end_ns) else end_ns
    ended = np.argsort(over, kind="stable")
    known = np.searchsorted(over[ended], arrived_ns, side="right")
    first = {window.rank: window.start_ns for window in reversed(windows(run))}
    begun = np.array([first.get(rank, 0) for rank in run.stored_ranks], np.int64)
    left = np.repeat(begun[:, None], len(begun), axis=1)
    found = np.empty(pairs.shape, np.int64)
    changes = np.append(np.flatnonzero(np.diff(known, prepend=-1)), len(known))
    done = 0
    for low, high in pairwise(changes.tolist()):
        for number in ended[done : known[low]].tolist():
            here = slice(edges[number], edges[number + 1])
            left[place[here, None], place[here]] = end_ns[here, None]
        done = known[low]
        own, other = pairs[:, low:high]
        found[:, low:high] = left[own, other], left[other, own]
    return found


def _rank(run: Run, rank: int, last: Int64Array) -> tuple[Did, Int64Array]:
    """Return what *rank* did, and for each of its spans how long it waited for it and did nothing else."""
    swept = sweep(run, rank)
    table = run.spans([rank])
    start = int64(table, "start_ns")
    state = swept.state.copy()
    for window in windows(run):
        if window.rank == rank:
            state[swept.inside(window)] = window_state(run, swept, window)
    kind = np.array([_column(name) for name in states(run)], np.int64)[state]
    length = np.diff(swept.point_ns)
    before = np.zeros((len(swept.point_ns), len(CAUSES) + 1), np.int64)
    before[np.arange(1, len(before)), kind] = length
    np.cumsum(before, axis=0, out=before)
    waits = np.flatnonzero((last > start) & is_one_of(table, "category", ("collective", "p2p")))
    sends = is_one_of(table, "kind", ("send",))[waits]
    waits = waits[np.lexsort((~sends, last[waits]))]  # the one that lets go last is painted last
    holder = np.full(len(length), -1, np.int64)
    low, high = (np.searchsorted(swept.point_ns, t[waits]) for t in (start, last))
    for row, a, b in zip(waits.tolist(), low.tolist(), high.tolist(), strict=True):
        holder[a:b] = row
    counted = (holder >= 0) & (kind == len(CAUSES)) & _in_averaged(run, rank, swept.point_ns)
    blocked = np.zeros(len(start), np.int64)
    np.add.at(blocked, holder[counted], length[counted])
    return Did(swept.point_ns, before), blocked


def _axes(whole: pa.Table, names: Sequence[str]) -> Int64Array:
    """Return the number of each span's axis in *names*; of spans without one, anything."""
    codes, found = labels(whole, "axis")
    number = np.array(
        [names.index(name or UNNAMED_AXIS) if (name or UNNAMED_AXIS) in names else 0 for name in found]
    )
    return number[codes].astype(np.int64)


def _column(state: str) -> int:
    """Return the index into ``CAUSES`` that a state of ``activity`` counts as; waiting comes behind."""
    head = state.partition(":")[0]
    return {"compute": 0, "exposed": 1, "host": 2, "other": 2}.get(head, len(CAUSES))


def _in_averaged(run: Run, rank: int, point_ns: Int64Array) -> NDArray[np.bool_]:
    """Return which intervals between *point_ns* lie in steps that averages are over."""
    averaged = set(averaged_steps(run, step_times_ns(breakdown(run))))
    inside = np.zeros(len(point_ns) - 1, np.bool_)
    for window in windows(run):
        if window.rank == rank and window.step in averaged:
            low, high = np.searchsorted(point_ns, (window.start_ns, window.end_ns))
            inside[low:high] = True
    return inside
