"""A bound on memory at a fraction of the cost: two ranks, and a pipeline that is just full."""

from __future__ import annotations

from typing import Final

from simulator.builder.stages import n_stages, stage_layers
from simulator.job import Job
from simulator.memory.ranks import rank_memory
from simulator.schedules import SCHEDULES, Plan, held_stages, plan

FULL: Final = 2
"""Micro-batches per pipeline rank that are planned: with as many a pipeline is full."""


def least_bytes(job: Job) -> int:
    """Return bytes that the fullest rank of *job* needs at least.

    The ranks of the first and of the last stage are looked at, with as many micro-batches in flight as in a
    shorter step. No schedule holds fewer when a step is longer (a test over all of them), so this is never
    above what ``rank_memories`` finds.

    Raises:
        SimulationError: the schedule does not allow these sizes.
    """
    orders = _short(job)
    layers = stage_layers(job, n_stages(orders))
    last = len(layers) - 1
    ends = [pp for pp, actions in enumerate(orders) if {0, last} & set(held_stages(actions))]
    return max(rank_memory(job, pp, orders[pp], layers).peak_bytes for pp in ends or range(len(orders)))


def short_microbatches(schedule: str, n_ranks: int, n_microbatches: int) -> int:
    """Return the fewest micro-batches, from twice the ranks on, that a schedule allows; at most those given.

    >>> short_microbatches("1f1b", 4, 64), short_microbatches("1f1b", 4, 5)
    (8, 5)
    """
    if schedule not in SCHEDULES:
        return n_microbatches
    fits = SCHEDULES[schedule].fits
    enough = range(FULL * n_ranks, n_microbatches)
    return next((n for n in enough if fits(n_ranks, n)), n_microbatches)


def _short(job: Job) -> Plan:
    n_ranks = job.layout.pp
    n_microbatches = short_microbatches(job.schedule, n_ranks, job.n_microbatches)
    return plan(job.schedule, n_ranks, n_microbatches, job.virtual_stages)
