"""Expands folded runs: gives every rank the spans of the rank that stands for it.

Only three columns differ between a rank and its representative: ``rank``, ``group`` and ``peer``. All others
are shared, so that expanding 512 ranks costs three columns per rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from traces.layout import Group


class Expander:
    """Gives ranks the spans of their representatives.

    Args:
        groups: the process groups of the run.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._of_rank: dict[int, dict[str, list[Group]]] = defaultdict(lambda: defaultdict(list))
        for group in groups:
            for rank in group.ranks:
                self._of_rank[rank][group.axis].append(group)

    def expand(self, spans: pa.Table, source: int, rank: int) -> pa.Table:
        """Return *spans* of rank *source* as those of *rank*.

        A group becomes the group of the same axis that *rank* belongs to (the n-th of that axis, where there
        are several); a peer becomes the rank as many places further in that group, which is a ring. Where
        the groups are unknown, a group becomes -1 and a peer keeps its distance.
        """
        n_spans = spans.num_rows
        group = spans["group"].to_numpy()
        peer = spans["peer"].to_numpy()
        new_group = np.full(n_spans, -1, np.int32)
        new_peer = np.where(peer >= 0, peer + (rank - source), -1).astype(np.int32)
        for ours, theirs in self._pairs(source, rank):
            rows = group == ours.id
            new_group[rows] = theirs.id
            moved = rows & np.isin(peer, ours.ranks)
            turn = theirs.ranks.index(rank) - ours.ranks.index(source)
            new_peer[moved] = _turned(ours.ranks, theirs.ranks, turn)[peer[moved]]
        changed = {
            "rank": pa.array(np.full(n_spans, rank, np.int32)),
            "group": pa.array(new_group),
            "peer": pa.array(new_peer),
        }
        return pa.table([changed.get(name, spans[name]) for name in spans.column_names], schema=spans.schema)

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
