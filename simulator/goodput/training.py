"""The training whose length is asked for: its step, and the machine that it runs on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Final

from foretrace.simulator.errors import GoodputError
from foretrace.traces.analysis.metrics import breakdown, summarize
from foretrace.traces.batch import batch_in
from foretrace.traces.run import Run

INTERVAL_LEVEL: Final = 0.8
"""Share of measured runs within the intervals that a simulated run carries (``simulator.intervals``)."""

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
        price_from: the machine whose file has that price; empty where it was given.
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
    price_from: str = ""
    step_error: float = 0.0
    step_error_from: str = ""
    compute_share: float = 1.0


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
        tokens_per_step = batch_in(job).tokens or None
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
        price_from=str(cluster.get("name", "its machine")),
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


def with_overrides(training: Training, **given: Any) -> Training:
    """Return *training* with what the user has said of it; None leaves it as it is."""
    if given.get("usd_per_gpu_hour") is not None:
        given["price_from"] = ""
    return replace(training, **{name: value for name, value in given.items() if value is not None})
