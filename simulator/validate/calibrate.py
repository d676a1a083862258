"""Calibration on one run: how slow a machine computes and communicates, from a single measured step."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from simulator.validate.curve import Curve

COMPUTE_SPREAD: Final = 0.15
COMMUNICATION_SPREAD: Final = 0.4
"""How far ``ln`` of each factor is expected to be from 0, before anything was measured. A convention: times
of communication are trusted less, as ``foretrace validate kernels`` and ``collectives`` find. Only the ratio
of the two has an effect."""

MACHINE_SPREAD: Final = 0.06
RUN_SPREAD: Final = 0.07
"""How far ``ln(predicted / measured)`` of a machine is off, and of a run from its machine: 1.48 median
deviations, over 21 machines and 340 published runs, a few of each family."""

TRUST: Final = MACHINE_SPREAD**2 / (MACHINE_SPREAD**2 + RUN_SPREAD**2)
"""Share of the error of one run that its machine is to blame for (the regression of one on the other)."""

STEPS: Final = 400
WIDEST: Final = 4.0
"""The ratio of the two factors is looked for between ``1 / WIDEST`` and ``WIDEST``, in so many steps."""


class Factors(NamedTuple):
    """How many times as long computing and communicating take as predicted."""

    compute: float
    communication: float


def fit(curve: Curve, measured_s: float) -> Factors:
    """Return the most likely factors of a machine on which *curve* was *measured_s*.

    One time cannot tell two factors apart; among those pairs that give it, the pair is chosen that is
    nearest to what was expected. Where communication is hidden, computing gets all of the blame. Part of the
    error is of that run alone, and so the factors go ``TRUST`` of the way.
    """
    found = []
    for step in range(-STEPS, STEPS + 1):
        ratio = WIDEST ** (step / STEPS)
        compute = measured_s / curve.at(communication=ratio)
        factors = Factors(compute, compute * ratio)
        found.append((_surprise(factors), factors))
    return Factors(*(factor**TRUST for factor in min(found)[1]))


def _surprise(factors: Factors) -> float:
    compute, communication = (math.log(factor) for factor in factors)
    return (compute / COMPUTE_SPREAD) ** 2 + (communication / COMMUNICATION_SPREAD) ** 2
