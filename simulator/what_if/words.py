"""What the what-if page says of a plan: its figures, against a pinned one, and what makes it fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from foretrace.simulator.job import Job
from foretrace.simulator.simulate import Simulation
from foretrace.simulator.summary import job_name
from foretrace.simulator.what_if.fitting import ways_to_fit
from foretrace.traces.report.format import format_share, format_si
from foretrace.traces.report.naming import subtitle
from foretrace.traces.report.words import figure, headline
from foretrace.traces.run import Run

SHOWN_REMEDIES: Final = 6

LOWER_IS_BETTER: Final = frozenset(
    {
        "Step time",
        "Pipeline bubble",
        "Exposed communication",
        "Waiting for other ranks",
        "Peak memory",
        "Cost",
    }
)
"""Figures that are better when they are smaller."""


SUMMARY_KEYS: Final = ("step_time_s", "tokens_per_s", "mfu", "bubble_fraction", "peak_memory_bytes", "fits")
"""Figures that the page passes on as numbers, as ``simulate --json`` prints them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One answer.

    Attributes:
        job: what was asked for.
        simulation: what it does.
        run: the same as a run, with what was worked out of it.
        price: price of a GPU-hour, in USD; None if not known.
    """

    job: Job
    simulation: Simulation
    run: Run
    price: float | None


def words_of(planned: Planned, pinned: Planned | None) -> dict[str, Any]:
    """Return the figures of a plan as the page takes them, beside those of a pinned one."""
    before = {} if pinned is None else {one["name"]: (one, value) for one, value in _figures_of(pinned)}
    cards = []
    for one, value in _figures_of(planned):
        cards.append(one if one["name"] not in before else _against(one, value, *before[one["name"]]))
    layout = planned.job.layout
    return {
        "title": job_name(planned.job),
        "subtitle": subtitle(planned.run),
        "headline": cards,
        "warnings": [text for text in planned.simulation.info.warnings if not _is_about_memory(text)],
        "dp": layout.dp,
        "n_microbatches": planned.job.n_microbatches,
        "misfit": _misfit(planned),
        "summary": {key: planned.simulation.summary[key] for key in SUMMARY_KEYS},
    }


def _figures_of(planned: Planned) -> list[tuple[dict[str, str], float | None]]:
    """Return the figures of one plan, each with its number."""
    summary = planned.simulation.summary
    numbers = {
        "Step time": summary["step_time_s"],
        "Computing": summary["shares"]["compute"],
        "Pipeline bubble": summary["bubble_fraction"],
        "Exposed communication": summary["exposed_comm_fraction"],
        "Waiting for other ranks": summary["waiting_fraction"],
        "Peak memory": summary["peak_memory_bytes"],
        "Throughput": summary["tokens_per_s_per_gpu"],
        "MFU": summary["mfu"],
    }
    found: list[tuple[dict[str, str], float | None]] = [
        (one, numbers.get(one["name"])) for one in headline(planned.run, summary)
    ]
    if planned.price is not None:
        usd_per_s = planned.price * planned.job.layout.world_size / 3600
        per_billion = usd_per_s / summary["tokens_per_s"] * 1e9
        note = f"per billion tokens at ${planned.price:g} per GPU-hour"
        found.append((figure("Cost", f"${per_billion:,.0f}", note), per_billion))
    return found


def _against(
    one: dict[str, str], value: float | None, before: dict[str, str], value_before: float | None
) -> dict[str, str]:
    """Return a figure with what it was in the pinned plan."""
    if not value or not value_before:
        return {**one, "was": f"A {before['value']}"}
    change = value / value_before - 1
    better = (change < 0) == (one["name"] in LOWER_IS_BETTER)
    sign = format_share(change, "+.1f").replace("-", "−")
    return {
        **one,
        "was": f"A {before['value']}, {'no change' if abs(change) < 5e-4 else sign}",
        "tone": "" if abs(change) < 5e-4 else "good" if better else "bad",
    }


def _misfit(planned: Planned) -> dict[str, Any] | None:
    """Return by how much a plan does not fit into memory, and changes with which it would."""
    job, summary = planned.job, planned.simulation.summary
    if summary["fits"]:
        return None
    peak, limit = summary["peak_memory_bytes"], summary["memory_limit_bytes"]
    return {
        "text": f"does not fit: {format_si(peak, 'B')} needed, {format_si(limit, 'B')} there",
        "remedies": [
            {"change": way.change, "peak": format_si(way.peak_bytes, "B"), "settings": way.settings}
            for way in ways_to_fit(job)[:SHOWN_REMEDIES]
        ],
    }


def _is_about_memory(text: str) -> bool:
    return "not fit" in text or text.startswith(("would fit", "no single setting"))
