"""What a micro-batch does on one rank, block by block.

The public face of the workload: types from ``simulator.ops``, blocks from ``simulator.workload_attention``,
``simulator.workload_mlp`` and ``simulator.workload_ends``.
"""

from __future__ import annotations

from simulator.job import Job
from simulator.ops import DTYPE_BYTES, PHASES, Block, Comm, Op, Phase
from simulator.workload_attention import attention_block
from simulator.workload_ends import embedding_block, head_block, optimizer_ops
from simulator.workload_mlp import mlp_block

__all__ = [
    "DTYPE_BYTES",
    "PHASES",
    "Block",
    "Comm",
    "Op",
    "Phase",
    "embedding_block",
    "head_block",
    "layer_blocks",
    "optimizer_ops",
]


def layer_blocks(job: Job, layer: int) -> tuple[Block, ...]:
    """Return the blocks of *layer* (from 0) for one micro-batch on one rank: attention, then MLP."""
    return attention_block(job, layer), mlp_block(job, layer)
