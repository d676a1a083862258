"""What a micro-batch does on one rank, block by block.

The public face of the workload: types from ``simulator.workload.ops``, blocks from
``simulator.workload.attention``, ``simulator.workload.mlp``, ``simulator.workload.ends`` and
``simulator.workload.mtp``.
"""

from __future__ import annotations

from foretrace.simulator.job import Job
from foretrace.simulator.workload.attention import attention_block
from foretrace.simulator.workload.ends import embedding_block, head_block, optimizer_ops
from foretrace.simulator.workload.mlp import mlp_block
from foretrace.simulator.workload.mtp import head_blocks
from foretrace.simulator.workload.ops import DTYPE_BYTES, PHASES, Block, Comm, Op, Phase

__all__ = [
    "DTYPE_BYTES",
    "PHASES",
    "Block",
    "Comm",
    "Op",
    "Phase",
    "embedding_block",
    "head_block",
    "head_blocks",
    "layer_blocks",
    "optimizer_ops",
]


def layer_blocks(job: Job, layer: int) -> tuple[Block, ...]:
    """Return the blocks of *layer* (from 0) for one micro-batch on one rank: attention, then MLP."""
    return attention_block(job, layer), mlp_block(job, layer)
