"""Which layers a pipeline stage holds, and in which units a rank goes through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from foretrace.simulator.builder.stage_layers import ranges, split_by_cost, split_layers
from foretrace.simulator.errors import JobError
from foretrace.simulator.job import Job
from foretrace.simulator.schedules import MOST_PASSES, Action, Plan, pairs, plan
from foretrace.simulator.workload.micro_batch import embedding_blocks, head_blocks, layer_blocks
from foretrace.simulator.workload.ops import Block

MOST_LAYERS: Final = 1_000_000
"""Passes through a layer that a program holds, over its stages. Each is some fifty tasks of its own."""


def check_work(job: Job) -> None:
    """Raise JobError, before anything is built, if there is more work in *job* than memory holds."""
    n_layers = job.model.n_layers + job.model.n_mtp
    if (n_passes := 2 * job.n_microbatches * n_layers * job.n_steps) > MOST_LAYERS:
        raise JobError(
            f"micro-batches times layers times steps, forward and backward = {n_passes:,}: at most "
            f"{MOST_LAYERS:,} are simulated; larger micro-batches, more dp or fewer steps would work"
        )


def job_plan(job: Job) -> Plan:
    """Return the actions of every pipeline rank of *job*.

    Raises ScheduleError if the schedule is unknown or does not allow these ranks and micro-batches. Raises
    JobError if there are more passes than memory holds.
    """
    found = plan(job.schedule, job.layout.pp, job.n_microbatches, job.virtual_stages)
    if (n_passes := sum(map(len, found)) * job.n_steps) > 2 * MOST_PASSES:
        raise JobError(
            f"{job.n_steps} steps of this job are {n_passes:,} passes: at most {2 * MOST_PASSES:,}"
        )
    return found


def job_pairs(job: Job) -> frozenset[Action]:
    """Return the forwards of *job* that run together with the backward after them."""
    if job.overlap_pairs is False:
        return frozenset()
    return pairs(job.schedule, job.layout.pp, job.n_microbatches, job.virtual_stages)


def scatters_p2p(job: Job) -> bool:
    """Return whether a message between stages goes in parts, one from each tensor-parallel rank."""
    return job.profile.p2p_scattered and job.layout.tp > 1 and not job.sequence_parallel


def n_stages(orders: Plan) -> int:
    """Return the number of stages that the model is cut into."""
    return 1 + max(action.stage for actions in orders for action in actions)


def stage_layers(job: Job, n_stages: int) -> list[range]:
    """Return the layers of each of *n_stages* stages: as the job lists them, or as its framework shares out.

    Raises JobError if the list is for another number of stages, there are more stages than layers, or one
    without a layer that full sharding would gather or adapters would be in.
    """
    listed, n_layers = job.layers_per_stage, job.model.n_layers
    if listed and len(listed) != n_stages:
        raise JobError(
            f"layers_per_stage lists {len(listed)} stages, but schedule {job.schedule} has {n_stages}: "
            f"{n_stages // job.layout.pp} on each of {job.layout.pp} pipeline ranks"
        )
    if listed:
        if job.lora_rank and not listed[0]:
            raise JobError(
                f"lora_rank={job.lora_rank}: the first of {n_stages} stages has no layer, and so no adapter "
                "to train; layers_per_stage with at least one there would work"
            )
        return ranges(listed)
    if job.profile.split == "cost" and n_stages > 1:
        costs = [job.model.matmul_params(layer) for layer in range(n_layers)]
        found = split_by_cost(costs, job.model.head_params(), n_stages)
        if job.shards.parameters and not all(found[1:-1]):
            raise JobError(
                f"{n_stages} pipeline stages of {job.model.name} with equal cost leave some without a layer "
                f"for {job.sharding} to gather; fewer stages, layers_per_stage or zero1 would work"
            )
        return found
    return split_layers(n_layers, n_stages, job.counted_ends)


@dataclass(frozen=True, slots=True)
class Unit:
    """What a rank goes through, gathers and frees at once: the embedding, a layer, or the head.

    *layer*: transformer layer, -1 for embedding and head. *blocks*: layers of a kind have the same.
    """

    layer: int
    blocks: tuple[Block, ...]

    @property
    def is_head(self) -> bool:
        """Whether it is the end of the model: final norm, output matrix and loss."""
        return self.blocks[0].name == "head"

    @property
    def is_embedding(self) -> bool:
        """Whether it is the start of the model."""
        return self.layer < 0 and not self.is_head

    @property
    def params(self) -> int:
        """Parameters on this rank whose replicas are all ``dp * cp`` ranks."""
        return sum(block.params - block.expert_params for block in self.blocks)

    @property
    def params_in_all(self) -> int:
        """Parameters on this rank."""
        return sum(block.params for block in self.blocks)

    @property
    def expert_params(self) -> int:
        """Parameters on this rank whose replicas are those of experts, ``Layout.expert_replicas``."""
        return sum(block.expert_params for block in self.blocks)

    @property
    def adapters(self) -> int:
        """Parameters that low-rank adaptation adds; their replicas are all ``dp * cp`` ranks."""
        return sum(block.adapters for block in self.blocks)

    @property
    def matrices(self) -> int:
        """Parameters among ``params`` that may be kept in 4 bits."""
        return sum(block.matrices for block in self.blocks)


def units_by_stage(job: Job, n_stages: int) -> list[tuple[Unit, ...]]:
    """Return what each of *n_stages* stages holds, in forward order: embedding, layers, head.

    Raises JobError if there are more stages than layers.
    """
    alike: dict[tuple[tuple[str, ...], int], tuple[Block, ...]] = {}

    def unit(layer: int) -> Unit:
        kind = layer_kind(job, layer)
        if kind not in alike:
            alike[kind] = layer_blocks(job, layer)
        return Unit(layer, alike[kind])

    found = [[unit(layer) for layer in layers] for layers in stage_layers(job, n_stages)]
    found[0].insert(0, Unit(-1, embedding_blocks(job)))
    found[-1].append(Unit(-1, head_blocks(job)))
    return [tuple(units) for units in found]


def layer_kind(job: Job, layer: int) -> tuple[tuple[str, ...], int]:
    """Return what tells the work of a layer from that of others: its blocks, and how far back it looks."""
    return job.model.kinds(layer), job.window_of(layer)
