"""What a report says of a step besides its sums: what it loses, and the chain that sets its length."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.analysis.activity import HOST_OPTIMIZER, KINDS, OFFLOADING, axes, stage_of
from foretrace.traces.analysis.critical_path import GAP, Piece, critical_path
from foretrace.traces.analysis.findings import findings
from foretrace.traces.analysis.metrics import averaged_rows, step_times_ns
from foretrace.traces.analysis.windows import extent_ns
from foretrace.traces.pack import Pack
from foretrace.traces.report.kinds import Kinds
from foretrace.traces.report.run import View
from foretrace.traces.run import Run

MOST_FINDINGS: Final = 6  # findings of a run that a report begins with

REPLAYED_SPANS: Final = 150_000
"""Spans up to which a report has what unlike operations cost a pipeline: playing them again takes up to a
second of processor time (5 to 6 µs per span). ``foretrace analyze`` has it for runs of any length."""

PATH_SPANS: Final = 2_000_000
"""Spans up to which a report has the critical path, which needs the spans of all ranks at once."""


def findings_entry(run: Run, most: int = MOST_FINDINGS) -> list[dict[str, Any]]:
    """Return what the run loses, dearest first: a sentence and the share of the step that it costs."""
    found = findings(run, replay=run.n_stored <= REPLAYED_SPANS)
    return [{"text": one.text, "advice": one.advice, "share": one.share} for one in found[:most]]


def critical_entry(view: View, kinds: Kinds, pack: Pack, key: str) -> dict[str, Any] | None:
    """Return what the critical path of the step shown first is made of; its pieces are added to *pack*.

    Pieces that follow one another on a rank and are of one kind are one piece. Their columns:
    ``<key>.critical.row``, -1 where the page does not hold the rank; ``.start`` and ``.end``, in ns from the
    start of the step. None for a run whose spans are too many to hold at once.
    """
    if view.run.n_stored > PATH_SPANS:
        return None
    step = view.steps[view.default_step]
    chain, n_pieces = critical_chain(view.run, step, kinds)
    place = {rank: row for row, rank in enumerate(view.rows)}
    columns: dict[str, NDArray[Any]] = {
        "row": np.array([place.get(one.rank, -1) for one in chain], np.int16),
        "start": np.array([one.start_ns for one in chain], np.float64),
        "end": np.array([one.end_ns for one in chain], np.float64),
    }
    for name, values in columns.items():
        pack.add(f"{key}.critical.{name}", values)
    total: Counter[int] = Counter()
    for one in chain:
        total[one.kind] += one.end_ns - one.start_ns
    return {
        "step": step,
        "length_ns": total.total(),
        "n_pieces": n_pieces,
        "n_ranks": len({one.rank for one in chain}),
        "parts": [list(part) for part in total.most_common()],
    }


class Stretch(NamedTuple):
    """Pieces of a critical path that follow one another on a rank and are of one kind; from the step's start.

    ``kind`` is a number in the kinds of a report.
    """

    rank: int
    kind: int
    start_ns: int
    end_ns: int


def critical_chain(run: Run, step: int, kinds: Kinds) -> tuple[list[Stretch], int]:
    """Return the critical path of a *step* of *run* in order of time, and of how many pieces it is made."""
    path, named = critical_path(run, step), axes(run)
    origin_ns, _ = extent_ns(run, step)
    found: list[Stretch] = []
    for piece in path.pieces:
        kind, start, end = _kind_of(piece, named, kinds), piece.start_ns - origin_ns, piece.end_ns - origin_ns
        last = found[-1] if found else None
        if last and (last.rank, last.kind, last.end_ns) == (piece.rank, kind, start):
            found[-1] = last._replace(end_ns=end)
        else:
            found.append(Stretch(piece.rank, kind, start, end))
    return found, len(path.pieces)


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


# The rank that computes longer than the others that do the same: the one to look at first.

NOTABLE: Final = 1.05
"""How many times as long a rank must compute as its like to be worth a word: 5 % is more than noise makes."""

LEAST_LOSS: Final = 0.02
"""Share of the step that it must compute longer: where ranks hardly compute, another one is to blame."""

FEWEST: Final = 3  # ranks of one stage that it takes to call one of them slow


@dataclass(frozen=True, slots=True)
class Slowest:
    """A rank that computes longer than its like."""

    rank: int  # global rank
    ratio: float  # its compute time over the median of the ranks of its stage

    @property
    def sentence(self) -> str:
        """What a person should know of it."""
        return f"Rank {self.rank} computes {self.ratio:.2f} times as long as the median rank of its stage."


def slowest(run: Run) -> Slowest | None:
    """Return the rank that computes longest compared with the ranks of its stage, None if all are alike.

    Means over the steps that averages are over; ranks that stand for others count as often as they stand.
    """
    rows = averaged_rows(run)
    least_ns = LEAST_LOSS * float(np.mean(list(step_times_ns(rows).values()) or [0]))
    times: dict[int, list[int]] = defaultdict(list)
    weight: dict[int, int] = {}
    for row in rows:
        times[row.rank].append(row.ns.get("compute", 0))
        weight[row.rank] = row.represents
    stages: dict[int, list[int]] = defaultdict(list)
    for rank in times:
        stages[stage_of(run, rank)].append(rank)
    found: Slowest | None = None
    for ranks in stages.values():
        mean = {rank: float(np.mean(times[rank])) for rank in ranks}
        alike = np.repeat([mean[rank] for rank in ranks], [weight[rank] for rank in ranks])
        middle = float(np.median(alike))
        if len(alike) < FEWEST or middle <= 0:
            continue
        rank = max(ranks, key=lambda one: mean[one])
        ratio = mean[rank] / middle
        is_notable = ratio >= NOTABLE and mean[rank] - middle >= least_ns
        if is_notable and (found is None or ratio > found.ratio):
            found = Slowest(rank, ratio)
    return found
