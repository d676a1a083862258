"""What a micro-batch does on one rank, block by block.

The public face of the workload: types from ``simulator.workload.ops``, blocks from
``simulator.workload.attention``, ``simulator.workload.mlp``, ``simulator.workload.ends`` and
``simulator.workload.tower``.
"""

from __future__ import annotations

from dataclasses import replace

from foretrace.simulator.job import Job
from foretrace.simulator.models.kinds import KINDS
from foretrace.simulator.models.model import Linear, share
from foretrace.simulator.schedules import has_two_copies
from foretrace.simulator.workload.attention import attention_block
from foretrace.simulator.workload.ends import embedding_block, head_block, optimizer_ops
from foretrace.simulator.workload.linear import column_linear, hidden_bytes, norm, tokens_per_rank, tp_comm
from foretrace.simulator.workload.mlp import mlp_block
from foretrace.simulator.workload.ops import (
    DTYPE_BYTES,
    PHASES,
    Block,
    Comm,
    Op,
    Phase,
    Piece,
    memory,
    phases,
)
from foretrace.simulator.workload.recompute import recompute_phase
from foretrace.simulator.workload.tower import embedding_blocks

# Multi-token prediction on one rank: modules behind the last layer that predict tokens further ahead.
#
# Each module norms the hidden states it gets and the embeddings of the tokens one further on, joins both
# in one matrix, goes through a layer like the last one, and predicts with the norm, the head and the loss
# that the model has. Embedding and head are shared; where the embedding is on another pipeline stage, the
# last one holds a copy. References: DeepSeek-V3, arXiv:2412.19437, section 2.2; Megatron-LM
# multi_token_prediction.py.


def head_blocks(job: Job) -> tuple[Block, ...]:
    """Return what the last stage does behind its layers: the head, and modules that look further ahead."""
    head = head_block(job)
    return head, *(block for depth in range(job.model.n_mtp) for block in _module(job, head, depth))


def join_linear(job: Job) -> Linear:
    """Return the matrix that joins hidden states and embeddings, as one tensor-parallel rank holds it."""
    return Linear("join", 2 * job.model.hidden, share(job.model.hidden, job.layout.tp))


def copied_embedding_params(job: Job) -> int:
    """Return parameters of the copy of the embedding on the last stage: none if it is there anyway.

    A rank that holds two copies of stages holds the first beside the last, and shares it (DeepSeek-V3,
    arXiv:2412.19437, section 3.2.3).
    """
    apart = job.layout.pp > 1 and not has_two_copies(job.schedule)
    elsewhere = apart and not job.model.tied_embeddings
    return share(job.model.vocab, job.layout.tp) * job.model.hidden if elsewhere and job.model.n_mtp else 0


def _module(job: Job, head: Block, depth: int) -> tuple[Block, ...]:
    last = job.model.n_layers - 1
    # -1, as of the head: the modules are no layers of the model.
    layer = (replace(block, layer=-1) for block in (attention_block(job, last), mlp_block(job, last)))
    # The head is that of the model: only the norm is the module's own.
    return _join(job, depth), *layer, replace(head, params=job.model.norm_params)


def _join(job: Job, depth: int) -> Block:
    """Norms of both inputs, the lookup of embeddings, and the matrix; its outputs are gathered.

    The modules share one embedding, so that its gradient is set to zero once.
    """
    linear, size = join_linear(job), hidden_bytes(job, tokens_per_rank(job))
    lookup = memory("mtp.lookup", 2 * size, job.precision)
    scatter: tuple[Op, ...] = (memory("mtp.lookup.backward", 3 * size, job.precision),)
    pieces = [
        Piece((lookup,), scatter, (), scatter) if not job.lora_rank else Piece((lookup,)),
        norm(job, "mtp", name="hidden_norm"),
        norm(job, "mtp", name="embedding_norm"),
        column_linear(job, "mtp", linear),
    ]
    if job.layout.tp > 1:  # features of all ranks for every token of a rank: as much as an all-gather moves
        gather, scatter_back = (
            tp_comm(job, kind, job.model.hidden) for kind in ("all_gather", "reduce_scatter")
        )
        pieces.append(Piece((gather,), (scatter_back,), (scatter_back,)))
    full = tuple(op for piece in pieces for op in piece.forward)
    # Norms of both inputs; the copy of the embedding, which all modules share, counts with the first.
    params = 2 * job.model.norm_params + linear.params + (copied_embedding_params(job) if depth == 0 else 0)
    return Block(
        name="mtp",
        layer=-1,
        params=params,
        expert_params=0,
        phases=phases(pieces, recompute_phase(job, full, ()) if job.recompute == "full" else ()),
    )


__all__ = [
    "DTYPE_BYTES",
    "PHASES",
    "Block",
    "Comm",
    "Op",
    "Phase",
    "embedding_block",
    "embedding_blocks",
    "head_block",
    "head_blocks",
    "layer_blocks",
    "optimizer_ops",
]


def layer_blocks(job: Job, layer: int) -> tuple[Block, ...]:
    """Return the blocks of *layer* (from 0) for one micro-batch on one rank: a mixer, an MLP, or both."""
    kinds = job.model.kinds(layer)
    return tuple((mlp_block if KINDS[kind].is_mlp else attention_block)(job, layer) for kind in kinds)
