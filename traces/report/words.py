"""What a report says in words: key figures, the story of a step, and what the figures rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from foretrace.traces.analysis.activity import is_pipelined
from foretrace.traces.analysis.gaps import CAUSES, gaps
from foretrace.traces.analysis.metrics import (
    averaged_steps,
    breakdown,
    grouped,
    has_steps,
    in_plural,
    step_times_ns,
    unaveraged,
)
from foretrace.traces.info import rank_list
from foretrace.traces.report.format import (
    format_left_out,
    format_share,
    format_si,
    format_time,
    lines,
    number,
)
from foretrace.traces.report.kinds import Kinds, axis_label
from foretrace.traces.report.likely import likely, likely_section
from foretrace.traces.run import Run

_LARGE_LOSS: Final = 0.15
"""Share of the step above which a loss is shown as bad: a seventh of the machine and more is idle."""

_CLOSED_FORM: Final = ("gpipe", "1f1b", "interleaved-1f1b")  # schedules whose bubble has a closed form

LEGEND_NOTE: Final = (
    "Communication: a thin line while waiting for the last rank, then the transfer, pale behind compute, "
    "solid where exposed."
)
"""What a page says below its legend."""

_SAID: Final = 3  # losses that the story of a step names


def figure(name: str, value: str, note: str = "", tone: str = "", likely: str = "") -> dict[str, str]:
    """Return one key figure as the page takes it.

    Args:
        name: name of the figure.
        value: with its unit.
        note: what the value refers to.
        tone: ``good``, ``bad`` or nothing.
        likely: between which values a measurement is likely to lie; nothing if not known.
    """
    found = {"name": name, "value": value, "note": note, "tone": tone}
    return found | {"likely": likely} if likely else found


def headline(run: Run, summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the key figures of a run.

    Args:
        run: the run.
        summary: what ``traces.analysis.metrics.summarize`` says of it.
    """
    figures = [
        figure(
            "Step time" if has_steps(run) else "Window",
            format_time(summary["step_time_s"]),
            "; ".join(filter(None, (_averaged_over(run), format_left_out(summary.get("left_out", ()))))),
            likely=likely(run, "step_time_s", format_time),
        ),
        figure("Computing", format_share(summary["shares"]["compute"]), "of the step, mean over ranks"),
    ]
    if is_pipelined(run):
        bubble = summary["bubble_fraction"]
        figures.append(figure("Pipeline bubble", format_share(bubble), _ideal_bubble(run), _tone(bubble)))
    exposed = summary["exposed_comm_fraction"]
    figures.append(figure("Exposed communication", format_share(exposed), _by_axis(summary), _tone(exposed)))
    waiting = summary["waiting_fraction"]
    if waiting > 0.005:  # less would read as 0.0 %, and is
        figures.append(
            figure("Waiting for other ranks", format_share(waiting), "in collectives", _tone(waiting))
        )
    return [*figures, *_memory(run), *_throughput(run)]


def story(run: Run, summary: Mapping[str, Any], kinds: Kinds) -> str:
    """Return what a step is made of in one or two sentences, largest losses first."""
    shares = {
        str(kinds.entries[kinds.state(state)]["label"]): share
        for state, share in summary["shares"].items()
        if state != "compute"
    }
    if idle := gaps(run):  # "other", by cause
        del shares[kinds.entries[kinds.state("other")]["label"]]
        for row in idle:
            cause = CAUSES[row["cause"]].short if row["cause"] in CAUSES else str(row["cause"])
            shares[cause] = shares.get(cause, 0.0) + row["share"]
    largest = sorted(shares, key=lambda name: -shares[name])[:_SAID]
    # what rounds to 0.0 % is not a loss worth naming
    named = [f"{name} {format_share(shares[name])}" for name in largest if shares[name] >= 0.0005]
    text = (
        f"A {'step' if has_steps(run) else 'window'} takes {format_time(summary['step_time_s'])}. "
        f"Ranks compute for {format_share(summary['shares']['compute'])} of it"
    )
    text += f"; the largest losses: {', '.join(named)}." if named else "."
    stored = len(run.stored_ranks)
    if run.info.representatives is not None and stored < run.info.world_size:
        rows = "One rank is" if stored == 1 else f"{stored} ranks are"
        stands = "stands" if stored == 1 else "stand"
        text += f" {rows} drawn and {stands} for all {run.info.world_size}: {_others(run)}."
    return text


def _others(run: Run) -> str:
    """Say what ranks do that are not drawn; uneven experts are simulated as if all had the most tokens."""
    if number((run.info.job or {}).get("expert_imbalance")):
        return "experts are uneven, and each rank is counted with the tokens of the fullest"
    return "the others do the same"


def basis(run: Run) -> list[dict[str, Any]]:
    """Return what the figures rest on: what the writer says of it, and the run, job, model and machine."""
    info = run.info
    about = {
        "origin": info.origin,
        "name": info.name,
        "ranks": info.world_size,
        "ranks stored": len(run.stored_ranks),
        "started": info.started or "",
        "clock_uncertainty_ns": max((clock.uncertainty_ns for clock in info.clock.values()), default=0)
        or None,
        **{f"lost {reason}": count for reason, count in info.dropped.items()},
        **dict(info.versions),
    }
    sections = (("This run", about), ("Job", info.job), ("Model", info.model), ("Machine", info.cluster))
    told = info.summary.get("rests_on")
    notes = [str(note) for note in told] if isinstance(told, list | tuple) else []
    ranges = likely_section(run)
    return [
        *([{"title": "Costs", "notes": notes, "lines": []}] if notes else []),
        *([ranges] if ranges else []),
        *(
            {"title": name, "notes": [], "lines": [list(line) for line in lines(description)]}
            for name, description in sections
            if isinstance(description, Mapping) and description
        ),
    ]


def share_words(parts: Sequence[tuple[int, int]], window_ns: int, kinds: Kinds) -> list[str]:
    """Return the three largest parts of a step in a few words each, compute kinds taken together."""
    total: dict[str, int] = {}
    for kind, ns in parts:
        entry = kinds.entries[kind]
        name = "compute" if entry["group"] == "compute" else str(entry["short"])
        total[name] = total.get(name, 0) + ns
    largest = sorted(total, key=lambda name: -total[name])[:_SAID]
    return [
        f"{format_share(total[name] / window_ns, '.0f')} {name}"
        for name in largest
        if total[name] >= 0.005 * window_ns  # what rounds to 0 % says nothing
    ]


def _averaged_over(run: Run) -> str:
    """Say over how many steps the figures are taken."""
    times = step_times_ns(breakdown(run))
    averaged = averaged_steps(run, times)
    if not has_steps(run):
        return "from first to last: nothing marks steps"
    if len(times) == 1:
        return "one step"
    left_out = "".join(
        f", step {steps[0]} {why}: left out"
        if len(steps) == 1
        else f", steps {rank_list(steps)} {in_plural(why)}: left out"
        for why, steps in grouped(unaveraged(run, times)).items()
    )
    return f"median of {len(averaged)} step{'s' if len(averaged) > 1 else ''}{left_out}"


def _by_axis(summary: Mapping[str, Any]) -> str:
    """Return exposed communication by axis, the largest first."""
    of_axis = summary["exposed_by_axis"]
    # Less would read as 0.0 %.
    named = [axis for axis in sorted(of_axis, key=lambda axis: -of_axis[axis]) if of_axis[axis] >= 0.0005]
    return " · ".join(f"{axis_label(axis)} {format_share(of_axis[axis])}" for axis in named)


def _ideal_bubble(run: Run) -> str:
    """Return the bubble of an ideal pipeline where a closed form is known, (p - 1) / (v m + p - 1).

    With p stages, m micro-batches and v virtual stages per rank, 1 but for the interleaved schedule.
    Reference: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    job, layout = run.info.job or {}, run.info.layout
    batches = number(job.get("n_microbatches"))
    interleaved = job.get("schedule") == "interleaved-1f1b"
    virtual = number(job.get("virtual_stages")) if interleaved else 1.0
    if layout is None or not batches or not virtual or job.get("schedule") not in _CLOSED_FORM:
        return "idle over total"
    ideal = (layout.pp - 1) / (virtual * batches + layout.pp - 1)
    return f"ideal: (p−1)/({'v·' if interleaved else ''}m+p−1) = {format_share(ideal)}"


def _memory(run: Run) -> list[dict[str, str]]:
    """Return the peak of memory, against what the device has."""
    peak = number(run.info.summary.get("peak_memory_bytes"))
    if peak is None:
        return []
    limit = memory_limit_bytes(run)
    fits = run.info.summary.get("fits")
    tone = "bad" if fits is False or (limit and peak > limit) else ""
    note = f"of {format_si(limit, 'B')} per device" if limit else "per rank"
    said = likely(run, "peak_memory_bytes", lambda size: format_si(size, "B"))
    return [
        figure("Peak memory", format_si(peak, "B"), note + (", does not fit" if tone else ""), tone, said)
    ]


def _throughput(run: Run) -> list[dict[str, str]]:
    """Return tokens per second and model FLOP/s utilisation, where the writer knew them."""
    summary = run.info.summary
    figures = []
    rate = number(summary.get("tokens_per_s_per_gpu"))
    if rate == 0 and (rows := number(summary.get("rows_per_s_per_gpu"))):
        figures.append(figure("Throughput", f"{rows:,.0f} rows/s", "of the model's input, per GPU"))
    elif rate is not None:
        whole = format_si(rate * run.info.world_size, "tok/s")
        said = likely(run, "tokens_per_s_per_gpu", lambda value: f"{value:,.0f}")
        figures.append(figure("Throughput", f"{rate:,.0f} tok/s", f"per GPU; {whole} in all", likely=said))
    if (mfu := number(summary.get("mfu"))) is not None:
        said = likely(run, "mfu", format_share)
        figures.append(figure("MFU", format_share(mfu), "model FLOP/s over peak", likely=said))
    return figures


def memory_limit_bytes(run: Run) -> float | None:
    """Return the memory of one device, None if the machine is not described."""
    device = (run.info.cluster or {}).get("device")
    return number(device.get("memory_bytes")) if isinstance(device, Mapping) else None


def _tone(loss: float) -> str:
    return "bad" if loss > _LARGE_LOSS else ""
