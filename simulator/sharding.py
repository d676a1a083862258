"""Ways of data parallelism: what the ranks share out of a model's states, one entry each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What data-parallel ranks share out; of everything else each rank has all.

    Parameters that are shared out are gathered before they are used. Otherwise, what an optimizer with shared
    states has updated is gathered after it. Gradients that are shared out are reduced in every backward, and
    otherwise once per step.

    Attributes:
        stage: the stage of ZeRO. Reference: Rajbhandari et al. 2020, arXiv:1910.02054.
        optimizer: states of the optimizer are shared out.
        updates_shards: the shards are in fp32 and the optimizer updates them (``torch.distributed.fsdp``);
            otherwise it keeps a copy in fp32 beside parameters in 16 bit.
    """

    stage: int
    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False
    updates_shards: bool = False

    @property
    def gathers_updated(self) -> bool:
        """Whether parameters are gathered after the optimizer: it has updated a share of what all have."""
        return self.optimizer and not self.parameters


SHARDINGS: Final[Mapping[str, Sharding]] = MappingProxyType(
    {
        "ddp": Sharding(stage=0),
        "zero1": Sharding(stage=1, optimizer=True),
        "zero2": Sharding(stage=2, optimizer=True, gradients=True),
        "zero3": Sharding(stage=3, optimizer=True, gradients=True, parameters=True),
        "fsdp": Sharding(stage=3, optimizer=True, gradients=True, parameters=True, updates_shards=True),
    }
)
"""Ways of data parallelism by name, from what takes most memory to what takes least."""
