"""The schedule of one step as lines of text: a letter per slice of time, for a terminal."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from foretrace.traces.analysis.windows import windows
from foretrace.traces.report.cells import rank_step
from foretrace.traces.report.colours import fill, mix, palette
from foretrace.traces.report.format import format_time
from foretrace.traces.report.kinds import Kinds
from foretrace.traces.report.labels import Labels
from foretrace.traces.report.overview import BINS, NOTHING, PAIR, slices
from foretrace.traces.report.rows import picks, rows_of
from foretrace.traces.run import Run

LEAST_WIDTH: Final = 24
"""Slices below which a picture says nothing."""

_STATES: Final = {"bubble": "·", "other": "?", "exposed": "=", "wait": "-", "host": "h"}
"""Letter of each state; work has the letter of its legend."""


class Piece(NamedTuple):
    """Letters of one kind, side by side.

    Attributes:
        text: the letters.
        colour: ``#rrggbb``: of the ground where the kind is work, else of the letters; "" for nothing.
        works: whether it is work.
    """

    text: str
    colour: str
    works: bool


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
    """Return the first step of *run*, at most one screen of rows; None where *width* letters are too few.

    Each letter is what its rank does for most of that slice of time.

    Raises:
        RunError: the run has no step with a length.
    """
    if width < LEAST_WIDTH:
        return None
    kinds = Kinds((run,))
    labels = Labels(kinds)
    step = min(window.step for window in windows(run))
    ours = [window for window in windows(run) if window.step == step]
    origin_ns = min(window.start_ns for window in ours)
    length_ns = max(window.end_ns for window in ours) - origin_ns
    present = {window.rank for window in ours}
    named = {entry["rank"]: entry["label"] for entry in rows_of(run, run.stored_ranks).entries}
    found: list[tuple[str, list[int]]] = []
    for rank in picks(run)[0]:
        stored = run.source(rank)
        if stored in present:
            done = rank_step(run, stored, step, labels, labels.of_rank(run, stored))
            found.append((named[stored], _shrunk(slices(done, origin_ns, length_ns, PAIR), width)))
    shown = sorted({kind for _, row in found for kind in row} - {NOTHING})
    return Picture(
        tuple(Line(name, tuple(_pieces(row, kinds))) for name, row in found),
        format_time(length_ns / 1e9),
        tuple((_piece(kind, 1, kinds), _label(kind, kinds)) for kind in shown),
    )


def _shrunk(slots: np.ndarray[Any, Any], width: int) -> list[int]:
    """Return the kind that most of the slices behind each letter have."""
    edges = np.linspace(0, BINS, width + 1).round().astype(int)
    return [
        int(np.bincount(slots[a:b], minlength=NOTHING + 1).argmax()) if b > a else NOTHING
        for a, b in pairwise(edges)
    ]


def _pieces(row: list[int], kinds: Kinds) -> list[Piece]:
    return [_piece(kind, len(list(same)), kinds) for kind, same in groupby(row)]


def _label(kind: int, kinds: Kinds) -> str:
    return "Forward and backward in turns" if kind == PAIR else str(kinds.entries[kind]["label"])


def _piece(kind: int, n_letters: int, kinds: Kinds) -> Piece:
    if kind == NOTHING:
        return Piece(" " * n_letters, "", works=False)
    if kind == PAIR:
        own = palette()["light"]["compute"]
        return Piece("X" * n_letters, mix(own["forward"], own["backward"], 0.5), works=True)
    entry = kinds.entries[kind]
    if entry["group"] == "compute":
        letter = (entry["letter"] or "c")[0]
        return Piece(letter * n_letters, fill(entry, palette(), "light").colour, works=True)
    light, dark = (fill(entry, palette(), theme) for theme in ("light", "dark"))
    colour = mix(light.line or light.colour, dark.line or dark.colour, 0.5)  # for a ground of either kind
    return Piece(_STATES.get(entry["id"].partition(":")[0], "?") * n_letters, colour, works=False)
