"""What the fit scripts share: a simplex minimiser without dependencies, and a repeatable hold-out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

HELD_OUT = 0.3
"""Share of the rows that no fit sees."""


def split(n_rows: int, seed: int = 0) -> npt.NDArray[np.bool_]:
    """Return which of *n_rows* rows a fit may see; the rest is held out."""
    return np.random.default_rng(seed).random(n_rows) >= HELD_OUT


def minimize(
    loss: Callable[[Floats], float], start: Sequence[float], *, step: float = 0.25, n_steps: int = 500
) -> tuple[Floats, float]:
    """Return the argument of least *loss* near *start*, and that loss.

    The simplex search of Nelder and Mead 1965 (doi:10.1093/comjnl/7.4.308), restarted once with a smaller
    simplex around what the first found.
    """
    best, _ = _simplex(loss, np.array(start, float), step, n_steps)
    return _simplex(loss, best, step * 0.4, n_steps * 3 // 5)


def _simplex(
    loss: Callable[[Floats], float], start: Floats, step: float, n_steps: int
) -> tuple[Floats, float]:
    points = [start, *(start + step * axis for axis in np.eye(len(start)))]
    losses = [loss(point) for point in points]
    for _ in range(n_steps):
        order = np.argsort(losses)
        points, losses = [points[i] for i in order], [losses[i] for i in order]
        if losses[-1] - losses[0] < 1e-6:
            break
        centre = np.mean(points[:-1], axis=0)
        reflected = 2 * centre - points[-1]
        value = loss(reflected)
        if value < losses[0]:
            further = 3 * centre - 2 * points[-1]
            better = loss(further)
            points[-1], losses[-1] = (further, better) if better < value else (reflected, value)
        elif value < losses[-2]:
            points[-1], losses[-1] = reflected, value
        else:
            nearer = (centre + points[-1]) / 2
            value = loss(nearer)
            if value < losses[-1]:
                points[-1], losses[-1] = nearer, value
            else:
                points = [points[0], *((points[0] + point) / 2 for point in points[1:])]
                losses = [losses[0], *map(loss, points[1:])]
    least = int(np.argmin(losses))
    return points[least], losses[least]


def log_error(predicted: Floats, measured: Floats) -> Floats:
    """Return ``ln(predicted / measured)`` of each row."""
    found: Floats = np.log(predicted / measured)
    return found
