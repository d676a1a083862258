"""A run as the viewer shows it: which ranks and steps, and their spans as packed columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.analysis.metrics import breakdown, step_times_ns, typical_step
from foretrace.traces.analysis.windows import extent_ns
from foretrace.traces.errors import RunError
from foretrace.traces.pack import Pack, smallest, tick_ns, to_ticks
from foretrace.traces.report.cells import COMPUTE_LANE, Cells, RankStep, rank_step
from foretrace.traces.report.kinds import Labels
from foretrace.traces.report.lanes import LaneKey, lane_order
from foretrace.traces.run import Run

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
    cells = _cells(run, wanted, cells_per_span / len(times_ns))
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


def _cells(run: Run, ranks: tuple[int, ...], cells_per_span: float) -> dict[int, float]:
    """Return about how many cells one step of each of *ranks* is."""
    return {rank: run.spans([rank], []).num_rows * cells_per_span for rank in ranks}


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
