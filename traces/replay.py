"""Plays the steps of a recorded pipeline again with other durations: what would the step have taken?

Every span of a step begins when what it depends on has ended, after the delay that the recording shows; a
communication moves data once its last participant has come. ``traces.replay_order`` says what depends on what
in pipeline training.

With the recorded durations and delays the recorded times come out again, to the nanosecond. Method: Lin et
al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025.
"""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
from numpy.typing import NDArray

from traces.columns import Int64Array
from traces.errors import RunError
from traces.replay_order import dependencies
from traces.replay_work import by_place, collected
from traces.run import Run

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
        self._posted: dict[int, int] = {}
        for rows in by_place(self.work):
            before, posted = dependencies(self.work, rows, line)
            self._posted |= posted
            for row, others in before.items():
                self._before[row] = tuple(others)
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
                if row in self._posted:
                    begun = np.maximum(begun, end[self._posted[row]])
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

    def _sorted(self, rows: Int64Array) -> list[tuple[int, list[int]]]:
        """Return the rows of a step so that what a span depends on precedes it."""
        before = {row: self._all_before(row) for row in rows.tolist()}
        waits = {row: len(others) for row, others in before.items()}
        after: defaultdict[int, list[int]] = defaultdict(list)
        members: defaultdict[int, list[int]] = defaultdict(list)
        for row in waits:
            for other in before[row]:
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

    def _all_before(self, row: int) -> tuple[int, ...]:
        """Return what a span waits for where delays count: its dependencies, and what it was posted after."""
        posted = self._posted.get(row, -1)
        return self._before[row] if posted < 0 else (*self._before[row], posted)

    def _delays(self) -> FloatArray:
        """Return how long after what it depends on each span began in the recording; may be negative."""
        delay = np.zeros(len(self.work.rank))
        for number, order in enumerate(self._order):
            for row, _ in order:
                ended = (int(self.work.end_ns[other]) for other in self._all_before(row))
                ready = max(ended, default=int(self.first_ns[number]))
                delay[row] = self.work.start_ns[row] - ready
        return delay


def replay(run: Run) -> Replay:
    """Return the steps of *run* as graphs; kept with the run."""
    return run.derived(Replay)
