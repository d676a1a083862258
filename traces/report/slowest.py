"""The rank that computes longer than the others that do the same: the one to look at first."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import numpy as np

from foretrace.traces.analysis.activity import stage_of
from foretrace.traces.analysis.metrics import averaged_steps, breakdown, step_times_ns
from foretrace.traces.run import Run

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
    rows = breakdown(run)
    lengths_ns = step_times_ns(rows)
    steps = set(averaged_steps(run, lengths_ns))
    least_ns = LEAST_LOSS * float(np.mean([lengths_ns[step] for step in steps] or [0]))
    times: dict[int, list[int]] = defaultdict(list)
    weight: dict[int, int] = {}
    for row in rows:
        if row.step in steps:
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
