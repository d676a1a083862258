"""Accelerate's YAML: FSDP 1 and 2, DDP and DeepSpeed, as ``accelerate config`` writes them.

Keys as in huggingface/accelerate: examples/config_yaml_templates, commands/launch.py, utils/dataclasses.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foretrace.simulator.configs.rules import Instead, Leave, Read, Reading, flag, words

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


READERS: Final[Mapping[str, Read]] = MappingProxyType(
    {"device": _device, "form": words(**_FORMS), "prefetch": _prefetch, "reshard": _reshard}
)
"""Readers of its own, by heading of ``accelerate.toml``."""


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
