"""What one rank does in one step, as the cells of its lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from foretrace.traces.analysis.activity import activity, states
from foretrace.traces.analysis.arrivals import arrivals
from foretrace.traces.analysis.communications import COMMUNICATION
from foretrace.traces.columns import BoolArray, Int64Array, flags, int64, is_one_of
from foretrace.traces.report.labels import Labels
from foretrace.traces.report.lanes import (
    LaneKey,
    Pieces,
    communication_lanes,
    compute_lane,
    hidden_ns,
    stream_lanes,
)
from foretrace.traces.report.pairs import FORWARD, pairs_of
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
