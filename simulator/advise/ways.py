"""The ways to train a model on some GPUs, from the simplest to the last resort: which settings each tries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

LORA_RANK: Final = 16
"""Rank of adapters; Hu et al. 2021 (arXiv:2106.09685) use 1 to 64, and see little beyond 8."""

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    """A rung of the ladder.

    Attributes:
        key: short name, for ``--json``.
        title: what people call it.
        variants: settings to try, the first that fits is taken.
        trains_all: whether every parameter is trained.
    """

    key: str
    title: str
    variants: tuple[Settings, ...]
    trains_all: bool = True


def _lora(**settings: Any) -> tuple[Settings, ...]:
    base = {"lora_rank": LORA_RANK, **settings}
    return (
        {**base, "sharding": "ddp"},
        {**base, "sharding": "ddp", "recompute": "full"},
        {**base, "sharding": "fsdp", "recompute": "full"},
    )


WAYS: Final[tuple[Way, ...]] = (
    Way("ddp", "DDP", ({"sharding": "ddp"},)),
    Way("zero1", "ZeRO-1 (optimizer states sharded)", ({"sharding": "zero1"},)),
    Way("zero2", "ZeRO-2 (gradients too)", ({"sharding": "zero2"},)),
    Way("fsdp", "FSDP (parameters too: ZeRO-3)", ({"sharding": "fsdp"},)),
    Way(
        "fsdp-selective", "FSDP + selective recomputation", ({"sharding": "fsdp", "recompute": "selective"},)
    ),
    Way("fsdp-full", "FSDP + full recomputation", ({"sharding": "fsdp", "recompute": "full"},)),
    Way(
        "offload",
        "FSDP + full recomputation + offload to the host",
        tuple(
            {"sharding": "fsdp", "recompute": "full", "offload": what}
            for what in ("optimizer", "states", "all")
        ),
    ),
    Way("lora", f"LoRA (rank {LORA_RANK}, frozen weights)", _lora(), trains_all=False),
    Way(
        "qlora",
        f"QLoRA (rank {LORA_RANK}, frozen weights in 4 bits)",
        _lora(quantized_base=True),
        trains_all=False,
    ),
)
"""The ladder up to model parallelism, which is searched."""

MODEL_PARALLEL: Final = Way("model-parallel", "tensor and pipeline parallelism", ())
