"""How far a prediction may be off: intervals from the measured errors of runs of its class.

``intervals.toml`` is written by ``benchmarks/intervals.py`` from what ``foretrace validate`` printed; nothing
in it is typed by hand. A figure is likely to lie between two shares of its prediction, in 8 of 10 runs.

A class may be biased so much that fewer than one run in ten lies on one side of its predictions. On that side
the interval then ends at the prediction: a range that excludes the figure it is shown with would help nobody,
and a wider range contains no fewer runs. The prediction itself is not corrected by the bias, because that
depends on the models and machines that happen to be in the class.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Final, NamedTuple

from foretrace.simulator.job import Job
from foretrace.traces.report.format import format_share

LEAST_FAMILIES: Final = 5
"""Fewest families of runs that the errors of a class are taken from; else those of a wider class are."""


class Interval(NamedTuple):
    """Where a measured figure is likely to lie.

    Attributes:
        low, high: shares of the prediction, which is between them.
        level: least share of runs that the ranges contain.
        what: the runs that it comes from, e.g. ``"FSDP · h100-sxm"``.
        families, rows: how many those are.
    """

    low: float
    high: float
    level: float
    what: str
    families: int
    rows: int

    @property
    def words(self) -> str:
        """Where the interval comes from, as a person reads it.

        >>> Interval(0.9, 1.1, 0.8, "FSDP", 12, 300).words
        'at least 80 % of 300 measured runs of FSDP, in 12 families, lie within'
        """
        return (
            f"at least {format_share(self.level, '.0f')} of {self.rows:,} measured runs of {self.what}, "
            f"in {self.families:,} families, lie within"
        )


def layout_class(job: Job) -> str:
    """Return the class of *job*: MoE, 3D, FSDP or DP/TP+DP, the first that fits."""
    if job.model.n_experts:
        return "MoE"
    if job.layout.pp > 1:
        return "3D"
    return "FSDP" if job.shards.parameters else "DP/TP+DP"


def interval(job: Job, kind: str) -> Interval | None:
    """Return the interval of *kind*, ``"step_time"`` or ``"memory"``, of *job*; None if nothing was measured.

    The narrowest class is taken that was measured in ``LEAST_FAMILIES``: layout and GPU if there is one kind,
    layout, all. Only runs on GPUs were measured; they say nothing of processes on a processor.
    """
    if job.cluster.device.kind != "gpu":
        return None
    summary = _summary()
    classes: Mapping[str, Any] = summary.get(kind, {})
    name = layout_class(job)
    of_device = () if job.cluster.others else (f"{name} · {job.cluster.device.name}",)
    for what in (*of_device, name, "all"):
        found = classes.get(what)
        if found is not None and found["families"] >= LEAST_FAMILIES:
            low, high = min(found["low"], 1.0), max(found["high"], 1.0)
            return Interval(low, high, float(summary["level"]), what, found["families"], found["rows"])
    return None


def intervals(job: Job, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return an interval for each headline figure of *summary*, as plain JSON types, and where it is from.

    Throughput and MFU go with one over the time.
    """
    found: dict[str, Any] = {}
    if time := interval(job, "step_time"):
        found["step_time_s"] = [summary["step_time_s"] * share for share in (time.low, time.high)]
        for name in ("tokens_per_s", "tokens_per_s_per_gpu", "mfu"):
            found[name] = [summary[name] / share for share in (time.high, time.low)]
        found["step_time_from"] = time.words
    if memory := interval(job, "memory"):
        size = summary["peak_memory_bytes"]
        found["peak_memory_bytes"] = [round(size * share) for share in (memory.low, memory.high)]
        found["peak_memory_from"] = memory.words
    return found


@cache
def _summary() -> dict[str, Any]:
    text = (resources.files("foretrace.simulator") / "intervals.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
