"""How long training really takes when machines fail: checkpoints, lost work, restarts, and the date it ends.

Failures come independently of each other and of what they hit, at a constant rate: the time between them is
exponential. A segment is ``interval_s`` of training and the checkpoint behind it; a failure throws the
segment away, and a restart, which may fail too, comes before the next attempt. The expected time of that is
known in closed form (Daly 2006, doi:10.1016/j.future.2004.11.016, equation 13); ``sampled_times_s`` draws
from the very same process, for quantiles and for the chance of a date.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from foretrace.simulator.errors import GoodputError
from foretrace.traces.report.format import format_share

HOUR_S: Final = 3600.0
DAY_S: Final = 24 * HOUR_S

MTBF_GPU_H: Final = 50_700.0
"""Hours of one GPU between two interruptions of the job, all causes counted: 419 unexpected interruptions in
54 days on 16,384 H100 (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.4)."""

CHECKPOINT_BYTES_PER_PARAM: Final = 14
"""Weights in 16 bits, master weights and two moments of Adam in 32."""

_NEWTON_STEPS: Final = 60
_MOST_LOG: Final = 600.0
"""Exponent beyond which a segment is as good as never done; e^600 of anything outlasts everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """What interrupts a job, and what that costs.

    Attributes:
        failures_per_s: rate at which the whole job is interrupted, preemptions included.
        checkpoint_s: time that training stands still for one checkpoint.
        restart_s: from the failure to the first step that is new: detection, replacement, loading, warm-up.
    """

    failures_per_s: float
    checkpoint_s: float
    restart_s: float

    def __post_init__(self) -> None:
        for name in ("failures_per_s", "checkpoint_s", "restart_s"):
            if not (math.isfinite(value := getattr(self, name)) and value >= 0):
                raise GoodputError(f"{name} = {value}: at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What training takes on average.

    Attributes:
        work_s: time in which nothing fails and nothing is saved.
        checkpoints_s: part of ``wall_s`` spent on checkpoints that were kept.
        lost_s: part spent on work and checkpoints that were thrown away.
        restarts_s: part spent on restarts, failed ones included.
        n_failures: failures in ``wall_s``.
    """

    wall_s: float
    work_s: float
    checkpoints_s: float
    lost_s: float
    restarts_s: float
    n_failures: float

    @property
    def goodput(self) -> float:
        """Share of the time that ends up in the model."""
        return self.work_s / self.wall_s


def failure_rate_per_s(
    n_gpus: int,
    n_nodes: int,
    *,
    mtbf_gpu_s: float,
    mtbf_node_s: float = math.inf,
    preempted_s: float = math.inf,
) -> float:
    """Return how often a job is interrupted when any part of its machine ends it.

    *mtbf_gpu_s*: mean time between failures that one GPU brings. *mtbf_node_s*: the same for what else is in
    a node. *preempted_s*: mean time until a spot node is taken away. Raises GoodputError if a time is not
    positive.
    """
    times = {"mtbf_gpu": mtbf_gpu_s, "mtbf_node": mtbf_node_s, "preempted": preempted_s}
    for name, value in times.items():
        if not value > 0:
            raise GoodputError(f"{name} = {value} s: more than 0")
    return n_gpus / mtbf_gpu_s + n_nodes / mtbf_node_s + n_nodes / preempted_s


def optimal_interval_s(reliability: Reliability) -> float:
    """Return the time of training between two checkpoints that makes ``expected`` shortest; inf if never.

    The exact minimum of Daly's expectation, 1 - x = e^-(x + c) with x and c the interval and the checkpoint
    in mean times between failures. Young's sqrt(2 c) is its first order (doi:10.1145/361147.361115). Raises
    GoodputError if checkpoints cost nothing, so that the best interval is none at all.
    """
    rate = reliability.failures_per_s
    if not rate:
        return math.inf
    cost = reliability.checkpoint_s * rate
    if not cost:
        raise GoodputError("checkpoint_s = 0: a checkpoint that costs nothing is best made all the time")
    # Young's first order, no more than the mean time between failures.
    x = min(math.sqrt(2 * cost), 1.0)
    for _ in range(_NEWTON_STEPS):  # 1 - x - e^-(x + c) falls, and is concave: Newton's steps converge
        decay = math.exp(-(x + cost))
        step = (1 - x - decay) / math.expm1(-(x + cost))
        # Never past 0 or 1, between which the root lies: at most half of the way there.
        x = min(max(x - step, x / 2), (1 + x) / 2)
    return x / rate


def expected(work_s: float, interval_s: float, reliability: Reliability) -> Expected:
    """Return how long *work_s* of training takes with a checkpoint after every *interval_s* of it.

    Raises GoodputError if *work_s* or *interval_s* is not positive, or the job fails too often to ever end.
    """
    _check(work_s, interval_s)
    rate = reliability.failures_per_s
    n_segments = _segments(work_s, interval_s)
    # Equal segments: the last is not shorter than the others.
    held_s = work_s / n_segments + reliability.checkpoint_s
    checkpoints_s = n_segments * reliability.checkpoint_s
    if not rate:
        return Expected(
            wall_s=work_s + checkpoints_s,
            work_s=work_s,
            checkpoints_s=checkpoints_s,
            lost_s=0.0,
            restarts_s=0.0,
            n_failures=0.0,
        )
    # Before ``expm1``, which overflows soon after.
    if rate * max(held_s, reliability.restart_s) > _MOST_LOG:
        raise GoodputError(
            f"a failure every {1 / rate:.3g} s leaves no time for {held_s:.3g} s between checkpoints and "
            f"{reliability.restart_s:.3g} s of restart; checkpoint more often, or restart faster"
        )
    retries = math.expm1(rate * held_s)  # failed attempts per segment that is kept
    # Mean time per segment, Daly's ``(e^(r t) - 1) / r``, without the restarts.
    attempts_s = n_segments * retries / rate
    restarts_s = n_segments * retries * math.expm1(rate * reliability.restart_s) / rate
    wall_s = attempts_s + restarts_s
    return Expected(
        wall_s=wall_s,
        work_s=work_s,
        checkpoints_s=checkpoints_s,
        lost_s=attempts_s - n_segments * held_s,
        restarts_s=restarts_s,
        n_failures=n_segments * retries * math.exp(rate * reliability.restart_s),
    )


def sampled_times_s(
    work_s: float,
    interval_s: float,
    reliability: Reliability,
    *,
    n_samples: int,
    seed: int,
    step_error: float = 0.0,
    stretch: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None = None,
) -> NDArray[np.float64]:
    """Return how long training takes in *n_samples* possible worlds, shape ``(n_samples,)``, in seconds.

    *work_s*: time in which nothing fails and nothing is saved. *step_error*: standard deviation of the
    logarithm of the true step time over the predicted one, the same for all steps of one world. *stretch*:
    maps a uniform number from 0 to 1 to the factor by which slow GPUs stretch all steps of a world; None: no
    GPU is slow. Raises GoodputError where ``expected`` does.
    """
    mean = expected(work_s, interval_s, reliability)
    rng = np.random.default_rng(seed)
    slower = np.exp(step_error * rng.standard_normal(n_samples)) if step_error else np.ones(n_samples)
    if stretch is not None:
        slower = slower * stretch(rng.random(n_samples))
    work = work_s * slower
    # Less a hair: work of exactly n intervals is not n + 1 because of rounding.
    n_left = np.maximum(np.ceil(work / interval_s - 1e-9), 1)
    held_s = work / n_left + reliability.checkpoint_s
    wall_s = np.zeros(n_samples)
    rate = reliability.failures_per_s
    if not rate:
        return wall_s + n_left * held_s
    # Far more than any world has by chance: a bound, so that a mistake ends in a line and not in a loop.
    most = 100 * (mean.n_failures + 100) * max(float(slower.max()), 1.0) ** 2
    open_ = np.arange(n_samples)
    for _ in range(int(most)):
        # Failures have no memory: after each the time until the next is drawn anew.
        until_failure_s = rng.exponential(1 / rate, len(open_))
        # Whole segments are kept; the one that the failure hits is lost.
        n_done = np.minimum(np.floor(until_failure_s / held_s[open_]), n_left[open_])
        is_done = n_done >= n_left[open_]
        # Until the failure, its lost segment included; to the end of the last one where none came in time.
        wall_s[open_] += np.where(is_done, n_left[open_] * held_s[open_], until_failure_s)
        n_left[open_] -= n_done
        open_ = open_[~is_done]
        if not len(open_):
            return wall_s
        wall_s[open_] += _restart_s(reliability, rng, len(open_))
    raise GoodputError(
        f"the slowest of {n_samples} samples does not end within {most:.0f} failures; checkpoint more often"
    )


def _restart_s(reliability: Reliability, rng: np.random.Generator, n_samples: int) -> NDArray[np.float64]:
    """Return the time of restarts that begin again whenever a failure hits them."""
    rate, restart_s = reliability.failures_per_s, reliability.restart_s
    total_s = np.full(n_samples, restart_s, np.float64)
    failed = np.arange(n_samples)
    while len(failed):
        until_failure_s = rng.exponential(1 / rate, len(failed))
        failed = failed[until_failure_s < restart_s]
        total_s[failed] += until_failure_s[until_failure_s < restart_s]
    return total_s


def _segments(work_s: float, interval_s: float) -> int:
    """Return into how many equal segments work is cut so that none is longer than *interval_s*."""
    # Less a hair: work of exactly n intervals is not n + 1 because of rounding.
    return 1 if math.isinf(interval_s) else max(math.ceil(work_s / interval_s - 1e-9), 1)


def _check(work_s: float, interval_s: float) -> None:
    if not (math.isfinite(work_s) and work_s > 0):
        raise GoodputError(f"steps that take {work_s} s in all: give a step time above 0 s")
    if not interval_s > 0:
        raise GoodputError(f"a checkpoint every {interval_s} s: more than 0")


# GPUs that compute slower than they should without breaking: everybody waits for the slowest of all.
#
# Users know quantiles of single GPUs, from a burn-in or from recorded runs: "99 % take at most 2 %
# longer". The slowest of n that are independent of each other lies at a far higher quantile of that:
# Q(u^(1/n)), where Q gives those of one (David and Nagaraja, Order Statistics, 3rd ed. 2003, section 2.1).

_POINT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%\s*:\s*([0-9]+(?:\.[0-9]+)?)")
_Factor = TypeVar("_Factor", float, NDArray[np.float64])
_FORM: Final = "e.g. '50%:1, 99%:1.02, 99.9%:1.15'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """How much longer the compute of single GPUs takes than in the run, as a distribution.

    *at*: quantiles, ascending within 0 to 1; from 0, where nothing is slower, to 1, the worst there is.
    *factors*: time of compute over that of the run at these, ascending from 1; in between it is linear.
    """

    at: tuple[float, ...]
    factors: tuple[float, ...]

    def slowest(self, quantile: float | NDArray[np.float64], n_gpus: int) -> NDArray[np.float64]:
        """Return the *quantile* of the factor of the slowest of *n_gpus* that are independent."""
        return np.interp(np.power(quantile, 1 / n_gpus), self.at, self.factors)

    def expected_slowest(self, n_gpus: int) -> float:
        """Return the mean factor of the slowest of *n_gpus*: the worst less the integral of F(x)^n."""
        points = list(zip(self.at, self.factors, strict=True))
        below = 0.0
        for (low, x), (high, y) in pairwise(points):
            # The integral of F(x)^n over this piece, along which F is linear from low to high.
            below += (y - x) * (high ** (n_gpus + 1) - low ** (n_gpus + 1)) / ((n_gpus + 1) * (high - low))
        return self.factors[-1] - below


@dataclass(frozen=True, slots=True)
class SlowGpus:
    """What the slowest GPU does to every step, at most.

    No path through a step holds more of a GPU's compute than there is: a step gets longer by at most what
    that gets longer, and by less where something hides it: a fuller stage of the pipeline, or launches.

    *one*: the distribution of single GPUs; None: none is slow. *compute_share*: share of the step in which
    the GPU that does most computes.
    """

    one: Stragglers | None
    n_gpus: int
    compute_share: float

    @property
    def mean(self) -> float:
        """Mean factor on a step."""
        return 1.0 if self.one is None else self._of_step(self.one.expected_slowest(self.n_gpus))

    def stretch(self, quantile: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the factor on a step at each *quantile* of all worlds."""
        return (
            np.ones_like(quantile)
            if self.one is None
            else self._of_step(self.one.slowest(quantile, self.n_gpus))
        )

    def slowest(self, quantiles: Sequence[float]) -> dict[str, float] | None:
        """Return the factor on the compute of the slowest GPU, mean and *quantiles*; None: none is slow."""
        if self.one is None:
            return None
        at = {f"{q:.0%}": float(self.one.slowest(q, self.n_gpus)) for q in quantiles}
        return {"mean": self.one.expected_slowest(self.n_gpus), **at}

    def notes(self, quantiles: Sequence[float]) -> list[str]:
        """Return in words what this rests on, from the first to the last of *quantiles*."""
        if (found := self.slowest(quantiles)) is None:
            return []
        _, low, *_, high = found.values()
        said = (
            f"the slowest of {self.n_gpus:,} GPUs computes {found['mean']:.3f} times as long ({low:.3f} to "
            f"{high:.3f}), if they are independent, to the end of training; everybody waits for all of that: "
            f"{format_share(self.compute_share, '.0f')} of a step is compute"
        )
        return [said]

    def _of_step(self, factor: _Factor) -> _Factor:
        return 1 + self.compute_share * (factor - 1)


def parse_stragglers(text: str) -> Stragglers:
    """Return ``"50%:1, 99%:1.02"`` as a distribution; none is slower than the last that is said.

    >>> parse_stragglers("99%:1.02").factors
    (1.0, 1.02, 1.02)

    Raises GoodputError if those are no quantiles, or they do not ascend.
    """
    points = [(0.0, 1.0)]
    for part in text.split(","):
        match = _POINT.fullmatch(part.strip())
        if match is None:
            raise GoodputError(f"slow GPUs: {part.strip()!r} is not percent:factor, {_FORM}")
        points.append((float(match[1]) / 100, float(match[2])))
    # 0 % was said: that point takes the place of the first.
    if points[1][0] == 0:
        del points[0]
    # None is slower than the last that was said.
    if points[-1][0] < 1:
        points.append((1.0, points[-1][1]))
    _check_quantiles(text, points)
    return Stragglers(at=tuple(at for at, _ in points), factors=tuple(factor for _, factor in points))


def _check_quantiles(text: str, points: Sequence[tuple[float, float]]) -> None:
    """Refuse what is no distribution of slowdowns.

    Raises GoodputError if quantiles do not ascend or are over 100 %, or factors fall or are below 1.
    """
    at, factors = zip(*points, strict=True)
    if at[-1] > 1 or any(low >= high for low, high in pairwise(at)):
        raise GoodputError(f"slow GPUs: {text!r}: percentages have to rise, up to 100, {_FORM}")
    if factors[0] < 1 or list(factors) != sorted(factors):
        raise GoodputError(f"slow GPUs: {text!r}: factors have to rise, from 1 on, {_FORM}")
