"""nanotron's YAML: keys as in huggingface/nanotron src/nanotron/config/config.py and its examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Final

from foretrace.door import shown
from foretrace.simulator.configs.rules import MODEL, Reading
from foretrace.simulator.errors import ConfigError
from foretrace.simulator.models.hf import model_from_config
from foretrace.simulator.models.hf_config import Config

KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {"is_llama_config": "llama", "is_qwen2_config": "qwen2", "is_starcoder2_config": "starcoder2"}
)
"""Switches of ``model.model_config`` that say which family its keys are of."""


def flat(document: Mapping[str, Any], flattened: Mapping[str, Any]) -> dict[str, Any]:
    """Return *flattened* with the shape of the model as one setting, which a reader of its own takes."""
    inside = "model.model_config."
    found = {key: value for key, value in flattened.items() if not key.startswith(inside)}
    model = document.get("model")
    shape = model.get("model_config") if isinstance(model, Mapping) else None
    return found | ({inside.rstrip("."): shape} if shape else {})


def finish(reading: Reading, given: Mapping[str, Any]) -> None:
    """Add nanotron's defaults, and read the model as Hugging Face would."""
    facts = reading.facts
    reading.assume("framework", "nanotron", "whose file this is")
    reading.assume("sharding", "zero1", "optimizer.zero_stage")
    reading.assume("precision", "bf16", "model.dtype")
    reading.assume("accumulation", 1, "batch_accumulation_per_replica")
    shape = facts.pop("shape", None)
    multiple = facts.pop("pad_vocab_to", 1) * facts.get("tp", 1)
    if shape is not None and not given.get("model"):
        if not isinstance(shape, Mapping):
            raise ConfigError(f"{reading.where}: model.model_config = {shown(shape)}: a table is needed")
        kind = next((kind for switch, kind in KINDS.items() if shape.get(switch)), "llama")
        config = {"model_type": kind, "_name_or_path": reading.where, **shape}
        model = asdict(model_from_config(config, where=f"{reading.where}: model.model_config"))
        model |= _experts(shape)
        model["vocab"] = -(-model["vocab"] // multiple) * multiple
        facts |= {MODEL + name: value for name, value in model.items() if name not in ("name", "source")}


def _experts(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that ``model_config.moe_config`` gives a model (nanotron/config/models_config.py)."""
    if not shape.get("moe_config"):
        return {}
    config = Config(shape, "model.model_config")
    experts = config.within("moe_config")
    return {
        "n_experts": experts.integer("num_experts"),
        "top_k": experts.integer("top_k", 1),
        "moe_ffn_hidden": experts.integer("moe_intermediate_size", config.integer("intermediate_size")),
        "n_shared_experts": int(experts.flag("enable_shared_expert", default=False)),
    }
