"""What a table says about overlap, sharding and recipes, as conventions of a job's framework."""

from __future__ import annotations

import re
from typing import Final

from foretrace.simulator.validate.spelling import keeps_parameters

ON: Final = True
OFF: Final = False

SAID: Final = (
    (r"no --overlap-grad-reduce", (("overlap_grad_reduce", OFF), ("overlap_param_gather", OFF))),
    (
        r"(?:dp )?grad/param (?:overlap|sync) on|overlap_grad_reduce=true",
        (("overlap_grad_reduce", ON), ("overlap_param_gather", ON)),
    ),
    (r"no tp overlap|tp overlap off|(?<!mc_)tp_comm_overlap=false", (("async_tp", OFF),)),
    (r"async tp|tp comm overlap.*? on|(?<!mc_)tp_comm_overlap=true", (("async_tp", ON),)),
    (r"bf16 grad sync", (("reduces_in_16_bit", ON),)),
    (r"overlap_param_gather=true", (("overlap_param_gather", ON),)),
)
"""What people write, in lower case, and the conventions it means; every pattern that is found counts."""

WHOLE_STEP: Final = r"moe routing.*recipe v0\.6\.\d+:\w*_fp8mx_"
"""Recipes for experts in MXFP8 that are one CUDA graph, exchange tokens once and beside other computing.

Since 0.6 Megatron-Bridge says so in functions that its recipes call, not in their lists of settings:
``_enable_hybridep_full_iteration_mxfp8`` and ``_apply_gpt_oss_120b_full_iter_fp8mx_configs``
(NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/perf_recipes).
"""

NOTED: Final = (
    (WHOLE_STEP, (("expert_dispatch", "once"), ("host_work", 0.05))),
    (
        r'"moe_flex_dispatcher_backend": "(?:hybridep|deepep)"|(?:\+|with) deepep',
        (("expert_dispatch", "once"),),
    ),
    (r'"cuda_graph_impl": "(?:full_iteration"|local", "cuda_graph_scope": "full_it)', (("host_work", 0.05),)),
    (r"mixedprecision mode default", (("reduces_in_16_bit", OFF),)),
)
"""The same for notes, which quote the recipe or the mode that a run was started with, and for frameworks.

A step that is one CUDA graph is launched at once; 0.05 is what ``frameworks/jax.toml`` has for one program.
Composer's ``DEFAULT`` reduces gradients in fp32, ``PURE`` in 16 bit (composer/trainer/mosaic_fsdp_utils.py).
"""

PAIRED: Final = re.compile(rf'"moe_a2a_overlap": true|overlap-moe-expert-parallel-comm|{WHOLE_STEP}')
"""Exchanges of experts run beside the computing of another micro-batch."""

EXPERT_TP: Final = re.compile(r"expert(?: tp|_tensor_parallel_size\"?:) (\d+)")
"""Ranks that every expert is cut over."""

CAPACITY: Final = re.compile(r"capacity factor:? (\d+(?:\.\d+)?)")
"""Tokens that every expert computes, over their even share."""

EMBEDDING_COUNTS: Final = re.compile(r"type:transformer\|embedding|embedding counted as a layer")
"""Embedding and tied head share of the pipeline as a layer each: DeepSpeed ``partition_method`` with a type
that both have (deepspeed/runtime/pipe/module.py, ``_partition_layers``)."""

RECIPE: Final = re.compile(r"_fp8_(cs|ds|sc)_")
"""How a recipe's name says that products are quantised."""

SCALINGS: Final = {"cs": "current", "ds": "delayed", "sc": "blockwise"}
"""Current, delayed, sub-channel: NVIDIA-NeMo/Megatron-Bridge scripts/performance/utils/precision.py."""

P2P_ON: Final = re.compile(r"p2p overlap on")


def conventions_of(overlap: str, sharding: str, notes: str = "") -> tuple[tuple[str, object], ...]:
    """Return what *overlap*, *sharding* and *notes*, as a table has them, say about conventions.

    >>> conventions_of("DP grad/param overlap on, bf16 grad sync", "zero1")
    (('overlap_grad_reduce', True), ('overlap_param_gather', True), ('reduces_in_16_bit', True))
    >>> conventions_of("", "zero1", "MoE routing balanced; recipe v0.6.1:a_model_64gpu_gb300_fp8mx_config {}")
    (('expert_dispatch', 'once'), ('host_work', 0.05))
    """
    found: dict[str, object] = {}
    for text, patterns in ((overlap.lower(), SAID), (notes.lower(), NOTED)):
        for pattern, settings in patterns:
            if re.search(pattern, text):
                found.update(settings)
    if keeps_parameters(sharding):
        found["reshard_after_forward"] = OFF
    return tuple(found.items())


def p2p_of(overlap: str) -> bool | None:
    """Return whether *overlap* says that transfers between stages run beside products; None if nothing."""
    return True if P2P_ON.search(overlap.lower()) else None


def expert_tp_of(notes: str) -> int:
    """Return over how many ranks *notes* say that every expert is cut; 0 if they do not.

    >>> expert_tp_of("config table in README expert TP 1 | Grok1"), expert_tp_of("")
    (1, 0)
    """
    found = EXPERT_TP.search(notes.lower())
    return int(found.group(1)) if found else 0


def capacity_of(notes: str) -> float:
    """Return the capacity factor of experts in *notes*; 0, as many tokens as come, if they have none.

    >>> capacity_of("top-2, capacity factor 1.25 with padding"), capacity_of("dropless")
    (1.25, 0.0)
    """
    found = CAPACITY.search(notes.lower())
    return float(found[1]) if found else 0.0


def counted_ends_of(notes: str) -> str:
    """Return which ends of the model *notes* count as a layer, of ``simulator.builder.stage_layers.ENDS``.

    >>> counted_ends_of("pp-partition type:transformer|embedding"), counted_ends_of("")
    ('both', 'none')
    """
    return "both" if EMBEDDING_COUNTS.search(notes.lower()) else "none"


def scaling_of(notes: str) -> str:
    """Return the recipe of 8-bit products that *notes* name; empty if none.

    >>> scaling_of("recipe v0.5.0:QWEN3_30B_A3B_PRETRAIN_CONFIG_H100_FP8_CS_V1 {}"), scaling_of("")
    ('current', '')
    """
    found = RECIPE.search(notes.lower())
    return SCALINGS[found.group(1)] if found else ""


def schedule_of(notes: str, virtual_stages: int) -> str:
    """Return the schedule of a run with *virtual_stages* per rank, combined if its *notes* say so.

    >>> schedule_of("", 2), schedule_of('{"moe_a2a_overlap": true}', 1)
    ('interleaved-1f1b', 'combined-1f1b')
    >>> schedule_of("MoE routing balanced; recipe v0.6.1:a_model_64gpu_gb300_fp8mx_config {}", 1)
    'combined-1f1b'
    """
    if PAIRED.search(notes.lower()):
        return "combined-1f1b"
    return "interleaved-1f1b" if virtual_stages > 1 else "1f1b"
