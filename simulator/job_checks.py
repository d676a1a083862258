"""Whether a job can be laid out at all: degrees divide what they deal out. Refusals say what would work."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from foretrace.simulator.dealing import check_heads
from foretrace.simulator.errors import JobError
from foretrace.simulator.nearest import near_divisors, near_multiples
from foretrace.simulator.workload.recipes import RECIPES

if TYPE_CHECKING:
    from foretrace.simulator.job import Job


_FROM_ZERO: Final = (
    *("capacity_factor", "expert_imbalance", "checkpoint_every", "checkpoint_bytes_per_s"),
    *("shard_ranks", "lora_rank", "recompute_layers"),
)
_FROM_ONE: Final = ("global_batch", "micro_batch", "seq_len", "n_steps", "recompute_every")


def check_numbers(job: Job) -> None:
    """Raise JobError unless all numbers of *job* are ones to count with."""
    for least, names in ((0, _FROM_ZERO), (1, _FROM_ONE)):
        for name in names:
            if not least <= (value := getattr(job, name)) < math.inf:
                raise JobError(f"{name.removeprefix('n_')}={value}: give a number from {least} on")


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


def check_schedule(job: Job) -> None:
    """Raise JobError if the pipeline schedule asks for something that the rest of the job does not have."""
    if reason := why_not_schedule(job, job.schedule, job.virtual_stages):
        raise JobError(f"schedule {job.schedule} {reason}")


def why_not_schedule(job: Job, schedule: str, virtual_stages: int | None) -> str:
    """Return why *job* cannot run by *schedule* with *virtual_stages*; empty if it can."""
    return why_not_combined(job, virtual_stages or 1) if schedule == "combined-1f1b" else ""


def why_not_combined(job: Job, virtual_stages: int) -> str:
    """Return why Megatron-LM would not run the micro-batches of *job* in pairs; empty if it would.

    A pair of a forward and a backward is of two virtual stages, or of a model that no pipeline cuts
    (megatron/core/transformer/transformer_config.py, ``overlap_moe_expert_parallel_comm``).
    """
    pp = job.layout.pp
    if job.layout.ep == 1:
        plain = "interleaved-1f1b" if pp > 1 else "1f1b"
        return f"hides what experts exchange, and with ep=1 they exchange nothing; {plain} would work"
    if pp > 1 and virtual_stages == 1:
        return (
            f"with pp={pp} needs virtual_stages of 2 or more: Megatron-LM pairs micro-batches of different "
            "virtual stages; or 1f1b, or dualpipe-v"
        )
    if job.recompute == "full" or "moe" in job.recomputed_modules:
        again = "recompute=full" if job.recompute == "full" else "recompute_modules moe"
        return f"does not run with {again}, which would exchange tokens again; other modules would work"
    return ""


def check_offload(job: Job) -> None:
    """Raise JobError unless what is to be offloaded is something, and layers by number are Megatron-LM's way.

    Reference: Megatron-LM ``transformer_config.py``, ``cpu_offloading_num_layers``.
    """
    if job.offload == "none" and job.offload_to != "host":
        raise JobError(f"offload_to={job.offload_to!r} needs offload: nothing is offloaded")
    number, n_layers = job.offload_layers, job.model.n_layers
    if not number:
        return
    what = f"offload_layers={number}"
    if job.offload not in ("activations", "all"):
        raise JobError(f"{what} needs offload=activations (or all): it says whose activations travel")
    if not 0 < number < n_layers:
        most = f"at most {n_layers - 1} of the {n_layers} layers of {job.model.name}"
        raise JobError(f"{what}: {most}; 0 is all of them")
    if job.layout.pp > 1:
        raise JobError(
            f"{what} with pp={job.layout.pp}: in a pipeline all layers are offloaded or none (Megatron-LM)"
        )
    if job.recompute != "none":
        raise JobError(
            f"{what} with recompute={job.recompute}: layers whose activations travel are not computed again "
            "(Megatron-LM); recompute none, or offload_layers 0"
        )


def check_recipe(job: Job) -> None:
    """Raise JobError or CatalogError unless the device can multiply what the recipe quantises.

    Scales of 8 bits per 32 values came with the tensor cores that also take 4 bits (Transformer Engine
    ``quantization.py``, ``check_mxfp8_support``: compute capability 10.0).
    """
    if not job.fp8:
        if job.recipe:
            raise JobError(f"recipe={job.recipe!r} needs fp8: it says how products are quantised")
        return
    name, device = job.recipe or job.profile.fp8_recipe, job.cluster.device
    device.peak(RECIPES[name].dtype)
    if name == "mxfp8" and "fp4" not in device.peak_flops_per_s:
        raise JobError(
            f"recipe='mxfp8': tensor cores of {device.name} take no scales per 32 values, those of Blackwell "
            "do; delayed, current or blockwise would work"
        )
