"""Memory over time: what each rank holds, as one curve, and what that is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from foretrace.traces.columns import Int64Array, int64, labels
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Memory that a rank holds. Arrays have shape ``(n_points,)``; a value holds until the next point."""

    rank: int  # global rank
    t_ns: Int64Array  # times, ascending
    total_bytes: Int64Array  # all that is held
    categories: Mapping[str, Int64Array]  # bytes by category, for those that make up the total

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


def _held(points: Int64Array, t_ns: Int64Array, held: Int64Array, rows: np.ndarray[Any, Any]) -> Int64Array:
    """Return what one category holds at each of *points*: its latest value, 0 before the first."""
    order = rows[np.argsort(t_ns[rows], kind="stable")]
    position = np.searchsorted(t_ns[order], points, side="right") - 1
    found: Int64Array = np.where(position >= 0, held[order[position.clip(0)]], 0)
    return found
