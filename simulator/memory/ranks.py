"""How much memory the ranks of a pipeline need: the stages that each holds, and what its schedule keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from foretrace.simulator.builder.stages import job_pairs, job_plan, n_stages, stage_layers
from foretrace.simulator.job import Job
from foretrace.simulator.memory.activations import layer_input_bytes
from foretrace.simulator.memory.stage import Peak, StageMemory, stage_memory
from foretrace.simulator.schedules import Action, held_stages, in_flight

SHARED: Final = ("gathered", "buffers", "reserved")
"""Categories of which a rank needs as much as the most demanding of its stages; the others add up. So does
what is gathered where stages stay whole from the first micro-batch to the last."""


class OfStage(Protocol):
    """Whoever knows how much memory a stage needs, as ``stage_memory`` does."""

    def __call__(
        self, job: Job, layers: Sequence[int], stage: int, in_flight: int, *, first: bool, last: bool
    ) -> StageMemory:
        """Return the memory of a rank of *stage*."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory(Peak):
    """Memory of every rank of one pipeline rank.

    Attributes:
        in_flight: micro-batches whose activations are held at once, at most, over all stages.
        kept_bytes: by stage, what one micro-batch keeps between its forward and its backward.
        ahead_bytes: by stage, what a forward keeps before the backward that it runs together with frees as
            much: one layer, as they take turns.
        brought_back_bytes: what recomputation brings back during a backward.
        when: that worst moment of its fullest stage, in words.
        host_bytes: what each keeps in the memory of its node instead.
    """

    pp: int
    stages: tuple[int, ...]
    n_layers: int
    in_flight: int
    kept_bytes: Mapping[int, int]
    ahead_bytes: Mapping[int, int]
    brought_back_bytes: int
    when: str
    host_bytes: int = 0


def rank_memories(job: Job) -> list[RankMemory]:
    """Return the memory of each pipeline rank of *job*, in order; on the kind of GPU where it is fullest.

    Of sites that train apart, each is as full as another.
    """
    job = job.of_one_site
    if job.cluster.others:
        by_rank = zip(*map(rank_memories, job.kinds), strict=True)
        return [max(found, key=lambda one: one.peak_bytes) for found in by_rank]
    orders = job_plan(job)
    layers = stage_layers(job, n_stages(orders))
    return [rank_memory(job, pp, actions, layers) for pp, actions in enumerate(orders)]


def peak_bytes(job: Job) -> int:
    """Return what the fullest rank of *job* needs."""
    return max(memory.peak_bytes for memory in rank_memories(job))


def host_bytes(job: Job, ranks: Sequence[RankMemory]) -> int:
    """Return what the memory of a node has to hold of *job* at most, as *ranks* say; not what is on disks."""
    if job.offload_to != "host":
        return 0
    return max(rank.host_bytes for rank in ranks) * min(job.most_ranks_per_node, job.layout.world_size)


def host_holds(job: Job, ranks: Sequence[RankMemory]) -> bool:
    """Return whether a node holds what *job* offloads into it; where its memory is not known, it does."""
    limit = job.cluster.node_memory_bytes
    return limit is None or host_bytes(job, ranks) <= limit


def fits(job: Job) -> bool:
    """Return whether every rank of *job* fits into its device, and what is offloaded into its node."""
    ranks, limit = rank_memories(job), job.cluster.device.memory_bytes
    return max(rank.peak_bytes for rank in ranks) <= limit and host_holds(job, ranks)


def rank_memory(
    job: Job,
    pp: int,
    actions: Sequence[Action],
    layers: Sequence[range],
    of_stage: OfStage = stage_memory,
) -> RankMemory:
    """Return the memory of a rank that goes through *actions*.

    *of_stage*: answers as ``stage_memory`` does; a search remembers its answers.
    """
    stages = held_stages(actions)
    last = len(layers) - 1
    parts: dict[int, StageMemory] = {}
    for stage in stages:
        held = in_flight([action for action in actions if action.stage == stage])
        parts[stage] = of_stage(job, layers[stage], stage, held, first=stage == 0, last=stage == last)
    kept = {stage: part.activation_bytes_per_microbatch for stage, part in parts.items()}
    # Only one layer at a time is computed again, whatever stage it is of: the largest counts, not the sum.
    brought_back = max(part.items["activations"] - kept[s] * part.in_flight for s, part in parts.items())
    if not job.deallocate_outputs:
        kept = {stage: size + (stage != last) * layer_input_bytes(job) for stage, size in kept.items()}
    shared = [name for name in SHARED if name != "gathered" or not job.keeps_stages_whole]
    items = {
        name: (max if name in shared else sum)(part.items[name] for part in parts.values())
        for name in parts[stages[0]].items
    }
    # -(-a // b) rounds up; a stage may hold the embedding or the head alone, without a layer.
    ahead = {stage: -(-kept[stage] // max(len(layers[stage]), 1)) for stage in stages}
    # The two of a pair take turns at communications within layers; without any, all of the forward is first.
    has_turns = job.layout.tp * job.layout.cp * job.layout.ep > 1
    paired = job_pairs(job) if has_turns else frozenset()
    items["activations"] = _most_kept(actions, kept, ahead, paired) + brought_back
    return RankMemory(
        pp=pp,
        stages=stages,
        n_layers=sum(len(layers[stage]) for stage in stages),
        in_flight=in_flight(actions),
        kept_bytes=kept,
        ahead_bytes=ahead,
        brought_back_bytes=brought_back,
        items=items,
        when=max(parts.values(), key=lambda part: part.peak_bytes).when,
        host_bytes=sum(part.host_bytes for part in parts.values()),
    )


def _most_kept(
    actions: Sequence[Action],
    kept: Mapping[int, int],
    ahead: Mapping[int, int],
    paired: Collection[Action],
) -> int:
    """Return the most bytes of activations held at once; a micro-batch of stage *s* holds ``kept[s]``.

    A forward that runs together with the backward after it takes up what that frees, layer by layer, and is
    ``ahead[s]`` of it.
    """
    held = most = late = 0
    for at, action in enumerate(actions):
        if action.kind == "F":
            together = action in paired and at + 1 < len(actions) and actions[at + 1].kind == "B"
            late = kept[action.stage] - ahead[action.stage] if together else 0
            held += kept[action.stage] - late
        elif action.kind in "BW":
            held += late - kept[action.stage]
            late = 0
        most = max(most, held)
    return most
