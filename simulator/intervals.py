"""How far a prediction may be off: conformal ranges from the errors of measured runs.

A range holds the measured figure of 8 in 10 runs. Its half width, in logarithms, is one spread times a factor
for each thing that is inherited or assumed (``WIDER``). ``benchmarks/intervals.py`` finds both: the spread is
the conformal quantile of errors over factors, with the runs of each source on each GPU as one group that
counts once (Dunn, Wasserman and Ramdas 2022, "Distribution-free prediction sets for two-layer hierarchical
models", section 4), so that it holds for a source, or a GPU, that nobody has measured before. Nothing in
``intervals.toml`` is typed by hand, and the prediction itself is not corrected by any bias.

What nobody said may be one of several things. Then the range covers what each of them makes of it, which
``covers`` takes from ``simulator.simulate.readings``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from foretrace.door import own_table
from foretrace.simulator.job import Job
from foretrace.topologies.units import format_time
from foretrace.traces.report.format import format_share, format_si

FIGURES: Final[Mapping[str, str]] = MappingProxyType(
    {"step_time_s": "step_time", "peak_memory_bytes": "memory"}
)
"""Figures that ranges were measured of, and their tables in ``intervals.toml``."""

RATES: Final = ("tokens_per_s", "tokens_per_s_per_gpu", "mfu")
"""Figures that go with one over the time."""


def _unmeasured(job: Job, measured: Collection[str]) -> str:
    names = sorted({kind.device.name for kind in job.cluster.kinds} - set(measured))
    return f"no run on {' or '.join(names)} was ever measured" if names else ""


WIDER: Final[Mapping[str, Callable[[Job, Collection[str]], str]]] = MappingProxyType(
    {
        "experts": lambda job, _: "experts" if job.model.n_experts else "",
        "device": _unmeasured,
    }
)
"""What makes a range wider: given a job and the GPUs that were measured, why, in words; empty if nothing."""


class Interval(NamedTuple):
    """Where a measured figure is likely to lie.

    Attributes:
        low, high: shares of the prediction, which is between them.
        level: share of runs that the range is to contain.
        rows, sources, devices: the runs that it comes from, who measured them, and on how many kinds of GPU.
    """

    low: float
    high: float
    level: float
    rows: int
    sources: int
    devices: int
    wider: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Where the interval comes from, as a person reads it.

        >>> Interval(0.9, 1.1, 0.8, 2100, 13, 11, ("experts",)).words.partition("; ")[2]
        'wider for: experts'
        """
        return (
            f"{format_share(self.level, '.0f')} of {self.rows:,} measured runs lie as near, each of "
            f"{self.sources:,} sources and {self.devices:,} GPUs left out in turn"
            + (f"; wider for: {'; '.join(self.wider)}" if self.wider else "")
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

    Only runs on GPUs were measured; they say nothing of processes on a processor.
    """
    found = measured().get(kind)
    if job.cluster.device.kind != "gpu" or not found:
        return None
    why = {name: words for name, reason in WIDER.items() if (words := reason(job, found["devices"]))}
    spread = half_width(found, why)
    return Interval(
        low=math.exp(-spread),
        high=math.exp(spread),
        level=float(measured()["level"]),
        rows=found["rows"],
        sources=found["sources"],
        devices=len(found["devices"]),
        wider=tuple(words for name, words in why.items() if found["wider"].get(name, 1.0) > 1),
    )


def half_width(found: Mapping[str, Any], why: Collection[str]) -> float:
    """Return ``|ln(measured / predicted)|`` that runs stay below, of a table with ``spread`` and ``wider``.

    >>> half_width({"spread": 0.1, "wider": {"experts": 1.5}}, ["experts", "device"])
    0.15000000000000002
    """
    return float(found["spread"] * math.prod(found["wider"].get(name, 1.0) for name in why))


def intervals(job: Job, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return an interval for each headline figure of *summary*, as plain JSON types, and where it is from."""
    found: dict[str, Any] = {}
    for name, kind in FIGURES.items():
        if one := interval(job, kind):
            found[name] = [summary[name] * share for share in (one.low, one.high)]
            found[f"{name.rpartition('_')[0]}_from"] = one.words
            for rate in RATES if name == "step_time_s" else ():
                # A rate is one over the time: its least belongs to the longest time.
                found[rate] = [summary[rate] / share for share in (one.high, one.low)]
    return found


NOTICED: Final = 1.001
"""Ratio of the most to the least of readings from which it is worth a word."""


class Reading(NamedTuple):
    """What a job may be, as far as anybody said.

    *name*: in a word, as the flag that decides it takes it. *step_time_s*, *peak_memory_bytes*: what is
    predicted then; no time where it does not fit the device that the job itself fits.
    """

    name: str
    step_time_s: float | None
    peak_memory_bytes: float


def covers(
    known: Mapping[str, Any], own: Reading, unsaid: Mapping[tuple[str, str], Sequence[Reading]]
) -> dict[str, Any]:
    """Return the intervals *known* of *own* so that they cover what else it may be, and say so.

    *known*: what ``intervals`` returned for *own*. *unsaid*: what else may be so, by what nobody said, in
    words, and the flag that says it.
    """
    found = dict(known)
    for name in FIGURES:
        value, source = attrgetter(name), f"{name.rpartition('_')[0]}_from"
        known_of = {why: [one for one in others if value(one) is not None] for why, others in unsaid.items()}
        shares = [value(one) / value(own) for others in known_of.values() for one in others]
        # 1: the job as it is, which is one of its readings.
        below, above = min([1.0, *shares]), max([1.0, *shares])
        if name not in found or above < below * NOTICED:
            continue
        for figure in (name, *(RATES if name == "step_time_s" else ())):
            low, high = found[figure]
            found[figure] = [low / above, high / below] if figure in RATES else [low * below, high * above]
        shown = format_time if name == "step_time_s" else partial(format_si, unit="B")
        for (words, flag), others in known_of.items():
            if not others:
                continue
            ends = sorted([own, *others], key=value)
            between = " to ".join(f"{shown(value(one))} ({one.name})" for one in (ends[0], ends[-1]))
            n, n_all = len(others), len(unsaid[words, flag])
            fitting = f" for the {n} of {n_all} that fit" if n < n_all else ""
            begin = "; " if "; wider for: " in found[source] else "; wider for: "
            found[source] += f"{begin}{words}, {between}{fitting}, {flag} says which"
    return found


@cache
def measured() -> dict[str, Any]:
    """Return what ``benchmarks/intervals.py`` wrote."""
    return own_table("simulator/intervals.toml")
