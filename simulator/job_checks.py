"""Whether a job can be laid out at all: degrees divide what they deal out. Refusals say what would work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.dealing import check_heads
from simulator.errors import JobError
from simulator.nearest import near_divisors, near_multiples

if TYPE_CHECKING:
    from simulator.job import Job


def check_batch(job: Job) -> None:
    """Raise JobError unless whole micro-batches make up the batch."""
    chunk = job.layout.dp * job.micro_batch
    if job.global_batch % chunk:
        below = max(job.global_batch // chunk, 1) * chunk
        raise JobError(
            f"global_batch={job.global_batch} is not a multiple of dp*micro_batch = "
            f"{job.layout.dp}*{job.micro_batch} = {chunk}; {below} or {below + chunk} would work"
        )


def check_shards(job: Job) -> None:
    """Raise JobError unless what is shared out goes round."""
    replicas = job.layout.dp * job.layout.cp
    if job.shard_ranks < 0 or job.lora_rank < 0:
        raise JobError(f"shard_ranks={job.shard_ranks}, lora_rank={job.lora_rank}: not negative")
    if job.shard_ranks and job.sharding == "ddp":
        raise JobError(f"shard_ranks={job.shard_ranks} needs a sharding that shares something: zero1, fsdp")
    if job.shard_ranks and replicas % job.shard_ranks:
        raise JobError(
            f"shard_ranks={job.shard_ranks} does not divide dp*cp = {job.layout.dp}*{job.layout.cp} = "
            f"{replicas} ranks; {near_divisors(replicas, job.shard_ranks)} would work"
        )


def check_layout(job: Job) -> None:
    """Raise JobError unless ranks, heads, layers, experts and tokens can be dealt out."""
    layout, model = job.layout, job.model
    if layout.world_size != job.cluster.n_gpus:
        per_replica = layout.world_size // layout.dp
        fits = job.cluster.n_gpus // per_replica
        advice = f"dp={fits} fills {fits * per_replica}" if fits else f"one replica needs {per_replica}"
        raise JobError(
            f"pp*dp*cp*tp = {layout.pp}*{layout.dp}*{layout.cp}*{layout.tp} = {layout.world_size} ranks, "
            f"but the cluster has {job.cluster.n_gpus} GPUs; with this pp, cp and tp {advice}"
        )
    check_heads(layout.tp, model)
    if layout.cp > 1 and job.profile.context == "ulysses" and model.n_heads // layout.tp % layout.cp:
        raise JobError(
            f"cp={layout.cp} does not divide the {model.n_heads // layout.tp} heads that tp={layout.tp} "
            f"leaves of {model.name}, as Ulysses needs; context ring or all_gather would work"
        )
    if layout.pp > model.n_layers and not job.layers_per_stage:
        raise JobError(f"pp={layout.pp} stages for {model.n_layers} layers of {model.name}: at most one each")
    if layout.ep > 1 and (not model.n_experts or model.n_experts % layout.ep):
        near = f"{near_divisors(model.n_experts, layout.ep)} would work" if model.n_experts else "it is dense"
        raise JobError(
            f"ep={layout.ep} does not divide the {model.n_experts} experts of {model.name}; {near}"
        )
    _check_expert_tp(job)
    if job.seq_len % (layout.cp * (layout.tp if job.sequence_parallel else 1)):
        raise JobError(
            f"seq_len={job.seq_len} does not divide over cp*tp = {layout.cp}*{layout.tp} ranks; "
            f"{near_multiples(job.seq_len, layout.cp * layout.tp)} would work"
        )


def _check_expert_tp(job: Job) -> None:
    """Raise JobError unless experts can be cut as the layout says."""
    layout, model = job.layout, job.model
    if not layout.expert_tp:
        return
    if not model.n_experts:
        raise JobError(f"expert_tp={layout.expert_tp}: {model.name} has no experts")
    width = model.moe_ffn_hidden
    if width % layout.expert_tp:
        raise JobError(
            f"expert_tp={layout.expert_tp} does not divide the inner width {width} of an expert of "
            f"{model.name}; {near_divisors(width, layout.expert_tp)} would work"
        )
    if layout.tp > 1 and not job.sequence_parallel:
        raise JobError(
            f"expert_tp={layout.expert_tp} beside tp={layout.tp} needs sequence_parallel: otherwise every "
            f"tensor-parallel rank sends the same tokens; or expert_tp={layout.tp}"
        )
