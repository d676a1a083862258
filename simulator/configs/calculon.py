"""Calculon's JSON: an execution and an application, keys as in calculon-ai/calculon calculon/llm/llm.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foretrace.simulator.configs.rules import MODEL, Leave, Read, Reading, flag

VOCABULARY: Final = 51200
"""Tokens that Calculon counts for every model (``num_parameters``)."""


def _trains(value: Any) -> Leave:
    if not flag(value):
        raise ValueError("true: inference is not simulated")
    return Leave("all that is simulated is training")


READERS: Final[Mapping[str, Read]] = MappingProxyType({"trains": _trains})
"""Readers of its own, by heading of ``calculon.toml``."""


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
