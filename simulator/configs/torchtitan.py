"""torchtitan's TOML: keys as in torchtitan/config/job_config.py (``parallelism``, ``training``, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foretrace.simulator.configs import rules
from foretrace.simulator.configs.rules import Leave, Reading, Rule, Use, flag, optimizer, text, whole, words

FLAVORS: Final[Mapping[tuple[str, str], str]] = MappingProxyType(
    {
        ("llama3", "8B"): "llama3-8b",
        ("llama3", "70B"): "llama3-70b",
        ("llama3", "405B"): "llama3-405b",
        ("deepseek_v3", "671B"): "deepseek-v3",
        ("deepseek_v3", "16B"): "deepseek-v2-lite",
        ("qwen3", "0.6B"): "qwen3-0.6b",
        ("qwen3", "1.7B"): "qwen3-1.7b",
        ("qwen3", "4B"): "qwen3-4b",
        ("qwen3", "8B"): "qwen3-8b",
        ("qwen3", "14B"): "qwen3-14b",
        ("qwen3", "32B"): "qwen3-32b",
        ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
        ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
    }
)
"""Models by name and flavor, as torchtitan/models/*/__init__.py lists them."""

SCHEDULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "1F1B": "1f1b",
        "GPipe": "gpipe",
        "Interleaved1F1B": "interleaved-1f1b",
        "LoopedBFS": "looped-bfs",
        "InterleavedZeroBubble": "interleaved-zb",
        "ZBVZeroBubble": "zb-v",
        "DualPipeV": "dualpipe-v",
    }
)
"""Schedules of torch.distributed.pipelining by name."""

_FILES: Final = Leave("where files are and how they are written; not how long a step takes")


def _degree(value: Any) -> int | None:
    """Return a degree; -1 stands for what is left over."""
    return None if value == -1 else whole(value)


def _every(value: Any) -> Any:
    """Return what selective recomputation does: ``"op"``, or every so many layers."""
    return "op" if str(value) == "op" else whole(value)


def _converts(value: Any) -> bool | None:
    """Return true if a converter quantises, as ``float8``, ``mx``, ``quantize.linear.float8`` do."""
    names = [value] if isinstance(value, str) else value
    return True if any("float8" in name or "mx" in name for name in names) else None


def _components(value: Any) -> Any:
    return Leave("the model and the loss are compiled here") if "model" in value else False


PARALLELISM: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "data_parallel_replicate_degree": Use("replicate_degree", whole),
        "data_parallel_shard_degree": Use("shard_degree", _degree),
        "fsdp_reshard_after_forward": Use("reshard", words(default=None, always=True, never=False)),
        "tensor_parallel_degree": Use("tp", whole),
        "enable_async_tensor_parallel": Use("convention.async_tp", flag),
        "pipeline_parallel_degree": Use("pp", whole),
        "pipeline_parallel_schedule": Use("schedule", words(**SCHEDULES)),
        "pipeline_parallel_schedule_csv": Use("schedule", lambda value: value or None),
        "pipeline_parallel_layers_per_stage": Use("layers_per_virtual_stage", whole),
        "pipeline_parallel_microbatch_size": Use("micro_batch", whole),
        "context_parallel_degree": Use("cp", whole),
        "context_parallel_rotate_method": Use(
            "convention.context", words(allgather="all_gather", alltoall="ring")
        ),
        "expert_parallel_degree": Use("ep", whole),
        "expert_tensor_parallel_degree": Use("expert_tp", whole),
        "pipeline_parallel_split_points": Leave("--layers-per-stage says it"),
        "module_fqns_per_model_part": Leave("--layers-per-stage says it"),
        "pipeline_parallel_first_stage_less_layers": Leave("--counted-ends says it"),
        "pipeline_parallel_last_stage_less_layers": Leave("--counted-ends says it"),
        "disable_loss_parallel": Leave("the loss is computed on the ranks of tp here"),
        "enable_compiled_autograd": Leave("compiles the backward: --set host_work=0.05"),
    }
)
"""What each key of ``[parallelism]`` means."""


RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "model.name": Use("family", text),
        "model.flavor": Use("flavor", text),
        "model.converters": Use("fp8", _converts),
        "training.local_batch_size": Use("local_batch", whole),
        "training.batch_size": Use("local_batch", whole),
        "training.global_batch_size": Use("global_batch", _degree),
        "training.seq_len": Use("seq_len", whole),
        "training.mixed_precision_param": Use("precision", words(bfloat16="bf16", float32="fp32")),
        "training.mixed_precision_reduce": Use(
            "convention.reduces_in_16_bit", words(float32=False, bfloat16=True)
        ),
        "training.enable_cpu_offload": Use("offload_states", rules.gives("cpu")),
        "training.compile": Use("kernels", rules.gives("fused")),
        "compile.enable": Use("kernels", rules.gives("fused")),
        "training.max_norm": Use("convention.grad_norm", rules.above_zero),
        "training.steps": rules.LENGTH,
        **{f"parallelism.{name}": rule for name, rule in PARALLELISM.items()},
        **{  # until there was a table of its own
            f"{table}.{name}": rule
            for table in ("training", "experimental")
            for name, rule in PARALLELISM.items()
        },
        "activation_checkpoint.mode": Use(
            "recompute", words(none="none", selective="selective", full="full")
        ),
        "activation_checkpoint.selective_ac_option": Use("form", _every),
        "activation_checkpoint": Leave("which products are kept; taken as every second one"),
        "float8.recipe_name": Use(
            "recipe", words(tensorwise="tensorwise", rowwise="rowwise", rowwise_with_gw_hp="rowwise")
        ),
        "mx.recipe_name": Use("recipe", words(mxfp8="mxfp8", mxfp8_cublas="mxfp8")),
        "float8": Leave("what is left in 16 bit, and gathers of 8 bits: not simulated"),
        "mx": Leave("what is left in 16 bit: not simulated"),
        "quantize": Leave("what is left in 16 bit: not simulated"),
        "training": Leave("data, seeds and clean-up: a step takes as long"),
        "model": _FILES,
        "training.dtype": Leave("weights, gradients and moments are kept in fp32 beside 16-bit copies here"),
        "optimizer.state_dtype": Leave("weights, gradients and moments are kept in fp32 here"),
        "optimizer.early_step_in_backward": Leave("the optimizer steps after backward here"),
        "compile.components": Use("compiled", _components),
        "float8.enable_float8_linear": Use("fp8", rules.gives(what=True)),
        "compile": Leave("how the model is compiled"),
        "optimizer.name": Use("optimizer", optimizer),
        **dict.fromkeys(("optimizer", "lr_scheduler"), rules.LEARNS),
        **dict.fromkeys(
            ("metrics", "profiling", "validation", "memory_estimation", "comm", "debug"), rules.LOGS
        ),
        **dict.fromkeys(("job", "checkpoint", "experimental"), _FILES),
        "fault_tolerance": Leave("foretrace goodput counts failures"),
        "activation_offload": Leave("--offload activations says it"),
    }
)
"""What each key means."""


def finish(reading: Reading, given: Mapping[str, Any]) -> None:
    """Add torchtitan's defaults (job_config.py), and find the preset of its model."""
    facts = reading.facts
    reading.assume("framework", "torchtitan", "whose file this is")
    reading.assume("local_batch", 8, "training.local_batch_size is 8 unless given")
    reading.assume("seq_len", 2048, "training.seq_len is 2048 unless given")
    reading.assume("precision", "bf16", "training.mixed_precision_param is bfloat16 unless given")
    reading.assume("recompute", "selective", "activation_checkpoint.mode is selective unless given")
    if facts.pop("compiled", True) is False:
        facts.pop("kernels", None)  # the loss alone is compiled
    _model(reading, given)
    _recompute(reading)
    replicas, shards = facts.get("replicate_degree", 1), facts.get("shard_degree")
    # Context-parallel ranks share out the states, whether others do or not (``ParallelDims.fsdp_enabled``).
    is_ddp = replicas > 1 and shards == 1 and facts.get("cp", 1) == 1
    reading.assume("sharding", "ddp" if is_ddp else "fsdp", "data_parallel_shard_degree")
    if facts.get("pp", 1) == 1:
        for name in ("schedule", "layers_per_virtual_stage", "micro_batch"):
            facts.pop(name, None)  # said of a pipeline that is not there
    else:
        reading.assume("micro_batch", 1, "pipeline_parallel_microbatch_size is 1 unless given")
    _reshard(reading)
    if facts.get("ep", 1) == 1:
        facts.pop("expert_tp", None)  # experts are cut as the layers are
    elif facts.get("tp", 1) > 1:
        reading.assume("expert_tp", 1, "expert_tensor_parallel_degree is 1 unless given")


def _model(reading: Reading, given: Mapping[str, Any]) -> None:
    """Name the preset of the family and flavor; another model has to be given."""
    facts = reading.facts
    family, flavor = facts.pop("family", "llama3"), facts.pop("flavor", "debugmodel")
    if (preset := FLAVORS.get((family, flavor))) is not None and not given.get("model"):
        reading.assume("model", preset, f"{family} {flavor}")


def _recompute(reading: Reading) -> None:
    """Every second layer is recomputed unless the file says ``op``, which keeps every other product."""
    facts = reading.facts
    every = facts.pop("form", 2)
    if facts["recompute"] == "selective" and every != "op":
        facts |= {"recompute": "full", "recompute_every": every}


def _reshard(reading: Reading) -> None:
    """By default parameters stay gathered where there is a pipeline, which would gather them often."""
    facts = reading.facts
    if facts["sharding"] == "fsdp":
        always = facts.pop("reshard", None)
        reading.assume(
            "convention.reshard_after_forward",
            facts.get("pp", 1) == 1 if always is None else always,
            "fsdp_reshard_after_forward: not with a pipeline unless always",
        )
