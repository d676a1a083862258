"""What a training costs in days and dollars, from the step of a run and what is known of failures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date, timedelta
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from simulator.errors import GoodputError
from simulator.goodput.failures import (
    CHECKPOINT_BYTES_PER_PARAM,
    DAY_S,
    HOUR_S,
    MTBF_GPU_H,
    Reliability,
    expected,
    failure_rate_per_s,
    optimal_interval_s,
    sampled_times_s,
)
from simulator.goodput.stragglers import SlowGpus, Stragglers
from traces.analysis.metrics import breakdown, summarize
from traces.run import Run

STORAGE_BYTES_PER_S: Final = 2e9
"""What one node writes of a checkpoint per second where nothing is said: an assumption, and shown as one."""

RESTART_S: Final = 600.0
"""From a failure to the first new step where nothing is said: an assumption, and shown as one."""

INTERVAL_LEVEL: Final = 0.8
"""Share of measured runs within the intervals that a simulated run carries (``simulator.intervals``)."""

QUANTILES: Final = (0.05, 0.5, 0.95)

_COUNT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)")
_FACTORS: Final = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training on its machine, as far as its length depends on it.

    Attributes:
        name: name of the run whose steps these are.
        step_time_s: one optimizer step.
        tokens_per_step: tokens of a step, over all ranks.
        n_gpus: GPUs that are paid for.
        n_nodes: nodes they are in.
        n_params: parameters; 0 if unknown.
        usd_per_gpu_hour: price; None if unknown.
        step_error: how far measured steps of its class lie around predicted ones, as in ``Risks``; 0 where
            the step was measured.
        step_error_from: the runs that this comes from, in words.
        compute_share: share of the step in which the GPU that does most computes.
    """

    name: str
    step_time_s: float
    tokens_per_step: float
    n_gpus: int
    n_nodes: int
    n_params: int = 0
    usd_per_gpu_hour: float | None = None
    step_error: float = 0.0
    step_error_from: str = ""
    compute_share: float = 1.0


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


def parse_count(text: str) -> float:
    """Return ``"15T"`` as a number: K, M, B and T are powers of a thousand.

    >>> parse_count("1.5T"), parse_count("300B")
    (1500000000000.0, 300000000000.0)

    Raises:
        GoodputError: that is no such number.
    """
    match = _COUNT.fullmatch(text.strip().upper())
    if match is None or not (value := float(match[1]) * _FACTORS[match[2]]):
        raise GoodputError(f"{text!r} is not a number of tokens: write e.g. 300B or 15T")
    return value


def training_of(run: Run, *, tokens_per_step: int | None = None) -> Training:
    """Return the training that *run* is a step of.

    Args:
        run: simulated or recorded.
        tokens_per_step: over all ranks, where the run does not tell; None: it does.

    Raises:
        GoodputError: the run does not tell its tokens per step.
        TraceError: the run cannot be read.
    """
    info, job = run.info, run.info.job or {}
    step_time_s = float(summarize(run)["step_time_s"])
    batch, seq_len = job.get("global_batch"), job.get("seq_len")
    if tokens_per_step is None and isinstance(batch, int) and isinstance(seq_len, int):
        tokens_per_step = batch * seq_len
    if tokens_per_step is None:
        raise GoodputError(
            f"{run.path} does not tell its tokens per step: give --tokens-per-step, sequences times length"
        )
    cluster, model = info.cluster or {}, info.model or {}
    likely: Mapping[str, Any] = (info.summary or {}).get("intervals") or {}
    per_node = cluster.get("gpus_per_node") or 8
    return Training(
        name=info.name,
        step_time_s=step_time_s,
        compute_share=max(row.shares["compute"] for row in breakdown(run)),
        tokens_per_step=float(tokens_per_step),
        n_gpus=info.world_size,
        n_nodes=math.ceil(info.world_size / per_node),
        n_params=int(model.get("n_params") or 0),
        usd_per_gpu_hour=cluster.get("price_usd_per_gpu_hour"),
        step_error=spread_of(likely["step_time_s"]) if "step_time_s" in likely else 0.0,
        step_error_from=str(likely.get("step_time_from", "")),
    )


def spread_of(interval: Sequence[float]) -> float:
    """Return the standard deviation of the logarithm of what lies in *interval* in 8 of 10 cases.

    >>> round(spread_of([math.exp(-0.128155), math.exp(0.128155)]), 4)
    0.1
    """
    low, high = interval
    return math.log(high / low) / (2 * NormalDist().inv_cdf((1 + INTERVAL_LEVEL) / 2))


def plan(
    training: Training,
    tokens: float,
    risks: Risks,
    *,
    start: date,
    by: date | None = None,
    budget_usd: float | None = None,
    n_samples: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """Return how long *tokens* take, what that costs, and how likely it is done in time.

    Args:
        training: the step and its machine.
        tokens: tokens to train on.
        risks: what may come in between.
        start: first day.
        by: day at whose end it has to be done.
        budget_usd: what may be spent on GPUs.
        n_samples: possible worlds to draw.
        seed: seed of the random numbers.

    Raises:
        GoodputError: training never ends with these risks, or a figure that is needed is unknown.
    """
    if risks.step_error is None:
        risks = replace(risks, step_error=training.step_error)
        told = training.step_error_from
    else:
        told = ""
    step_error = risks.step_error or 0.0
    reliability, rests_on = _reliability(training, risks)
    if step_error:
        rests_on.append(
            f"true step times are {100 * step_error:.0f} % around the predicted one (log-normal)"
            + (f": {told}" if told else "")
        )
    work_s = tokens / training.tokens_per_step * training.step_time_s
    interval_s = optimal_interval_s(reliability) if risks.interval_s is None else risks.interval_s
    slow = SlowGpus(risks.stragglers, training.n_gpus, training.compute_share)
    rests_on += slow.notes(QUANTILES)
    mean = expected(work_s * slow.mean, interval_s, reliability)
    times_s = sampled_times_s(
        work_s,
        interval_s,
        reliability,
        n_samples=n_samples,
        seed=seed,
        step_error=step_error,
        stretch=slow.stretch if risks.stragglers else None,
    )
    usd_per_s = (training.usd_per_gpu_hour or 0.0) * training.n_gpus / HOUR_S
    found: dict[str, Any] = {
        **asdict(training),
        "tokens": tokens,
        "start": start.isoformat(),
        "work_days": work_s / DAY_S,
        "expected_days": mean.wall_s / DAY_S,
        "days": {f"{q:.0%}": float(np.quantile(times_s, q)) / DAY_S for q in QUANTILES},
        "ends": {
            f"{q:.0%}": (start + timedelta(seconds=float(np.quantile(times_s, q)))).isoformat()
            for q in QUANTILES
        },
        "goodput": work_s / mean.wall_s,
        "slowest_gpu": slow.slowest(QUANTILES),
        "shares": {
            name: value / mean.wall_s
            for name, value in (
                ("training", work_s),
                ("slow GPUs", mean.work_s - work_s),
                ("checkpoints", mean.checkpoints_s),
                ("lost work", mean.lost_s),
                ("restarts", mean.restarts_s),
            )
        },
        "failures": mean.n_failures,
        "hours_between_failures": None
        if not reliability.failures_per_s
        else 1 / reliability.failures_per_s / HOUR_S,
        "checkpoint_interval_s": None if math.isinf(interval_s) else interval_s,
        "interval_is_optimal": risks.interval_s is None,
        "checkpoint_s": reliability.checkpoint_s,
        "restart_s": reliability.restart_s,
        "samples": n_samples,
        "seed": seed,
        "rests_on": rests_on,
    }
    if by is not None:
        limit_s = ((by - start).days + 1) * DAY_S
        found["by"], found["chance_by"] = by.isoformat(), float((times_s <= limit_s).mean())
    if training.usd_per_gpu_hour is not None:
        found["expected_usd"] = mean.wall_s * usd_per_s
        found["usd_per_1b_tokens"] = mean.wall_s * usd_per_s / (tokens / 1e9)
    if budget_usd is not None:
        if training.usd_per_gpu_hour is None:
            raise GoodputError("a budget needs a price: this machine has none, give --price '2.5 USD/h'")
        found["budget_usd"] = budget_usd
        found["chance_in_budget"] = float((times_s * usd_per_s <= budget_usd).mean())
    return found


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


def with_overrides(training: Training, **given: Any) -> Training:
    """Return *training* with what the user has said of it; None leaves it as it is."""
    return replace(training, **{name: value for name, value in given.items() if value is not None})
