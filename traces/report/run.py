"""The part of a report that is about one run: rows, lanes, steps, memory, overview."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.analysis.memory import Curve, curves
from foretrace.traces.analysis.metrics import breakdown, step_times_ns, typical_step
from foretrace.traces.analysis.windows import extent_ns
from foretrace.traces.columns import Int64Array, int64
from foretrace.traces.errors import RunError
from foretrace.traces.layout import Layout
from foretrace.traces.pack import Pack, smallest, tick_ns, to_ticks
from foretrace.traces.report.cells import COMPUTE_LANE, Cells, RankStep, painted, rank_step, share_of_bins
from foretrace.traces.report.kinds import Kinds, Labels, axis_label
from foretrace.traces.report.lanes import LaneKey, lane_order
from foretrace.traces.report.rows import MOST_ROWS, pick_of, reading_order, rows_of
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


# A run as the viewer shows it: which ranks and steps, and their spans as packed columns.

MOST_CELLS: Final = 3_000_000
"""Cells that a page holds, gaps included: 20 MB if no two durations are equal, far less where they repeat."""

_USUAL_CELLS: Final = 8  # cells that no usual span becomes more than
NO_SEQUENCE: Final = -1  # sequence number on the page of a span that has none
_LARGEST_SEQUENCE: Final = 2**31 - 1  # numbers that a page has for sequences; they begin again after it

_COLUMNS: Final = {"microbatch": "microbatch", "layer": "layer", "chunk": "virtual_stage", "peer": "peer"}
"""Columns of the page that are columns of the timeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The part of a run that a page shows."""

    run: Run  # the run
    rows: tuple[int, ...]  # stored ranks whose spans the page holds
    steps: tuple[int, ...]  # steps that it holds, ascending
    default_step: int  # position in ``steps`` of the one to show first
    done: Mapping[tuple[int, int], RankStep]  # what each rank does in each step, by step and rank
    lanes: tuple[LaneKey, ...]  # keys of the lanes, the compute lane first; the same for all rows
    omitted: str  # what did not fit, in words; empty if everything did

    def origin_ns(self, step: int) -> int:
        """Return the start of *step* on the first rank to begin it."""
        return extent_ns(self.run, step)[0]

    def length_ns(self, step: int) -> int:
        """Return the time from the first start of *step* to its last end, over all ranks."""
        return extent_ns(self.run, step)[1]

    def cells(self) -> list[tuple[int, int, Cells]]:
        """Return step, rank and cells in the order in which the page holds them: by step, row and lane."""
        return [
            (step, rank, self.done[step, rank].lanes[key])
            for step in self.steps
            for rank in self.rows
            for key in self.lanes
            if (step, rank) in self.done and key in self.done[step, rank].lanes
        ]

    def starts(self) -> NDArray[np.uint32]:
        """Return where the cells of each lane begin, by step, row and lane; and, last, how many there are."""
        lengths = [
            len(self.done[step, rank].lanes[key].row)
            if (step, rank) in self.done and key in self.done[step, rank].lanes
            else 0
            for step in self.steps
            for rank in self.rows
            for key in self.lanes
        ]
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32)


def view_of(
    run: Run,
    labels: Labels,
    ranks: Sequence[int] | None = None,
    *,
    step: int | None = None,
    most_cells: int | None = None,
) -> View:
    """Return what a page shows of *run*: everything if it fits, else the median step and the first ranks.

    Args:
        run: the run.
        labels: the words of the report, added to.
        ranks: stored ranks in order of importance; None: all, in rank order.
        step: the only step to show; None: as many as fit.
        most_cells: that a page holds; None: ``MOST_CELLS``.

    Raises:
        RunError: the run has no step with a length.
    """
    rows = breakdown(run)
    if not rows:
        raise RunError(f"{run.path} holds no span with a length: nothing to show")
    times_ns = step_times_ns(rows)
    median = typical_step(run)[0] if step is None else step
    if median not in times_ns:
        raise RunError(f"no step {step} in {run.path}; it has {', '.join(map(str, times_ns))}")
    wanted = tuple(run.stored_ranks if ranks is None else ranks)
    present = {(row.step, row.rank) for row in rows}
    most = most_cells or MOST_CELLS
    cells_per_span = _cells_per_span(run, median, len(times_ns), labels, most)
    # About how many cells one step of each rank is.
    cells = {rank: run.spans([rank], []).num_rows * (cells_per_span / len(times_ns)) for rank in wanted}
    steps, shown = _that_fit(tuple(times_ns), median, cells, most)
    if step is not None:
        steps = (step,)
    done: dict[tuple[int, int], RankStep] = {}
    for rank in shown:
        words = labels.of_rank(run, rank)
        for one in (one for one in steps if (one, rank) in present):
            done[one, rank] = rank_step(run, rank, one, labels, words)
    found = {key for cells in done.values() for key in cells.lanes} - {COMPUTE_LANE}
    return View(
        run=run,
        rows=shown,
        steps=steps,
        default_step=steps.index(median),
        done=done,
        lanes=(COMPUTE_LANE, *sorted(found, key=lane_order)),
        omitted=_omitted(len(times_ns) - len(steps), len(wanted) - len(shown)),
    )


def pack_spans(view: View, pack: Pack, prefix: str, first_rows: Sequence[int]) -> dict[str, Any]:
    """Add the spans of *view* to *pack*, columns named after *prefix*.

    Args:
        view: what the page shows.
        pack: gets the columns.
        prefix: prefix of their names.
        first_rows: rows of *view* that the page shows first.

    Returns:
        ``tick_ns``, nanoseconds of a tick; ``first``, the range of the cells that the page gets first.
    """
    tick = tick_ns(max(view.length_ns(step) for step in view.steps))
    ptr = view.starts()
    cells = view.cells()
    origin = [np.full(len(part.row), view.origin_ns(step)) for step, _, part in cells]
    begin, until = (
        np.concatenate([getattr(part, name) for _, _, part in cells]) - np.concatenate(origin)
        for name in ("start_ns", "end_ns")
    )
    gap, duration = to_ticks(begin, until, ptr, tick)
    columns: dict[str, NDArray[Any]] = {"gap": smallest(gap), "duration": smallest(duration)}
    columns["label"] = smallest(np.concatenate([part.label for _, _, part in cells]))
    for name in ("waited_ns", "hidden_ns"):
        values = np.concatenate([getattr(part, name) for _, _, part in cells])
        columns[name.removesuffix("_ns")] = smallest((values + tick // 2) // tick)
    columns |= {name: smallest(_timeline_column(view, column)) for name, column in _COLUMNS.items()}
    sequence = _timeline_column(view, "sequence")
    columns["sequence"] = smallest(np.where(sequence < 0, NO_SEQUENCE, sequence & _LARGEST_SEQUENCE))
    if any(done.pair.any() for done in view.done.values()):
        columns["pair"] = smallest(_pairs(view))
    pack.add(f"{prefix}.ptr", ptr)
    named = {f"{prefix}.{name}": values for name, values in columns.items()}
    return {"tick_ns": tick, "first": pack.add_parts(named, _first_cells(view, ptr, first_rows))}


def _first_cells(view: View, ptr: NDArray[np.uint32], rows: Sequence[int]) -> tuple[int, int]:
    """Return the range of cells that *rows* take in the step that is shown first."""
    begin = view.default_step * len(view.rows)
    ends = [(begin + row) * len(view.lanes) for row in (min(rows, default=0), max(rows, default=0) + 1)]
    return int(ptr[ends[0]]), int(ptr[ends[1]])


def _timeline_column(view: View, column: str) -> NDArray[np.int64]:
    """Return *column* of the timeline for each cell, -1 for idle time."""
    whole = {rank: view.run.spans([rank], [column])[column].to_numpy().astype(np.int64) for rank in view.rows}
    parts = []
    for _, rank, cells in view.cells():
        values = np.full(len(cells.row), -1, np.int64)
        named = cells.row >= 0
        values[named] = whole[rank][cells.row[named]]
        parts.append(values)
    return np.concatenate(parts)


def _pairs(view: View) -> NDArray[np.int64]:
    """Return the pair of passes that each cell belongs to, 0 for none, as for all communication."""
    parts = []
    for step, rank, cells in view.cells():
        done = view.done[step, rank]
        parts.append(done.pair if cells is done.compute else np.zeros(len(cells.row), np.int64))
    return np.concatenate(parts)


def _cells_per_span(run: Run, step: int, n_steps: int, labels: Labels, most_cells: int) -> float:
    """Return how many cells a span becomes, gaps between spans included; of a long run as one rank shows."""
    if run.n_stored < most_cells // _USUAL_CELLS:
        return _USUAL_CELLS
    rank = next(row.rank for row in breakdown(run) if row.step == step)
    done = rank_step(run, rank, step, labels, labels.of_rank(run, rank))
    n_cells = sum(len(cells.row) for cells in done.lanes.values())
    return n_cells * n_steps / max(1, int(run.spans([rank], []).num_rows))


def _that_fit(
    steps: tuple[int, ...], median: int, cells: Mapping[int, float], most_cells: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the steps and ranks whose *cells* fit on a page: steps near the median, the first ranks."""
    up_to = np.cumsum(list(cells.values()))
    n_shown = max(1, int(np.searchsorted(up_to, most_cells, side="right")))
    room = max(1, int(most_cells // max(1.0, up_to[n_shown - 1])))
    nearest = sorted(steps, key=lambda step: abs(steps.index(step) - steps.index(median)))[:room]
    return tuple(sorted(nearest)), tuple(cells)[:n_shown]


def _omitted(n_steps: int, n_ranks: int) -> str:
    """Say how many steps and ranks did not fit."""
    parts = [f"{count} {noun}" for count, noun in ((n_steps, "steps"), (n_ranks, "ranks")) if count]
    if not parts:
        return ""
    return f"the page holds {MOST_CELLS:,} spans at most: {' and '.join(parts)} are not on it"
