"""Expands folded runs: gives every rank the spans of the rank that stands for it.

Only three columns differ between a rank and its representative: ``rank``, ``group`` and ``peer``. All others
are shared, so that expanding 512 ranks costs three columns per rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.layout import Group

_Meetings = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]
"""Distinct pairs of a group and a peer, and for each span which of them it names."""


class Expander:
    """Gives ranks the spans of their representatives.

    Args:
        groups: the process groups of the run.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._distinct: tuple[pa.Table, _Meetings] | None = None

    def expand(self, spans: pa.Table, source: int, rank: int) -> pa.Table:
        """Return *spans* of rank *source* as those of *rank*.

        A group becomes the group of the same axis that *rank* belongs to (the n-th of that axis, where there
        are several); a peer becomes the rank as many places further in that group, which is a ring. Where
        the groups are unknown, a group becomes -1 and a peer keeps its distance.
        """
        group, peer, row_of = self._meetings(spans)
        new_group = np.full(len(group), -1, np.int32)
        new_peer = np.where(peer >= 0, peer + (rank - source), -1).astype(np.int32)
        for ours, theirs in self._pairs(source, rank):
            rows = group == ours.id
            new_group[rows] = theirs.id
            moved = rows & np.isin(peer, ours.ranks)
            turn = theirs.ranks.index(rank) - ours.ranks.index(source)
            new_peer[moved] = _turned(ours.ranks, theirs.ranks, turn)[peer[moved]]
        changed = {
            "rank": pa.array(np.full(spans.num_rows, rank, np.int32)),
            "group": pa.array(new_group[row_of]),
            "peer": pa.array(new_peer[row_of]),
        }
        return pa.table([changed.get(name, spans[name]) for name in spans.column_names], schema=spans.schema)

    def _meetings(self, spans: pa.Table) -> _Meetings:
        """Return which groups and peers are named together; remembered for the table that was asked last."""
        known = self._distinct
        if known is None or known[0] is not spans:
            pairs = np.stack([spans["group"].to_numpy(), spans["peer"].to_numpy()]).astype(np.int64)
            codes, row_of = np.unique((pairs[0] << 32) + pairs[1], return_inverse=True)
            low = (codes & 0xFFFFFFFF).astype(np.uint32).astype(np.int32)
            meetings = ((codes - low) >> 32).astype(np.int32), low, row_of
            known = self._distinct = spans, meetings
        return known[1]

    @cached_property
    def _of_rank(self) -> dict[int, dict[str, list[Group]]]:
        """The groups of every rank, by axis; only who expands needs them."""
        found: dict[int, dict[str, list[Group]]] = defaultdict(lambda: defaultdict(list))
        for group in self._groups:
            for rank in group.ranks:
                found[rank][group.axis].append(group)
        return found

    def _pairs(self, source: int, rank: int) -> list[tuple[Group, Group]]:
        """Return the groups of *source*, each with the corresponding group of *rank*."""
        found = self._of_rank[rank]
        return [
            (ours, theirs)
            for axis, groups in self._of_rank[source].items()
            for ours, theirs in zip(groups, found.get(axis, ()), strict=False)
            if len(ours.ranks) == len(theirs.ranks)
        ]


def _turned(ours: Sequence[int], theirs: Sequence[int], turn: int) -> NDArray[np.int32]:
    """Return an array that leads from a rank of *ours* to the one *turn* places further in *theirs*."""
    table = np.full(max(ours) + 1, -1, np.int32)
    table[list(ours)] = np.roll(theirs, -turn)
    return table
