"""nanotron's YAML: keys as in huggingface/nanotron src/nanotron/config/config.py and its examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Final

from foretrace.door import shown
from foretrace.simulator.configs import rules
from foretrace.simulator.configs.rules import (
    MODEL,
    Leave,
    Reading,
    Rule,
    Use,
    flag,
    negated,
    one_of,
    optimizer,
    whole,
    words,
)
from foretrace.simulator.errors import ConfigError
from foretrace.simulator.models.hf import model_from_config
from foretrace.simulator.models.hf_config import Config

KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {"is_llama_config": "llama", "is_qwen2_config": "qwen2", "is_starcoder2_config": "starcoder2"}
)
"""Switches of ``model.model_config`` that say which family its keys are of."""

RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "parallelism.dp": Use("dp", whole),
        "parallelism.tp": Use("tp", whole),
        "parallelism.pp": Use("pp", whole),
        "parallelism.context_parallel_size": Use("cp", whole),
        "parallelism.expert_parallel_size": Use("ep", whole),
        "parallelism.pp_engine": Use("schedule", words(**{"1f1b": "1f1b", "afab": "gpipe"})),
        "parallelism.tp_mode": Use("sequence_parallel", words(REDUCE_SCATTER=True, ALL_REDUCE=False)),
        "parallelism.tp_linear_async_communication": Use("convention.overlap_tp_backward", flag),
        "parallelism.tp_recompute_allgather": Use("convention.keeps_gathered_inputs", negated),
        "parallelism.recompute_layer": Use("recompute", rules.gives("full", "none")),
        "parallelism.recompute_granularity": Use("recompute", words(selective="selective", full="full")),
        "parallelism.moe_layer_recompute": Leave("experts alone are not recomputed here"),
        "parallelism.domino": Leave("halves of a batch that hide each other's communication: not simulated"),
        "parallelism": Leave("how parallelism is set up; not how long a step takes"),
        "tokens.micro_batch_size": Use("micro_batch", whole),
        "tokens.batch_accumulation_per_replica": Use("accumulation", whole),
        "tokens.sequence_length": Use("seq_len", whole),
        "tokens.train_steps": rules.LENGTH,
        "tokens": rules.LOGS,
        "model.dtype": Use("precision", words(bfloat16="bf16", float16="fp16", float32="fp32")),
        "model.ddp_bucket_cap_mb": Use("convention.bucket_mib", float),
        "model.make_vocab_size_divisible_by": Use("pad_vocab_to", whole),
        "model.model_config": Use("shape"),
        "model": Leave("how weights are made; not how long a step takes"),
        "optimizer.zero_stage": Use("sharding", one_of({0: "ddp", 1: "zero1"})),
        "optimizer.accumulate_grad_in_fp32": Use("fp32_gradients", flag),
        "optimizer.clip_grad": Use("convention.grad_norm", lambda value: value is not None and value > 0),
        "optimizer.optimizer_factory.name": Use("optimizer", optimizer),
        "optimizer": rules.LEARNS,
        "checkpoints": rules.WRITES,
        "s3_upload": rules.WRITES,
        "data_stages": rules.DATA,
        "data": rules.DATA,
        "tokenizer": rules.DATA,
        **dict.fromkeys(("general", "logging", "profiler", "lighteval", "metrics_logging"), rules.LOGS),
    }
)
"""What each key means."""


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
