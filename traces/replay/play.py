"""Plays the steps of a recorded pipeline again with other durations: what would the step have taken?

Every span of a step begins when what it depends on has ended, after the delay that the recording shows; a
communication moves data once its last participant has come. ``traces.replay.order`` says what depends on what
in pipeline training.

With the recorded durations and delays the recorded times come out again, to the nanosecond. Method: Lin et
al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025.
"""

from __future__ import annotations

import numpy as np

from foretrace.traces.replay.order import dependencies
from foretrace.traces.replay.waves import Edges, FloatArray, waves
from foretrace.traces.replay.work import by_place, collected
from foretrace.traces.run import Run


class Replay:
    """The steps of a run as graphs of dependencies.

    Args:
        run: a run with forward and backward passes that say their micro-batch.

    Raises:
        RunError: the run has no such passes, or its dependencies go round in a circle.
    """

    def __init__(self, run: Run) -> None:
        self.work, line = collected(run)
        after: list[int] = []
        before: list[int] = []
        posted: dict[int, int] = {}
        for rows in by_place(self.work):
            needed, at = dependencies(self.work, rows, line)
            posted |= at
            for row, others in needed.items():
                after += [row] * len(others)
                before += others
        n = len(self.work.rank)
        free = Edges.of(after, before)
        every = Edges.of([*after, *posted], [*before, *posted.values()])
        self.steps, step = np.unique(self.work.step, return_inverse=True)
        self._by_step = np.argsort(step, kind="stable")
        self._step_at = np.searchsorted(step[self._by_step], np.arange(len(self.steps)))
        self.first_ns = np.minimum.reduceat(self.work.start_ns[self._by_step], self._step_at)
        self._origin_ns = self.first_ns[step]
        self.delay_ns = self.work.start_ns - every.latest(n, self.work.end_ns, self._origin_ns)
        self._waves = {
            delays: waves(n, edges, self.work.instance) for delays, edges in ((False, free), (True, every))
        }

    def step_times_ns(self, work_ns: FloatArray, *, delays: bool) -> FloatArray:
        """Return how long each step takes on its slowest rank, in every scenario.

        Args:
            work_ns: duration of each span in each scenario, shape ``(n_spans, n_scenarios)``.
            delays: whether spans start as late after what they depend on as they did in the recording.

        Returns:
            Times in ns, shape ``(n_steps, n_scenarios)``.
        """
        start, end = np.zeros(work_ns.shape), np.zeros(work_ns.shape)
        for wave in self._waves[delays]:
            begun = np.repeat(self._origin_ns[wave.rows, None].astype(np.float64), work_ns.shape[1], axis=1)
            if len(wave.targets):
                begun[wave.targets] = np.maximum.reduceat(end[wave.sources], wave.offsets, axis=0)
            if delays:
                begun += self.delay_ns[wave.rows, None]
            start[wave.rows] = begun
            end[wave.singles] = start[wave.singles] + work_ns[wave.singles]
            if len(wave.members):
                arrived = np.maximum.reduceat(start[wave.members], wave.bounds, axis=0)
                end[wave.members] = np.repeat(arrived, wave.sizes, axis=0) + work_ns[wave.members]
        last = np.maximum.reduceat(end[self._by_step], self._step_at, axis=0)
        times: FloatArray = last - self.first_ns[:, None]
        return times


def replay(run: Run) -> Replay:
    """Return the steps of *run* as graphs; kept with the run."""
    return run.derived(Replay)
