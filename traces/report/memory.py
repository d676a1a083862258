"""Memory over time in a report: one curve per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from foretrace.traces.analysis.memory import Curve
from foretrace.traces.columns import Int64Array
from foretrace.traces.pack import Pack
from foretrace.traces.run import Run

_SLICES: Final = 4096  # slices of a long curve; in each, its first point and its highest are kept


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


def _thinned(curve: Curve) -> Int64Array:
    """Return which points to keep: all of a short curve, of a long one two per slice."""
    n_points = len(curve.t_ns)
    if n_points <= 2 * _SLICES:
        return np.arange(n_points)
    number = np.linspace(0, _SLICES, n_points, endpoint=False).astype(np.int64)
    first = np.flatnonzero(np.diff(number, prepend=-1))
    # By slice, and in each by height: the highest comes last.
    by_height = np.lexsort((curve.total_bytes, number))
    highest = by_height[np.append(first[1:], n_points) - 1]
    return np.unique(np.concatenate([first, highest, [n_points - 1]]))
