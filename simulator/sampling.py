"""How long steps take when tasks and links do not always take the same time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from foretrace.simulator.engine import choose
from foretrace.simulator.program import Int64Array, Program
from foretrace.simulator.variation import Variation

QUANTILES: Final = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""Quantiles of the step time that a summary lists."""


def straggling(program: Program, factors: Mapping[int, float]) -> Int64Array:
    """Return the duration of each task of *program* when the compute of some ranks takes longer."""
    duration_ns, computes = program.duration_ns.copy(), _computes(program)
    for rank, factor in factors.items():
        own = computes & (program.rank == rank)
        duration_ns[own] = np.rint(duration_ns[own] * factor).astype(np.int64)
    return duration_ns


def sample_steps(
    program: Program,
    variation: Variation,
    *,
    clock: Any = None,
    alike: NDArray[np.int64] | None = None,
    in_step: int = 1,
) -> NDArray[np.float64]:
    """Return the time of a step, in s, for each sample of the jitter; shape ``(variation.samples,)``.

    A folded rank has the slowest of the ranks that it stands for. Those in step with it all the time (tensor
    and context parallel) draw for every task, all of them once per step.

    Args:
        program: what runs; of several steps, the mean is taken.
        variation: what to draw.
        clock: an engine's ``Clock`` of *program*; None: that of the engine sooner done.
        alike: by rank, how many ranks it stands for; None: for itself.
        in_step: how many of them are in step with it all the time.
    """
    clock = clock or choose("auto", program.n_tasks * variation.samples).Clock(program)
    draw = np.random.default_rng(variation.seed)
    n_ranks = int(program.rank.max()) + 1
    counts = np.ones(n_ranks, np.int64) if alike is None else alike[:n_ranks]
    computes = np.flatnonzero(_computes(program))
    n_steps = max(int(program.step.max()) + 1, 1)
    found = np.empty(variation.samples)
    for at in range(variation.samples):
        of_rank = np.array([_slowest(draw, variation.rank_jitter, 1, n)[0] for n in counts])
        duration_ns = program.duration_ns.astype(np.float64)
        duration_ns[computes] *= of_rank[program.rank[computes]]
        duration_ns[computes] *= _slowest(draw, variation.compute_jitter, len(computes), in_step)
        transfer_ns = clock.transfer_ns * _slowest(draw, variation.network_jitter, program.n_instances, 1)
        _, end_ns = clock.times(np.rint(duration_ns).astype(np.int64), np.rint(transfer_ns).astype(np.int64))
        found[at] = end_ns.max() / n_steps / 1e9
    return found


def _computes(program: Program) -> NDArray[np.bool_]:
    """Return for each task whether it is compute."""
    return np.array([label.category == "compute" for label in program.labels], np.bool_)[program.label]


def _slowest(draw: np.random.Generator, spread: float, n: int, among: int) -> NDArray[np.float64]:
    """Return *n* factors of mean 1, each the largest *among* so many."""
    if not spread or not among:
        return np.ones(n)
    normal = draw.standard_normal(n)
    for _ in range(among - 1):
        np.maximum(normal, draw.standard_normal(n), out=normal)
    return np.exp(spread * normal - spread**2 / 2)


def distribution(step_s: NDArray[np.float64], seed: int) -> dict[str, Any]:
    """Return the mean, the spread and the quantiles of sampled step times."""
    return {
        "samples": len(step_s),
        "seed": seed,
        "mean_s": float(step_s.mean()),
        "std_s": float(step_s.std()),
        "quantiles_s": {f"{q:g}": float(np.quantile(step_s, q)) for q in QUANTILES},
    }
