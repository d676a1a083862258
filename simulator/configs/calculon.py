"""Calculon's JSON: an execution and an application, keys as in calculon-ai/calculon calculon/llm/llm.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foretrace.simulator.configs import rules
from foretrace.simulator.configs.rules import MODEL, Leave, Reading, Rule, Use, flag, negated, whole, words

VOCABULARY: Final = 51200
"""Tokens that Calculon counts for every model (``num_parameters``)."""

_NETWORK: Final = Leave("which network a group uses follows from the machine and the order of ranks here")
_MACHINE: Final = Leave("the machine is given by --cluster")


def _trains(value: Any) -> Leave:
    if not flag(value):
        raise ValueError("true: inference is not simulated")
    return Leave("all that is simulated is training")


RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "num_procs": Use("gpus", whole),
        "tensor_par": Use("tp", whole),
        "pipeline_par": Use("pp", whole),
        "data_par": Use("dp", whole),
        "batch_size": Use("global_batch", whole),
        "microbatch_size": Use("micro_batch", whole),
        "datatype": Use("precision", words(float16="fp16", bfloat16="bf16", float32="fp32")),
        "fused_activation": Leave("kernels are those of the framework here: --set says others"),
        "attention_type": Use("shared_keys", words(multihead=False, multiquery=True)),
        "activation_recompute": Use("recompute", words(full="full", attn_only="selective", none="none")),
        "pipeline_interleaving": Use("virtual_stages", whole),
        "optimizer_sharding": Use("sharding", rules.gives("zero1", "ddp")),
        "tensor_par_comm_type": Use("sequence_parallel", words(ar=False, p2p_rs_ag=False, rs_ag=True)),
        "tensor_par_overlap": Use("convention.async_tp", words(none=False, ring=True, pipe=True)),
        "seq_par_ag_redo": Use("convention.keeps_gathered_inputs", negated),
        "data_par_overlap": Use("convention.overlap_grad_reduce", flag),
        "weight_offload": Leave("weights alone are not offloaded here"),
        "activations_offload": Use("offload_activations", rules.gives("cpu")),
        "optimizer_offload": Use("offload_optimizer", rules.gives("cpu")),
        "training": Use("trains", _trains),
        **dict.fromkeys(("tensor_par_net", "pipeline_par_net", "data_par_net"), _NETWORK),
        # The model.
        "hidden": Use("model.hidden", whole),
        "feedforward": Use("model.ffn_hidden", whole),
        "seq_size": Use("seq_len", whole),
        "attn_heads": Use("model.n_heads", whole),
        "attn_size": Use("model.head_dim", whole),
        "num_blocks": Use("model.n_layers", whole),
        # The machine.
        **dict.fromkeys(("matrix", "vector", "mem1", "mem2", "processing_mode", "networks"), _MACHINE),
    }
)
"""What each key means."""


def finish(reading: Reading, given: Mapping[str, Any]) -> None:
    """Add what every run and every model of Calculon is: Megatron-LM's, with the model of GPT-3."""
    facts = reading.facts
    one_key = facts.pop("shared_keys", False)
    if "gpus" in facts:
        reading.assume("framework", "megatron", "what Calculon imitates")
        reading.assume("flash_attention", value=False, reason="attention is two products and a softmax there")
    if facts.get("sequence_parallel") is False:
        facts.pop("convention.keeps_gathered_inputs", None)
    if facts.get("virtual_stages", 1) > 1:
        reading.assume("schedule", "interleaved-1f1b", "pipeline_interleaving stages per rank")
    if given.get("model"):
        for name in [name for name in facts if name.startswith(MODEL)]:
            del facts[name]
    elif f"{MODEL}n_layers" in facts:
        # Without a number of heads nothing is assumed, and the model says that it has none.
        if (n_keys := 1 if one_key else facts.get("model.n_heads")) is not None:
            reading.assume("model.n_kv_heads", n_keys, "attention_type")
        reading.assume("model.vocab", VOCABULARY, "what Calculon counts for every model")
        reading.assume("model.max_positions", facts.get("seq_len", 0), "learned positions, one per token")
        for name, value in (("norm", "layernorm"), ("gated", False)):
            reading.assume(MODEL + name, value, "every model of Calculon is built as GPT-3")
        for name in ("tied_embeddings", "dropout", "qkv_bias", "proj_bias", "mlp_bias"):
            reading.assume(MODEL + name, value=True, reason="every model of Calculon is built as GPT-3")
