"""How long a step takes if computing, or communicating, were slower or faster than it is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from foretrace.simulator.builder.step import build, job_groups
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.engine import choose
from foretrace.simulator.job import Job
from foretrace.simulator.network.cost import Network

RATIOS: Final = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Factors on the time of every transfer at which a program is run."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The time of a step over how slow communication is, with computing as it is.

    A task starts at the latest end of what it waits for, so this time is a maximum of sums: convex and
    piecewise linear in the factor. Straight lines between the points are never below it.

    Attributes:
        step_s: time of the step at each of ``RATIOS``.
    """

    step_s: tuple[float, ...]

    def at(self, *, compute: float = 1.0, communication: float = 1.0) -> float:
        """Return the time of a step in s, if tasks and transfers take so many times as long.

        Twice both is twice the time, so one curve has all of them.

        >>> Curve((1.0, 1.0, 1.5, 2.5, 4.5)).at(compute=2.0, communication=2.0)
        3.0
        """
        ratio = communication / compute
        right = min(max(bisect_right(RATIOS, ratio), 1), len(RATIOS) - 1)
        (a, b), (low, high) = RATIOS[right - 1 : right + 1], self.step_s[right - 1 : right + 1]
        return compute * (low + (high - low) * (ratio - a) / (b - a))

    def scaled(self, factor: float) -> Curve:
        """Return the curve of a step that takes *factor* times as long."""
        return Curve(tuple(factor * step_s for step_s in self.step_s))


def curve_of(job: Job, network: Network, compute: ComputeModel, ratios: Sequence[float] = RATIOS) -> Curve:
    """Return the curve of one step of *job*, from its program on the compiled engine.

    Raises:
        SimulationError: the job cannot run as described, or numba is not installed.
    """
    program = build(job, network, compute, groups=job_groups(job))
    clock = choose("compiled", program.n_tasks).Clock(program)
    found = []
    for ratio in ratios:
        transfer_ns = np.rint(ratio * clock.transfer_ns).astype(np.int64)
        _, end_ns = clock.times(transfer_ns=transfer_ns)
        found.append(int(end_ns.max()) / 1e9)
    return Curve(tuple(found))
