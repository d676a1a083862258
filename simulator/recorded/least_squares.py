"""Fits a few factors to times, says how certain they are, and which of them the times do not tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEAST_MISFIT: Final = 0.001
"""Smallest relative error that a model is believed to have."""

TURNS: Final = 4
"""Times that the error of the model is taken from how well it fits, and the fit done again."""

TOLD: Final = 0.5
"""Times tell a factor if they shrink its uncertainty to less than this share. A convention."""

STEPS: Final = 50
LONGEST_STEP: Final = 1.0
SETTLED: Final = 1e-9
"""Most steps of Newton's method, the longest change of a logarithm in one, and when it has settled."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Factors by column of the design.

    Attributes:
        values: shape ``(n_columns,)``.
        errors: standard errors of *values*; same shape.
        told: whether the times say more of each than was expected before.
        held: whether the times hardly depend on it, so that it was held at 1.
    """

    values: Floats
    errors: Floats
    told: NDArray[np.bool_]
    held: NDArray[np.bool_]


def fit_factors(
    design: Floats, times: Floats, expected: Sequence[float], *, misfit: float, power: float
) -> Fit:
    """Return the most likely factors ``x`` with which ``design @ x`` gives *times*.

    Before anything was measured each factor is expected to be 1, give or take a factor of *expected*, twice
    as long as likely as half as long: its logarithm is normal. What the times do not tell apart stays as near
    to 1 as they allow. A factor that they would not tell even if all others were known is held at 1.

    Args:
        design: predicted seconds by cause; shape ``(n_rows, n_columns)``.
        times: measured seconds; shape ``(n_repetitions, n_rows)``. Of repetitions the median counts, for
            others on the machine make some long.
        expected: factor by which each may be off, above 1; shape ``(n_columns,)``.
        misfit: relative error of the model itself on a row of middling length, at most; less where the times
            follow the model more closely.
        power: errors grow with ``time^(power/2)``: 1 where long rows count more, 2 where all are alike.
    """
    middle = np.median(times, axis=0)
    noise = np.array([median_error(column) for column in times.T])
    # A row of next to no time must not count for ever so much: it has a floor, a millionth of the mean.
    scale = np.maximum(middle, middle.mean() * 1e-6) ** power * middle.mean() ** (2 - power)
    spread = np.log(np.asarray(expected, np.float64))
    spare = max(len(middle) - len(spread), 1)
    slower = max(
        float(middle.sum() / design.sum()), 1.0
    )  # on a machine that is slower as a whole, parts are longer
    for _ in range(TURNS):
        # What no factor explains, and what the repetitions scatter by.
        variance = misfit**2 * scale + noise**2
        # A factor counts as free if times alone, all others known, would tell it to within ``TOLD`` of its
        # spread.
        free = spread**2 * ((slower * design.T) ** 2 / variance).sum(axis=1) > 1 / TOLD**2
        values, inverse = _solved(design, middle, variance, np.where(free, spread, 0.0))
        off = (design @ values - middle) ** 2
        # Only downward: the model is believed to be as good as it fits, never worse than was said.
        misfit = min(max(float((off / scale).sum() / spare) ** 0.5, LEAST_MISFIT), misfit)
    # Errors grow if the rest is larger than was expected of it, and never shrink.
    inflation = max(float((off / variance).sum()) / spare, 1.0)
    # Nothing is known worse than it was before the measurement.
    errors = np.where(free, np.minimum(np.sqrt(np.diag(inverse) * inflation), spread), spread)
    return Fit(values, errors * values, errors < TOLD * spread, ~free)


def _solved(design: Floats, times: Floats, variance: Floats, spread: Floats) -> tuple[Floats, Floats]:
    """Return the most likely factors, and the covariance of their logarithms; *spread* 0 holds one at 1."""
    n = len(spread)
    free = spread > 0
    logs, inner = np.zeros(n), np.zeros((n, n))
    if not free.any():
        return np.ones(n), inner
    prior = np.diag(1 / spread[free] ** 2)

    def cost(at: Floats) -> float:
        left = design @ np.exp(at) - times
        return float((left**2 / variance).sum() + (at[free] ** 2 / spread[free] ** 2).sum())

    for _ in range(STEPS):
        values = np.exp(logs)
        slope = (design * values)[:, free]
        normal = slope.T @ (slope / variance[:, None]) + prior
        right = slope.T @ ((times - design @ values) / variance) - prior @ logs[free]
        step = np.zeros(n)
        # Cut off: far from the solution the slope says little.
        step[free] = np.clip(np.linalg.solve(normal, right), -LONGEST_STEP, LONGEST_STEP)
        # Halved until it helps: Newton's full step may overshoot.
        while cost(logs + step) > cost(logs) and np.abs(step).max() > SETTLED:
            step /= 2
        logs = logs + step
        if np.abs(step).max() <= SETTLED:
            break
    inner[np.ix_(free, free)] = np.linalg.inv(normal)
    return np.exp(logs), inner


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
