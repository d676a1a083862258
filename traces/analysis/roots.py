"""Whose own work makes ranks wait: waiting is followed back, from who came last to what held that rank up.

A rank that comes last at a collective need not be slow: it may have waited itself. For every wait, what the
two ranks did since they last met is compared. By what the late one computed, moved or did otherwise longer,
it is the cause; by what it waited longer, the cause is whoever it waited for, and so on. This is the delay
analysis of Böhme, Geimer, Wolf and Arnold, "Identifying the Root Causes of Wait States in Large-Scale
Parallel Applications", ICPP 2010: the shares of a wait add up to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.analysis.activity import (
    UNNAMED_AXIS,
    axes,
    is_pipelined,
    stage_of,
    states,
    sweep,
    window_state,
)
from foretrace.traces.analysis.communications import Communications, arrivals, came_last, communications
from foretrace.traces.analysis.metrics import (
    averaged_rows,
    averaged_steps,
    represented,
)
from foretrace.traces.analysis.windows import windows, windows_of
from foretrace.traces.columns import Int64Array, int64, is_one_of, labels
from foretrace.traces.info import rank_list
from foretrace.traces.report.format import along, format_share
from foretrace.traces.run import Run

Floats = NDArray[np.float64]
Key = TypeVar("Key", str, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """One rank as the root of waiting."""

    rank: int  # whose work takes longer
    caused_ns: int  # waiting of all ranks that leads back to it
    direct_ns: int  # the part in which it came last itself; in the rest others came last because of it
    by_cause: Mapping[str, int]  # ``caused_ns`` by what it did longer, one of ``CAUSES``
    by_axis: Mapping[str, int]  # ``caused_ns`` by the axis along which others waited
    by_rank: Mapping[int, int]  # ``caused_ns`` by the stored rank that waits

    @property
    def waiting_ranks(self) -> tuple[int, ...]:
        """The other stored ranks that wait for it in earnest: those with a tenth or more of the most."""
        most = max((ns for rank, ns in self.by_rank.items() if rank != self.rank), default=0)
        return tuple(rank for rank, ns in self.by_rank.items() if rank != self.rank and 0 < most <= ns * 10)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        said = asdict(self)
        return said | {"by_rank": {str(rank): ns for rank, ns in self.by_rank.items()}}


def roots(run: Run) -> list[Root]:
    """Return the ranks at the root of waiting, those that cause most first; kept with the run.

    Waiting of folded ranks counts as often as they stand for one. Waiting for a rank that is not in the run
    is nobody's. Steps that averages leave out do not count.
    """
    return run.derived(_roots)


def _roots(run: Run) -> list[Root]:
    named = axes(run)
    did, waits = followed(run, named)
    if not len(waits.rank):
        return []
    stored = run.stored_ranks
    blame, direct = _traced(
        waits, *_shares(did, waits), {rank: i for i, rank in enumerate(stored)}, len(named)
    )
    weight = represented(run)
    scale = np.array([weight[rank] for rank in stored], np.float64)
    found = []
    for i, rank in enumerate(stored):
        caused = blame[i, :, : len(stored)] * scale
        along = blame[i, :, len(stored) :].sum(axis=0)
        if (total := float(caused.sum())) >= 1:
            along *= total / along.sum()
            found.append(
                Root(
                    rank=rank,
                    caused_ns=round(total),
                    direct_ns=round(float(direct[i] @ scale)),
                    by_cause=_rounded(CAUSES, caused.sum(axis=1)),
                    by_axis=_rounded(named, along),
                    by_rank=_rounded(stored, caused.sum(axis=0)),
                )
            )
    return sorted(found, key=lambda one: -one.caused_ns / weight[one.rank])


def _rounded(keys: Sequence[Key], values: Floats) -> dict[Key, int]:
    """Return *values* by key in whole ns, without those that are none."""
    return {key: round(ns) for key, ns in zip(keys, values.tolist(), strict=True) if round(ns)}


def _shares(did: dict[int, Did], waits: Waits) -> tuple[Floats, Floats]:
    """Return of each wait the shares that are the late rank's own, by cause, and the share it passes on."""
    late = np.zeros((len(waits.rank), len(CAUSES) + 1), np.int64)
    own = late.copy()
    for rank, one in did.items():
        rows = np.flatnonzero(waits.late == rank)
        late[rows] = one.between(waits.late_since_ns[rows], waits.until_ns[rows])
        rows = np.flatnonzero(waits.rank == rank)
        own[rows] = one.between(waits.since_ns[rows], waits.until_ns[rows])
    own[:, -1] -= waits.waited_ns
    longer = np.maximum(late - own, 0).astype(np.float64)
    total = longer.sum(axis=1)
    nothing = total == 0  # clocks or rounding: the last to come has it
    longer[nothing, len(CAUSES) - 1] = total[nothing] = 1.0
    shares = longer / total[:, None]
    return shares[:, :-1], shares[:, -1]


def _traced(
    waits: Waits, shares: Floats, passed_on: Floats, place: Mapping[int, int], n_axes: int
) -> tuple[Floats, Floats]:
    """Return the waiting that leads back to each rank, and what of it is direct.

    Waits are gone through from the last to the first. What a wait passes on is spread over the earlier waits
    of the late rank since the two met, by their lengths.

    Returns:
        ns by root, cause and waiting rank, behind the ranks by axis, shape ``(n, 3, n + n_axes)``; ns by root
        and waiting rank that waits for the root itself, shape ``(n, n)``.
    """
    n = len(place)
    blame, direct = np.zeros((n, len(CAUSES), n + n_axes)), np.zeros((n, n))
    of_rank = {rank: np.flatnonzero(waits.rank == rank) for rank in place}
    before, until = _earlier(waits, of_rank)
    stored = np.array(list(place), np.int64)
    who, whom = np.searchsorted(stored, waits.rank), np.searchsorted(stored, waits.late)
    turn = np.array([len(rows) for rows in of_rank.values()])
    base = np.cumsum(turn + 1) - turn - 1  # of each rank in ``sums``: its waits, added up
    sums = np.concatenate([np.append(0, np.cumsum(waits.waited_ns[rows])) for rows in of_rank.values()])
    carried = np.zeros((n, n + n_axes))  # by rank: what its waits have to carry, per ns of their length
    ends: defaultdict[tuple[int, int], Floats] = defaultdict(lambda: np.zeros(n + n_axes))
    for groups in _at_once(who, whom, _together(waits)):
        rows = np.concatenate([np.arange(*one) for one in groups])
        ends_at = np.array([last - first for first, last in groups], np.int64).cumsum()
        starts, each = np.append(0, ends_at[:-1]), np.arange(len(rows))
        me, late, waited = who[rows], whom[rows], waits.waited_ns[rows].astype(np.float64)
        load = carried[me] * waited[:, None]
        turn[me] -= 1
        for key in zip(me.tolist(), turn[me].tolist(), strict=True):
            if (ended := ends.pop(key, None)) is not None:
                carried[key[0]] -= ended
        load[each, me] += waited
        load[each, n + waits.axis[rows]] += waited
        low, high = before[rows], np.maximum(np.minimum(until[rows], turn[late]), before[rows])
        length, own = sums[base[late] + high] - sums[base[late] + low], shares[rows]
        own[:, -1] += np.where(length, 0.0, passed_on[rows])  # it waited for nobody that is known
        factor = np.divide(passed_on[rows], length, out=np.zeros(len(rows)), where=length > 0)
        rate, other = load * factor[:, None], late[starts]
        carried[other] += np.add.reduceat(rate, starts)
        for row in np.flatnonzero(factor).tolist():
            ends[int(late[row]), int(low[row])] += rate[row]
        for cause in np.flatnonzero(own.any(axis=0)):
            blame[other, cause] += np.add.reduceat(load * own[:, cause, None], starts)
        direct[late, me] += own.sum(axis=1) * waited
    return blame, direct


def _at_once(
    who: NDArray[np.intp], whom: NDArray[np.intp], together: Sequence[tuple[int, int]]
) -> Iterable[list[tuple[int, int]]]:
    """Return ranges of waits from the last to the first; those of no common rank are in one list."""
    found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    turn: defaultdict[int, int] = defaultdict(int)
    for first, last in reversed(together):
        ranks = [*who[first:last].tolist(), int(whom[first])]
        now = max(turn[rank] for rank in ranks)
        found[now].append((first, last))
        turn.update(dict.fromkeys(ranks, now + 1))
    return (found[now] for now in range(len(found)))


def _together(waits: Waits) -> list[tuple[int, int]]:
    """Return ranges of waits that end at once with the same late rank, each of another rank's."""
    changes = (np.diff(waits.late) != 0) | (np.diff(waits.until_ns) != 0)
    edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(waits.late)]
    found: list[tuple[int, int]] = []
    for first, last in pairwise(edges):
        once = len(set(waits.rank[first:last].tolist())) == last - first
        found += [(first, last)] if once else [(row, row + 1) for row in range(first, last)]
    return found


def _earlier(waits: Waits, of_rank: Mapping[int, NDArray[np.intp]]) -> tuple[Int64Array, Int64Array]:
    """Return of each wait how many of the late rank had ended when it began to be late, and when it came."""
    before, until = np.zeros((2, len(waits.rank)), np.int64)
    for late, rows in of_rank.items():
        ended, ours = waits.until_ns[rows], np.flatnonzero(waits.late == late)
        before[ours] = np.searchsorted(ended, waits.late_since_ns[ours], side="right")
        until[ours] = np.searchsorted(ended, waits.until_ns[ours], side="right")
    return before, until


# The waits of ranks for one another, with what each of the two did since they last met.
#
# Only waiting counts in which a rank neither computes nor moves data. Of several communications that it waits
# for at once, the one that lets it go last has the time.

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
    averaged = set(averaged_steps(run))
    inside = np.zeros(len(point_ns) - 1, np.bool_)
    for window in windows_of(run, rank):
        if window.step in averaged:
            low, high = np.searchsorted(point_ns, (window.start_ns, window.end_ns))
            inside[low:high] = True
    return inside


# Whom ranks wait for, in words: the ranks at the root of waiting, and why.

MOST: Final = 3  # ranks, or stages, that are named; the others together are one sentence

SLOWER: Final = 1.02
"""How many times as long as its peers a rank computes from which on that is said. A convention: less is
within the spread of equal GPUs."""

INDIRECT: Final = 0.1  # share of the waiting that is passed on by others from which on that is said


class HeldUp(NamedTuple):
    """One cause of waiting: a short name, a sentence, and the ns that all ranks wait for it."""

    what: str
    text: str
    cost_ns: float


class _Compute(NamedTuple):
    """How long ranks compute in a step, in ns, and in which pipeline stage they are."""

    ns: dict[int, float]
    stage: dict[int, int]

    def times(self, ranks: Sequence[int], peers: Sequence[int]) -> float:
        """Return how many times as long as *peers* the *ranks* compute; 1 without peers."""
        usual = median([self.ns[rank] for rank in peers]) if peers else 0.0
        return median([self.ns[rank] for rank in ranks]) / usual if usual else 1.0


def held_up(run: Run) -> list[HeldUp]:
    """Return what ranks wait for, the worst first: ranks or stages by name, then all others together.

    In a pipeline every stage waits for others. What the rank in the middle causes is the bubble of the
    pipeline itself; only what a rank causes beyond that is held against it.
    """
    found = roots(run)
    weight = represented(run)
    caused = {one.rank: one.caused_ns / weight[one.rank] for one in found}
    everyone = [caused.get(rank, 0.0) for rank in run.stored_ranks for _ in range(weight[rank])]
    usual = median(everyone) if is_pipelined(run) and everyone else 0.0
    compute = _compute(run)
    said: list[HeldUp] = []
    named: set[int] = set()
    for one in found:
        if len(said) == MOST:
            break
        ranks = _named_with(one.rank, compute, found)
        cost = sum((caused[rank] - usual) * weight[rank] for rank in ranks)
        if one.rank not in named and cost > 0:
            said.append(_sentence(run, [r for r in found if r.rank in ranks], compute, cost))
        named |= set(ranks)
    rest = sum(max(caused[rank] - usual, 0) * weight[rank] for rank in caused if rank not in named)
    if rest:
        said.append(HeldUp("waiting", "ranks come late in turns, none of them much more than others", rest))
    return said


def _compute(run: Run) -> _Compute:
    ns: dict[int, list[int]] = {}
    for row in averaged_rows(run):
        ns.setdefault(row.rank, []).append(row.ns["compute"])
    stage = {rank: stage_of(run, rank) for rank in ns}
    return _Compute({rank: float(median(values)) for rank, values in ns.items()}, stage)


def _named_with(rank: int, compute: _Compute, found: Sequence[Root]) -> list[int]:
    """Return the ranks to name with *rank*: its whole stage, if that computes longer than other stages do."""
    mates = [other for other in compute.ns if compute.stage[other] == compute.stage[rank]]
    others = [other for other in compute.ns if other not in mates]
    alone = compute.times([rank], [other for other in mates if other != rank])
    if others and alone < SLOWER <= compute.times(mates, others):
        return [one.rank for one in found if one.rank in mates]
    return [rank]


def _sentence(run: Run, chosen: Sequence[Root], compute: _Compute, cost_ns: float) -> HeldUp:
    ranks = [one.rank for one in chosen]
    worst = chosen[0]
    cause = max(worst.by_cause, key=worst.by_cause.__getitem__)
    mates = [r for r in compute.ns if compute.stage[r] == compute.stage[worst.rank] and r not in ranks]
    pipelined = len(set(compute.stage.values())) > 1
    weight = represented(run)
    who = f"rank {worst.rank}"
    if pipelined and len(ranks) > 1:
        who = f"stage {compute.stage[worst.rank]} (rank {rank_list(ranks)})"
    elif pipelined and not mates and weight[worst.rank] > 1:  # it stands for all of its stage
        who = f"stage {compute.stage[worst.rank]}"
    others = [r for r in compute.ns if r not in ranks]
    apart = "the other ranks" if len(others) > 1 else "the other rank"
    peers = apart if not pipelined else "others of its stage" if mates else "the other stages"
    text = f"{who} {_why(cause, compute.times(ranks, mates or others), peers)}"
    n = sum(weight[r] for r in set().union(*(one.waiting_ranks for one in chosen)) - set(ranks))
    axis = max(worst.by_axis, key=worst.by_axis.__getitem__)
    text += f": {n} other{'s wait' if n != 1 else ' waits'} for it, most {along(axis)}"
    indirect = 1 - sum(one.direct_ns for one in chosen) / sum(one.caused_ns for one in chosen)
    if indirect >= INDIRECT:
        text += f", {format_share(indirect, '.0f')} of that behind ranks that it makes late"
    return HeldUp(f"held up:{worst.rank}", text, cost_ns)


def _why(cause: str, times: float, peers: str) -> str:
    if cause == "transfer":
        return "takes longer to move data than those that wait for it"
    if cause == "other":
        return "comes late for reasons outside of its kernels (host, launches, data)"
    if times >= SLOWER:
        return f"computes {times:.2f} times as long as {peers}"
    return "computes longer than those that wait for it"
