"""How long training really takes when machines fail: checkpoints, lost work, restarts, and the date it ends.

Failures come independently of each other and of what they hit, at a constant rate: the time between them is
exponential. A segment is ``interval_s`` of training and the checkpoint behind it; a failure throws the
segment away, and a restart, which may fail too, comes before the next attempt. The expected time of that is
known in closed form (Daly 2006, doi:10.1016/j.future.2004.11.016, equation 13); ``sampled_times_s`` draws
from the very same process, for quantiles and for the chance of a date.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from foretrace.simulator.errors import GoodputError

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
        wall_s: time until it is done.
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

    Args:
        n_gpus: GPUs of the job.
        n_nodes: nodes of the job.
        mtbf_gpu_s: mean time between failures that one GPU brings.
        mtbf_node_s: the same for what else is in a node.
        preempted_s: mean time until a spot node is taken away.

    Raises:
        GoodputError: a time is not positive.
    """
    times = {"mtbf_gpu": mtbf_gpu_s, "mtbf_node": mtbf_node_s, "preempted": preempted_s}
    for name, value in times.items():
        if not value > 0:
            raise GoodputError(f"{name} = {value} s: more than 0")
    return n_gpus / mtbf_gpu_s + n_nodes / mtbf_node_s + n_nodes / preempted_s


def optimal_interval_s(reliability: Reliability) -> float:
    """Return the time of training between two checkpoints that makes ``expected`` shortest; inf if never.

    The exact minimum of Daly's expectation, 1 - x = e^-(x + c) with x and c the interval and the checkpoint
    in mean times between failures. Young's sqrt(2 c) is its first order (doi:10.1145/361147.361115).

    Raises:
        GoodputError: checkpoints cost nothing, so that the best interval is none at all.
    """
    rate = reliability.failures_per_s
    if not rate:
        return math.inf
    cost = reliability.checkpoint_s * rate
    if not cost:
        raise GoodputError("checkpoint_s = 0: a checkpoint that costs nothing is best made all the time")
    x = min(math.sqrt(2 * cost), 1.0)
    for _ in range(_NEWTON_STEPS):  # 1 - x - e^-(x + c) falls, and is concave: Newton's steps converge
        decay = math.exp(-(x + cost))
        step = (1 - x - decay) / math.expm1(-(x + cost))
        x = min(max(x - step, x / 2), (1 + x) / 2)
    return x / rate


def expected(work_s: float, interval_s: float, reliability: Reliability) -> Expected:
    """Return how long *work_s* of training takes with a checkpoint after every *interval_s* of it.

    Raises:
        GoodputError: *work_s* or *interval_s* is not positive, or the job fails too often to ever end.
    """
    _check(work_s, interval_s)
    rate = reliability.failures_per_s
    n_segments = _segments(work_s, interval_s)
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
    if rate * max(held_s, reliability.restart_s) > _MOST_LOG:
        raise GoodputError(
            f"a failure every {1 / rate:.3g} s leaves no time for {held_s:.3g} s between checkpoints and "
            f"{reliability.restart_s:.3g} s of restart; checkpoint more often, or restart faster"
        )
    retries = math.expm1(rate * held_s)  # failed attempts per segment that is kept
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

    Args:
        work_s: time in which nothing fails and nothing is saved.
        interval_s: time of training between two checkpoints.
        reliability: what interrupts the job.
        n_samples: worlds to draw.
        seed: seed of the random numbers.
        step_error: standard deviation of the logarithm of the true step time over the predicted one, the
            same for all steps of one world.
        stretch: maps a uniform number from 0 to 1 to the factor by which slow GPUs stretch all steps of a
            world; None: no GPU is slow.

    Raises:
        GoodputError: as ``expected``.
    """
    mean = expected(work_s, interval_s, reliability)
    rng = np.random.default_rng(seed)
    slower = np.exp(step_error * rng.standard_normal(n_samples)) if step_error else np.ones(n_samples)
    if stretch is not None:
        slower = slower * stretch(rng.random(n_samples))
    work = work_s * slower
    n_left = np.maximum(np.ceil(work / interval_s - 1e-9), 1)
    held_s = work / n_left + reliability.checkpoint_s
    wall_s = np.zeros(n_samples)
    rate = reliability.failures_per_s
    if not rate:
        return wall_s + n_left * held_s
    most = 100 * (mean.n_failures + 100) * max(float(slower.max()), 1.0) ** 2
    open_ = np.arange(n_samples)
    for _ in range(int(most)):
        until_failure_s = rng.exponential(1 / rate, len(open_))
        n_done = np.minimum(np.floor(until_failure_s / held_s[open_]), n_left[open_])
        is_done = n_done >= n_left[open_]
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
    return 1 if math.isinf(interval_s) else max(math.ceil(work_s / interval_s - 1e-9), 1)


def _check(work_s: float, interval_s: float) -> None:
    if not (math.isfinite(work_s) and work_s > 0):
        raise GoodputError(f"steps that take {work_s} s in all: give a step time above 0 s")
    if not interval_s > 0:
        raise GoodputError(f"a checkpoint every {interval_s} s: more than 0")
