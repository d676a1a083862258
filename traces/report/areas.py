"""Where time becomes area: in every picture a colour covers as much as its share of the time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.report.cells import RankStep

_ROUNDING = 1e-6  # share of a bin that is the rounding of its edges, not time


def share_of_bins(done: RankStep, edges_ns: NDArray[np.float64], n_kinds: int) -> NDArray[np.float32]:
    """Return how much of each bin is of each kind: shape ``(n_bins, n_kinds + 1)``, rows that add up to 1.

    Args:
        done: what a rank does; its compute lane is without gaps.
        edges_ns: the edges of the bins, of equal width.
        n_kinds: of the run; the last column is the part of a bin that lies outside of the step of this rank.
    """
    start, until = done.compute.start_ns, done.compute.end_ns[-1:]
    n_bins = len(edges_ns) - 1
    points = np.sort(np.concatenate([edges_ns, start, until]))
    points = points[(points >= edges_ns[0]) & (points <= edges_ns[-1])]
    at = points[:-1]
    cell = np.searchsorted(start, at, side="right") - 1
    outside = (cell < 0) | (at >= until)
    kind = np.where(outside, n_kinds, done.kind[cell])
    place = (np.searchsorted(edges_ns, at, side="right") - 1).clip(0, n_bins - 1)
    width = (edges_ns[-1] - edges_ns[0]) / n_bins
    total = np.bincount(
        place * (n_kinds + 1) + kind, np.diff(points) / width, minlength=n_bins * (n_kinds + 1)
    )
    found: NDArray[np.float32] = total.reshape(n_bins, n_kinds + 1).astype(np.float32)
    return found


def painted(shares: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """Return the one kind that each bin is painted as, shape ``(n_rows, n_bins)``.

    A bin goes to the kind in it that has been painted least so far, compared to its time. So in no stretch
    of a row is a kind off by more than a bin or two, however little of each bin it has; always to paint what
    covers most of a bin would never show what covers a third of every one.

    Args:
        shares: how much of each bin is of each kind, shape ``(n_bins, n_rows, n_kinds)``.
    """
    n_bins, n_rows, n_kinds = shares.shape
    owed = np.zeros((n_rows, n_kinds))
    rows = np.arange(n_rows)
    found = np.empty((n_rows, n_bins), np.int64)
    for place in range(n_bins):
        owed += shares[place]
        chosen = np.where(shares[place] > _ROUNDING, owed, -np.inf).argmax(axis=1)
        owed[rows, chosen] -= 1
        found[:, place] = chosen
    return found
