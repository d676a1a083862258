"""Calibrates a model on a machine with a single number: a measured step time.

Without a recording nothing tells matrix products from attention, or links inside nodes from those between
them. So two factors are fitted, one on all computing and one on all communication. They explain only the part
of the difference that runs of one model usually share (docs/calibration.md).

Computing and communicating are each taken to be off by an unknown factor, and every run by something of its
own beside that. One time cannot tell these apart; how far each is usually off, and what share of the step it
has, says how much of the difference each gets (Gaussian-process regression, or kriging, with one observation:
Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", section 2.2).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from foretrace.simulator.builder.step import build, job_groups
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.engine import choose, require_numba
from foretrace.simulator.errors import CalibrationError
from foretrace.simulator.job import Job
from foretrace.simulator.network.cost import Network, job_network
from foretrace.simulator.recorded.calibration import (
    COMPUTE,
    LINKS,
    OTHERS,
    PARTS,
    Calibration,
    Factor,
    constants_of,
    job_kind,
)
from foretrace.simulator.simulate import simulate
from foretrace.topologies.units import format_time

RATIOS: Final = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Factors on the time of every transfer at which a program is run."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The time of a step over how slow communication is, with computing as it is.

    A task starts at the latest end of what it waits for, so this time is a maximum of sums: convex and
    piecewise linear in the factor. Straight lines between the points are never below it.

    Attributes:
        step_s: time of the step at each of ``RATIOS``.
    """

    step_s: tuple[float, ...]

    def at(self, *, compute: float = 1.0, communication: float = 1.0) -> float:
        """Return the time of a step in s, if tasks and transfers take so many times as long.

        Twice both is twice the time, so one curve has all of them.

        >>> Curve((1.0, 1.0, 1.5, 2.5, 4.5)).at(compute=2.0, communication=2.0)
        3.0
        """
        ratio = communication / compute
        right = min(max(bisect_right(RATIOS, ratio), 1), len(RATIOS) - 1)
        (a, b), (low, high) = RATIOS[right - 1 : right + 1], self.step_s[right - 1 : right + 1]
        return compute * (low + (high - low) * (ratio - a) / (b - a))


def curve_of(job: Job, network: Network, compute: ComputeModel, ratios: Sequence[float] = RATIOS) -> Curve:
    """Return the curve of one step of *job*, from its program on the compiled engine.

    Raises:
        SimulationError: the job cannot run as described, or numba is not installed.
    """
    program = build(job, network, compute, groups=job_groups(job))
    clock = choose("compiled", program.n_tasks).Clock(program)
    found = []
    for ratio in ratios:
        transfer_ns = np.rint(ratio * clock.transfer_ns).astype(np.int64)
        _, end_ns = clock.times(transfer_ns=transfer_ns)
        found.append(int(end_ns.max()) / 1e9)
    return Curve(tuple(found))


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
"""With which other runs of a model are predicted best, by the published runs of it."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OneTime:
    """A calibration on one measured step.

    Attributes:
        calibration: the factors.
        measured_s: time of the step that was measured.
        before_s: what the catalogue predicts for it.
        after_s: what is predicted with the factors.
        usual: how far off a prediction usually is, as a standard deviation of its logarithm.
    """

    calibration: Calibration
    measured_s: float
    before_s: float
    after_s: float
    usual: float

    @property
    def is_unusual(self) -> bool:
        """Whether the run is too far off for the factors to explain it."""
        return abs(math.log(self.measured_s / self.before_s)) > OUTLIER * self.usual

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        one = self.calibration
        return {
            **{key: getattr(one, key) for key in ("run", "cluster", "device", "precision", "only")},
            "factors": {name: {"value": f.value, "error": f.error} for name, f in one.named()},
            **{key: getattr(self, key) for key in ("measured_s", "before_s", "after_s")},
            "error_before": self.before_s / self.measured_s - 1,
            "error_after": self.after_s / self.measured_s - 1,
            "is_unusual": self.is_unusual,
        }


def calibrate_on_time(job: Job, measured_s: float) -> OneTime:
    """Return the calibration of the model of *job* on its machine, if a step of it took *measured_s*.

    Args:
        job: what was run, on the machine of the catalogue.
        measured_s: mean or median time of its steps after warm-up, in s.

    Raises:
        CalibrationError: the time is not above zero.
        SimulationError: the job cannot be simulated, or numba is not installed.
    """
    require_numba("calibrating on a step time")
    if not (math.isfinite(measured_s) and measured_s > 0):
        raise CalibrationError(f"step time {measured_s!r}: seconds above zero, such as 3.21")
    job = replace(job, n_steps=1)
    cluster = job.cluster
    curve = curve_of(job, job_network(job), ComputeModel(cluster.device, job.precision))
    values, spreads = fit(curve, measured_s), errors(curve)
    compute, communication = (
        Factor(value, value * spread) for value, spread in zip(values, spreads, strict=True)
    )
    found = Calibration(
        run=f"a step of {format_time(measured_s)}",
        cluster=cluster.name,
        device=cluster.device.name,
        precision=job.precision,
        constants=constants_of(cluster),
        compute=dict.fromkeys(COMPUTE, compute),
        network={f"{link}.{OTHERS}.{part}": communication for link in LINKS for part in PARTS},
        only=job_kind(job),
    )
    before, after = (simulate(one).summary["step_time_s"] for one in (job, found.calibrated(job)))
    return OneTime(
        calibration=found,
        measured_s=measured_s,
        before_s=before,
        after_s=after,
        usual=usual_spread(curve),
    )
