"""Plays the steps of a recorded pipeline again with other durations: what would the step have taken?

Every span of a step begins when what it depends on has ended, after the delay that the recording shows; a
communication moves data once its last participant has come. The dependencies are those of pipeline training:

- forward and backward passes of a rank run in their recorded order;
- a pass needs the transfer that brings its input, a send follows its pass, and the n-th receive is posted
  after the pass before the n-th; transfers of one direction keep their order;
- collectives before the first pass precede it; what follows the last pass runs in its recorded order;
- any other span follows what had ended on its rank when it began.

With the recorded durations and delays the recorded times come out again, to the nanosecond. Method: Lin et
al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025.
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from traces.activity import PASSES
from traces.columns import BoolArray, Int64Array
from traces.errors import RunError
from traces.replay_work import by_place, collected
from traces.run import Run

FORWARD: Final = ("forward", "recompute")
"""Kinds of passes that go from the first stage to the last; the others go back."""

FloatArray = NDArray[np.float64]


class Replay:
    """The steps of a run as graphs of dependencies.

    Args:
        run: a run with forward and backward passes that say their micro-batch.

    Raises:
        RunError: the run has no such passes, or its dependencies go round in a circle.
    """

    def __init__(self, run: Run) -> None:
        self.work, line = collected(run)
        self.steps = np.unique(self.work.step)
        self._before: list[tuple[int, ...]] = [()] * len(self.work.rank)
        for rows in by_place(self.work):
            self._connect(rows, line)
        self._order = [self._sorted(np.flatnonzero(self.work.step == step)) for step in self.steps]
        self.first_ns = np.array([self.work.start_ns[self.work.step == step].min() for step in self.steps])
        self.delay_ns = self._delays()

    def step_times_ns(self, work_ns: FloatArray, *, delays: bool) -> FloatArray:
        """Return how long each step takes on its slowest rank, in every scenario.

        Args:
            work_ns: duration of each span in each scenario, shape ``(n_spans, n_scenarios)``.
            delays: whether spans start as late after what they depend on as they did in the recording.

        Returns:
            Times in ns, shape ``(n_steps, n_scenarios)``.
        """
        end = np.zeros(work_ns.shape)
        times = np.zeros((len(self.steps), work_ns.shape[1]))
        for number, order in enumerate(self._order):
            self._play(order, work_ns, end, self.first_ns[number], delays=delays)
            rows = np.array([row for row, _ in order])
            times[number] = end[rows].max(axis=0) - self.first_ns[number]
        return times

    def _play(
        self,
        order: list[tuple[int, list[int]]],
        work_ns: FloatArray,
        end: FloatArray,
        first_ns: int,
        *,
        delays: bool,
    ) -> None:
        """Fill in the ends of one step; *order* says which communication each row completes."""
        start: dict[int, FloatArray] = {}
        origin = np.full(work_ns.shape[1], float(first_ns))
        for row, completes in order:
            begun = origin
            before = self._before[row]
            if before:
                begun = end[before[0]]
                for other in before[1:]:
                    begun = np.maximum(begun, end[other])
            if delays:
                begun = begun + self.delay_ns[row]
            if self.work.instance[row] < 0:
                end[row] = begun + work_ns[row]
                continue
            start[row] = begun
            if completes:
                arrived = start.pop(completes[0])
                for other in completes[1:]:
                    arrived = np.maximum(arrived, start.pop(other))
                for other in completes:
                    end[other] = arrived + work_ns[other]

    def _connect(self, rows: Int64Array, line: BoolArray) -> None:
        """Say what each span of one rank in one step depends on."""
        work = self.work
        by_name: defaultdict[str, list[int]] = defaultdict(list)
        for row in rows.tolist():
            by_name[work.names[work.what[row]]].append(row)
        passes = [row for row in rows.tolist() if line[row]]
        before: defaultdict[int, list[int]] = defaultdict(list)
        for one, other in pairwise(passes):
            before[other].append(one)
        for direction in ("forward", "backward"):
            own = [row for row in passes if _direction(work.names[work.what[row]]) == direction]
            self._transfers(by_name, direction, own, before)
            self._first_receive(by_name[f"recv {direction}"], direction, passes, own, before)
        self._others(rows, passes, before)
        for row in rows.tolist():
            self._before[row] = tuple(before[row])

    def _transfers(
        self,
        by_name: dict[str, list[int]],
        direction: str,
        own: list[int],
        before: defaultdict[int, list[int]],
    ) -> None:
        """Connect the n-th transfer of a direction with its n-th pass, and transfers with one another."""
        sends, receives = by_name.get(f"send {direction}", []), by_name.get(f"recv {direction}", [])
        missing = max(len(own) - len(receives), 0)  # the first stage receives nothing
        for place, row in enumerate(receives):
            at = place + missing if receives and missing < len(own) else place
            if at < len(own):
                before[own[at]].append(row)
            if 0 < at <= len(own):
                before[row].append(own[at - 1])
        for place, row in enumerate(sends):
            if place < len(own):
                before[row].append(own[place])
        for transfers in (sends, receives):
            for one, other in pairwise(transfers):
                before[other].append(one)

    @staticmethod
    def _first_receive(
        receives: list[int],
        direction: str,
        passes: list[int],
        own: list[int],
        before: defaultdict[int, list[int]],
    ) -> None:
        """Post the first receive of a gradient during the pass before the first backward one, not at once."""
        if direction != "backward" or not receives or not own:
            return
        place = passes.index(own[0])
        if place >= 2:
            before[receives[0]].append(passes[place - 2])

    def _others(self, rows: Int64Array, passes: list[int], before: defaultdict[int, list[int]]) -> None:
        """Connect what is neither pass nor transfer: before the first pass, after the last, or between."""
        work = self.work
        names = [work.names[code] for code in work.what[rows]]
        rest = [
            row
            for row, name in zip(rows.tolist(), names, strict=True)
            if row not in set(passes) and not name.startswith(("send ", "recv "))
        ]
        first = work.start_ns[passes[0]]
        last = max(passes, key=lambda row: int(work.end_ns[row]))
        head = [row for row in rest if work.start_ns[row] < first]
        tail = [row for row in rest if work.start_ns[row] >= work.start_ns[last]]
        for one, other in pairwise(head):
            before[other].append(one)
        if head:
            before[passes[0]].append(head[-1])
        for one, other in zip([last, *tail[:-1]], tail, strict=False):
            before[other].append(one)
        between = [row for row in rest if row not in set(head) and row not in set(tail)]
        for row in between:
            ended = [other for other in passes if work.end_ns[other] <= work.start_ns[row]]
            if ended:
                before[row].append(ended[-1])
            if (later := next((p for p in passes if work.start_ns[p] >= work.end_ns[row]), None)) is not None:
                before[later].append(row)

    def _sorted(self, rows: Int64Array) -> list[tuple[int, list[int]]]:
        """Return the rows of a step so that what a span depends on precedes it."""
        waits = {row: len(self._before[row]) for row in rows.tolist()}
        after: defaultdict[int, list[int]] = defaultdict(list)
        members: defaultdict[int, list[int]] = defaultdict(list)
        for row in waits:
            for other in self._before[row]:
                after[other].append(row)
            if self.work.instance[row] >= 0:
                members[int(self.work.instance[row])].append(row)
        arrived: defaultdict[int, int] = defaultdict(int)
        ready = deque(row for row, count in waits.items() if not count)
        order: list[tuple[int, list[int]]] = []
        while ready:
            row = ready.popleft()
            instance = int(self.work.instance[row])
            done = [row]
            if instance >= 0:
                arrived[instance] += 1
                done = members[instance] if arrived[instance] == len(members[instance]) else []
            order.append((row, done if instance >= 0 else []))
            for other in done:
                for later in after[other]:
                    waits[later] -= 1
                    if not waits[later]:
                        ready.append(later)
        if len(order) < len(rows):
            raise RunError(f"{len(rows) - len(order)} spans of a step wait for one another in a circle")
        return order

    def _delays(self) -> FloatArray:
        """Return how long after what it depends on each span began in the recording; may be negative."""
        delay = np.zeros(len(self.work.rank))
        for number, order in enumerate(self._order):
            for row, _ in order:
                before = self._before[row]
                ready = max(
                    (int(self.work.end_ns[other]) for other in before), default=int(self.first_ns[number])
                )
                delay[row] = self.work.start_ns[row] - ready
        return delay


def replay(run: Run) -> Replay:
    """Return the steps of *run* as graphs; kept with the run."""
    return run.derived(Replay)


def _direction(name: str) -> str:
    return "forward" if name in FORWARD else "backward" if name in PASSES else ""
