"""All ranks of a run in one picture: what each does most in each thin slice of the step."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.layout import Layout
from foretrace.traces.report.cells import RankStep, rank_step
from foretrace.traces.report.kinds import axis_label
from foretrace.traces.report.labels import Labels
from foretrace.traces.report.rows import reading_order
from foretrace.traces.report.view import View

BINS: Final = 1536
"""Slices of a step: about one per pixel of the page."""

MOST_LINES: Final = 1024
"""Ranks in the picture; of more, every n-th is shown."""

SHORT_GAP: Final = 12
"""Slices; a shorter gap within one pass over a micro-batch is shown as part of the pass."""

PAIR: Final = 254
"""Kind of the time in which a forward and a backward pass take turns, as DualPipe pairs them."""

NOTHING: Final = 255
"""Kind of a slice in which a rank is outside its step."""


def overview(view: View, labels: Labels) -> tuple[dict[str, Any], NDArray[np.uint8], list[list[float]]]:
    """Return the overview of all ranks: its description, its pixels, and the busy share by step and pattern.

    Ranks that share their spans share a pattern. Pixels have shape ``(n_steps * n_patterns * BINS,)``.

    Args:
        view: what the page shows of the run; ranks that it leaves out are in the overview all the same.
        labels: the words of the report.
    """
    run = view.run
    pixels = np.full((len(view.steps), len(run.stored_ranks), BINS), NOTHING, np.uint8)
    busy = np.zeros((len(view.steps), len(run.stored_ranks)))
    for pattern, rank in enumerate(run.stored_ranks):
        for number, step in enumerate(view.steps):
            done = _done(view, rank, step, labels)
            if done is not None:
                pixels[number, pattern] = slices(done, view.origin_ns(step), view.length_ns(step), PAIR)
                busy[number, pattern] = _busy(done)
    lines = reading_order(run)
    every = -(-len(lines) // MOST_LINES)
    order = lines[::every]
    place = {rank: pattern for pattern, rank in enumerate(run.stored_ranks)}
    description = {
        "bins": BINS,
        "n_patterns": len(run.stored_ranks),
        "every": every,
        "paired": bool((pixels == PAIR).any()),
        "folded": len(run.stored_ranks) < len(run.ranks),
        "order": order,
        "pattern": [place[run.info.representative(rank)] for rank in order],
        "groups": _groups(run.info.layout, order),
    }
    return description, pixels.reshape(-1), busy.tolist()


def slices(done: RankStep, origin_ns: int, length_ns: int, pair: int | None = None) -> NDArray[np.uint8]:
    """Return the kind that covers most of each slice of the step, ``NOTHING`` where none does.

    Args:
        done: what the rank does.
        origin_ns: start of the first slice.
        length_ns: length of all slices together.
        pair: kind of the time in which a forward and a backward pass take turns; None: what runs.
    """
    edges = origin_ns + np.linspace(0, length_ns, BINS + 1)
    kind_of = done.kind_of_passes(length_ns * SHORT_GAP // BINS)
    if pair is not None:
        kind_of = np.where(done.pair > 0, pair, kind_of)
    kinds = np.unique(kind_of)
    covered = np.empty((len(kinds), BINS))
    start, end = done.compute.start_ns, done.compute.end_ns
    for row, kind in enumerate(kinds):
        ours = kind_of == kind
        points = np.stack([start[ours], end[ours]], axis=1).reshape(-1)
        total = np.stack([np.zeros(ours.sum(), np.int64), (end - start)[ours]], axis=1).reshape(-1)
        covered[row] = np.diff(np.interp(edges, points, np.cumsum(total)))
    winner: NDArray[np.uint8] = kinds[covered.argmax(axis=0)].astype(np.uint8)
    winner[covered.max(axis=0) <= 0] = NOTHING
    return winner


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
