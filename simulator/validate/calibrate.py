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

STEPS: Final = 400
WIDEST: Final = 4.0
"""The ratio of the two factors is looked for between ``1 / WIDEST`` and ``WIDEST``, in so many steps."""


class Factors(NamedTuple):
    """How many times as long computing and communicating take as predicted."""

    compute: float
    communication: float

    def trusted(self, share: float) -> Factors:
        """Return the factors *share* of the way from 1.

        >>> Factors(4.0, 9.0).trusted(0.5)
        Factors(compute=2.0, communication=3.0)
        """
        return Factors(self.compute**share, self.communication**share)


class Spreads(NamedTuple):
    """Standard deviations of what ``ln(predicted / measured)`` of a run is the sum of.

    Attributes:
        machine: what all runs of a machine share.
        model: what the runs of one model, in one precision, on that machine share beyond that.
        run: what is left.
    """

    machine: float
    model: float
    run: float

    def trust(self, *, same_model: bool) -> float:
        """Return the share of one run's error to expect of another run of its machine.

        The best linear prediction where the three parts are independent: that of the variance which the two
        runs have in common (Henderson 1975, "Best linear unbiased estimation and prediction under a selection
        model", Biometrics 31).

        >>> Spreads(1.0, 1.0, 0.0).trust(same_model=True), Spreads(1.0, 1.0, 0.0).trust(same_model=False)
        (1.0, 0.5)
        """
        shared = self.machine**2 + (self.model**2 if same_model else 0.0)
        whole = self.machine**2 + self.model**2 + self.run**2
        return shared / whole if whole else 0.0


SPREADS: Final = Spreads(machine=0.0, model=0.076, run=0.052)
"""As ``spreads_of`` of ``simulator.validate.one_run`` finds them in 2,127 published runs of 23 machines."""


def fit(curve: Curve, measured_s: float) -> Factors:
    """Return the most likely factors of a machine on which *curve* was *measured_s*.

    One time cannot tell two factors apart; among those pairs that give it, the pair is chosen that is
    nearest to what was expected. Where communication is hidden, computing gets all of the blame.
    """
    found = []
    for step in range(-STEPS, STEPS + 1):
        ratio = WIDEST ** (step / STEPS)
        compute = measured_s / curve.at(communication=ratio)
        factors = Factors(compute, compute * ratio)
        found.append((_surprise(factors), factors))
    return min(found)[1]


def _surprise(factors: Factors) -> float:
    compute, communication = (math.log(factor) for factor in factors)
    return (compute / COMPUTE_SPREAD) ** 2 + (communication / COMMUNICATION_SPREAD) ** 2
