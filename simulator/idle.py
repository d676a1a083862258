"""What a job sets for itself and what can have no effect in it: said, never passed over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from functools import cache
from types import MappingProxyType
from typing import Final

from foretrace.door import own_table
from foretrace.simulator.builder.stages import job_plan, n_stages, stage_layers
from foretrace.simulator.compute.fusion import is_separate
from foretrace.simulator.compute.gemm import ALIGNED_BYTES
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.models.model import share
from foretrace.simulator.schedules import pairs
from foretrace.simulator.workload.ops import DTYPE_BYTES

NEEDS: Final[Mapping[str, tuple[str, Callable[[Job], bool]]]] = MappingProxyType(
    {
        "pp": ("pp is 1", lambda job: job.layout.pp > 1),
        "tp": ("tp is 1", lambda job: job.layout.tp > 1),
        "no_tp": ("tp is not 1", lambda job: job.layout.tp == 1),
        "cp": ("cp is 1", lambda job: job.layout.cp > 1),
        "ep": ("ep is 1", lambda job: job.layout.ep > 1),
        "sp": ("there is no sequence parallelism", lambda job: job.sequence_parallel),
        "no_sp": (
            "sequence parallelism cuts what is sent already",
            lambda job: not job.sequence_parallel,
        ),
        "experts": ("the model is dense", lambda job: job.model.n_experts > 0),
        "shared_experts": ("no experts are shared", lambda job: job.model.n_shared_experts > 0),
        "sent_once": ("every copy is sent", lambda job: job.profile.expert_dispatch == "once"),
        "sent_as_copies": ("tokens are sent once", lambda job: job.profile.expert_dispatch == "copies"),
        "open_expert_tp": ("it is known", lambda job: job.expert_tp_from in ("framework", "open")),
        "no_capacity": ("capacity_factor says what experts get", lambda job: not job.capacity_factor),
        "latent": ("attention is not latent", lambda job: bool(job.model.kv_lora_rank)),
        "replicas": ("there is one replica", lambda job: job.layout.dp * job.layout.cp > 1),
        "whole": ("parameters are not shared out: fsdp and zero3 do", lambda job: job.shards.parameters),
        "buckets": ("full sharding reduces by unit, not in buckets", lambda job: not job.shards.parameters),
        "blocks": ("the model is gathered as one", lambda job: job.profile.wrap == "block"),
        "reduces_once": (
            "zero2, zero3 and fsdp reduce in every micro-batch",
            lambda job: not job.shards.gradients,
        ),
        "states": ("only zero1 and zero2 gather what was updated", lambda job: job.shards.gathers_updated),
        "copies": ("there is one copy", lambda job: 0 < job.shard_ranks < job.layout.dp * job.layout.cp),
        "fewer_shards": (
            "that many are all there are",
            lambda job: job.shard_ranks < job.layout.dp * job.layout.cp,
        ),
        "device_updates": (
            "the processor updates",
            lambda job: job.offload not in ("optimizer", "states", "all"),
        ),
        "micro_batches": ("a step has one micro-batch", lambda job: job.n_microbatches > 1),
        "sequences": ("a micro-batch is one sequence", lambda job: job.micro_batch > 1),
        "images": ("sequences have no images", lambda job: job.images > 0),
        "fp8": ("fp8 is off", lambda job: job.fp8),
        "few_bits": ("no product runs in few bits", lambda job: job.fp8),
        "few_bit_shards": ("shards are fp32", lambda job: not job.shards.parameters),
        "no_recipe": ("recipe says it", lambda job: not job.recipe),
        "delayed": ("only delayed scales are agreed on", lambda job: _recipe(job) == "delayed"),
        "mxfp8": ("products of experts are not in mxfp8", lambda job: job.fp8 and _recipe(job) == "mxfp8"),
        "16_bit": ("products are not in 16 bit", lambda job: job.precision != "fp32"),
        "16_bit_products": (
            "products are not in 16 bit",
            lambda job: job.precision != "fp32" and not job.fp8,
        ),
        "fp32_sums": ("sums of gradients are not fp32", lambda job: job.fp32_gradients),
        "whole_fp32": (
            "it is for parameters that are whole and in fp32: ddp, without adapters",
            lambda job: not job.shards.optimizer and not job.lora_rank,
        ),
        "rotary": ("rotary embeddings are one kernel", lambda job: is_separate(job, "rotary")),
        "not_compiled": ("what is compiled is padded", lambda job: job.kernels != "fused"),
        "ragged_logits": (
            "rows of logits are aligned as they are",
            lambda job: not _has_aligned_logits(job),
        ),
        "full": ("recompute is not full", lambda job: job.recompute == "full"),
        "selective": ("recompute is not selective", lambda job: job.recompute == "selective"),
        "pairs": ("the schedule pairs nothing", lambda job: bool(_pairs(job))),
        "ends_count": ("stages have the same layers without", lambda job: not _split_alike(job)),
        "sites": ("sites do not train apart: outer_every is 0", lambda job: job.outer_every > 0),
        "checkpoints": ("nothing is saved: checkpoint_every is 0", lambda job: job.checkpoint_every > 0),
    }
)
"""By name, why something has no effect and what has to be so for it to have one."""

OF_MEMORY: Final = (
    *("bucket_bytes", "flat_bucket_bytes", "bucket_ranks", "step_copy_bytes", "wgrad_placeholders"),
    *("logits_kept_bytes", "logits_working_bytes", "compiles_loss"),
    *("keeps_gate_output", "keeps_norm_in_fp32"),
)
"""Conventions that only say what is in memory: the fullest moment may not know them."""

_DEFAULTS: Final = {found.name: found.default for found in fields(Job)}


@cache
def needed_by() -> Mapping[str, Mapping[str, list[str]]]:
    """Return the names of what is needed, of ``conventions`` and of ``settings``."""
    return own_table("simulator/idle.toml")


def _first_unmet(job: Job, needed: Iterable[str]) -> str:
    return next((words for words, is_met in map(NEEDS.__getitem__, needed) if not is_met(job)), "")


def _recipe(job: Job) -> str:
    return job.recipe or job.profile.fp8_recipe


def idle(job: Job) -> list[str]:
    """Return a sentence for each setting and convention that *job* sets for itself to no effect.

    >>> from foretrace.simulator.config import job_from
    >>> where = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 8}
    >>> idle(job_from({**where, "sequence_parallel": False}))
    ['sequence_parallel = false has no effect here: tp is 1']
    """
    found = []
    for name, needed in needed_by()["settings"].items():
        # Of a setting that is as by default nobody asked for an effect.
        if (value := getattr(job, name)) == _DEFAULTS[name]:
            continue
        if why := _first_unmet(job, needed):
            found.append(_sentence(name, value, why))
    return found + idle_conventions(job)


def _pairs(job: Job) -> Collection[object]:
    return pairs(job.schedule, job.layout.pp, job.n_microbatches, job.virtual_stages)


def _has_aligned_logits(job: Job) -> bool:
    """Return whether a rank's rows of logits begin where tensor cores can be fed from."""
    return share(job.model.vocab, job.layout.tp) * DTYPE_BYTES[job.precision] % ALIGNED_BYTES == 0


def _split_alike(job: Job) -> bool:
    """Return whether the stages of *job* would have the same layers if no end counted as one."""
    n = n_stages(job_plan(job))
    if n > job.model.n_layers:  # only counted ends make so many stages possible
        return False
    return stage_layers(job, n) == stage_layers(replace(job, counted_ends="none"), n)


def idle_conventions(job: Job) -> list[str]:
    """Return a sentence for each convention that *job* sets for itself to no effect.

    >>> from foretrace.simulator.config import job_from
    >>> where = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 8}
    >>> idle_conventions(job_from({**where, "conventions": {"async_tp": True}}))
    ['async_tp = true has no effect here: tp is 1']
    """
    found = []
    for name, value in job.conventions:
        if why := why_idle(job, name):
            found.append(_sentence(name, value, why))
    return found


def _sentence(name: str, value: object, why: str) -> str:
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"{name} = {shown} has no effect here: {why}"


def why_idle(job: Job, convention: str) -> str:
    """Return why *convention* has no effect on *job*, empty if it may have one."""
    found = _first_unmet(job, needed_by()["conventions"].get(convention, ()))
    if found or convention not in OF_MEMORY:
        return found
    others = tuple((name, value) for name, value in job.conventions if name != convention)
    # Nothing but trying tells: which moment is the fullest depends on everything else in the job.
    with_it, without = (rank_memories(one) for one in (job, replace(job, conventions=others)))
    return "memory is fullest where it plays no part" if with_it == without else ""
