"""DeepSpeed's JSON: keys as on deepspeed.ai/docs/config-json and in deepspeed/runtime/zero/config.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foretrace.simulator.configs.rules import Assumed, Leave, Read, Reading, optimizer, whole, words

BUCKET_BYTES: Final = 1_000_000_000
"""``reduce_bucket_size`` unless given, 5e8 elements, of 16 bit (deepspeed/runtime/zero/config.py)."""


def _device(value: Any) -> str | None:
    return None if words(none=None, cpu="host", nvme="nvme")(value) is None else str(value).lower()


def _bucket_mib(value: Any) -> float:
    """Return the size of a bucket of so many elements; DeepSpeed counts elements, of 16 bit here."""
    return whole(value) * 2 / 2**20


_BUFFER: Final = "a buffer's size: parameters are gathered a block at a time here"


def _prefetches(value: Any) -> Any:
    """Return false where nothing is gathered ahead; of how much is not simulated: a block at a time."""
    return False if float(value) == 0 else Leave(_BUFFER)


def _optimizer(value: Any) -> Any:
    """Return the optimizer; some send gradients of one bit once they have warmed up."""
    if str(value).lower() in ("onebitadam", "zerooneadam", "onebitlamb"):
        return Leave("gradients of one bit are not simulated, nor states other than those of AdamW")
    return optimizer(value)


_PRECISIONS: Final = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")

READERS: Final[Mapping[str, Read]] = MappingProxyType(
    {"bucket_mib": _bucket_mib, "device": _device, "optimizer": _optimizer, "prefetches": _prefetches}
)
"""Readers of its own, by heading of ``deepspeed.toml``."""


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
