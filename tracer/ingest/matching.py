"""Numbers the communication of each rank so that ranks can be joined, and checks that they fit together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.columns import BoolArray, Int64Array, factorized, int64, is_one_of, labels
from foretrace.traces.report.format import format_share

SYMMETRIC: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that end at the same moment on all ranks: nobody is done before everybody has contributed."""

FIT: Final = 0.9
"""Share of the collectives of two ranks that must have been running at the same time."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Collectives of one rank in one group, in the order of their numbers."""

    sequence: Int64Array
    kind: tuple[str, ...]
    start_ns: Int64Array
    end_ns: Int64Array


def numbered_in_order(table: pa.Table) -> pa.Table:
    """Return *table* with communication numbered in order of time: by group; p2p by pair and direction."""
    sequence = int64(table, "sequence").copy()
    start, group = int64(table, "start_ns"), int64(table, "group")
    peer, rank = int64(table, "peer"), int64(table, "rank")
    collective = is_one_of(table, "category", ("collective",)) & (group >= 0)
    p2p = is_one_of(table, "category", ("p2p",)) & (peer >= 0)
    sending = is_one_of(table, "kind", ("send",)).astype(np.int64)
    _number(sequence, np.flatnonzero(collective), start, [group])
    _number(
        sequence, np.flatnonzero(p2p), start, [group, np.minimum(rank, peer), np.maximum(rank, peer), sending]
    )
    return table.set_column(table.column_names.index("sequence"), "sequence", pa.array(sequence))


def collectives(table: pa.Table, kinds: tuple[str, ...] = SYMMETRIC) -> dict[int, Ends]:
    """Return the numbered collectives of *kinds* in *table*, by group."""
    chosen: BoolArray = is_one_of(table, "category", ("collective",)) & is_one_of(table, "kind", kinds)
    rows = np.flatnonzero(chosen & (int64(table, "sequence") >= 0) & (int64(table, "group") >= 0))
    picked = table.take(rows)
    group, sequence, start = (int64(picked, name) for name in ("group", "sequence", "start_ns"))
    end = start + int64(picked, "duration_ns")
    codes, names = labels(picked, "kind")
    found = {}
    for number in np.unique(group):
        of = np.flatnonzero(group == number)
        of = of[np.argsort(sequence[of], kind="stable")]
        found[int(number)] = Ends(sequence[of], tuple(names[code] for code in codes[of]), start[of], end[of])
    return found


def unmatched_ranks(tables: dict[int, pa.Table]) -> dict[int, str]:
    """Return the ranks whose collectives do not fit those of the lowest rank of their groups, and why.

    Two ranks fit if the collectives of equal number are of equal kind and, after the typical difference of
    the clocks, were running at the same time.
    """
    found: dict[int, str] = {}
    first: dict[int, tuple[int, Ends]] = {}
    for rank in sorted(tables):
        for group, ends in collectives(tables[rank]).items():
            if group not in first:
                first[group] = (rank, ends)
            elif reason := _misfit(first[group][1], ends):
                found[rank] = (
                    f"its collectives cannot be joined with those of rank {first[group][0]}: {reason}"
                )
    return found


def shared(a: Ends, b: Ends) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows of *a* and of *b* that have the same number."""
    _, left, right = np.intersect1d(a.sequence, b.sequence, assume_unique=False, return_indices=True)
    return left, right


def _misfit(a: Ends, b: Ends) -> str:
    """Return why two ranks do not fit, "" if they do."""
    left, right = shared(a, b)
    if not len(left):
        return "no number in common"
    kinds = [a.kind[i] == b.kind[j] for i, j in zip(left.tolist(), right.tolist(), strict=True)]
    if not all(kinds):
        return f"{kinds.count(False)} of {len(kinds)} are of different kinds"
    offset = int(np.median(a.end_ns[left] - b.end_ns[right]))
    together = (b.start_ns[right] + offset <= a.end_ns[left]) & (a.start_ns[left] <= b.end_ns[right] + offset)
    if together.mean() < FIT:
        return f"only {format_share(together.mean(), '.0f')} were running at the same time"
    return ""


def _number(sequence: Int64Array, rows: NDArray[np.intp], start: Int64Array, keys: list[Int64Array]) -> None:
    """Write into *sequence* the place of each of *rows* in time among those with equal *keys*."""
    if not len(rows):
        return
    key = factorized(*(k[rows] for k in keys))
    order = np.lexsort((start[rows], key))
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    sizes = np.diff(first, append=len(rows))
    sequence[rows[order]] = np.arange(len(rows)) - np.repeat(first, sizes)
