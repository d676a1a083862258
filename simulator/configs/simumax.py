"""SimuMax's JSON: a strategy and a model, keys as in MooreThreads/SimuMax simumax/core/config.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foretrace.simulator.configs import rules
from foretrace.simulator.configs.megatron import complete_experts, complete_latent
from foretrace.simulator.configs.megatron_rules import comma_list, on
from foretrace.simulator.configs.rules import (
    MODEL,
    Leave,
    Reading,
    Rule,
    Use,
    flag,
    negated,
    one_of,
    some,
    whole,
    words,
)

_FUSED: Final = Leave("kernels are those of the framework here: --set says others")
_NETWORK: Final = Leave("where a group sends follows from the machine and the order of ranks here")
_MACHINE: Final = Leave("the machine is given by --cluster")
_PARTS: Final = Leave("parts of a layer are recomputed by --recompute and --recompute-modules here")
_BUFFERS: Final = Leave("how a buffer is accounted for there")


def _many(value: Any) -> int | None:
    """Return a number of experts; 1, the default, is none."""
    return whole(value) if whole(value) > 1 else None


def _granularity(value: Any) -> Any:
    known = {"full_block": "full", "sdp_only": "selective"}
    return known.get(str(value), _PARTS)


RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "seq_len": Use("seq_len", whole),
        "micro_batch_size": Use("micro_batch", whole),
        "micro_batch_num": Use("accumulation", whole),
        "dtype": Use("precision", words(bf16="bf16", fp16="fp16", fp32="fp32")),
        "fp8": Use("fp8", rules.gives(what=True)),
        "world_size": Use("gpus", whole),
        "tp_size": Use("tp", whole),
        "cp_size": Use("cp", whole),
        "pp_size": Use("pp", whole),
        "ep_size": Use("ep", whole),
        "etp_size": Use("expert_tp", whole),
        "cp_comm_type": Use("convention.context", words(a2a="ulysses", all_gather="all_gather", p2p="ring")),
        "cp_a2a_mode": Leave("whether an exchange waits for the last one: not simulated"),
        "moe_dispatcher_policy": Use(
            "convention.expert_dispatch",
            lambda value: (
                "copies" if str(value).startswith("all2all") else Leave("not a way of dispatching here")
            ),
        ),
        "num_layers_in_first_pipeline_stage": Use("first_stage_layers", whole),
        "num_layers_in_last_pipeline_stage": Use("last_stage_layers", whole),
        "account_for_embedding_in_pipeline_split": on("counted_embedding"),
        "account_for_loss_in_pipeline_split": on("counted_head"),
        "enable_sequence_parallel": Use("sequence_parallel", flag),
        "interleaving_size": Use("virtual_stages", whole),
        "microbatch_group_size_per_vp_stage": Leave("groups of micro-batches are as many as stages here"),
        "zero_state": Use("sharding", one_of({0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"})),
        "enable_dropout": Use("dropout", flag),
        "enable_recompute": Use("recomputes", flag),
        "recompute_granularity": Use("recompute", _granularity),
        "recompute_layer_num": Use("recompute_layers", some),
        "megatron_recompute_modules": Use("recompute_modules", comma_list),
        "overlap_grad_reduce": Use("convention.overlap_grad_reduce", flag),
        "use_flash_sdp": Use("flash_attention", flag),
        "use_math_sdp": Use("flash_attention", negated),
        "use_fp32_accum_grad": Use("fp32_gradients", flag),
        "order_of_paralielism": Leave("ranks are laid out as Megatron-LM does"),
        "pp_comm_async": Use("overlap_p2p", flag),
        **dict.fromkeys(
            (
                "use_fused_norm",
                "use_fused_swiglu",
                "use_fused_grad_accumulation",
                "cross_entropy_loss_fusion",
            ),
            _FUSED,
        ),
        **dict.fromkeys((f"{axis}_net" for axis in ("tp", "cp", "pp", "dp", "ep", "etp", "edp")), _NETWORK),
        **dict.fromkeys(
            (
                "attn_recompute",
                "mla_rms_recompute",
                "mlp_recompute",
                "mlp_rms_recompute",
                "megatron_recompute",
            ),
            _PARTS,
        ),
        **dict.fromkeys(
            ("use_accm_weight", "recompute_variance", "mem_factor", "dispatch_probs", "te_version"), _BUFFERS
        ),
        "enable_straggler_model": Leave("--stragglers rules.gives slow ranks here"),
        "attention_sparse_ratio": Leave("sparse attention of a share: not simulated"),
        # The model.
        "model_name": Use("model"),
        "model_type": Leave("expert_num says it"),
        "layer_num": Use("model.n_layers", whole),
        "hidden_size": Use("model.hidden", whole),
        "head_num": Use("model.n_heads", whole),
        "kv_head_num": Use("model.n_kv_heads", whole),
        "head_size": Use("model.head_dim", whole),
        "intermediate_size": Use("model.ffn_hidden", whole),
        "vocab_size": Use("model.vocab", whole),
        "orig_vocab_size": Leave("vocab_size is with its padding"),
        "use_swiglu": Use("model.gated", flag),
        "attention_type": Use("latent_attention", words(mha=None, mla=True)),
        "expert_num": Use("model.n_experts", _many),
        "topk": Use("model.top_k", whole),
        "dense_layers": Use("model.n_dense_layers", some),
        "moe_ffn_hidden_size": Use("model.moe_ffn_hidden", whole),
        "moe_shared_expert_intermediate_size": Use("shared_expert_hidden", whole),
        "moe_pad_expert_input_to_capacity": Leave("every expert gets as much as the routing says here"),
        "capacity": Leave("--capacity-factor says it"),
        "q_lora_rank": Use("model.q_lora_rank", whole),
        "kv_lora_rank": Use("model.kv_lora_rank", whole),
        "qk_head_dim": Use("qk_head_dim", whole),
        "qk_pos_emb_head_dim": Use("model.rope_head_dim", whole),
        "v_head_dim": Use("model.v_head_dim", whole),
        # The machine.
        **dict.fromkeys(("sys_name", "num_per_node", "accelerator", "networks", "intra_with_pcie"), _MACHINE),
    }
)
"""What each key means."""


def finish(reading: Reading, given: Mapping[str, Any]) -> None:
    """Add SimuMax's defaults, which are those of a Megatron-LM run, and complete the model."""
    facts = reading.facts
    # A model's file has neither, and says nothing of a run.
    if "accumulation" in facts or "gpus" in facts:
        reading.assume("framework", "megatron", "what SimuMax imitates")
        reading.assume("precision", "bf16", "dtype is bf16 unless given")
        reading.assume(
            "sequence_parallel", value=True, reason="enable_sequence_parallel is true unless given"
        )
        reading.assume("sharding", "zero1", "zero_state is 1 unless given")
        reading.assume("convention.overlap_grad_reduce", value=True, reason="true unless given")
    # Without a granularity nothing is recomputed.
    if facts.pop("recomputes", True) is False or "recompute" not in facts:
        for name in ("recompute", "recompute_layers", "recompute_modules"):
            facts.pop(name, None)
    if facts.get("recompute") != "full":
        facts.pop("recompute_layers", None)
    if facts.get("virtual_stages", 1) > 1:
        reading.assume("schedule", "interleaved-1f1b", "interleaving_size stages per rank")
    if given.get("model"):
        for name in [name for name in facts if name == "model" or name.startswith(MODEL)]:
            del facts[name]
    elif f"{MODEL}n_layers" in facts:
        complete_experts(facts)
        complete_latent(reading)
    dropout = facts.pop("dropout", None)
    if dropout and f"{MODEL}n_layers" in facts:
        facts[f"{MODEL}dropout"] = True
    for name in ("shared_expert_hidden", "latent_attention", "qk_head_dim"):
        facts.pop(name, None)
