"""The part of a report that is about one run: rows, lanes, steps, memory, overview."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretrace.traces.analysis.memory import Curve, curves
from foretrace.traces.analysis.metrics import breakdown
from foretrace.traces.columns import int64
from foretrace.traces.pack import Pack
from foretrace.traces.report.kinds import Kinds, axis_label
from foretrace.traces.report.labels import Labels
from foretrace.traces.report.memory import pack_memory
from foretrace.traces.report.overview import overview
from foretrace.traces.report.rows import MOST_ROWS, pick_of, rows_of
from foretrace.traces.report.view import View, pack_spans
from foretrace.traces.report.words import share_words


def run_entry(
    view: View, kinds: Kinds, pack: Pack, key: str, *, label: str, first: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the part of the document that is about one run; its spans and memory are added to *pack*.

    Args:
        view: what the page shows of the run.
        kinds: the kinds of the report.
        pack: what the page gets besides the document.
        key: what the document calls the run; its columns are named after it.
        label: what the page calls it.
        first: ranks that the page shows first.
    """
    run = view.run
    rows = rows_of(run, view.rows)
    first_rows = sorted({rows.row_of[rank] for rank in first if rows.row_of[rank] >= 0})
    memory = curves(run, view.rows)
    return {
        "key": key,
        "label": label,
        "origin": run.info.origin,
        "n_chunks": 1 + max(int(int64(run.spans([r]), "virtual_stage").max(initial=0)) for r in view.rows),
        "most_microbatch": max(
            (int(done.microbatch.max(initial=0)) for done in view.done.values()), default=0
        ),
        **pack_spans(view, pack, key, first_rows),
        "rows": list(rows.entries),
        "row_of": list(rows.row_of),
        "lanes": [kinds.lane(axis, direction) for axis, direction, _ in view.lanes],
        "default_step": view.default_step,
        "steps": [_step_entry(view, step, kinds) for step in view.steps],
        "memory": pack_memory(memory, {rank: row for row, rank in enumerate(view.rows)}, pack, key),
        "memory_peaks": [_peak(view, curve) for curve in memory],
    }


def overview_entry(
    view: View, groups: Sequence[Sequence[int]], labels: Labels, pack: Pack, entry: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the overview of all ranks, None if they all have a row, or all do the same.

    Args:
        view: what the page shows of the run.
        groups: ranks that are shown together.
        labels: the words of the report.
        pack: gets the pixels.
        entry: what ``run_entry`` returned; each of its steps gets the busy share of every pattern.
    """
    if len(view.run.ranks) <= MOST_ROWS or len(view.run.stored_ranks) == 1:
        return None
    description, pixels, busy = overview(view, labels)
    pack.add(f"{entry['key']}.overview", pixels)
    for step, shares in zip(entry["steps"], busy, strict=True):
        step["busy"] = shares
    return {**description, "pick": pick_of(view.run, groups, description["order"])}


def _step_entry(view: View, step: int, kinds: Kinds) -> dict[str, Any]:
    """Return the numbers of one step; those of ``traces.analysis.metrics``, with work split by kind."""
    of_rank = {row.rank: row for row in breakdown(view.run) if row.step == step}
    rows: list[dict[str, Any]] = []
    for rank in view.rows:
        done = view.done.get((step, rank))
        if done is None:
            rows.append({"window_ns": 0, "parts": [], "hidden": {}, "words": ["not recorded"]})
            continue
        parts, window_ns = done.parts_ns(), of_rank[rank].window_ns
        hidden = {axis_label(axis): ns for axis, ns in of_rank[rank].hidden_ns.items() if ns}
        words = share_words(parts, window_ns, kinds)
        rows.append({"window_ns": window_ns, "parts": parts, "hidden": hidden, "words": words})
    return {"step": step, "t0_ns": view.origin_ns(step), "length_ns": view.length_ns(step), "rows": rows}


def _peak(view: View, curve: Curve) -> dict[str, Any]:
    """Return the highest point of a curve in the step that is shown first, and what it is made of."""
    step = view.steps[view.default_step]
    origin = view.origin_ns(step)
    t_ns, peak = curve.peak(origin, origin + view.length_ns(step))
    row = view.rows.index(curve.rank)
    return {"row": row, "t_ns": t_ns - origin, "bytes": peak, "parts": list(curve.parts_at(t_ns).items())}
