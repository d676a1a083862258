"""Bounds on memory at a fraction of the cost: for one job, and for all that differ in their schedule only."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields
from typing import Final

from foretrace.simulator.builder.stages import layer_kind, n_stages, stage_layers
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import rank_memory
from foretrace.simulator.memory.stage import StageMemory, stage_memory
from foretrace.simulator.schedules import SCHEDULES, Plan, held_stages, plan
from foretrace.simulator.workload.recompute import recomputes

FULL: Final = 2
"""Micro-batches per pipeline rank that are planned: with as many a pipeline is full."""

SPREAD: Final = ("parameters", "gradients", "optimizer")
"""Categories of which the ranks of a pipeline together hold at least what one rank would hold alone."""

_OF_STAGE: Final = tuple(
    field.name
    for field in fields(Job)
    if field.name not in {"model", "cluster", "schedule", "virtual_stages", "overlap_p2p", "variation"}
)
"""Settings of a job on which the memory of a stage depends; more of them only mean remembering more."""


class LeastMemory:
    """Answers how much memory jobs need at least; stages that are alike are worked out once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, StageMemory] = {}
        self._kinds: dict[Hashable, Hashable] = {}
        self._alive: dict[int, object] = {}

    def least_bytes(self, job: Job) -> int:
        """Return bytes that the fullest rank of *job* needs at least.

        The ranks of the first and of the last stage are looked at, with as many micro-batches in flight as in
        a shorter step. No schedule holds fewer when a step is longer (a test over all of them), so this is
        never above what ``rank_memories`` finds.

        Raises:
            SimulationError: the schedule does not allow these sizes.
        """
        orders = short_plan(job)
        layers = stage_layers(job, n_stages(orders))
        last = len(layers) - 1
        ends = [pp for pp, actions in enumerate(orders) if {0, last} & set(held_stages(actions))]
        return max(
            rank_memory(job, pp, orders[pp], layers, self._of_stage).peak_bytes
            for pp in ends or range(len(orders))
        )

    def family_bytes(self, job: Job) -> int:
        """Return bytes that the fullest rank of *job* needs at least, whatever its schedule.

        All ranks of a pipeline together hold the states of the whole model, and each what the first
        micro-batch keeps in every one of its stages: when that has come to the last stage, no backward has
        begun. The fullest rank has at least the average.
        """
        whole = self._of_stage(job, range(job.model.n_layers), 0, 1, first=True, last=True)
        spread = sum(whole.items[name] for name in SPREAD)
        if not job.recompute_layers:  # which count from the first layer of every stage
            spread += whole.activation_bytes_per_microbatch
        return spread // job.layout.pp + whole.items["reserved"]

    def _of_stage(
        self, job: Job, layers: Sequence[int], stage: int, in_flight: int, *, first: bool, last: bool
    ) -> StageMemory:
        """Return what ``stage_memory`` does, of a stage that is alike."""
        self._alive.setdefault(id(job.model), job.model)
        self._alive.setdefault(id(job.cluster), job.cluster)
        settings = (id(job.model), id(job.cluster), *(getattr(job, name) for name in _OF_STAGE))
        key = (settings, self._alike(job, layers), in_flight, first, last)
        if key not in self._known:
            self._known[key] = stage_memory(job, layers, stage, in_flight, first=first, last=last)
        return self._known[key]

    def _alike(self, job: Job, layers: Sequence[int]) -> Hashable:
        """Return what tells the *layers* of a stage from those of others."""
        key = (id(job.model), job.recompute_layers, job.recompute_every, layers)
        if key not in self._kinds:
            self._kinds[key] = tuple(
                (layer_kind(job, layer), recomputes(job, layer, layers)) for layer in layers
            )
        return self._kinds[key]


def short_plan(job: Job) -> Plan:
    """Return the plan of *job* with as many micro-batches as make its pipeline just full."""
    n_ranks = job.layout.pp
    n_microbatches = short_microbatches(job.schedule, n_ranks, job.n_microbatches)
    return plan(job.schedule, n_ranks, n_microbatches, job.virtual_stages)


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
