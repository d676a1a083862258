"""DeepSpeed's JSON: keys as on deepspeed.ai/docs/config-json and in deepspeed/runtime/zero/config.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foretrace.simulator.configs import rules
from foretrace.simulator.configs.rules import (
    Assumed,
    Leave,
    Reading,
    Rule,
    Use,
    flag,
    one_of,
    optimizer,
    whole,
    words,
)

STAGES: Final[Mapping[int, str]] = MappingProxyType({0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"})
"""What each ZeRO stage is called here."""

BUCKET_BYTES: Final = 1_000_000_000
"""``reduce_bucket_size`` unless given, 5e8 elements, of 16 bit (deepspeed/runtime/zero/config.py)."""

_NUMERIC: Final = Leave("scaling of a loss or gradients: no time to speak of")
_HOST: Final = Leave("how buffers on the host or on drives are handled: rates are those of the machine")
_BUFFERS: Final = Leave("a buffer's size: parameters are gathered a block at a time here")


def _device(value: Any) -> str | None:
    return None if words(none=None, cpu="host", nvme="nvme")(value) is None else str(value).lower()


def _bucket_mib(value: Any) -> float:
    """Return the size of a bucket of so many elements; DeepSpeed counts elements, of 16 bit here."""
    return whole(value) * 2 / 2**20


def _prefetches(value: Any) -> Any:
    """Return false where nothing is gathered ahead; of how much is not simulated: a block at a time."""
    return False if float(value) == 0 else _BUFFERS


def _optimizer(value: Any) -> Any:
    """Return the optimizer; some send gradients of one bit once they have warmed up."""
    if str(value).lower() in ("onebitadam", "zerooneadam", "onebitlamb"):
        return Leave("gradients of one bit are not simulated, nor states other than those of AdamW")
    return optimizer(value)


_PRECISIONS: Final = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")

RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "train_batch_size": Use("global_batch", whole),
        "train_micro_batch_size_per_gpu": Use("micro_batch", whole),
        "gradient_accumulation_steps": Use("accumulation", whole),
        "bf16.enabled": Use("precision", rules.gives("bf16")),
        "bfloat16.enabled": Use("precision", rules.gives("bf16")),
        "fp16.enabled": Use("precision", rules.gives("fp16")),
        "fp16": _NUMERIC,
        "bf16": _NUMERIC,
        "data_types.grad_accum_dtype": Use("fp32_gradients", words(fp32=True, bf16=False, fp16=False)),
        "communication_data_type": Use(
            "convention.reduces_in_16_bit", words(fp32=False, bf16=True, bfp16=True, fp16=True)
        ),
        "zero_optimization.stage": Use("sharding", one_of(STAGES)),
        "zero_optimization.overlap_comm": Use("convention.overlap_grad_reduce", flag),
        "zero_optimization.reduce_bucket_size": Use("convention.bucket_mib", _bucket_mib),
        "zero_optimization.offload_optimizer.device": Use("offload_optimizer", _device),
        "zero_optimization.offload_param.device": Use("offload_states", _device),
        "zero_optimization.offload_optimizer": _HOST,
        "zero_optimization.offload_param": _HOST,
        "zero_optimization.cpu_offload": Use("offload_optimizer", rules.gives("cpu")),
        "zero_optimization.cpu_offload_params": Use("offload_states", rules.gives("cpu")),
        "zero_optimization.cpu_offload_param": Use("offload_states", rules.gives("cpu")),
        **dict.fromkeys(
            ("zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.prefetch_bucket_size"),
            Use("prefetches", _prefetches),
        ),
        **{
            f"zero_optimization.{name}": _BUFFERS
            for name in (
                *("allgather_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
                *("stage3_param_persistence_threshold", "sub_group_size"),
                *("max_live_parameters", "max_reuse_distance"),
                *("param_persistence_threshold", "model_persistence_threshold"),
                "stage3_model_persistence_threshold",
            )
        },
        "zero_optimization.allgather_partitions": Leave("gathers or broadcasts: the same bytes arrive"),
        "zero_optimization.reduce_scatter": Leave("taken as true, which is the default"),
        "zero_optimization.contiguous_gradients": Leave("avoids fragments: the allocator's slack covers it"),
        "zero_optimization.round_robin_gradients": Leave("an order of copies to the host"),
        "zero_optimization.ignore_unused_parameters": Leave("all parameters are used here"),
        "zero_optimization.zero_hpz_partition_size": Leave(
            "ZeRO++: a second copy of parameters within a node is not simulated; all ranks share all states"
        ),
        "zero_optimization.zero_quantized_weights": Leave("ZeRO++: gathers of 8 bits are not simulated"),
        "zero_optimization.zero_quantized_gradients": Leave("ZeRO++: reductions of 4 bits are not simulated"),
        **{
            f"zero_optimization.{name}": Leave("how checkpoints are written, not how long a step takes")
            for name in (
                *("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"),
                *("stage3_gather_fp16_weights_on_model_save", "elastic_checkpoint", "load_from_fp32_weights"),
            )
        },
        "activation_checkpointing.cpu_checkpointing": Use("offload_activations", rules.gives(what=True)),
        "activation_checkpointing.partition_activations": Leave(
            "kept activations over tensor-parallel ranks: --sequence-parallel does that here"
        ),
        "activation_checkpointing": Leave(
            "how recomputation works, not whether: the training script says that; give --recompute full"
        ),
        "tensor_parallel.autotp_size": Use("tp", whole),
        "sequence_parallel_size": Use("cp", whole),
        "gradient_clipping": Use("convention.grad_norm", rules.above_zero),
        "optimizer.type": Use("optimizer", _optimizer),
        "optimizer": rules.LEARNS,
        "scheduler": rules.LEARNS,
        **dict.fromkeys(("prescale_gradients", "gradient_predivide_factor", "sparse_gradients"), _NUMERIC),
        **dict.fromkeys(
            (
                "zero_allow_untested_optimizer",
                "zero_force_ds_cpu_optimizer",
                "amp",
                "seed",
                "disable_allgather",
            ),
            rules.LEARNS,
        ),
        **dict.fromkeys(
            (
                *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "wandb"),
                *("flops_profiler", "tensorboard", "csv_monitor", "comms_logger", "comet", "monitor_config"),
            ),
            rules.LOGS,
        ),
        "aio": _HOST,
        "_comment": Leave("a comment"),
        "autotuning": Leave("tries settings before training: foretrace search does"),
        "comms_config": rules.LOGS,
        "fp8": Leave("not a key of DeepSpeed itself; --fp8 says it"),
        "sequence_parallel": Leave("not a key of DeepSpeed itself: sequence_parallel_size is, or --cp"),
        "sparse_attention": Leave("attention is dense, causal, here"),
        "compression_training": Leave("pruning and quantisation: not simulated"),
        "curriculum_learning": Leave("sequences of one length: --seq-len"),
        "data_efficiency": Leave("sequences of one length: --seq-len"),
        "progressive_layer_drop": Leave("every layer runs in every step here"),
        "checkpoint": Leave("how checkpoints are written, not how long a step takes"),
        "elasticity": Leave("sizes of other runs: this one has the GPUs that are given"),
    }
)
"""What each key means."""


def finish(reading: Reading, given: Mapping[str, Any]) -> None:
    """Add what DeepSpeed does where its file says nothing."""
    del given
    facts = reading.facts
    reading.assume(
        "framework", "deepspeed", "ZeRO under a Hugging Face model; Megatron-LM's script is not here"
    )
    reading.assume("sharding", "ddp", "zero_optimization.stage is 0 unless given")
    if any(one.key in _PRECISIONS and one.value == "auto" for one in reading.ignored):
        reading.assume("precision", "bf16", "auto: as the training script says, taken as bf16; --precision")
    reading.assume("precision", "fp32", "neither bf16 nor fp16 is enabled")
    if facts["sharding"] == "zero3":
        reading.assume(
            "convention.overlap_grad_reduce", value=True, reason="overlap_comm is true by default in stage 3"
        )
    if facts["sharding"] == "ddp" and facts["precision"] == "bf16":
        shares_states(reading)
    if facts.pop("prefetches", True) is False:
        facts |= {"convention.prefetch_forward": False, "convention.prefetch_backward": False}
    _buckets(facts)


def shares_states(reading: Reading) -> None:
    """Say what bf16 without ZeRO is: its optimizer shares out fp32 states and sums gradients in fp32.

    deepspeed/runtime/bf16_optimizer.py; engine.py takes it where ``zero_optimization.stage`` is 0.
    """
    reason = "bf16 at stage 0: BF16_Optimizer shares out fp32 states as ZeRO-1 does"
    reading.facts["sharding"] = "zero1"
    # The default was noted already, and is taken back.
    reading.assumed = [one for one in reading.assumed if one.fact != "sharding"]
    reading.assumed.append(Assumed("sharding", "zero1", reason))
    reading.assume("fp32_gradients", value=True, reason="bf16 at stage 0: gradients are summed in fp32")


def _buckets(facts: dict[str, Any]) -> None:
    """Size the buffer that gradients leave from: stage_1_and_2.py has two of them with ``overlap_comm``."""
    size_mib, overlaps = (
        facts.get("convention.bucket_mib"),
        facts.get("convention.overlap_grad_reduce", False),
    )
    if facts["sharding"] != "zero1" or (size_mib is None and not overlaps):
        return
    one = BUCKET_BYTES if size_mib is None else round(size_mib * 2**20)
    facts["convention.flat_bucket_bytes"] = one * (2 if overlaps else 1)
