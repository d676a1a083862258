"""Calibrates a model on a machine with single numbers: measured step times of one run, or of a few.

Without a recording nothing tells matrix products from attention, or links inside nodes from those between
them. So two factors are fitted, one on all computing and one on all communication. They explain only the part
of the difference that runs of one model usually share (docs/calibration.md).

Computing and communicating are each taken to be off by an unknown factor, and every run by something of its
own beside that. One time cannot tell these apart; how far each is usually off, and what share of the step it
has, says how much of the difference each gets (Gaussian-process regression, or kriging: Rasmussen and
Williams 2006, "Gaussian Processes for Machine Learning", section 2.2). Runs that differ in these shares tell
them apart; what they do not tell stays where it usually is, and ``untold`` says so. The host's own time is
not fitted: on 634 published runs of 107 families a third factor, free where runs told it, made other runs
worse, 4.8 instead of 4.3 % off with two runs and 3.9 instead of 3.7 % with three.
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
from foretrace.simulator.recorded.least_squares import TOLD
from foretrace.simulator.simulate import simulate
from foretrace.topologies.units import format_time

RATIOS: Final = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Factors on the time of every transfer at which a program is run."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The time of a step over how slow communication is, with computing as it is.

    A task starts at the latest end of what it waits for, so this time is a maximum of sums: convex and
    piecewise linear in the factor. Straight lines between the points are never below it.

    *step_s*: time of the step at each of ``RATIOS``.
    """

    step_s: tuple[float, ...]

    def at(self, *, compute: float = 1.0, communication: float = 1.0) -> float:
        """Return the time of a step in s, if tasks and transfers take so many times as long.

        Twice both is twice the time, so one curve has all of them.

        >>> Curve((1.0, 1.0, 1.5, 2.5, 4.5)).at(compute=2.0, communication=2.0)
        3.0
        """
        ratio = communication / compute
        # Beyond the last ratio the last line goes on, which is not above the convex curve.
        right = min(max(bisect_right(RATIOS, ratio), 1), len(RATIOS) - 1)
        (a, b), (low, high) = RATIOS[right - 1 : right + 1], self.step_s[right - 1 : right + 1]
        return compute * (low + (high - low) * (ratio - a) / (b - a))


def curve_of(job: Job, network: Network, compute: ComputeModel, ratios: Sequence[float] = RATIOS) -> Curve:
    """Return the curve of one step of *job*, from its program on the compiled engine.

    Raises SimulationError if the job cannot run as described, or numba is not installed.
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


AS_PREDICTED: Final = Factors(1.0, 1.0)


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
    # What is further off than OUTLIER is mostly a cold run or a setting that was not said: not all is
    # believed.
    slower = max(-limit, min(limit, math.log(measured_s / curve.at())))
    # The part of the difference that is not this run's own.
    shared_s = curve.at() * math.exp(slower * (1 - spreads.run**2 / variance))
    along = [
        # strict=False: the spread of the run itself comes last and has no share.
        spread**2 * share / variance * slower
        for spread, share in zip(spreads, _shares(curve), strict=False)
    ]

    def factors(size: float) -> Factors:
        return Factors(*(math.exp(size * one) for one in along))

    low, high = 0.0, LARGEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found_s = curve.at(**factors(middle)._asdict())
        # Half of the range in which the curve reaches the time, whichever way it is off.
        low, high = (middle, high) if (found_s < shared_s) == (slower > 0) else (low, middle)
    return factors((low + high) / 2)


def fit_together(curves: Sequence[Curve], measured_s: Sequence[float], spreads: Spreads = SPREADS) -> Factors:
    """Return the factors to expect of a model on a machine, if runs with *curves* took *measured_s*.

    The most likely logarithms, by Gauss and Newton: of one run those of ``fit`` where a step is linear.

    >>> both = Curve((1.0,) * 5), Curve((0.5, 0.75, 1.0, 1.5, 2.5))
    >>> [round(factor, 2) for factor in fit_together(both, [1.1, 1.3], Spreads(0.3, 0.5, 0.01))]
    [1.1, 1.5]
    """
    if len(curves) == 1:
        return fit(curves[0], measured_s[0], spreads)
    prior = np.diag(np.square(spreads[:2]))
    limits = [OUTLIER * usual_spread(curve, spreads) for curve in curves]
    off = [
        # As in ``fit``: what is further off is not believed whole.
        max(-limit, min(limit, math.log(time_s / curve.at())))
        for curve, time_s, limit in zip(curves, measured_s, limits, strict=True)
    ]
    logs = np.zeros(2)
    for _ in range(TURNS):
        at = Factors(*np.exp(logs))
        slope = np.array([_shares(curve, at) for curve in curves])
        done = [math.log(curve.at(**at._asdict()) / curve.at()) for curve in curves]
        variance = slope @ prior @ slope.T + spreads.run**2 * np.eye(len(curves))
        # The Gauss-Newton step around the factors so far.
        logs = prior @ slope.T @ np.linalg.solve(variance, np.array(off) - done + slope @ logs)
    return Factors(*map(float, np.exp(logs)))


TURNS: Final = 8
"""Turns of Gauss and Newton's method; a step is so nearly linear that the fourth changes nothing."""


def errors(curves: Sequence[Curve], spreads: Spreads = SPREADS) -> Factors:
    """Return the standard errors of ``ln`` of the factors that are found on runs with *curves*."""
    slope = np.array([_shares(curve) for curve in curves])
    told = slope.T @ slope / spreads.run**2 + np.diag(1 / np.square(spreads[:2]))
    return Factors(*map(float, np.sqrt(np.diag(np.linalg.inv(told)))))


def untold(curves: Sequence[Curve], spreads: Spreads = SPREADS) -> list[str]:
    """Return which factors runs with *curves* do not tell, in words: those hardly better known by them."""
    left = [
        name
        for name, error, before in zip(Factors._fields, errors(curves, spreads), spreads, strict=False)
        if error > TOLD * before
    ]
    ways = "runs that differ in micro-batch or layout would tell more"
    return [f"{name}: mostly where it usually is; {ways}" for name in left]


def usual_spread(curve: Curve, spreads: Spreads = SPREADS) -> float:
    """Return the standard deviation of ``ln(predicted / measured)`` to expect of a run with *curve*."""
    return math.sqrt(_variance(curve, spreads))


def _variance(curve: Curve, spreads: Spreads) -> float:
    """Return the variance of ``ln(predicted / measured)`` of a run with *curve*."""
    compute, communication = _shares(curve)
    return (spreads.compute * compute) ** 2 + (spreads.communication * communication) ** 2 + spreads.run**2


def _shares(curve: Curve, at: Factors = AS_PREDICTED) -> tuple[float, float]:
    """Return by how many per cent a step takes longer if computing, or communicating, takes 1 % longer."""
    now = curve.at(**at._asdict())
    shorter, longer = (
        curve.at(compute=at.compute, communication=ratio * at.communication) / now for ratio in (0.5, 2.0)
    )
    # The range from 0.5 to 2.0 is 1.5 wide.
    communication = (longer - shorter) / 1.5
    # Twice both is twice the time, so that the two shares are 1 together.
    return 1 - communication, communication


class Timed(NamedTuple):
    """A step that was measured, in s: what it took, and what is predicted without and with the factors."""

    measured_s: float
    before_s: float
    after_s: float

    def to_dict(self) -> dict[str, float]:
        """Return times and errors as plain JSON types."""
        errors = {
            f"error_{when}": getattr(self, f"{when}_s") / self.measured_s - 1 for when in ("before", "after")
        }
        return {**self._asdict(), **errors}


@dataclass(frozen=True, slots=True, kw_only=True)
class OneTime:
    """A calibration on one measured step, or on a few.

    *calibration*: the factors. *usual*: how far off a prediction of each usually is, as a standard deviation
    of its logarithm.
    """

    calibration: Calibration
    runs: tuple[Timed, ...]
    usual: tuple[float, ...]

    @property
    def is_unusual(self) -> bool:
        """Whether a run is too far off for the factors to explain it."""
        return any(
            abs(math.log(run.measured_s / run.before_s)) > OUTLIER * usual
            for run, usual in zip(self.runs, self.usual, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types; the first run's times stand beside those of all."""
        one = self.calibration
        return {
            **{key: getattr(one, key) for key in ("run", "cluster", "device", "precision", "only")},
            "factors": {name: {"value": f.value, "error": f.error} for name, f in one.named()},
            **self.runs[0].to_dict(),
            "runs": [run.to_dict() for run in self.runs],
            "not_identified": list(one.not_identified),
            "is_unusual": self.is_unusual,
        }


def calibrate_on_times(jobs: Sequence[Job], measured_s: Sequence[float]) -> OneTime:
    """Return the calibration of the model of *jobs* on its machine, if a step of each took *measured_s*.

    *jobs*: what was run, on the machine of the catalogue; one model on one kind of machine. *measured_s*:
    mean or median time of a step of each after warm-up, in s. Raises CalibrationError if a time is not above
    zero, or the jobs are not of one model and machine. Raises SimulationError if a job cannot be simulated,
    or numba is not installed.
    """
    require_numba("calibrating on a step time")
    for time_s in measured_s:
        if not (math.isfinite(time_s) and time_s > 0):
            raise CalibrationError(f"step time {time_s!r}: seconds above zero, such as 3.21")
    if len(jobs) != len(measured_s):
        raise CalibrationError(f"{len(jobs)} runs and {len(measured_s)} step times: one time for each run")
    jobs = [replace(job, n_steps=1) for job in jobs]
    cluster, precision = jobs[0].cluster, jobs[0].precision
    for job in jobs[1:]:
        if (job_kind(job), job.cluster.name) != (job_kind(jobs[0]), cluster.name):
            raise CalibrationError(
                f"{job_kind(job)} on {job.cluster.name}, beside {job_kind(jobs[0])} on {cluster.name}: "
                "runs of one model on one machine, in other layouts"
            )
    curves = [curve_of(job, job_network(job), ComputeModel(job.cluster.device, precision)) for job in jobs]
    values, spreads = fit_together(curves, measured_s), errors(curves)
    compute, communication = (
        Factor(value, value * spread) for value, spread in zip(values, spreads, strict=True)
    )
    found = Calibration(
        run=f"a step of {' and of '.join(map(format_time, measured_s))}",
        cluster=cluster.name,
        device=cluster.device.name,
        precision=precision,
        constants=constants_of(cluster),
        compute=dict.fromkeys(COMPUTE, compute),
        network={f"{link}.{OTHERS}.{part}": communication for link in LINKS for part in PARTS},
        not_identified=tuple(untold(curves)),
        only=job_kind(jobs[0]),
    )
    runs = []
    for job, time_s in zip(jobs, measured_s, strict=True):
        before_s, after_s = (
            simulate(one, only_figures=True, covers_unsaid=False).summary["step_time_s"]
            for one in (job, found.calibrated(job))
        )
        runs.append(Timed(time_s, before_s, after_s))
    return OneTime(calibration=found, runs=tuple(runs), usual=tuple(usual_spread(curve) for curve in curves))
