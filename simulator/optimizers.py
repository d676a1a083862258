"""Optimizers: what each keeps of a parameter, and what a step does with it, one entry each in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from foretrace.door import own_table


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
    {name: Optimizer(**kept) for name, kept in own_table("simulator/optimizers.toml").items()}
)
"""Optimizers by name. Beside these a weight in fp32 is kept, unless ``master_weights`` is off."""
