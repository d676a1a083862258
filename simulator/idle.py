"""Conventions that a job sets for itself and that can have no effect in it: said, never passed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from simulator.job import FULLY_SHARDED, Job

Idle = Callable[[Job], str]
"""Returns why a convention has no effect in a job; empty if it may have one."""


def _unless(words: str, *, needs: Callable[[Job], bool]) -> Idle:
    return lambda job: "" if needs(job) else words


_TP: Final = _unless("tp is 1", needs=lambda job: job.layout.tp > 1)
_CP: Final = _unless("cp is 1", needs=lambda job: job.layout.cp > 1)
_EP: Final = _unless("ep is 1", needs=lambda job: job.layout.ep > 1)
_EXPERTS: Final = _unless("the model is dense", needs=lambda job: job.model.n_experts > 0)
_REPLICAS: Final = _unless("there is one replica", needs=lambda job: job.layout.dp * job.layout.cp > 1)
_WHOLE: Final = _unless(
    "parameters are not shared out: fsdp and zero3 do", needs=lambda job: job.sharding in FULLY_SHARDED
)
_BUCKETS: Final = _unless(
    "full sharding reduces by unit, not in buckets", needs=lambda job: job.sharding not in FULLY_SHARDED
)
_ONCE: Final = _unless(
    "zero2, zero3 and fsdp reduce in every micro-batch", needs=lambda job: job.sharding in ("ddp", "zero1")
)
_STATES: Final = _unless(
    "only zero1 and zero2 gather what was updated", needs=lambda job: job.sharding in ("zero1", "zero2")
)

REASONS: Final[Mapping[str, tuple[Idle, ...]]] = MappingProxyType(
    {
        "overlap_grad_reduce": (_REPLICAS,),
        "overlap_param_gather": (_REPLICAS, _STATES),
        "reduces_in_16_bit": (_REPLICAS,),
        "fp8_param_gather": (
            _unless("no product runs in few bits", needs=lambda job: job.fp8),
            _unless("shards are fp32", needs=lambda job: job.sharding not in FULLY_SHARDED),
        ),
        "no_sync": (_REPLICAS, _ONCE),
        "bucket_mib": (_REPLICAS, _BUCKETS),
        **dict.fromkeys(("async_tp", "overlap_tp_backward"), (_TP,)),
        "p2p_scattered": (
            _TP,
            _unless("pp is 1", needs=lambda job: job.layout.pp > 1),
            _unless(
                "sequence parallelism cuts what is sent already", needs=lambda job: not job.sequence_parallel
            ),
        ),
        "host_per_tensor_rank": (
            _TP,
            _unless("pp is 1", needs=lambda job: job.layout.pp > 1),
        ),
        "context": (_CP,),
        "expert_dispatch": (_EXPERTS, _EP),
        "grouped": (_EXPERTS,),
        "fused_experts": (
            _EXPERTS,
            _unless(
                "products of experts are not in mxfp8",
                needs=lambda job: job.fp8 and (job.recipe or job.profile.fp8_recipe) == "mxfp8",
            ),
        ),
        **dict.fromkeys(
            ("wrap", "prefetch_forward", "prefetch_backward", "reshard_after_forward", "limit_all_gathers"),
            (_WHOLE, _REPLICAS),
        ),
        "copies_gathered": (_WHOLE, _REPLICAS),
        "pipeline_keeps_whole": (
            _WHOLE,
            _REPLICAS,
            _unless("pp is 1", needs=lambda job: job.layout.pp > 1),
        ),
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


def idle_conventions(job: Job) -> list[str]:
    """Return a sentence for each convention that *job* sets for itself to no effect.

    >>> from simulator.config import job_from
    >>> where = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 8}
    >>> idle_conventions(job_from({**where, "conventions": {"async_tp": True}}))
    ['async_tp = true has no effect here: tp is 1']
    """
    found = []
    for name, value in job.conventions:
        if why := why_idle(job, name):
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            found.append(f"{name} = {shown} has no effect here: {why}")
    return found


def why_idle(job: Job, convention: str) -> str:
    """Return why *convention* has no effect on *job*, empty if it may have one."""
    return next((words for reason in REASONS.get(convention, ()) if (words := reason(job))), "")
