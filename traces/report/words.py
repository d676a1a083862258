"""What a report says in words: key figures, the story of a step, and what the figures rest on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from foretrace.traces.analysis import metrics
from foretrace.traces.analysis.activity import is_pipelined
from foretrace.traces.analysis.gaps import causes, gaps
from foretrace.traces.info import rank_list
from foretrace.traces.report.format import (
    format_left_out,
    format_share,
    format_si,
    format_time,
    lines,
    number,
    quantity,
)
from foretrace.traces.report.kinds import AXIS_WORDS, Kinds, axis_label
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
            "Step time" if metrics.has_steps(run) else "Window",
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
            cause = causes()[row["cause"]].short if row["cause"] in causes() else str(row["cause"])
            shares[cause] = shares.get(cause, 0.0) + row["share"]
    largest = sorted(shares, key=lambda name: -shares[name])[:_SAID]
    # what rounds to 0.0 % is not a loss worth naming
    named = [f"{name} {format_share(shares[name])}" for name in largest if shares[name] >= 0.0005]
    text = (
        f"A {'step' if metrics.has_steps(run) else 'window'} takes {format_time(summary['step_time_s'])}. "
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
    times = metrics.step_times_ns(metrics.breakdown(run))
    averaged = metrics.averaged_steps(run)
    if not metrics.has_steps(run):
        return "from first to last: nothing marks steps"
    if len(times) == 1:
        return "one step"
    left_out = "".join(
        f", step {steps[0]} {why}: left out"
        if len(steps) == 1
        else f", steps {rank_list(steps)} {metrics.in_plural(why)}: left out"
        for why, steps in metrics.grouped(metrics.unaveraged(run)).items()
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
        figures.append(figure("Throughput per GPU", f"{rows:,.0f} rows/s", "of the model's input"))
    elif rate is not None:
        whole = format_si(rate * run.info.world_size, "tok/s")
        said = likely(run, "tokens_per_s_per_gpu", lambda value: f"{value:,.0f}")
        figures.append(figure("Throughput per GPU", f"{rate:,.0f} tok/s", f"{whole} in all", likely=said))
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


# Between which values a measurement is likely to lie, and how that is known.

_HOW: Final = (
    "how far predictions of measured runs were off, class by class. Where runs of a class take longer or "
    "hold more than predicted, or less, the prediction lies near the end of its range, or outside it"
)

_RANGES: Final[tuple[tuple[str, str, str, Callable[[float], str]], ...]] = (
    ("step time", "step_time_s", "step_time_from", format_time),
    ("peak memory", "peak_memory_bytes", "peak_memory_from", lambda size: format_si(size, "B")),
)
"""Name, figure, where its range comes from, and how a value of it is written."""


def likely(run: Run, key: str, said: Callable[[float], str]) -> str:
    """Return between which values a measurement of *key* is likely to lie, "" if the writer does not say.

    Args:
        run: the run; ``info.summary["intervals"]`` has two values by the name of a figure.
        key: key of the figure; where the run's own value lies outside, the words say on which side.
        said: writes a value.
    """
    ends = _ends(run, key)
    if ends is None:
        return ""
    low, high = ends
    predicted = number(run.info.summary.get(key))
    words = f"likely {said(low)} to {said(high)}"
    if predicted is None or low <= predicted <= high:
        return words
    return f"{words}: {'more' if predicted < low else 'less'} than predicted"


def likely_section(run: Run) -> dict[str, Any] | None:
    """Return the part of what a page rests on that says where ranges come from, None if there are none."""
    lines = [
        [name, f"{said(ends[0])} to {said(ends[1])}", str(_known(run).get(source, ""))]
        for name, key, source, said in _RANGES
        if (ends := _ends(run, key)) is not None
    ]
    return {"title": "Likely ranges", "notes": [_HOW], "lines": lines} if lines else None


def _known(run: Run) -> Mapping[str, Any]:
    known = run.info.summary.get("intervals")
    return known if isinstance(known, Mapping) else {}


def _ends(run: Run, key: str) -> tuple[float, float] | None:
    """Return the two ends of the range of *key*, None if the writer does not say, or says something else."""
    ends = _known(run).get(key)
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        return None
    low, high = (number(end) for end in ends)
    return None if low is None or high is None else (low, high)


# What a report calls runs: a title, how they were laid out, and a short word for each of several.


def title(run: Run) -> str:
    """Return what a run is, in one line: its script or its model on its machine, else its name."""
    model, cluster = _script(run) or _name(run.info.model), _name(run.info.cluster)
    if not model:
        return run.info.name or run.path.rstrip("/").rpartition("/")[2]
    ranks = f"{run.info.world_size} {_device_words(run)}"
    where = f"{ranks} ({cluster})" if cluster else ranks
    return f"{model} on {where}"


def subtitle(run: Run) -> str:
    """Return how a run was laid out, in words."""
    job, model = run.info.job or {}, _name(run.info.model)
    if _script(run):
        parts = ["rehearsed", _stages(run) if is_pipelined(run) else model, layout_words(run)]
    else:
        parts = [
            run.info.origin,
            run.info.name if model and model not in run.info.name else "",
            layout_words(run),
        ]
    if batches := number(job.get("n_microbatches")):
        each = [quantity("", job[key]) for key in ("micro_batch", "seq_len") if number(job.get(key))]
        of = f" of {' × '.join(each)} tokens" if len(each) == 2 else ""
        parts.append(f"{batches:.0f} micro-batch{'es' if batches > 1 else ''}{of}")
    for key, noun in (("schedule", ""), ("sharding", ""), ("recompute", "recompute "), ("precision", "")):
        value = job.get(key)
        if isinstance(value, str) and value not in ("", "none") and (key != "schedule" or is_pipelined(run)):
            parts.append(f"{noun}{value}")
    parts += _unusual(job)
    return " · ".join(part for part in parts if part)


def _unusual(job: Mapping[str, Any]) -> list[str]:
    """Return settings that most jobs leave alone and that change what a step is made of, in words."""
    said = []
    if job.get("fp8"):
        said.append(f"products in fp8{f' ({recipe})' if (recipe := job.get('recipe')) else ''}")
    if shards := number(job.get("shard_ranks")):
        said.append(f"shards over {shards:.0f} ranks")
    if rank := number(job.get("lora_rank")):
        said.append(f"LoRA of rank {rank:.0f}{', base in 4 bits' if job.get('quantized_base') else ''}")
    if (offload := job.get("offload", "none")) != "none":
        n_layers = number(job.get("offload_layers"))
        of = f" of {n_layers:.0f} layers" if n_layers else ""
        said.append(f"{'everything' if offload == 'all' else offload}{of} on {job.get('offload_to', 'host')}")
    return said


def _script(run: Run) -> str:
    """Return the name of the script of which a run is a rehearsal, empty if it is none."""
    return run.info.name.partition(" on ")[0] if (run.info.job or {}).get("rehearsed") else ""


def _stages(run: Run) -> str:
    """Return how large the model of a pipeline is: the modules that were called are called after stages.

    Empty if stages are missing, whose parameters nobody has seen.
    """
    layout, model = run.info.layout, run.info.model or {}
    n_params, structure = model.get("n_params"), model.get("structure")
    if layout is None or len(run.stored_ranks) < layout.pp or not isinstance(structure, Mapping):
        return ""
    layers = {layer for part in structure.values() for layer in part.get("layers", ())}
    return f"{quantity('', n_params)} parameters in {len(layers)} layers" if n_params and layers else ""


def layout_words(run: Run) -> str:
    """Return the parallel degrees above 1 in words, and the number of ranks."""
    layout = run.info.layout
    ranks = f"{run.info.world_size} rank{'s' if run.info.world_size > 1 else ''}"
    if layout is None:
        return ranks
    axes = [axis for axis in ("tp", "cp", "ep", "pp", "dp") if layout.degrees[axis] > 1]
    return ranks + "".join(f" · {AXIS_WORDS[axis]} {layout.degrees[axis]}" for axis in axes)


def run_labels(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return a short word for each run: where it comes from, or, if that is the same, its name or folder.

    Of names, what they have in common in front is left out.
    """
    origins = tuple(run.info.origin for run in runs)
    if len(set(origins)) == len(runs):
        return origins
    names = tuple(run.info.name for run in runs)
    folders = tuple(Path(run.path).name for run in runs)
    apart = (one for one in (names, folders) if len(set(one)) == len(runs) and all(one))
    return _own_parts(next(apart, ("first", "second")))


def _own_parts(names: Sequence[str]) -> tuple[str, ...]:
    """Return *names* from the first word on in which they differ, if every one of them has such a word.

    >>> _own_parts(["8b on 64 dgx-h100, tp8 dp8", "8b on 64 dgx-h100, tp4 dp16"])
    ('tp8 dp8', 'tp4 dp16')
    >>> _own_parts(["8b on 64", "8b"])
    ('8b on 64', '8b')
    """
    words = [name.split() for name in names]
    same = next((at for at, column in enumerate(zip(*words, strict=False)) if len(set(column)) > 1), 0)
    return tuple(" ".join(each[same:]) for each in words) if same else tuple(names)


def _name(description: Mapping[str, Any] | None) -> str:
    """Return the name that a description gives itself, "" if none."""
    name = (description or {}).get("name")
    return name if isinstance(name, str) else ""


def _device_words(run: Run) -> str:
    device = (run.info.cluster or {}).get("device")
    name = device.get("name") if isinstance(device, Mapping) else None
    return f"× {name}" if isinstance(name, str) and name else "ranks"
