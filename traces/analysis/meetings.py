"""The waits of ranks for one another, with what each of the two did since they last met.

Only waiting counts in which a rank neither computes nor moves data. Of several communications that it waits
for at once, the one that lets it go last has the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.analysis.activity import UNNAMED_AXIS, states, sweep, window_state
from foretrace.traces.analysis.arrivals import arrivals
from foretrace.traces.analysis.communications import Communications, came_last, communications
from foretrace.traces.analysis.metrics import averaged_steps, breakdown, step_times_ns
from foretrace.traces.analysis.windows import windows, windows_of
from foretrace.traces.columns import Int64Array, int64, is_one_of, labels
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
    blocked: dict[int, Int64Array] = {}
    for rank, like in arrivals(run).like.items():
        did[rank], blocked[rank] = (did[like], blocked[like]) if like in did else _rank(run, rank)
    joined = communications(run, by_step=True)
    place = {rank: at for at, rank in enumerate(run.stored_ranks)}
    late_ns, last_rank = came_last(joined.n_numbers, ((part, part.number) for part in joined))
    stored = np.array(run.stored_ranks, np.int64)
    late = np.searchsorted(stored, last_rank)
    asked = [np.empty((0, 5), np.int64)]
    for part in joined:
        waited, who = blocked[part.rank][part.rows], place[part.rank]
        rows = np.flatnonzero((part.number >= 0) & (waited > 0))
        rows = rows[late[part.number[rows]] != who]
        if len(rows):
            axis = _axes(run.spans([part.rank], ["axis"]), names)[part.rows[rows]]
            columns = np.full(len(rows), who), part.number[rows], part.start_ns[rows], waited[rows], axis
            asked.append(np.stack(columns, axis=1))
    who, number, start, waited, axis = _by_start(np.concatenate(asked)).T
    pairs = np.stack([who, late[number]])
    left = _left(run, joined, place, pairs, arrived_ns=start)
    order = np.lexsort((start, late_ns[number]))
    return did, Waits(
        rank=stored[pairs[0][order]],
        late=stored[pairs[1][order]],
        axis=axis[order],
        until_ns=late_ns[number][order],
        waited_ns=waited[order],
        since_ns=left[0][order],
        late_since_ns=left[1][order],
    )


def _by_start(asked: Int64Array) -> Int64Array:
    """Return rows of place, number, start and more by start, and at one start by number."""
    asked = asked[np.lexsort((asked[:, 2], asked[:, 1]))]
    return asked[np.argsort(asked[:, 2], kind="stable")]


def _meetings(
    joined: Communications, place: Mapping[int, int], pairs: NDArray[np.intp]
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return number, place and end of all that takes part where some of the *pairs* of places can meet."""
    wanted = np.zeros((len(place), len(place)), np.bool_)
    wanted[pairs[0], pairs[1]] = True
    wanted |= wanted.T
    members: list[list[int]] = [[] for _ in joined.channels]
    for part in joined:
        for channel in part.channels.tolist():
            members[channel].append(place[part.rank])
    meets = np.array([wanted[np.ix_(one, one)].any() for one in members], np.bool_)
    found = [np.empty((3, 0), np.int64)]
    for part in joined:
        rows = np.flatnonzero(part.slot >= 0)
        rows = rows[meets[part.channels[part.slot[rows]]]]
        who = np.full(len(rows), place[part.rank])
        found.append(np.stack([part.number[rows], who, part.end_ns[rows]]))
    number, who, end_ns = np.concatenate(found, axis=1)
    order = np.argsort(number, kind="stable")
    return number[order], who[order], end_ns[order]


def _left(
    run: Run,
    joined: Communications,
    place: Mapping[int, int],
    pairs: NDArray[np.intp],
    *,
    arrived_ns: Int64Array,
) -> Int64Array:
    """Return when each of the *pairs* of places left the last meeting of both; shape ``(2, n_pairs)``.

    A meeting counts if it was over when the first of a pair arrived; pairs come in that order. Before the
    first meeting, the two met at the start of their first step.
    """
    number, who, end_ns = _meetings(joined, place, pairs)
    edges = np.append(np.flatnonzero(np.diff(number, prepend=-1)), len(number))
    over = np.maximum.reduceat(end_ns, edges[:-1]) if len(end_ns) else end_ns
    ended = np.argsort(over, kind="stable")
    # How many meetings were over when each pair's wait began.
    known = np.searchsorted(over[ended], arrived_ns, side="right")
    first = {window.rank: window.start_ns for window in reversed(windows(run))}
    begun = np.array([first.get(rank, 0) for rank in place], np.int64)
    left = np.repeat(begun[:, None], len(begun), axis=1)
    found = np.empty(pairs.shape, np.int64)
    changes = np.append(np.flatnonzero(np.diff(known, prepend=-1)), len(known))
    done = 0
    for low, high in pairwise(changes.tolist()):
        for one in ended[done : known[low]].tolist():
            here = slice(edges[one], edges[one + 1])
            # Each of them leaves all others at its own end.
            left[who[here, None], who[here]] = end_ns[here, None]
        done = known[low]
        own, other = pairs[:, low:high]
        found[:, low:high] = left[own, other], left[other, own]
    return found


def _rank(run: Run, rank: int) -> tuple[Did, Int64Array]:
    """Return what *rank* did, and for each of its spans how long it waited for it and did nothing else."""
    swept, last = sweep(run, rank), arrivals(run).last_ns[rank]
    table = run.spans([rank])
    start = int64(table, "start_ns")
    state = swept.state.copy()
    for window in windows_of(run, rank):
        state[swept.inside(window)] = window_state(run, swept, window)
    kind = np.array([_column(name) for name in states(run)], np.int64)[state]
    length = np.diff(swept.point_ns)
    before = np.zeros((len(swept.point_ns), len(CAUSES) + 1), np.int64)
    before[np.arange(1, len(before)), kind] = length
    np.cumsum(before, axis=0, out=before)
    waits = np.flatnonzero((last > start) & is_one_of(table, "category", ("collective", "p2p")))
    sends = is_one_of(table, "kind", ("send",))[waits]
    # Of those that let go at one moment sends come first, so that one of the others is the holder.
    waits = waits[np.lexsort((~sends, last[waits]))]
    low, high = (np.searchsorted(swept.point_ns, t[waits]) for t in (start, last))
    holder = np.full(len(length), -1, np.int64)
    np.maximum.at(holder, low, np.arange(len(waits)))
    holder = np.maximum.accumulate(holder)  # of those that have begun, the one that lets go last
    counted = (
        (holder >= 0)
        & (np.append(high, 0)[holder] > np.arange(len(holder)))
        & (kind == len(CAUSES))
        & _in_averaged(run, rank, swept.point_ns)
    )
    blocked = np.zeros(len(start), np.int64)
    np.add.at(blocked, waits[holder[counted]], length[counted])
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
    for window in windows_of(run, rank):
        if window.step in averaged:
            low, high = np.searchsorted(point_ns, (window.start_ns, window.end_ns))
            inside[low:high] = True
    return inside
