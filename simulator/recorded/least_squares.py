"""Fits a few factors to times, says how certain they are, and which of them the times do not tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEAST: Final = 0.01
"""Smallest factor: nothing takes less than a hundredth of what was expected."""

LEAST_MISFIT: Final = 0.001
"""Smallest relative error that a model is believed to have."""

TURNS: Final = 4
"""Times that the error of the model is taken from how well it fits, and the fit done again."""

TOLD: Final = 0.5
"""Times tell a factor if they shrink its uncertainty to less than this share. A convention."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Factors by column of the design.

    Attributes:
        values: shape ``(n_columns,)``.
        errors: their standard errors.
        told: whether the times say more of each than was expected before.
    """

    values: Floats
    errors: Floats
    told: NDArray[np.bool_]


def fit_factors(
    design: Floats, times: Floats, expected: Sequence[float], *, misfit: float, power: float
) -> Fit:
    """Return the most likely factors ``x`` with which ``design @ x`` gives *times*.

    Before anything was measured each factor is expected around 1, give or take *expected*. What the times do
    not tell apart stays as near to 1 as they allow, with an error as large as what was expected.

    Args:
        design: predicted seconds by cause; shape ``(n_rows, n_columns)``.
        times: measured seconds; shape ``(n_repetitions, n_rows)``. Of repetitions the median counts, for
            others on the machine make some long.
        expected: spread of each factor; shape ``(n_columns,)``.
        misfit: relative error of the model itself on a row of middling length, at most; less where the times
            follow the model more closely.
        power: errors grow with ``time^(power/2)``: 1 where long rows count more, 2 where all are alike.
    """
    middle = np.median(times, axis=0)
    noise = np.array([median_error(column) for column in times.T])
    scale = np.maximum(middle, middle.mean() * 1e-6) ** power * middle.mean() ** (2 - power)
    spread = np.asarray(expected, np.float64)
    spare = max(len(middle) - len(spread), 1)
    for _ in range(TURNS):
        variance = misfit**2 * scale + noise**2
        weighted = design.T / variance
        inverse = np.linalg.inv(weighted @ design + np.diag(1 / spread**2))
        values = _solved(weighted @ design, weighted @ middle, spread)
        off = (design @ values - middle) ** 2
        misfit = min(max(float((off / scale).sum() / spare) ** 0.5, LEAST_MISFIT), misfit)
    inflation = max(float((off / variance).sum()) / spare, 1.0)
    errors = np.sqrt(np.diag(inverse) * inflation)
    return Fit(values, errors, errors < TOLD * spread)


def _solved(normal: Floats, right: Floats, spread: Floats) -> Floats:
    """Return the most likely factors; those that would be below ``LEAST`` are held there, others refit."""
    values = np.full(len(right), LEAST)
    free = np.ones(len(right), np.bool_)
    while free.any():
        inner = normal[np.ix_(free, free)] + np.diag(1 / spread[free] ** 2)
        held = normal[np.ix_(free, ~free)] @ values[~free]
        values[free] = np.linalg.solve(inner, right[free] - held + 1 / spread[free] ** 2)
        below = free & (values < LEAST)
        if not below.any():
            break
        values[below] = LEAST
        free &= ~below
    return values


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
