"""Fits a few factors to times, says how certain they are, and which of them the times cannot tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CERTAIN: Final = 0.5
"""Standard error over value from which on a factor counts as not identified. A convention."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Factors by column of the design, their standard errors, and which columns had to share one.

    Attributes:
        values: factor of each column; shape ``(n_columns,)``.
        errors: standard error of each; equal for columns that share a factor.
        tied: columns that share a factor because the times do not tell them apart.
    """

    values: Floats
    errors: Floats
    tied: tuple[tuple[int, ...], ...]


def fit_factors(design: Floats, times: Floats, ties: Sequence[Sequence[Sequence[int]]], power: float) -> Fit:
    """Return the factors ``x`` for which ``design @ x`` is nearest to *times*.

    The first of *ties* is taken with which every factor is above zero and certain; the last one if none is.
    Of repetitions the median counts, for others on the machine make some long. The standard error has two
    parts: how badly the model fits the medians, and how much the
    factors differ from one repetition to the next.

    Args:
        design: predicted seconds by cause; shape ``(n_rows, n_columns)``.
        times: measured seconds; shape ``(n_repetitions, n_rows)``.
        ties: each a way to put columns together under one factor, from the freest to a single group.
        power: times count with ``1 / time^power``: 1 where long ones matter more, 2 where all are alike.
    """
    found = None
    for groups in ties:
        found = _fit(design, times, groups, power)
        certain = found.errors <= CERTAIN * found.values
        if (found.values > 0).all() and certain.all():
            return found
    if found is None:
        raise ValueError("no way to put columns together was given")
    return found


def median_error(values: Floats) -> float:
    """Return the standard error of the median of *values*, out of their quartiles.

    Half of a normal distribution lies within 0.6745 standard deviations, and its median is known 1.2533
    times worse than its mean.

    >>> round(median_error(np.array([1.0, 2.0, 3.0, 4.0, 5.0])), 3)
    0.831
    """
    if len(values) < 2:
        return 0.0
    low, high = np.quantile(values, (0.25, 0.75))
    return float(1.2533 * (high - low) / (2 * 0.6745) / len(values) ** 0.5)


def _fit(design: Floats, times: Floats, groups: Sequence[Sequence[int]], power: float) -> Fit:
    """Return the fit with one factor per group of columns."""
    together = np.stack([design[:, list(group)].sum(axis=1) for group in groups], axis=1)
    middle = np.median(times, axis=0)
    weight = np.sqrt(1 / np.maximum(middle, middle.max() * 1e-6) ** power)
    solve = np.linalg.pinv(together * weight[:, None])
    one = solve @ (middle * weight)
    misfit = (together @ one - middle) * weight
    spare = len(middle) - len(groups)
    variance = float(misfit @ misfit) / spare if spare > 0 else 0.0
    squared = variance * np.diag(solve @ solve.T)
    if len(times) > 1:
        each = np.array([solve @ (row * weight) for row in times])
        squared = squared + np.array([median_error(column) ** 2 for column in each.T])
    values, errors = np.empty(design.shape[1]), np.empty(design.shape[1])
    for group, value, error in zip(groups, one, np.sqrt(squared), strict=True):
        values[list(group)], errors[list(group)] = value, error
    return Fit(values, errors, tuple(tuple(group) for group in groups if len(group) > 1))
