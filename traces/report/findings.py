"""What a report says of a step besides its sums: what it loses, and the chain that sets its length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.analysis.activity import axes
from foretrace.traces.analysis.critical_path import GAP, Piece, critical_path
from foretrace.traces.analysis.findings import findings
from foretrace.traces.analysis.offloaded import HOST_OPTIMIZER, KINDS, OFFLOADING
from foretrace.traces.pack import Pack
from foretrace.traces.report.kinds import Kinds
from foretrace.traces.report.view import View
from foretrace.traces.run import Run

MOST_FINDINGS: Final = 6
"""Findings of a run that a report begins with."""

REPLAYED_SPANS: Final = 150_000
"""Spans up to which a report has what unlike operations cost a pipeline: playing them again takes up to a
second of processor time (5 to 6 µs per span). ``foretrace analyze`` has it for runs of any length."""

PATH_SPANS: Final = 2_000_000
"""Spans up to which a report has the critical path, which needs the spans of all ranks at once."""


def findings_entry(run: Run, most: int = MOST_FINDINGS) -> list[dict[str, Any]]:
    """Return what the run loses, dearest first: a sentence and the share of the step that it costs."""
    found = findings(run, replay=stored_spans(run) <= REPLAYED_SPANS)
    return [{"text": one.text, "share": one.share} for one in found[:most]]


def critical_entry(view: View, kinds: Kinds, pack: Pack, key: str) -> dict[str, Any] | None:
    """Return what the critical path of the step shown first is made of; its pieces are added to *pack*.

    Pieces that follow one another on a rank and are of one kind are one piece. Their columns:
    ``<key>.critical.row``, -1 where the page does not hold the rank; ``.start`` and ``.end``, in ns from the
    start of the step. None for a run whose spans are too many to hold at once.
    """
    if stored_spans(view.run) > PATH_SPANS:
        return None
    step = view.steps[view.default_step]
    path = critical_path(view.run, step)
    origin_ns = view.origin_ns(step)
    named = axes(view.run)
    kind = [_kind_of(piece, named, kinds) for piece in path.pieces]
    place = {rank: row for row, rank in enumerate(view.rows)}
    joined = _joined(path.pieces, kind)
    columns: dict[str, NDArray[Any]] = {
        "row": np.array([place.get(piece.rank, -1) for piece, _ in joined], np.int16),
        "start": np.array([piece.start_ns - origin_ns for piece, _ in joined], np.float64),
        "end": np.array([end - origin_ns for _, end in joined], np.float64),
    }
    for name, values in columns.items():
        pack.add(f"{key}.critical.{name}", values)
    total: Counter[int] = Counter()
    for piece, one in zip(path.pieces, kind, strict=True):
        total[one] += piece.end_ns - piece.start_ns
    return {
        "step": step,
        "length_ns": path.length_ns,
        "n_pieces": len(path.pieces),
        "n_ranks": len({piece.rank for piece in path.pieces}),
        "parts": [list(part) for part in total.most_common()],
    }


def stored_spans(run: Run) -> int:
    """Return how many spans are stored."""
    return sum(run.spans([rank], []).num_rows for rank in run.stored_ranks)


def _kind_of(piece: Piece, named: Sequence[str], kinds: Kinds) -> int:
    """Return the kind in whose colour a piece is shown; *named* are the axes of the run."""
    if piece.kind == GAP:
        return kinds.state("other")
    if piece.kind == "launch":
        return kinds.host
    if piece.kind in KINDS:
        return kinds.state(OFFLOADING)
    if piece.kind == "optimizer" and piece.kind not in kinds and HOST_OPTIMIZER in kinds:
        return kinds.state(HOST_OPTIMIZER)
    axis = max((name for name in named if piece.kind.endswith(f" {name}")), key=len, default="")
    return kinds.axis(axis) if axis else kinds.compute(piece.kind)


def _joined(pieces: Sequence[Piece], kind: Sequence[int]) -> list[tuple[Piece, int]]:
    """Return the first piece and the end of every run of pieces on one rank and of one kind."""
    found: list[tuple[Piece, int]] = []
    last = -1
    for piece, one in zip(pieces, kind, strict=True):
        if found and found[-1][0].rank == piece.rank and last == one and found[-1][1] == piece.start_ns:
            found[-1] = (found[-1][0], piece.end_ns)
        else:
            found.append((piece, piece.end_ns))
        last = one
    return found
