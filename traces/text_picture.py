"""The schedule of one step as lines of text: a letter per slice of time, for a terminal."""

from __future__ import annotations

from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.analysis.metrics import typical_step
from foretrace.traces.analysis.windows import extent_ns, windows
from foretrace.traces.report.cells import painted, rank_step, share_of_bins
from foretrace.traces.report.format import format_share, format_time
from foretrace.traces.report.kinds import Kinds, Labels, fill, mix, palette
from foretrace.traces.report.rows import picks, rows_of
from foretrace.traces.run import Run

LEAST_WIDTH: Final = 24  # slices below which a picture says nothing

_STATES: Final = {"bubble": "·", "other": "?", "wait": "-", "host": "h"}
"""Letter of each state; exposed communication has that of its axis, work that of its legend."""


class Piece(NamedTuple):
    """Letters of one kind, side by side."""

    text: str  # the letters
    colour: str  # ``#rrggbb``: of the ground where the kind is work, else of the letters; "" for nothing
    works: bool  # whether it is work


class Line(NamedTuple):
    """One row of the picture."""

    name: str
    pieces: tuple[Piece, ...]


class Picture(NamedTuple):
    """Lines, the length of the step, and what the letters mean, each with its colour."""

    lines: tuple[Line, ...]
    length: str
    legend: tuple[tuple[Piece, str], ...]


def picture(run: Run, width: int) -> Picture | None:
    """Return the step of median length of *run*, at most one screen of rows; None if *width* is too small.

    The letters of a kind are its share of all of them, and no kind of work is without one. Raises RunError:
    the run has no step with a length.
    """
    if width < LEAST_WIDTH:
        return None
    kinds = Kinds((run,))
    labels = Labels(kinds)
    step, _ = typical_step(run)
    origin_ns, length_ns = extent_ns(run, step)
    present = {window.rank for window in windows(run) if window.step == step}
    named = {entry["rank"]: entry["label"] for entry in rows_of(run, run.stored_ranks).entries}
    ranks = [stored for rank in picks(run)[0] if (stored := run.source(rank)) in present]
    edges = origin_ns + np.linspace(0, length_ns, width + 1)
    shares = np.stack(
        [
            share_of_bins(rank_step(run, r, step, labels, labels.of_rank(run, r)), edges, len(kinds.entries))
            for r in ranks
        ]
    )
    works = [entry["group"] == "compute" for entry in kinds.entries]
    rows = _letters(shares, np.flatnonzero(works))
    total = shares.sum(axis=(0, 1))
    shown = np.unique(rows[rows < len(works)])
    return Picture(
        tuple(Line(named[rank], tuple(_pieces(row, kinds))) for rank, row in zip(ranks, rows, strict=True)),
        format_time(length_ns / 1e9),
        tuple(
            (_piece(int(kind), 1, kinds), f"{kinds.entries[kind]['label']} {format_share(part)}")
            for kind, part in zip(shown, total[shown] / total[:-1].sum(), strict=True)
        ),
    )


def _letters(shares: NDArray[np.float32], works: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return the kind of each letter, of *shares* by row, place and kind.

    The rows are painted as one, so that what is too short for a letter in every row gets one in some. A kind
    of work, of those numbered *works*, that is too short for that has the one that is most its own.
    """
    n_rows, width, n_kinds = shares.shape
    flat = shares.reshape(n_rows * width, 1, n_kinds)
    found = painted(flat)[0]
    for kind in works:
        own = flat[:, 0, kind]
        if own.any() and kind not in found:
            found[np.where(np.bincount(found)[found] > 1, own, -1).argmax()] = kind
    letters: NDArray[np.int64] = found.reshape(n_rows, width)
    return letters


def _pieces(row: NDArray[np.int64], kinds: Kinds) -> list[Piece]:
    return [_piece(kind, len(list(same)), kinds) for kind, same in groupby(row.tolist())]


def _piece(kind: int, n_letters: int, kinds: Kinds) -> Piece:
    if kind == len(kinds.entries):
        return Piece(" " * n_letters, "", works=False)
    entry = kinds.entries[kind]
    if entry["group"] == "compute":
        letter = (entry["letter"] or "c")[0]
        return Piece(letter * n_letters, fill(entry, palette(), "light").colour, works=True)
    light, dark = (fill(entry, palette(), theme) for theme in ("light", "dark"))
    colour = mix(light.line or light.colour, dark.line or dark.colour, 0.5)  # for a ground of either kind
    state, _, axis = entry["id"].partition(":")
    return Piece((_STATES.get(state) or axis[:1].lower() or "=") * n_letters, colour, works=False)
