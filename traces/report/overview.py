"""All ranks of a run in one picture: what each does in each thin slice of the step."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.layout import Layout
from foretrace.traces.report.areas import painted, share_of_bins
from foretrace.traces.report.cells import RankStep, rank_step
from foretrace.traces.report.kinds import axis_label
from foretrace.traces.report.labels import Labels
from foretrace.traces.report.rows import reading_order
from foretrace.traces.report.view import View

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
