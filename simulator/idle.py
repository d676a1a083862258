"""What a job sets for itself and what can have no effect in it: said, never passed over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Final

from foretrace.simulator.builder.stages import job_plan, n_stages, stage_layers
from foretrace.simulator.compute.fusion import is_separate
from foretrace.simulator.compute.gemm import ALIGNED_BYTES
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.models.model import share
from foretrace.simulator.schedules import pairs
from foretrace.simulator.workload.ops import DTYPE_BYTES

Idle = Callable[[Job], str]
"""Returns why a convention has no effect in a job; empty if it may have one."""


def _unless(words: str, *, needs: Callable[[Job], bool]) -> Idle:
    return lambda job: "" if needs(job) else words


_PP: Final = _unless("pp is 1", needs=lambda job: job.layout.pp > 1)
_SP: Final = _unless("there is no sequence parallelism", needs=lambda job: job.sequence_parallel)
_TP: Final = _unless("tp is 1", needs=lambda job: job.layout.tp > 1)
_CP: Final = _unless("cp is 1", needs=lambda job: job.layout.cp > 1)
_EP: Final = _unless("ep is 1", needs=lambda job: job.layout.ep > 1)
_EXPERTS: Final = _unless("the model is dense", needs=lambda job: job.model.n_experts > 0)
_REPLICAS: Final = _unless("there is one replica", needs=lambda job: job.layout.dp * job.layout.cp > 1)
_WHOLE: Final = _unless(
    "parameters are not shared out: fsdp and zero3 do", needs=lambda job: job.shards.parameters
)
_BUCKETS: Final = _unless(
    "full sharding reduces by unit, not in buckets", needs=lambda job: not job.shards.parameters
)
_BLOCKS: Final = _unless("the model is gathered as one", needs=lambda job: job.profile.wrap == "block")
_ONCE: Final = _unless(
    "zero2, zero3 and fsdp reduce in every micro-batch", needs=lambda job: not job.shards.gradients
)
_STATES: Final = _unless(
    "only zero1 and zero2 gather what was updated", needs=lambda job: job.shards.gathers_updated
)

_UPDATES: Final = _unless(
    "the processor updates", needs=lambda job: job.offload not in ("optimizer", "states", "all")
)

REASONS: Final[Mapping[str, tuple[Idle, ...]]] = MappingProxyType(
    {
        "overlap_grad_reduce": (_REPLICAS,),
        "overlap_param_gather": (_REPLICAS, _STATES),
        "reduces_in_16_bit": (_REPLICAS,),
        "fp8_param_gather": (
            _unless("no product runs in few bits", needs=lambda job: job.fp8),
            _unless("shards are fp32", needs=lambda job: not job.shards.parameters),
        ),
        "no_sync": (_REPLICAS, _ONCE),
        "bucket_mib": (_REPLICAS, _BUCKETS),
        "buckets_first_chunk_only": (_REPLICAS, _BUCKETS, _PP),
        "overlap_tp_backward": (_TP,),
        **dict.fromkeys(("async_tp", "keeps_gathered_inputs", "norm_reductions"), (_TP, _SP)),
        "batch_first": (
            _TP,
            _SP,
            _unless("a micro-batch is one sequence", needs=lambda job: job.micro_batch > 1),
        ),
        "overlap_shared_experts": (
            _EXPERTS,
            _unless("no experts are shared", needs=lambda job: job.model.n_shared_experts > 0),
            _EP,
            _unless("tp is not 1", needs=lambda job: job.layout.tp == 1),
        ),
        **dict.fromkeys(("split", "even_chunks"), (_PP,)),
        "p2p_scattered": (
            _TP,
            _PP,
            _unless(
                "sequence parallelism cuts what is sent already", needs=lambda job: not job.sequence_parallel
            ),
        ),
        "host_per_tensor_rank": (_TP, _PP),
        "context": (_CP,),
        "expert_dispatch": (_EXPERTS, _EP),
        "dispatch_fp8": (_EXPERTS, _EP, _unless("no product runs in few bits", needs=lambda job: job.fp8)),
        "dispatch_processors": (
            _EXPERTS,
            _EP,
            _unless("every copy is sent", needs=lambda job: job.profile.expert_dispatch == "once"),
        ),
        "fp8_activation_inputs": (_unless("no product runs in few bits", needs=lambda job: job.fp8),),
        "router_launches": (_EXPERTS,),
        "latent_launches": (
            _unless("attention is not latent", needs=lambda job: bool(job.model.kv_lora_rank)),
        ),
        "dispatch_launches": (
            _EXPERTS,
            _unless("tokens are sent once", needs=lambda job: job.profile.expert_dispatch == "copies"),
        ),
        "update_launches": (_UPDATES,),
        "expert_tp": (
            _EXPERTS,
            _TP,
            _unless("it is known", needs=lambda job: job.expert_tp_from in ("framework", "open")),
        ),
        "grouped": (_EXPERTS,),
        "fused_experts": (
            _EXPERTS,
            _unless(
                "products of experts are not in mxfp8",
                needs=lambda job: job.fp8 and (job.recipe or job.profile.fp8_recipe) == "mxfp8",
            ),
        ),
        **dict.fromkeys(
            ("prefetch_forward", "prefetch_backward", "reshard_after_forward", "limit_all_gathers"),
            (_WHOLE, _REPLICAS, _BLOCKS),
        ),
        **dict.fromkeys(
            ("wrap", "copies_gathered", "joins_gradients", "unit_calls", "tensor_calls"), (_WHOLE, _REPLICAS)
        ),
        "update_calls": (_WHOLE, _UPDATES),
        "copies_once": (
            _WHOLE,
            _unless(
                "there is one copy", needs=lambda job: 0 < job.shard_ranks < job.layout.dp * job.layout.cp
            ),
            _unless("a step has one micro-batch", needs=lambda job: job.n_microbatches > 1),
        ),
        "pipeline_keeps_whole": (_WHOLE, _REPLICAS, _PP),
        "rotary": (
            _unless("rotary embeddings are one kernel", needs=lambda job: is_separate(job, "rotary")),
        ),
        "pads_vocabulary": (
            _unless("products are not in 16 bit", needs=lambda job: job.precision != "fp32"),
            _unless("what is compiled is padded", needs=lambda job: job.kernels != "fused"),
            _unless("rows of logits are aligned as they are", needs=lambda job: not _has_aligned_logits(job)),
        ),
        "autocast": (
            _unless("sums of gradients are not fp32", needs=lambda job: job.fp32_gradients),
            _unless(
                "it is for parameters that are whole and in fp32: ddp, without adapters",
                needs=lambda job: not job.shards.optimizer and not job.lora_rank,
            ),
            _unless("products are not in 16 bit", needs=lambda job: job.precision != "fp32" and not job.fp8),
        ),
        "stops_early": (_unless("recompute is not full", needs=lambda job: job.recompute == "full"),),
        "selective": (_unless("recompute is not selective", needs=lambda job: job.recompute == "selective"),),
        "fp8_recipe": (
            _unless("fp8 is off", needs=lambda job: job.fp8),
            _unless("recipe says it", needs=lambda job: not job.recipe),
        ),
        "amax_ranks": (
            _unless("fp8 is off", needs=lambda job: job.fp8),
            _unless(
                "only delayed scales are agreed on",
                needs=lambda job: (job.recipe or job.profile.fp8_recipe) == "delayed",
            ),
        ),
    }
)
"""What has to be so for a convention to have an effect, by its name; others always may."""

OF_MEMORY: Final = (
    *("bucket_bytes", "flat_bucket_bytes", "bucket_ranks", "step_copy_bytes", "wgrad_placeholders"),
    *("logits_kept_bytes", "logits_working_bytes", "compiles_loss"),
    *("keeps_gate_output", "keeps_norm_in_fp32"),
)
"""Conventions that only say what is in memory: the fullest moment may not know them."""

SETTINGS: Final[Mapping[str, tuple[Idle, ...]]] = MappingProxyType(
    {
        "sequence_parallel": (_TP,),
        **dict.fromkeys(("overlap_p2p", "deallocate_outputs", "virtual_stages"), (_PP,)),
        "overlap_pairs": (_unless("the schedule pairs nothing", needs=lambda job: bool(_pairs(job))),),
        "counted_ends": (_PP, lambda job: "stages have the same layers without" if _split_alike(job) else ""),
        "shard_ranks": (
            _unless(
                "that many are all there are",
                needs=lambda job: job.shard_ranks < job.layout.dp * job.layout.cp,
            ),
        ),
        "expert_imbalance": (
            _EP,
            _unless("capacity_factor says what experts get", needs=lambda job: not job.capacity_factor),
        ),
        "image_tokens": (_unless("sequences have no images", needs=lambda job: job.images > 0),),
        **dict.fromkeys(
            ("outer_fragments", "outer_overlap", "outer_bits"),
            (_unless("sites do not train apart: outer_every is 0", needs=lambda job: job.outer_every > 0),),
        ),
        "checkpoint_bytes_per_s": (
            _unless("nothing is saved: checkpoint_every is 0", needs=lambda job: job.checkpoint_every > 0),
        ),
    }
)
"""The same for settings of a job that are not what they are by default."""

_DEFAULTS: Final = {found.name: found.default for found in fields(Job)}


def idle(job: Job) -> list[str]:
    """Return a sentence for each setting and convention that *job* sets for itself to no effect.

    >>> from foretrace.simulator.config import job_from
    >>> where = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 8}
    >>> idle(job_from({**where, "sequence_parallel": False}))
    ['sequence_parallel = false has no effect here: tp is 1']
    """
    found = []
    for name, reasons in SETTINGS.items():
        # Of a setting that is as by default nobody asked for an effect.
        if (value := getattr(job, name)) == _DEFAULTS[name]:
            continue
        if why := next((words for reason in reasons if (words := reason(job))), ""):
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
    found = next((words for reason in REASONS.get(convention, ()) if (words := reason(job))), "")
    if found or convention not in OF_MEMORY:
        return found
    others = tuple((name, value) for name, value in job.conventions if name != convention)
    # Nothing but trying tells: which moment is the fullest depends on everything else in the job.
    with_it, without = (rank_memories(one) for one in (job, replace(job, conventions=others)))
    return "memory is fullest where it plays no part" if with_it == without else ""
