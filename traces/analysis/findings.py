"""What a run loses, in words: one sentence per cause, with its cost, the dearest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from foretrace.traces.analysis.activity import HOST_OPTIMIZER
from foretrace.traces.analysis.collectives import bandwidths, lacks_ranks
from foretrace.traces.analysis.device_time import launching_share
from foretrace.traces.analysis.gaps import HELD_BACK, ON_ITS_WAY, UNNAMED, causes, gaps
from foretrace.traces.analysis.metrics import assumptions, averaged_rows, averaged_steps, summarize
from foretrace.traces.analysis.roots import held_up
from foretrace.traces.errors import RunError
from foretrace.traces.replay.whatif import what_if
from foretrace.traces.report.format import along, cut, format_share, format_si, format_time
from foretrace.traces.run import Run

LEAST_SHARE: Final = 0.005  # what costs less of a step than this is not worth a sentence

SMALL_BYTES: Final = 1 << 20
"""Collectives below this take as long as their latency: at 8 H100s bus bandwidth is a tenth of its peak."""

SLOW_SHARE: Final = 0.5
"""Share of what links allow below which a large collective is called slow. A convention."""

MANY: Final = 100  # small collectives per step that are worth putting together

SHORT_S: Final = 1e-3
"""Longest collective of unknown size that may be small. A convention: with nobody late, 1 MiB takes less than
that on any link above 2 GB/s."""

MOST_DOING: Final = 3
LEAST_DOING: Final = 0.05
"""What the host did in idle time, of one cause: most that a sentence tells, and least share of it."""

LONGEST_DOING: Final = 80  # letters of what the host did that a sentence tells
SELF_EVIDENT: Final = ("", ON_ITS_WAY, HELD_BACK)  # names of idle time that say no more than its cause

VARIATIONS: Final = ("stragglers", "compute_jitter", "network_jitter", "rank_jitter")
"""Settings of a simulated job that make like operations take unlike times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause of lost time."""

    what: str  # short name of the cause, for programs
    text: str  # one sentence for a person
    cost_s: float  # time of a step that it takes on the mean rank
    share: float  # the same, of the step
    advice: str = ""  # what to do about it, "" if that is another matter
    usd_per_hour: float | None = None  # the same, of the price of all GPUs; None without a price


def findings(
    run: Run,
    usd_per_gpu_hour: float | None = None,
    *,
    replay: bool = True,
    limit_bytes_per_s: float | None = None,
) -> list[Finding]:
    """Return what the run loses, the dearest first; costs may overlap, they need not add up.

    A run without times loses nothing that could be known.

    Args:
        run: an open run.
        usd_per_gpu_hour: price of one GPU, for costs in money.
        replay: also play a pipeline again to find what unlike operations cost it, which takes seconds where
            it has tens of thousands of spans.
        limit_bytes_per_s: bus bandwidth that the links allow, if the run does not describe them.
    """
    if run.is_timeless:
        return []
    summary = summarize(run)
    step_s = summary["step_time_s"]
    averaged_s = sum(row.window_ns * row.represents for row in averaged_rows(run)) / 1e9
    said = [(one.what, one.text, one.cost_ns / 1e9 / averaged_s) for one in held_up(run)]
    said += [*_exposed(run, summary), *_delayed(run, summary), *(_unlike(run) if replay else ())]
    idle = _idle(run)
    moved = bandwidths(run, averaged=True, limit_bytes_per_s=limit_bytes_per_s)
    said += [
        *idle,
        *_untold(run, summary, sum(share for _, _, share in idle)),
        *_small(run, moved, averaged_s, len(averaged_steps(run))),
        *_slow(run, moved, summary, averaged_s),
    ]
    each = " a step" if summary["has_steps"] else ""
    rate = None if usd_per_gpu_hour is None else usd_per_gpu_hour * run.info.world_size
    found = [
        Finding(
            what=what,
            # The cost of slow links is a bound, and several may have the same.
            text=f"{text}: {'at most ' if what.startswith('slow:') else ''}"
            f"{format_time(share * step_s)}{each}, {format_share(share)}",
            advice=causes()[what.removeprefix("idle:")].advice if what.startswith("idle:") else "",
            cost_s=share * step_s,
            share=share,
            usd_per_hour=None if rate is None else rate * share,
        )
        for what, text, share in said
        if share >= LEAST_SHARE
    ]
    return sorted(found, key=lambda one: -one.share)


def _unlike(run: Run) -> list[tuple[str, str, float]]:
    """Say what operations that take unlike times cost a pipeline, and where most of it is."""
    try:
        found = what_if(run)
    except RunError:
        return []
    if len(found.by_worker) == 1 and _is_even(run):
        return []
    kind = next(iter(found.by_kind))
    worst = [f"{kind} (alone {found.by_kind[kind]:.2f})"]
    for name, slowdowns in (("stage", found.by_stage), ("rank", found.by_worker)):
        if len(slowdowns) > 1:
            one = next(iter(slowdowns))
            worst.append(f"{name} {one} ({slowdowns[one]:.2f})")
    text = (
        f"like operations take unlike times: {found.slowdown:.2f} times the step in which they are equal, "
        f"most of all {', '.join(worst)}"
    )
    # With equal operations the step would take 1 / slowdown of its time.
    return [("unlike", text, 1 - 1 / found.slowdown)]


def _is_even(run: Run) -> bool:
    """Whether a run was simulated without stragglers and jitter: what differs is the model's own shape."""
    job = run.info.job or {}
    return run.info.origin == "simulated" and not any(job.get(name) for name in VARIATIONS)


def _exposed(run: Run, summary: dict[str, Any]) -> list[tuple[str, str, float]]:
    """Say where data moves and nobody computes; with ranks missing, that it may as well be waiting."""
    text = "data moves {} while nobody computes"
    either = "communication {} while nobody computes, be it transfer or waiting for a missing rank"
    return [
        (f"exposed:{axis}", (either if lacks_ranks(run, axis) else text).format(_along(run, axis)), share)
        for axis, share in summary["exposed_by_axis"].items()
    ]


def _along(run: Run, axis: str) -> str:
    """Return between whom an axis communicates, and whether that is only assumed."""
    assumed = axis == "world" and "group" in assumptions(run)
    return along(axis) + (" (assumed: the file names no group)" if assumed else "")


def _delayed(run: Run, summary: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Say what else delays ranks or their devices: other stages, the optimizer on the host, launches."""
    yield "bubble", "pipeline stages wait for one another", summary["bubble_fraction"]
    share = summary["shares"].get(HOST_OPTIMIZER, 0.0)
    yield HOST_OPTIMIZER, "devices wait for the optimizer, which runs on their host", share
    text = "devices wait for their host, which takes longer to launch kernels than they to run them"
    yield "launch", text, launching_share(run)


def _idle(run: Run) -> list[tuple[str, str, float]]:
    """Say why devices were idle: each cause with what the host did most of that time."""
    by_cause: dict[str, dict[str, float]] = {}
    for row in gaps(run):
        by_cause.setdefault(row["cause"], {})[row["doing"]] = row["share"]
    return [
        (f"idle:{cause}", f"{causes()[cause].text}{_doing(shares)}", sum(shares.values()))
        for cause, shares in by_cause.items()
        if cause in causes()
    ]


def _untold(run: Run, summary: dict[str, Any], told: float) -> list[tuple[str, str, float]]:
    """Say how much of a run that other tools traced nothing explains, but for the share that is *told*."""
    if run.info.origin != "ingested":
        return []
    text = "nothing runs on a device as far as the files tell, nor do they tell why"
    return [("untold", text, summary["shares"].get("other", 0.0) - told)]


def _doing(shares: Mapping[str, float]) -> str:
    """Return what the host did most of the time, of shares of the steps by what it did."""
    total = sum(shares.values())
    said = [
        f"{format_share(share, '.0f')} "
        + ("in code that nothing names" if name == UNNAMED else cut(name, LONGEST_DOING))
        for name, share in list(shares.items())[:MOST_DOING]
        if name not in SELF_EVIDENT and share >= max(LEAST_SHARE, total * LEAST_DOING)
    ]
    return f" ({', '.join(said)})" if said else ""


def _slow(
    run: Run, moved: list[dict[str, Any]], summary: dict[str, Any], window_s: float
) -> list[tuple[str, str, float]]:
    """Say where large collectives use less than half of what their links allow.

    What it costs is at most what is exposed along their axis, whichever of its collectives that is.
    """
    said = []
    for row in moved:
        share = row["share_of_limit"]
        least = "at least " if lacks_ranks(run, row["axis"]) else ""
        if share is None or share >= SLOW_SHARE or row["size_bytes"] < SMALL_BYTES:
            continue
        reached, limit = (
            format_si(row[name], "B/s") for name in ("median_busbw_bytes_per_s", "limit_bytes_per_s")
        )
        size = format_si(row["size_bytes"], "B")
        text = (
            f"{row['kind']} of about {size} {_along(run, row['axis'])} reaches {least}{reached} "
            f"of the {limit} of its links"
        )
        # At the limit the same bytes would take *share* of this time.
        lost = row["rank_s"] / window_s * (1 - share)
        said.append(
            (f"slow:{row['axis']}", text, min(lost, summary["exposed_by_axis"].get(row["axis"], 0.0)))
        )
    return said


def _small(
    run: Run, moved: list[dict[str, Any]], window_s: float, n_steps: int
) -> list[tuple[str, str, float]]:
    """Say where many small collectives take the time of few large ones."""
    said = []
    for row in moved:
        per_step, n_timed = row["count"] / n_steps, row["count"] - row["n_bounds"]
        if not row["size_bytes"] and per_step >= MANY and row["transfer_s"] < n_timed * SHORT_S:
            each, between = format_time(row["transfer_s"] / n_timed), _along(run, row["axis"])
            text = (
                f"{per_step:,.0f} {row['kind']} {between}, {each} each on average, of unknown size"
                ": if they are small, fewer and larger ones cost less"
            )
            said.append((f"small:{row['axis']}", text, row["rank_s"] / window_s))
        elif row["size_bytes"] and row["size_bytes"] < SMALL_BYTES and per_step >= MANY:
            each = format_si(row["size_bytes"], "B")
            text = (
                f"{per_step:,.0f} {row['kind']} of about {each} {_along(run, row['axis'])} cost their latency"
            )
            said.append((f"small:{row['axis']}", text, row["rank_s"] / window_s))
    return said
