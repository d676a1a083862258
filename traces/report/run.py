"""The part of a report that is about one run: rows, lanes, steps, memory, overview."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.analysis.memory import Curve, curves
from foretrace.traces.analysis.metrics import breakdown
from foretrace.traces.columns import Int64Array, int64
from foretrace.traces.layout import Layout
from foretrace.traces.pack import Pack
from foretrace.traces.report.cells import RankStep, painted, rank_step, share_of_bins
from foretrace.traces.report.kinds import Kinds, Labels, axis_label
from foretrace.traces.report.rows import MOST_ROWS, pick_of, reading_order, rows_of
from foretrace.traces.report.view import View, pack_spans
from foretrace.traces.report.words import share_words
from foretrace.traces.run import Run


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


# Memory over time in a report: one curve per row.

_SLICES: Final = 4096  # slices of a long curve; in each, its first point and its highest are kept


def held_where(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Return what the curves of *runs*, which the page calls *names*, are of, in words.

    A recording without a GPU has the resident set of its processes, libraries included: more than the tensors
    that a prediction counts.
    """
    held = [
        "held by the process, libraries included" if _is_resident(run) else "held on the device"
        for run in runs
    ]
    if len(set(held)) == 1:
        return held[0]
    return "; ".join(f"{name}: {what}" for name, what in zip(names, held, strict=True))


def _is_resident(run: Run) -> bool:
    device = (run.info.cluster or {}).get("device")
    return run.info.origin == "recorded" and isinstance(device, Mapping) and device.get("kind") == "cpu"


def pack_memory(
    found: Sequence[Curve], place: Mapping[int, int], pack: Pack, prefix: str
) -> list[dict[str, Any]]:
    """Add *found* to *pack*; return where in it each row's curve is.

    Args:
        found: the curves.
        place: row of each rank.
        pack: what the page gets.
        prefix: prefix of the columns' names.
    """
    series, times, sizes, done = [], [], [], 0
    for curve in found:
        kept = _thinned(curve)
        times.append(curve.t_ns[kept])
        sizes.append(curve.total_bytes[kept])
        series.append({"row": place[curve.rank], "from": done, "to": done + len(kept)})
        done += len(kept)
    for name, parts in (("memory.t", times), ("memory.bytes", sizes)):
        pack.add(f"{prefix}.{name}", np.concatenate([np.zeros(0), *parts]).astype(np.float64))
    return series


def _thinned(curve: Curve) -> Int64Array:
    """Return which points to keep: all of a short curve, of a long one two per slice."""
    n_points = len(curve.t_ns)
    if n_points <= 2 * _SLICES:
        return np.arange(n_points)
    number = np.linspace(0, _SLICES, n_points, endpoint=False).astype(np.int64)
    first = np.flatnonzero(np.diff(number, prepend=-1))
    # By slice, and in each by height: the highest comes last.
    by_height = np.lexsort((curve.total_bytes, number))
    highest = by_height[np.append(first[1:], n_points) - 1]
    return np.unique(np.concatenate([first, highest, [n_points - 1]]))


# All ranks of a run in one picture: what each does in each thin slice of the step.

BINS: Final = 1536  # slices of a step: about one per pixel of the page
MOST_LINES: Final = 1024  # ranks in the picture; of more, every n-th is shown
_AT_ONCE: Final = 256  # rows that are painted together; their bins take about 40 MB
NOTHING: Final = 255  # kind of a slice in which a rank is outside its step


def overview(view: View, labels: Labels) -> tuple[dict[str, Any], NDArray[np.uint8], list[list[float]]]:
    """Return the overview of all ranks: its description, its pixels, and the busy share by step and pattern.

    Ranks that share their spans share a pattern. Pixels have shape ``(n_steps * n_patterns * BINS,)``.

    Args:
        view: what the page shows of the run; ranks that it leaves out are in the overview all the same.
        labels: the words of the report.
    """
    run = view.run
    n_kinds = len(labels.kinds.entries)
    rows = [(step, rank) for step in view.steps for rank in run.stored_ranks]
    pixels = np.full((len(rows), BINS), NOTHING, np.uint8)
    busy = np.zeros(len(rows))
    edges = {
        step: view.origin_ns(step) + np.linspace(0, view.length_ns(step), BINS + 1) for step in view.steps
    }
    for first in range(0, len(rows), _AT_ONCE):
        together = rows[first : first + _AT_ONCE]
        shares = np.zeros((BINS, len(together), n_kinds + 1), np.float32)
        # The kind behind all others is nothing: a rank that has no such step is that throughout.
        shares[:, :, n_kinds] = 1
        for row, (step, rank) in enumerate(together):
            if (done := _done(view, rank, step, labels)) is not None:
                shares[:, row] = share_of_bins(done, edges[step], n_kinds)
                busy[first + row] = _busy(done)
        kind = painted(shares)
        pixels[first : first + _AT_ONCE] = np.where(kind == n_kinds, NOTHING, kind)
    lines = reading_order(run)
    # Rounded up, so that no more lines are left than fit.
    every = -(-len(lines) // MOST_LINES)
    order = lines[::every]
    place = {rank: pattern for pattern, rank in enumerate(run.stored_ranks)}
    description = {
        "bins": BINS,
        "n_patterns": len(run.stored_ranks),
        "every": every,
        "folded": len(run.stored_ranks) < len(run.ranks),
        "order": order,
        "pattern": [place[run.info.representative(rank)] for rank in order],
        "groups": _groups(run.info.layout, order),
    }
    return description, pixels.reshape(-1), busy.reshape(len(view.steps), -1).tolist()


def _done(view: View, rank: int, step: int, labels: Labels) -> RankStep | None:
    if rank in view.rows:
        return view.done.get((step, rank))
    return rank_step(view.run, rank, step, labels, labels.of_rank(view.run, rank))


def _busy(done: RankStep) -> float:
    """Return the share of the step in which the rank computes."""
    length = done.compute.end_ns - done.compute.start_ns
    return float(length[done.compute.row >= 0].sum() / length.sum())


def _groups(layout: Layout | None, order: list[int]) -> list[tuple[int, int, str]]:
    """Return first line, line after the last, and name of the groups of neighbouring lines."""
    if layout is None:
        return [(line, line + 1, str(rank)) for line, rank in enumerate(order)]
    axis = next((axis for axis in ("dp", "cp", "pp", "tp") if getattr(layout, axis) > 1), "dp")
    found: list[tuple[int, int, str]] = []
    for line, rank in enumerate(order):
        name = f"{axis_label(axis)} {getattr(layout.coord(rank), axis)}"
        if found and found[-1][2] == name:
            found[-1] = (found[-1][0], line + 1, name)
        else:
            found.append((line, line + 1, name))
    return found
