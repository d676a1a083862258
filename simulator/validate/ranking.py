"""Whether predictions choose the right layout: rank correlation, and what following them would cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import TypeVar

One = TypeVar("One")


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Return Kendall's tau-b of two orders of the same things; None if one of them is all ties.

    Reference: Kendall 1945, "The treatment of ties in ranking problems", Biometrika 33.

    >>> kendall_tau([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.3333333333333333
    """
    signs = [
        (_sign(p - q), _sign(m - n))
        for (p, m), (q, n) in combinations(zip(predicted, measured, strict=True), 2)
    ]
    agreeing = sum(one * other for one, other in signs)
    pairs = math.sqrt(sum(one * one for one, _ in signs) * sum(other * other for _, other in signs))
    return agreeing / pairs if pairs else None


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return by how much the layout that is predicted to be fastest is slower than the fastest, as a share.

    Of several that are predicted to be equally fast, the mean counts.

    >>> regret([1.0, 2.0], [15.0, 10.0])
    0.5
    """
    fastest = min(predicted)
    chosen = fmean(m for p, m in zip(predicted, measured, strict=True) if p == fastest)
    return chosen / min(measured) - 1


def quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """Return the value below which *share* of the weight of pairs ``(value, weight)`` lies.

    >>> quantile([(3.0, 1.0), (1.0, 1.0), (2.0, 2.0)], 0.5)
    2.0
    """
    ordered = sorted(weighted)
    left = share * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        left -= weight
        if left <= 0:
            return value
    return ordered[-1][0]


def evenly(found: Sequence[One], n: int) -> list[One]:
    """Return *n* of *found*, or all if there are fewer: the middle of as many equal parts.

    >>> evenly(range(9), 3)
    [1, 4, 7]
    """
    n = min(n, len(found))
    return [found[int((at + 0.5) * len(found) / n)] for at in range(n)]


def _sign(difference: float) -> int:
    return (difference > 0) - (difference < 0)
