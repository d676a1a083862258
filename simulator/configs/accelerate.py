"""Accelerate's YAML: FSDP 1 and 2, DDP and DeepSpeed, as ``accelerate config`` writes them.

Keys as in huggingface/accelerate: examples/config_yaml_templates, commands/launch.py, utils/dataclasses.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foretrace.simulator.configs import rules
from foretrace.simulator.configs.deepspeed import STAGES
from foretrace.simulator.configs.rules import Instead, Leave, Reading, Rule, Use, flag, one_of, whole, words

_LOADING: Final = Leave("how weights are loaded or saved; not how long a step takes")
_OTHER: Final = Leave("of other hardware")

HYBRID: Final = ("hybrid", "hybrid_keeps")
"""Forms of FSDP that shard within a node and replicate over nodes."""

KEEPING: Final = ("keeps", "hybrid_keeps")
"""Forms whose gathered parameters stay from forward to backward; the rest is sharded as in any other form."""

_FORMS: Final = {
    "full_shard": "full",
    "shard_grad_op": "keeps",
    "no_shard": "none",
    "hybrid_shard": "hybrid",
    "hybrid_shard_zero2": "hybrid_keeps",
    "1": "full",
    "2": "keeps",
    "3": "none",
    "4": "hybrid",
    "5": "hybrid_keeps",
}


def _prefetch(value: Any) -> Any:
    how = words(backward_pre=True, backward_post=True, no_prefetch=False)(value)
    if str(value).upper() == "BACKWARD_POST":
        return Leave("the next unit is gathered after a backward here only with NO_PREFETCH; taken as PRE")
    return how


def _reshard(value: Any) -> Any:
    """Return what FSDP 2's flag says; with FSDP 1 Accelerate takes a sharding strategy in its place."""
    if str(value).lower() in ("true", "false"):
        return flag(value)
    return Instead("form", words(**_FORMS)(value))


def _device(value: Any) -> str | None:
    word: str | None = words(none=None, cpu="cpu", nvme="nvme")(value)
    return word


def _sequence_parts(value: Any) -> int | None:
    """Return over how many ranks Ulysses cuts a sequence; 1 says nothing of context parallelism beside it."""
    return None if (found := whole(value)) == 1 else found


RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "distributed_type": Use(
            "distributed",
            words(FSDP="full", MULTI_GPU="none", NO="none", DEEPSPEED="deepspeed", MEGATRON_LM="megatron"),
        ),
        "mixed_precision": Use("precision", words(no="fp32", bf16="bf16", fp16="fp16", fp8="fp8")),
        "num_processes": Use("gpus", whole),
        "num_machines": Use("nodes", whole),
        "gradient_accumulation_steps": Use("accumulation", whole),
        "fsdp_config.fsdp_sharding_strategy": Use("form", words(**_FORMS)),
        "fsdp_config.fsdp_reshard_after_forward": Use("convention.reshard_after_forward", _reshard),
        "fsdp_config.fsdp_offload_params": Use("offload_states", rules.gives("cpu")),
        "fsdp_config.fsdp_backward_prefetch": Use("convention.prefetch_backward", _prefetch),
        "fsdp_config.fsdp_forward_prefetch": Leave(
            "FSDP's stream gathers the next unit while this one computes with and without it"
        ),
        "fsdp_config.fsdp_auto_wrap_policy": Use(
            "convention.wrap",
            words(TRANSFORMER_BASED_WRAP="block", SIZE_BASED_WRAP="block", NO_WRAP="model"),
        ),
        "fsdp_config.fsdp_activation_checkpointing": Use("recompute", rules.gives("full", "none")),
        "fsdp_config.fsdp_version": Use(
            "convention.copies_gathered", lambda value: one_of({1: False, 2: True})(whole(value))
        ),
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap": Leave("a unit is a layer of the model"),
        "fsdp_config.fsdp_min_num_params": Leave("a unit is a layer of the model"),
        "fsdp_config.fsdp_use_orig_params": Leave("the same parameters under other names"),
        **{
            f"fsdp_config.{name}": _LOADING
            for name in (
                *("fsdp_state_dict_type", "fsdp_sync_module_states", "fsdp_cpu_ram_efficient_loading"),
                "fsdp_ignored_modules",
            )
        },
        "deepspeed_config.zero_stage": Use("sharding", one_of(STAGES)),
        "deepspeed_config.gradient_accumulation_steps": Use("accumulation", whole),
        "deepspeed_config.offload_optimizer_device": Use("offload_optimizer", _device),
        "deepspeed_config.offload_param_device": Use("offload_states", _device),
        "deepspeed_config.gradient_clipping": Use("convention.grad_norm", rules.above_zero),
        "deepspeed_config.deepspeed_config_file": Leave("a file of its own: give it beside this one"),
        **dict.fromkeys(
            ("deepspeed_config.zero3_init_flag", "deepspeed_config.zero3_save_16bit_model"), _LOADING
        ),
        **{
            f"deepspeed_config.deepspeed_{name}": rules.LAUNCH
            for name in ("hostfile", "multinode_launcher", "exclusion_filter", "inclusion_filter")
        },
        "deepspeed_config.deepspeed_moe_layer_cls_names": _LOADING,
        "deepspeed_config.seq_parallel_communication_data_type": Leave(
            "sums over parts of a sequence: small"
        ),
        "megatron_lm_config.megatron_lm_tp_degree": Use("tp", whole),
        "megatron_lm_config.megatron_lm_pp_degree": Use("pp", whole),
        "megatron_lm_config.megatron_lm_sequence_parallelism": Use("sequence_parallel", flag),
        "megatron_lm_config.megatron_lm_recompute_activations": Use(
            "recompute", rules.gives("selective", "none")
        ),
        "megatron_lm_config.megatron_lm_use_distributed_optimizer": Use(
            "sharding", rules.gives("zero1", "ddp")
        ),
        "parallelism_config.parallelism_config_dp_replicate_size": Use("replicate_degree", whole),
        "parallelism_config.parallelism_config_dp_shard_size": Use("shard_degree", whole),
        "parallelism_config.parallelism_config_tp_size": Use("tp", whole),
        "parallelism_config.parallelism_config_cp_size": Use("cp", whole),
        "parallelism_config.parallelism_config_sp_size": Use("cp", _sequence_parts),
        "parallelism_config.parallelism_config_sp_backend": Leave("Ulysses, as DeepSpeed's is here"),
        "dynamo_config": Leave("compiled programs: --kernels fused, --set host_work=0.05"),
        "fp8_config": Leave("how tensors are quantised: --recipe"),
        **dict.fromkeys(
            (
                *("compute_environment", "debug", "machine_rank", "main_process_ip", "main_process_port"),
                *("main_training_function", "rdzv_backend", "same_network", "use_cpu", "gpu_ids"),
                *("enable_cpu_affinity", "deepspeed_hostfile"),
            ),
            rules.LAUNCH,
        ),
        **dict.fromkeys(
            ("downcast_bf16", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "mpirun_config", "ipex_config"),
            _OTHER,
        ),
    }
)
"""What each key means."""


def finish(reading: Reading, given: Mapping[str, Any]) -> None:
    """Add what Accelerate does where its file says nothing, and turn FSDP's forms into shardings."""
    facts = reading.facts
    # ``distributed`` and ``form`` are facts of this file alone, and no setting.
    kind = facts.pop("distributed", "none")
    form = facts.pop("form", kind) if kind == "full" else kind
    if facts.get("precision") == "fp8":
        facts |= {"precision": "bf16", "fp8": True}
    if form in ("deepspeed", "megatron"):
        reading.assume("framework", form, "the profile that knows it")
        if form == "deepspeed":
            reading.assume("sharding", "zero2", "zero_stage is 2 unless it or deepspeed_config_file says")
    else:
        reading.assume("framework", "transformers", "Accelerate's, with models of Hugging Face")
        reading.assume("sharding", "ddp" if form == "none" else "fsdp", "distributed_type and its strategy")
    if form in KEEPING:
        facts["convention.reshard_after_forward"] = False
    if form in HYBRID:
        # A flag for the GPUs goes before what the file says.
        nodes, gpus = facts.get("nodes", 1), given.get("gpus", facts.get("gpus"))
        if gpus and nodes > 1:
            reading.assume("shard_ranks", gpus // nodes, "HYBRID_SHARD shards within a node")
    if facts.get("sharding") == "fsdp":
        _assume_version(reading)
    # Without shards there is nothing to keep or to send away.
    if facts.get("sharding") == "ddp":
        for name in ("offload_states", "convention.reshard_after_forward"):
            facts.pop(name, None)
    if form != "deepspeed":
        reading.assume("precision", "fp32", "mixed_precision is no unless given")
    if form in ("deepspeed", "megatron") or facts.get("gpus"):
        facts.pop("nodes", None)


def _assume_version(reading: Reading) -> None:
    """Add what FSDP is unless the file says: version 1, which gathers no unit ahead in backward."""
    reading.assume("convention.copies_gathered", value=False, reason="fsdp_version is 1 unless given")
    if reading.facts["convention.copies_gathered"] is False:
        reading.assume(
            "convention.joins_gradients",
            value=True,
            reason="FSDP 1 has one flat tensor per unit (torch/distributed/fsdp/_runtime_utils.py)",
        )
        reading.assume(
            "convention.prefetch_backward",
            value=False,
            reason="fsdp_backward_prefetch is NO_PREFETCH unless given",
        )
        reading.assume("convention.update_calls", value=0, reason="parameters of FSDP 1 are no DTensors")
