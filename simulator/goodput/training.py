"""The training whose length is asked for: its step, and the machine that it runs on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Final

from foretrace.door import shown
from foretrace.simulator.energy import Power, nodes_of, power, unknown
from foretrace.simulator.errors import GoodputError
from foretrace.traces.analysis.metrics import breakdown, summarize
from foretrace.traces.batch import work_of
from foretrace.traces.run import Run

INTERVAL_LEVEL: Final = 0.8
"""Share of measured runs within the intervals that a simulated run carries (``simulator.intervals``)."""

_END: Final = NormalDist().inv_cdf((1 + INTERVAL_LEVEL) / 2)
"""Standard deviations from the middle of such an interval to its ends."""

_COUNT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)")
_FACTORS: Final = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training on its machine, as far as its length depends on it.

    Attributes:
        name: name of the run whose steps these are.
        tokens_per_step: tokens of a step, over all ranks.
        n_gpus: GPUs that are paid for.
        gpus_without_rank: other GPUs in their nodes.
        n_params: parameters; 0 if unknown.
        usd_per_gpu_hour: price; None if unknown.
        price_from: the machine whose file has that price; empty where it was given.
        step_error: how far measured steps of its class lie around predicted ones, as in ``Risks``; 0 where
            the step was measured.
        step_error_from: the runs that this comes from, in words.
        step_range: between which shares of ``step_time_s`` 8 of 10 measured steps lie, as ``simulate`` says.
        compute_share: share of the step in which the GPU that does most computes.
        drawn: what is drawn for a GPU, its host included, while a step runs; None if that is not known.
        waiting: what is drawn for a GPU while it waits; None if that is not known.
        power_unknown: why that is not known; empty if it is.
    """

    name: str
    step_time_s: float
    tokens_per_step: float
    n_gpus: int
    n_nodes: int
    gpus_without_rank: int = 0
    n_params: int = 0
    usd_per_gpu_hour: float | None = None
    price_from: str = ""
    step_error: float = 0.0
    step_error_from: str = ""
    step_range: tuple[float, float] = (1.0, 1.0)
    compute_share: float = 1.0
    drawn: Power | None = None
    waiting: Power | None = None
    power_unknown: str = ""

    def __post_init__(self) -> None:
        for name in ("step_time_s", "tokens_per_step", "n_gpus", "n_nodes"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise GoodputError(f"{self.name}: {name}={value}: a training needs a number above 0")


def parse_count(text: str) -> float:
    """Return ``"15T"`` as a number: K, M, B and T are powers of a thousand.

    >>> parse_count("1.5T"), parse_count("300B")
    (1500000000000.0, 300000000000.0)

    Raises GoodputError if that is no such number.
    """
    match = _COUNT.fullmatch(text.strip().upper())
    if match is None or not (value := float(match[1]) * _FACTORS[match[2]]):
        raise GoodputError(f"{text!r} is not a number of tokens: write e.g. 300B or 15T")
    return value


def training_of(run: Run, *, tokens_per_step: int | None = None) -> Training:
    """Return the training that *run* is a step of.

    *run*: simulated or recorded. *tokens_per_step*: over all ranks, where the run does not tell; None: it
    does. Raises GoodputError if the run does not tell its tokens per step. Raises TraceError if the run
    cannot be read.
    """
    info = run.info
    figures, summary = summarize(run), info.summary or {}
    step_time_s, n_sites = float(figures["step_time_s"]), 1
    if outer := summary.get("outer"):  # the run is of one of several sites
        step_time_s, n_sites = float(summary["average_step_time_s"]), int(outer["sites"])
    # Shares are of the step that was run; in what an average one takes longer nobody computes.
    shares = {name: share * figures["step_time_s"] / step_time_s for name, share in figures["shares"].items()}
    work = work_of(info.job or {}, info.layout)
    if tokens_per_step is None and work is not None and work[1] == "tokens":
        is_of_one_site = (info.job or {}).get("gpus") == info.world_size  # as earlier runs noted their job
        tokens_per_step = work[0] * (n_sites if is_of_one_site else 1)
    if tokens_per_step is None:
        raise GoodputError(
            f"{run.path} does not tell its tokens per step: give --tokens-per-step, sequences times length"
        )
    cluster, model = info.cluster or {}, info.model or {}
    likely: Mapping[str, Any] = summary.get("intervals") or {}
    nodes = nodes_of(cluster, info.world_size, summary.get("ranks_per_node"))
    drawn = power(cluster, shares, summary.get("memory_bound_share"), nodes)
    error, ends = 0.0, (1.0, 1.0)
    if times := likely.get("step_time_s"):
        error, ends = spread_of(times), tuple(end / figures["step_time_s"] for end in times)
    is_old = info.origin == "simulated" and "power_limit_w_per_gpu" not in cluster
    return Training(
        name=info.name,
        step_time_s=step_time_s,
        compute_share=max(row.shares["compute"] for row in breakdown(run)),
        tokens_per_step=float(tokens_per_step),
        n_gpus=info.world_size * n_sites,
        n_nodes=nodes.n_nodes * n_sites,
        gpus_without_rank=nodes.n_idle * n_sites,
        n_params=int(model.get("n_params") or 0),
        usd_per_gpu_hour=cluster.get("price_usd_per_gpu_hour"),
        price_from=str(cluster.get("name", "its machine")),
        step_error=error,
        step_error_from=str(likely.get("step_time_from", "")),
        step_range=(ends[0], ends[1]),
        drawn=drawn,
        waiting=power(cluster, {}, None, nodes),
        power_unknown="" if drawn else unknown(cluster.get("name", "this machine"), is_old=is_old),
    )


def spread_of(interval: Sequence[float]) -> float:
    """Return the standard deviation of the logarithm of what lies in *interval* in 8 of 10 cases.

    >>> round(spread_of([math.exp(-0.128155), math.exp(0.128155)]), 4)
    0.1
    """
    # Two times are needed: anything else fails below, with a message.
    low, high = interval if len(interval) == 2 else (0.0, 0.0)
    if not 0 < low <= high:
        raise GoodputError(f"intervals.step_time_s is {shown(interval)}, but two times are needed")
    return math.log(high / low) / (2 * _END)


def range_of(spread: float) -> tuple[float, float]:
    """Return between which shares of the predicted time 8 in 10 steps lie; ``spread_of`` it is *spread*.

    >>> round(spread_of(range_of(0.1)), 4)
    0.1
    """
    return math.exp(-_END * spread), math.exp(_END * spread)


def with_overrides(training: Training, **given: Any) -> Training:
    """Return *training* with what the user has said of it; None leaves it as it is."""
    if given.get("usd_per_gpu_hour") is not None:
        given["price_from"] = ""
    return replace(training, **{name: value for name, value in given.items() if value is not None})
