"""Memory over time in a report: one curve per row, and what its highest point is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from foretrace.traces.columns import Int64Array, int64, labels
from foretrace.traces.pack import Pack
from foretrace.traces.run import Run

WHOLE: Final = ("total", "allocated")
"""Categories that are the sum of others; the first that a rank has is its curve."""

_PEAKS: Final = ("peak", "peak_at_most")
"""Categories that say what was reached within a step, not what is held."""

_OUTSIDE: Final = {
    "total": ("total", "allocated", *_PEAKS),
    "allocated": ("total", "allocated", "reserved", *_PEAKS),
}
"""Categories that are not part of such a sum; what an allocator reserves exceeds what is allocated."""

_SLICES: Final = 4096
"""Slices of a long curve; in each, its first point and its highest are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Memory that a rank holds. Arrays have shape ``(n_points,)``; a value holds until the next point.

    Attributes:
        rank: global rank.
        t_ns: times, ascending.
        total_bytes: all that is held.
        categories: bytes by category, for those that make up the total.
    """

    rank: int
    t_ns: Int64Array
    total_bytes: Int64Array
    categories: Mapping[str, Int64Array]

    def peak(self, from_ns: int, until_ns: int) -> tuple[int, int]:
        """Return time and bytes of the highest point that holds at any moment of the given interval."""
        ends = np.append(self.t_ns[1:], np.iinfo(np.int64).max)
        inside = np.flatnonzero((ends > from_ns) & (self.t_ns < until_ns))
        if not len(inside):
            return from_ns, 0
        point = inside[self.total_bytes[inside].argmax()]
        return int(self.t_ns[point]), int(self.total_bytes[point])

    def parts_at(self, t_ns: int) -> dict[str, int]:
        """Return bytes by category at *t_ns*, largest first, without those that hold nothing."""
        point = int(np.searchsorted(self.t_ns, t_ns, side="right")) - 1
        held = {name: int(values[point]) for name, values in self.categories.items() if point >= 0}
        return {name: held[name] for name in sorted(held, key=lambda name: -held[name]) if held[name]}


def held_where(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Return what the curves of *runs*, which the page calls *names*, are of, in words.

    A recording without a GPU has the resident set of its processes, libraries included: more than the tensors
    that a prediction counts.
    """
    held = [
        "held by the process, libraries included" if _is_resident(run) else "held on the device"
        for run in runs
    ]
    if len(set(held)) == 1:
        return held[0]
    return "; ".join(f"{name}: {what}" for name, what in zip(names, held, strict=True))


def _is_resident(run: Run) -> bool:
    device = (run.info.cluster or {}).get("device")
    return run.info.origin == "recorded" and isinstance(device, Mapping) and device.get("kind") == "cpu"


def curves(run: Run, ranks: Sequence[int]) -> list[Curve]:
    """Return the curve of each of *ranks* that the run has memory of."""
    table = run.memory()
    if not table.num_rows:
        return []
    of_row, t_ns, held = (int64(table, name) for name in ("rank", "t_ns", "bytes"))
    codes, names = labels(table, "category")
    found = []
    for rank in ranks:
        rows = np.flatnonzero(of_row == rank)
        if not len(rows):
            continue
        points = np.unique(t_ns[rows])
        by_name = {
            names[code]: _held(points, t_ns, held, rows[codes[rows] == code])
            for code in np.unique(codes[rows])
        }
        whole = next((name for name in WHOLE if name in by_name), None)
        outside = _OUTSIDE.get(whole or "", ())
        parts = {name: values for name, values in by_name.items() if name not in outside}
        total = by_name[whole] if whole is not None else np.sum(list(parts.values()), axis=0)
        found.append(Curve(rank=rank, t_ns=points, total_bytes=total, categories=parts))
    return found


def pack_memory(
    found: Sequence[Curve], place: Mapping[int, int], pack: Pack, prefix: str
) -> list[dict[str, Any]]:
    """Add *found* to *pack*; return where in it each row's curve is.

    Args:
        found: the curves.
        place: row of each rank.
        pack: what the page gets.
        prefix: prefix of the columns' names.
    """
    series, times, sizes, done = [], [], [], 0
    for curve in found:
        kept = _thinned(curve)
        times.append(curve.t_ns[kept])
        sizes.append(curve.total_bytes[kept])
        series.append({"row": place[curve.rank], "from": done, "to": done + len(kept)})
        done += len(kept)
    for name, parts in (("memory.t", times), ("memory.bytes", sizes)):
        pack.add(f"{prefix}.{name}", np.concatenate([np.zeros(0), *parts]).astype(np.float64))
    return series


def _held(points: Int64Array, t_ns: Int64Array, held: Int64Array, rows: np.ndarray[Any, Any]) -> Int64Array:
    """Return what one category holds at each of *points*: its latest value, 0 before the first."""
    order = rows[np.argsort(t_ns[rows], kind="stable")]
    position = np.searchsorted(t_ns[order], points, side="right") - 1
    found: Int64Array = np.where(position >= 0, held[order[position.clip(0)]], 0)
    return found


def _thinned(curve: Curve) -> Int64Array:
    """Return which points to keep: all of a short curve, of a long one two per slice."""
    n_points = len(curve.t_ns)
    if n_points <= 2 * _SLICES:
        return np.arange(n_points)
    number = np.linspace(0, _SLICES, n_points, endpoint=False).astype(np.int64)
    first = np.flatnonzero(np.diff(number, prepend=-1))
    by_height = np.lexsort((curve.total_bytes, number))
    highest = by_height[np.append(first[1:], n_points) - 1]
    return np.unique(np.concatenate([first, highest, [n_points - 1]]))
