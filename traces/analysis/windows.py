"""The window of each optimizer step on each rank: the time that the shares of a step add up to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from foretrace.traces.columns import BoolArray, bounds, int64, is_one_of
from foretrace.traces.run import Run
from foretrace.traces.timeline import MARKS


class Window(NamedTuple):
    """One optimizer step on one rank, from ``start_ns`` to ``end_ns``; ``step`` -1 if it has no number."""

    rank: int
    step: int
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """Length of the window."""
        return self.end_ns - self.start_ns


def windows(run: Run) -> list[Window]:
    """Return the windows of the stored ranks, by rank and step; kept with the run.

    They are the rows of category ``step``. A rank without such rows gets the windows of the others, from the
    first start to the last end. If no rank has any, a step is as long as its spans, over all ranks, and
    spans without a step number make one step if there is no other. Windows without length are left out.
    """
    return run.derived(_windows)


def windows_of(run: Run, rank: int) -> Sequence[Window]:
    """Return the windows of the stored *rank*, by step."""
    return run.derived(_by_rank).get(rank, ())


def extent_ns(run: Run, step: int) -> tuple[int, int]:
    """Return when the first rank begins *step*, and how long it is from there to its last end, in ns."""
    own = [window for window in windows(run) if window.step == step]
    first = min(window.start_ns for window in own)
    return first, max(window.end_ns for window in own) - first


def _by_rank(run: Run) -> dict[int, list[Window]]:
    return {rank: list(own) for rank, own in groupby(windows(run), key=lambda window: window.rank)}


def _windows(run: Run) -> list[Window]:
    marked = {rank: run.once(_marked, rank) for rank in run.stored_ranks}
    if not any(marked.values()):
        numbered = {rank: run.once(_worked, rank) for rank in run.stored_ranks}
        steps = {step for extents in numbered.values() for step in extents}
        shared = _hull(
            [{s: e for s, e in extents.items() if s >= 0 or steps == {-1}} for extents in numbered.values()]
        )
    else:
        shared = _hull(list(marked.values()))
    return [
        Window(rank, step, start, end)
        for rank in run.stored_ranks
        for step, (start, end) in sorted((marked[rank] or shared).items())
        if end > start
    ]


def _marked(table: pa.Table) -> dict[int, tuple[int, int]]:
    return _extents(table, is_one_of(table, "category", ("step",)))


def _worked(table: pa.Table) -> dict[int, tuple[int, int]]:
    return _extents(table, ~is_one_of(table, "category", MARKS))


def _extents(table: pa.Table, chosen: BoolArray) -> dict[int, tuple[int, int]]:
    """Return first start and last end by step of the *chosen* rows."""
    step = int64(table, "step")[chosen]
    start, end = (edge[chosen] for edge in bounds(table))
    found, group = np.unique(step, return_inverse=True)
    first = np.full(len(found), np.iinfo(np.int64).max)
    last = np.full(len(found), np.iinfo(np.int64).min)
    np.minimum.at(first, group, start)
    np.maximum.at(last, group, end)
    return {int(s): (int(a), int(b)) for s, a, b in zip(found, first, last, strict=True)}


def _hull(extents: list[dict[int, tuple[int, int]]]) -> dict[int, tuple[int, int]]:
    """Return by step the first start and the last end over all ranks."""
    hull: dict[int, tuple[int, int]] = {}
    for rank_extents in extents:
        for step, (start, end) in rank_extents.items():
            low, high = hull.get(step, (start, end))
            hull[step] = (min(low, start), max(high, end))
    return hull
