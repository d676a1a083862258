"""What one rank does in one step, as the cells of its lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.analysis.activity import activity, states
from foretrace.traces.analysis.communications import COMMUNICATION, arrivals
from foretrace.traces.columns import BoolArray, Int64Array, flags, int64, is_one_of
from foretrace.traces.report.kinds import Labels
from foretrace.traces.report.lanes import (
    LaneKey,
    Pieces,
    communication_lanes,
    compute_lane,
    hidden_ns,
    stream_lanes,
)
from foretrace.traces.run import Run

COMPUTE_LANE: Final[LaneKey] = ("", "", -1)  # key of the first lane, that of compute and the gaps in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """One lane of one rank in one step. Arrays have shape ``(n_cells,)``, in order, without overlap."""

    # on the clock of the run
    start_ns: Int64Array
    end_ns: Int64Array
    row: Int64Array  # row of the rank's timeline, ``traces.report.lanes.STATE_ROW`` for idle time
    label: Int64Array  # number of the description of each
    waited_ns: Int64Array  # for communication, the time until the last rank arrived; else 0
    hidden_ns: Int64Array  # for communication, the part of the transfer that passes behind compute; else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """What one rank does in one step."""

    lanes: dict[LaneKey, Cells]  # the cells of each lane; ``COMPUTE_LANE`` covers the window exactly
    kind: Int64Array  # kind of each cell of the compute lane, as a number in ``traces.report.kinds.Kinds``
    microbatch: Int64Array  # micro-batch of each cell of the compute lane, -1 where it has none
    pair: Int64Array  # number of the pair of passes of each cell of the compute lane, 0 where it has none
    forward: BoolArray  # for each cell of the compute lane, whether it is part of a forward pass

    @property
    def compute(self) -> Cells:
        """The compute lane."""
        return self.lanes[COMPUTE_LANE]

    def parts_ns(self) -> list[tuple[int, int]]:
        """Return kind and total time of what the step is made of; the times add up to the window."""
        lengths = np.zeros(int(self.kind.max(initial=0)) + 1, np.int64)
        np.add.at(lengths, self.kind, self.compute.end_ns - self.compute.start_ns)
        return [(kind, int(ns)) for kind, ns in enumerate(lengths) if ns]

    def halves(self, first: int, last: int) -> tuple[int, int]:
        """Return a cell of the forward and one of the backward pass of the pair from *first* to *last*."""
        works = self.compute.row[first : last + 1] >= 0
        forward = self.forward[first : last + 1]
        return first + int(np.argmax(forward)), first + int(np.flatnonzero(works & ~forward)[-1])

    def kind_of_passes(self, longest_ns: int) -> Int64Array:
        """Return the kind of each cell of the compute lane, short gaps within a pass counted as that pass.

        A pass is the work of one kind on one micro-batch. Where its layers are too short to be told apart,
        the gaps between them would hide what a picture is to show.

        Args:
            longest_ns: a gap longer than this stays a gap.
        """
        works = self.compute.row >= 0
        if not works.any():
            return self.kind
        position = np.arange(len(works))
        # The cells of work nearest to each cell, in front of it and behind it.
        before = np.maximum.accumulate(np.where(works, position, -1))
        after = np.minimum.accumulate(np.where(works, position, len(works))[::-1])[::-1]
        inner = ~works & (before >= 0) & (after < len(works))
        before, after = before.clip(0), after.clip(0, len(works) - 1)
        inner &= (self.kind[before] == self.kind[after]) & (self.microbatch[before] == self.microbatch[after])
        inner &= self.compute.start_ns[after] - self.compute.end_ns[before] <= longest_ns
        return np.where(inner, self.kind[before], self.kind)


def rank_step(run: Run, rank: int, step: int, labels: Labels, words: Int64Array) -> RankStep:
    """Return what the stored *rank* of *run* does in *step*.

    Args:
        run: the run.
        rank: one of its stored ranks.
        step: one of its steps.
        labels: the words of the report.
        words: what ``labels.of_rank`` says of this rank.

    Raises:
        RunError: the rank has no such step.
    """
    spans = run.spans([rank])
    lane = compute_lane(spans, activity(run, rank, step))
    # State 0 is compute, which the spans describe.
    of_state = np.array([labels.of_state(name) for name in states(run)[1:]], np.int64)
    named, waits = lane.row >= 0, lane.state > 0
    label = np.full(len(lane.row), labels.of_unnamed_work, np.int64)
    label[named] = words[lane.row[named]]
    label[waits] = of_state[lane.state[waits] - 1]
    nothing = np.zeros(len(label), np.int64)
    compute = Cells(
        start_ns=lane.start_ns,
        end_ns=lane.end_ns,
        row=lane.row,
        label=label,
        waited_ns=nothing,
        hidden_ns=nothing,
    )
    low, high = int(lane.start_ns[0]), int(lane.end_ns[-1])
    lanes = {
        key: _transfers(run, rank, rows, lane, words[rows])
        for key, rows in (communication_lanes(spans, low, high) | stream_lanes(spans, low, high)).items()
    }
    microbatch = np.full(len(label), -1, np.int64)
    microbatch[named] = int64(spans, "microbatch")[lane.row[named]]
    forward = named & is_one_of(spans, "kind", FORWARD)[lane.row]
    return RankStep(
        lanes={COMPUTE_LANE: compute, **lanes},
        kind=labels.kind[label],
        microbatch=microbatch,
        pair=pairs_of(spans, lane.row),
        forward=forward,
    )


def _transfers(run: Run, rank: int, rows: Int64Array, lane: Pieces, label: Int64Array) -> Cells:
    """Return a lane of communication, or of a stream, cut at the edges of the step."""
    spans = run.spans([rank], ["category", "start_ns", "duration_ns", "is_bound"])
    low, high = int(lane.start_ns[0]), int(lane.end_ns[-1])
    start = spans["start_ns"].to_numpy()[rows]
    end = (start + spans["duration_ns"].to_numpy()[rows]).clip(low, high)
    start = start.clip(low, high)
    moves = arrivals(run).last_ns[rank][rows].clip(start, end)
    moves_nothing = flags(spans, "is_bound")[rows] | ~is_one_of(spans, "category", COMMUNICATION)[rows]
    return Cells(
        start_ns=start,
        end_ns=end,
        row=rows,
        label=label,
        waited_ns=np.where(moves_nothing, 0, moves - start),
        hidden_ns=np.where(moves_nothing, 0, hidden_ns(lane, moves, end)),
    )


# Forward and backward passes that a rank computes in turns, as DualPipe pairs them.
#
# While the data of one micro-batch is on its way, the rank computes the other; what a person wants to see is
# the pair. The schedule is not asked: the spans tell, whether they were simulated or recorded. Reference:
# DeepSeek-V3, arXiv:2412.19437, figures 4 and 5.

FORWARD: Final = ("forward",)  # kinds of work of a forward pass

_BACKWARD: Final = ("recompute", "backward", "backward_input", "backward_weight")


def pairs_of(spans: pa.Table, row: Int64Array) -> Int64Array:
    """Return the pair that each cell of a compute lane belongs to, counted from 1; 0: none.

    A pair is a stretch in which the work of one forward and one backward pass, of different micro-batches or
    stages, takes turns at least twice. The idle time between the turns belongs to it.

    Args:
        spans: the timeline of the rank.
        row: row of *spans* of each cell in order, negative for idle time. Shape ``(n_cells,)``.
    """
    pair = np.zeros(len(row), np.int64)
    work = np.flatnonzero(row >= 0)
    line = _lines(spans)[row[work]]
    begins = np.flatnonzero(np.diff(line, prepend=-2) != 0)
    turn = line[begins]
    if len(turn) < 3:
        return pair
    again = (turn[:-2] == turn[2:]) & _belong_together(turn[:-2], turn[1:-1])
    bounds = np.flatnonzero(np.diff(again.astype(np.int8), prepend=0, append=0))
    if not len(bounds):
        return pair
    last_of_turn = np.append(begins[1:], len(work)) - 1
    first, last = bounds[::2].copy(), bounds[1::2] + 1
    first[1:] = np.maximum(first[1:], last[:-1] + 1)  # a turn between two pairs counts as the first one's
    number = np.arange(1, len(first) + 1)
    # Running sums of these are the number of a pair from its first cell to its last.
    change = np.zeros(len(row) + 1, np.int64)
    np.add.at(change, work[begins[first]], number)
    np.add.at(change, work[last_of_turn[last]] + 1, -number)
    return np.cumsum(change[:-1])


def _lines(spans: pa.Table) -> Int64Array:
    """Return a number per span, one for each pass: even if forward, odd if backward, -1 if neither."""
    microbatch, stage = int64(spans, "microbatch"), int64(spans, "virtual_stage")
    forward, backward = (is_one_of(spans, "kind", kinds) for kinds in (FORWARD, _BACKWARD))
    width = int(stage.max(initial=0)) + 2
    found: Int64Array = (microbatch * width + stage + 1) * 2 + backward
    return np.where((forward | backward) & (microbatch >= 0), found, -1)


def _belong_together(one: Int64Array, other: Int64Array) -> NDArray[np.bool_]:
    """Return whether two passes may be a pair: a forward and a backward, not of one micro-batch and stage."""
    found: NDArray[np.bool_] = (one >= 0) & (other >= 0) & (one % 2 != other % 2) & (one // 2 != other // 2)
    return found


# Where time becomes area: in every picture a colour covers as much as its share of the time.

_ROUNDING = 1e-6  # share of a bin that is the rounding of its edges, not time


def share_of_bins(done: RankStep, edges_ns: NDArray[np.float64], n_kinds: int) -> NDArray[np.float32]:
    """Return how much of each bin is of each kind: shape ``(n_bins, n_kinds + 1)``, rows that add up to 1.

    Args:
        done: what a rank does; its compute lane is without gaps.
        edges_ns: the edges of the bins, of equal width.
        n_kinds: of the run; the last column is the part of a bin that lies outside of the step of this rank.
    """
    start, until = done.compute.start_ns, done.compute.end_ns[-1:]
    n_bins = len(edges_ns) - 1
    points = np.sort(np.concatenate([edges_ns, start, until]))
    points = points[(points >= edges_ns[0]) & (points <= edges_ns[-1])]
    at = points[:-1]
    cell = np.searchsorted(start, at, side="right") - 1
    outside = (cell < 0) | (at >= until)
    kind = np.where(outside, n_kinds, done.kind[cell])
    place = (np.searchsorted(edges_ns, at, side="right") - 1).clip(0, n_bins - 1)
    width = (edges_ns[-1] - edges_ns[0]) / n_bins
    total = np.bincount(
        place * (n_kinds + 1) + kind, np.diff(points) / width, minlength=n_bins * (n_kinds + 1)
    )
    found: NDArray[np.float32] = total.reshape(n_bins, n_kinds + 1).astype(np.float32)
    return found


def painted(shares: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """Return the one kind that each bin is painted as, shape ``(n_rows, n_bins)``.

    A bin goes to the kind in it that has been painted least so far, compared to its time. So in no stretch
    of a row is a kind off by more than a bin or two, however little of each bin it has; always to paint what
    covers most of a bin would never show what covers a third of every one.

    Args:
        shares: how much of each bin is of each kind, shape ``(n_bins, n_rows, n_kinds)``.
    """
    n_bins, n_rows, n_kinds = shares.shape
    owed = np.zeros((n_rows, n_kinds))
    rows = np.arange(n_rows)
    found = np.empty((n_rows, n_bins), np.int64)
    for place in range(n_bins):
        owed += shares[place]
        chosen = np.where(shares[place] > _ROUNDING, owed, -np.inf).argmax(axis=1)
        owed[rows, chosen] -= 1
        found[:, place] = chosen
    return found
