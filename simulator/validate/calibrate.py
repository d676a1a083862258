"""Calibration on one measured step: how slow a model computes and communicates on a machine, from one time.

Computing and communicating are each taken to be off by an unknown factor, and every run by something of its
own beside that. One time cannot tell these apart; how far each is usually off, and what share of the step it
has, says how much of the difference each gets (Gaussian-process regression, or kriging, with one observation:
Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", section 2.2).
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from foretrace.simulator.validate.curve import Curve

OUTLIER: Final = 2.0
"""Standard deviations beyond which a difference is taken to be no larger: of what is off by more, most is a
cold or disturbed run, or a setting that was not said. Between 1.5 and 3 the score is the same."""


class Factors(NamedTuple):
    """How many times as long computing and communicating take as predicted."""

    compute: float
    communication: float


class Spreads(NamedTuple):
    """Standard deviations of ``ln(predicted / measured)``, before anything was measured.

    Attributes:
        compute: spread of the factor on compute that all runs of a model and precision on one machine share.
        communication: spread of the factor on communication that they share.
        run: spread of what is peculiar to one run.
    """

    compute: float
    communication: float
    run: float


SPREADS: Final = Spreads(compute=0.045, communication=0.5, run=0.05)
"""With which other runs of a model are predicted best, by ``checked`` of ``one_run``."""


LARGEST: Final = 4.0
"""Most by which factors are larger, in logarithms, than those of a step that is linear in them."""

HALVINGS: Final = 40
"""Halvings of the range up to ``LARGEST``; they leave 4e-12, far below what a time is measured to."""


def fit(curve: Curve, measured_s: float, spreads: Spreads = SPREADS) -> Factors:
    """Return the factors to expect of a model on a machine, if a run with *curve* took *measured_s*.

    Only what runs are likely to share is in them: with them the run itself is predicted nearer, not exactly.
    Their logarithms are in the ratio of a step that is linear in them, and as large as the curve needs.

    >>> computes = Curve((1.0,) * 5)
    >>> [round(factor, 3) for factor in fit(computes, 1.1, Spreads(0.05, 0.3, 0.05))]
    [1.049, 1.0]
    """
    variance = _variance(curve, spreads)
    limit = OUTLIER * usual_spread(curve, spreads)
    slower = max(-limit, min(limit, math.log(measured_s / curve.at())))
    shared_s = curve.at() * math.exp(slower * (1 - spreads.run**2 / variance))
    along = [
        spread**2 * share / variance * slower for spread, share in zip(spreads, _shares(curve), strict=False)
    ]

    def factors(size: float) -> Factors:
        return Factors(*(math.exp(size * one) for one in along))

    low, high = 0.0, LARGEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found_s = curve.at(**factors(middle)._asdict())
        low, high = (middle, high) if (found_s < shared_s) == (slower > 0) else (low, middle)
    return factors((low + high) / 2)


def errors(curve: Curve, spreads: Spreads = SPREADS) -> Factors:
    """Return the standard errors of ``ln`` of the factors that ``fit`` finds on a run with *curve*."""
    variance = _variance(curve, spreads)
    compute, communication = (
        math.sqrt(spread**2 * (1 - (spread * share) ** 2 / variance))
        for spread, share in zip(spreads, _shares(curve), strict=False)
    )
    return Factors(compute, communication)


def usual_spread(curve: Curve, spreads: Spreads = SPREADS) -> float:
    """Return the standard deviation of ``ln(predicted / measured)`` to expect of a run with *curve*."""
    return math.sqrt(_variance(curve, spreads))


def _variance(curve: Curve, spreads: Spreads) -> float:
    """Return the variance of ``ln(predicted / measured)`` of a run with *curve*."""
    compute, communication = _shares(curve)
    return (spreads.compute * compute) ** 2 + (spreads.communication * communication) ** 2 + spreads.run**2


def _shares(curve: Curve) -> tuple[float, float]:
    """Return by how many per cent a step takes longer if computing, or communicating, takes 1 % longer."""
    shorter, longer = (curve.at(communication=ratio) / curve.at() for ratio in (0.5, 2.0))
    communication = (longer - shorter) / 1.5
    return 1 - communication, communication
