"""Plays the steps of a recorded pipeline again with other durations: what would the step have taken?

Every span of a step begins when what it depends on has ended, after the delay that the recording shows; a
communication moves data once its last participant has come. ``traces.replay.order`` says what depends on what
in pipeline training.

With the recorded durations and delays the recorded times come out again, to the nanosecond. Method: Lin et
al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025.
"""

from __future__ import annotations

import numpy as np

from foretrace.traces.replay.alike import coloured
from foretrace.traces.replay.order import Pairs, dependencies
from foretrace.traces.replay.waves import Edges, FloatArray, Graph
from foretrace.traces.replay.work import by_place, collected
from foretrace.traces.run import Run


class Replay:
    """The steps of a run as graphs of dependencies, of one rank for all that do the same.

    Args:
        run: a run with forward and backward passes that say their micro-batch.

    Raises:
        RunError: the run has no such passes, too many spans, or its dependencies go round in a circle.
    """

    def __init__(self, run: Run) -> None:
        self.meetings, self.colour = coloured(run)
        self.ranks = np.array(run.stored_ranks, np.int64)
        self.work, line = collected(run, self.meetings, self.colour)
        needs, posted = Pairs(), Pairs()
        for rows in by_place(self.work):
            dependencies(self.work, rows, line, needs, posted)
        after, before = needs.joined()
        self.free = Edges.of(after, before).reduced(len(self.work.start_ns))
        self._every = Edges.of(*map(np.concatenate, zip((after, before), posted.joined(), strict=True)))
        self.steps, self.step = np.unique(self.work.step, return_inverse=True)
        self.first_ns = np.full(len(self.steps), np.iinfo(np.int64).max)
        np.minimum.at(self.first_ns, self.step, self.work.start_ns)

    def delayed_ns(self, work_ns: FloatArray) -> FloatArray:
        """Return how long each step takes on its slowest rank, in every scenario.

        Spans start as late after what they depend on as recorded.

        Args:
            work_ns: duration of each span in each scenario, shape ``(n_spans, n_scenarios)``.

        Returns:
            Times in ns, shape ``(n_steps, n_scenarios)``.
        """
        n = len(self.step)
        latest = self._every.latest(n, self.work.end_ns, self.first_ns[self.step])
        graph = Graph(n, self._every, self.work.instance, chains=False)
        return graph.played(work_ns, self.first_ns, self.step, self.work.start_ns - latest)


def replay(run: Run) -> Replay:
    """Return the steps of *run* as graphs; kept with the run."""
    return run.derived(Replay)
