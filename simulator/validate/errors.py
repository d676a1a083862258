"""Between which shares of a prediction measured figures lie, by class of layout and by GPU."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from foretrace.simulator.validate.ranking import quantile
from foretrace.simulator.validate.scores import Scored

LIKELY: Final = (0.1, 0.9)
"""Quantiles between which a measured figure is likely to be: 8 in 10."""


def errors(rows: Iterable[tuple[Scored, tuple[str, str]]]) -> dict[str, dict[str, float]]:
    """Return how far off each class of *rows* is, each class on each GPU, and all of them.

    ``low`` and ``high`` are the quantiles ``LIKELY`` of measured over predicted. Families count the same,
    however many rows they have.

    Args:
        rows: each with the class of its layout and its GPU.
    """
    found: dict[str, list[Scored]] = defaultdict(list)
    for row, (name, device) in rows:
        for what in ("all", name, f"{name} · {device}"):
            found[what].append(row)
    return {name: _errors(same) for name, same in sorted(found.items())}


def _errors(rows: Sequence[Scored]) -> dict[str, float]:
    sizes = Counter(row.family for row in rows)
    weighted = [(-row.log_ratio, 1 / sizes[row.family]) for row in rows]
    low, high = (math.exp(quantile(weighted, share)) for share in LIKELY)
    return {"families": len(sizes), "rows": len(rows), "low": low, "high": high}
