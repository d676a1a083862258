"""What a training costs in days and dollars, from the step of a run and what is known of failures."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from foretrace.simulator.energy import Supply, energy_kwh
from foretrace.simulator.errors import GoodputError
from foretrace.simulator.goodput.failures import (
    CHECKPOINT_BYTES_PER_PARAM,
    DAY_S,
    HOUR_S,
    MTBF_GPU_H,
    Expected,
    Reliability,
    SlowGpus,
    Stragglers,
    expected,
    failure_rate_per_s,
    optimal_interval_s,
    sampled_times_s,
)
from foretrace.simulator.goodput.training import Training, range_of
from foretrace.traces.report.format import format_share

STORAGE_BYTES_PER_S: Final = 2e9
"""What one node writes of a checkpoint per second where nothing is said: an assumption, and shown as one."""

RESTART_S: Final = 600.0
"""From a failure to the first new step where nothing is said: an assumption, and shown as one."""

LATE: Final = 100
"""How many times as long as on average a training may take and still have a date."""

MOST_DRAWS: Final = 1e9
"""Failures that are drawn, over all trainings: some minutes."""

QUANTILES: Final = (0.05, 0.5, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Risks:
    """What may interrupt a training; None: the default, which the plan says.

    Attributes:
        mtbf_gpu_s: mean time between interruptions that one GPU brings, all causes.
        mtbf_node_s: the same for a node, beside its GPUs.
        preempted_s: mean time until a spot node is taken away.
        checkpoint_s: time that training stands still for a checkpoint.
        storage_bytes_per_s: what one node writes of a checkpoint, to work out ``checkpoint_s``.
        restart_s: from a failure to the first new step.
        interval_s: training between checkpoints; None: what is best.
        step_error: standard deviation of the logarithm of true over predicted step times; None: that of
            the training.
        stragglers: GPUs that are slow without breaking; None: none are, but for those in the run.
    """

    mtbf_gpu_s: float | None = None
    mtbf_node_s: float | None = None
    preempted_s: float | None = None
    checkpoint_s: float | None = None
    storage_bytes_per_s: float | None = None
    restart_s: float | None = None
    interval_s: float | None = None
    step_error: float | None = None
    stragglers: Stragglers | None = None


def plan(
    training: Training,
    tokens: float,
    risks: Risks,
    *,
    start: date,
    by: date | None = None,
    budget_usd: float | None = None,
    supply: Supply | None = None,
    n_samples: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """Return how long *tokens* take, what that costs, and how likely it is done in time.

    *supply*: where the power comes from; None: nobody said. Raises GoodputError if training never ends with
    these risks, or a figure that is needed is unknown.
    """
    reliability, rests_on = _reliability(training, risks)
    step_error, error_notes = _step_error(training, risks)
    rests_on += error_notes
    work_s = tokens / training.tokens_per_step * training.step_time_s
    interval_s = optimal_interval_s(reliability) if risks.interval_s is None else risks.interval_s
    slow = SlowGpus(risks.stragglers, training.n_gpus, training.compute_share)
    rests_on += slow.notes(QUANTILES)
    # Samples draw the slowest GPU anew in each world; this has its mean.
    mean = expected(work_s * slow.mean, interval_s, reliability)
    _check_length(mean, start, n_samples)
    times_s = sampled_times_s(
        work_s,
        interval_s,
        reliability,
        n_samples=n_samples,
        seed=seed,
        step_error=step_error,
        stretch=slow.stretch if risks.stragglers else None,
    )
    told = {name: value for name, value in asdict(training).items() if name not in ("drawn", "waiting")}
    return {
        **told,
        "tokens": tokens,
        "start": start.isoformat(),
        **_length(work_s, mean, times_s, start),
        "slowest_gpu": slow.slowest(QUANTILES),
        **_interruptions(reliability, interval_s, is_optimal=risks.interval_s is None),
        "samples": n_samples,
        "seed": seed,
        "rests_on": rests_on,
        **_chance_by(times_s, start, by),
        **_money(training, tokens, mean, times_s, budget_usd),
        "energy": _energy(training, mean, risks, supply or Supply()),
    }


def _step_error(training: Training, risks: Risks) -> tuple[float, list[str]]:
    """Return the relative spread of step times around the prediction, and what it rests on, in words."""
    is_told = risks.step_error is not None
    error = (risks.step_error if is_told else training.step_error) or 0.0
    if not error:
        return 0.0, []
    said = f"true step times are {format_share(error, '.0f')} around the predicted one (log-normal)"
    source = "" if is_told else training.step_error_from
    return error, [f"{said}: {source}" if source else said]


def _interruptions(reliability: Reliability, interval_s: float, *, is_optimal: bool) -> dict[str, Any]:
    """Return how often training is interrupted, by failures and by checkpoints, as plain JSON types."""
    rate = reliability.failures_per_s
    return {
        "hours_between_failures": 1 / rate / HOUR_S if rate else None,
        "checkpoint_interval_s": None if math.isinf(interval_s) else interval_s,
        "interval_is_optimal": is_optimal,
        "checkpoint_s": reliability.checkpoint_s,
        "restart_s": reliability.restart_s,
    }


def _check_length(mean: Expected, start: date, n_samples: int) -> None:
    """Raise GoodputError if a training ends after the calendar, or fails more often than can be drawn."""
    if LATE * mean.wall_s / DAY_S > (date.max - start).days:
        raise GoodputError(
            f"on average this takes {mean.wall_s / DAY_S / 365.25:,.3g} years, longer than there are dates: "
            "fewer tokens, more GPUs or an earlier --start would work"
        )
    if mean.n_failures * n_samples > MOST_DRAWS:
        raise GoodputError(
            f"{mean.n_failures:,.0f} failures in each of {n_samples:,} trainings are more than can be drawn: "
            "fewer --samples or fewer tokens would work"
        )


def _length(work_s: float, mean: Expected, times_s: NDArray[np.float64], start: date) -> dict[str, Any]:
    """Return how long the training takes, and what the time goes into."""
    quantiles_s = {f"{q:.0%}": float(np.quantile(times_s, q)) for q in QUANTILES}
    ends = {name: start + timedelta(seconds=time_s) for name, time_s in quantiles_s.items()}
    parts = {
        "training": work_s,
        "slow GPUs": mean.work_s - work_s,
        "checkpoints": mean.checkpoints_s,
        "lost work": mean.lost_s,
        "restarts": mean.restarts_s,
    }
    return {
        "work_days": work_s / DAY_S,
        "expected_days": mean.wall_s / DAY_S,
        "days": {name: time_s / DAY_S for name, time_s in quantiles_s.items()},
        "ends": {name: end.isoformat() for name, end in ends.items()},
        "goodput": work_s / mean.wall_s,
        "shares": {name: part_s / mean.wall_s for name, part_s in parts.items()},
        "failures": mean.n_failures,
    }


def _chance_by(times_s: NDArray[np.float64], start: date, by: date | None) -> dict[str, Any]:
    """Return how likely the training is done at the end of the day *by*."""
    if by is None:
        return {}
    # To the end of that day.
    limit_s = ((by - start).days + 1) * DAY_S
    return {"by": by.isoformat(), "chance_by": float((times_s <= limit_s).mean())}


def _money(
    training: Training, tokens: float, mean: Expected, times_s: NDArray[np.float64], budget_usd: float | None
) -> dict[str, Any]:
    """Return what the training costs, and how likely it stays within a budget."""
    if training.usd_per_gpu_hour is None:
        if budget_usd is not None:
            raise GoodputError("a budget needs a price: this machine has none, give --price '2.5 USD/h'")
        return {}
    usd_per_s = training.usd_per_gpu_hour * training.n_gpus / HOUR_S
    found = {
        "expected_usd": mean.wall_s * usd_per_s,
        "usd_per_1b_tokens": mean.wall_s * usd_per_s / (tokens / 1e9),
    }
    if budget_usd is None:
        return found
    return found | {
        "budget_usd": budget_usd,
        "chance_in_budget": float((times_s * usd_per_s <= budget_usd).mean()),
    }


def _energy(training: Training, mean: Expected, risks: Risks, supply: Supply) -> dict[str, Any] | None:
    """Return the energy of all hours, those thrown away too; None if the power of a GPU is not known.

    While a checkpoint is written and while a job restarts, GPUs wait. The range counts what is assumed of
    power and of the time of a step, as that of ``simulate`` does; of failures it has their mean.
    """
    if training.drawn is None or training.waiting is None:
        return None
    waits_s = mean.checkpoints_s + mean.restarts_s
    works_s = mean.wall_s - waits_s
    # An error that is told has a range of its own.
    low, high = training.step_range if risks.step_error is None else range_of(risks.step_error)
    shares = " to ".join(format_share(end, ".0f") for end in (low, high))
    steps = "" if low == high else f" and steps of {shares} of the predicted time"
    kwh = energy_kwh(training.drawn.total.widened(low, high), works_s * training.n_gpus, supply).plus(
        energy_kwh(training.waiting.total, waits_s * training.n_gpus, supply)
    )
    return {
        "kwh": kwh.likely,
        "kwh_interval": [kwh.low, kwh.high],
        "kg_co2e": kwh.likely * supply.kg_per_kwh,
        "g_co2e_per_kwh": supply.kg_per_kwh * 1000,
        "w_per_gpu": training.drawn.total.likely,
        "w_per_gpu_interval": [training.drawn.total.low, training.drawn.total.high],
        "w_per_waiting_gpu": training.waiting.total.likely,
        "pue": supply.pue or 1.0,
        "rests_on": [
            *training.drawn.rests_on,
            *supply.rests_on,
            f"the range of the energy covers what is assumed of power{steps}, not the chance of failures",
        ],
    }


def _reliability(training: Training, risks: Risks) -> tuple[Reliability, list[str]]:
    """Return what interrupts *training*, and in words what that rests on."""
    notes = []
    mtbf_gpu_s = risks.mtbf_gpu_s
    if mtbf_gpu_s is None:
        mtbf_gpu_s = MTBF_GPU_H * HOUR_S
        notes.append(
            f"a GPU interrupts the job every {MTBF_GPU_H:,.0f} h, all causes (419 times in 54 days on 16,384 "
            "H100: Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.4)"
        )
    rate = failure_rate_per_s(
        training.n_gpus,
        training.n_nodes,
        mtbf_gpu_s=mtbf_gpu_s,
        mtbf_node_s=math.inf if risks.mtbf_node_s is None else risks.mtbf_node_s,
        preempted_s=math.inf if risks.preempted_s is None else risks.preempted_s,
    )
    checkpoint_s = risks.checkpoint_s
    if checkpoint_s is None:
        if not training.n_params:
            raise GoodputError("the run does not tell its parameters: give --checkpoint-time, e.g. '60 s'")
        per_node = risks.storage_bytes_per_s or STORAGE_BYTES_PER_S
        size_bytes = CHECKPOINT_BYTES_PER_PARAM * training.n_params
        # All nodes write their parts at the same time.
        checkpoint_s = size_bytes / (per_node * training.n_nodes)
        assumed = "" if risks.storage_bytes_per_s else " (assumed)"
        notes.append(
            f"a checkpoint stops training for {checkpoint_s:.1f} s: {CHECKPOINT_BYTES_PER_PARAM} bytes per "
            f"parameter at {per_node / 1e9:g} GB/s per node{assumed}; less if it is written in the background"
        )
    restart_s = risks.restart_s
    if restart_s is None:
        restart_s = RESTART_S
        notes.append(f"a restart takes {RESTART_S / 60:.0f} min from failure to the first new step (assumed)")
    return Reliability(failures_per_s=rate, checkpoint_s=checkpoint_s, restart_s=restart_s), notes
