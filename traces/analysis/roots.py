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
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.analysis.activity import axes
from foretrace.traces.analysis.meetings import CAUSES, Did, Waits, followed
from foretrace.traces.analysis.metrics import represented
from foretrace.traces.columns import Int64Array
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
