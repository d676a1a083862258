"""Optimizers: what each keeps of a parameter, and what a step does with it, one entry each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What one optimizer keeps beside the weight, and does with it.

    Attributes:
        state_bytes: of an entry of a matrix of a layer: its moments or momentum.
        other_bytes: the same of everything else: embeddings, head, norms and biases.
        gradient_reads: times that the update reads each gradient.
        iterations: of Newton and Schulz, which make the momentum of a matrix nearly orthogonal.
        source: where this was read.
    """

    state_bytes: float
    other_bytes: float
    gradient_reads: int = 1
    iterations: int = 0
    source: str = ""


OPTIMIZERS: Final[Mapping[str, Optimizer]] = MappingProxyType(
    {
        "adamw": Optimizer(
            state_bytes=8, other_bytes=8, source="two moments in fp32 (Loshchilov & Hutter, arXiv:1711.05101)"
        ),
        "adamw-bf16": Optimizer(
            state_bytes=4,
            other_bytes=4,
            source="two moments in bf16 (DeepSeek-V3, arXiv:2412.19437, section 3.3.3; Megatron-LM "
            "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16)",
        ),
        "adamw-8bit": Optimizer(
            state_bytes=2 * (1 + 4 / 256),
            other_bytes=2 * (1 + 4 / 256),
            source="two moments in 8 bits with an fp32 scale for 256 (Dettmers et al., arXiv:2110.02861; "
            "bitsandbytes optim/optimizer.py, blocksize = 256)",
        ),
        "muon": Optimizer(
            state_bytes=4,
            other_bytes=8,
            iterations=5,
            source="one momentum in fp32 for matrices, five iterations in bf16; AdamW for the rest "
            "(Liu et al., arXiv:2502.16982, section 2)",
        ),
        "adafactor": Optimizer(
            state_bytes=0,
            other_bytes=0,
            gradient_reads=2,
            source="sums of squares over rows and columns alone, without momentum (Shazeer & Stern, "
            "arXiv:1804.04235, section 3)",
        ),
        "sgd": Optimizer(state_bytes=0, other_bytes=0, source="nothing (torch.optim.SGD)"),
        "sgd-momentum": Optimizer(
            state_bytes=4, other_bytes=4, source="one momentum in fp32 (torch.optim.SGD)"
        ),
    }
)
"""Optimizers by name. Beside these a weight in fp32 is kept, unless ``master_weights`` is off."""
