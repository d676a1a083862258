"""The ends of the model on one rank: embedding, head with loss, and the optimizer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from foretrace.simulator.compute.fusion import ADAM_EAGER_PASSES, ADAM_FUSED_PASSES, is_separate, traffic
from foretrace.simulator.job import Job
from foretrace.simulator.models.model import Linear, share
from foretrace.simulator.workload.linear import (
    column_linear,
    gradient_sum,
    norm,
    residual_dtype,
    tokens_per_rank,
    tp_comm,
)
from foretrace.simulator.workload.ops import DTYPE_BYTES, Block, Comm, Op, Piece, gemm, memory, phases


def embedding_block(job: Job) -> Block:
    """Return the embedding, cut by vocabulary over tp, for one micro-batch on the first stage.

    Forward reads a row per token and writes it; learned positions are added in a second pass. Backward sets a
    gradient of the whole matrix to zero, adds a row per token, and adds it to the sums (those are of
    shards where parameters are sharded). It has no input gradient.
    """
    dtype = residual_dtype(job)
    size = tokens_per_rank(job) * job.model.hidden * DTYPE_BYTES[dtype]
    # Read and write; with learned positions two reads and a write more, in a kernel of its own.
    passes = 2 if not job.model.max_positions else 5
    lookup: list[Op | Comm] = [memory("embedding.lookup", passes * size, dtype, count=passes // 2)]
    n_params = job.model.embedding_params(job.layout.tp)
    zeros = n_params * DTYPE_BYTES[dtype]
    scatter: list[Op | Comm] = [memory("embedding.backward", 3 * size + zeros, dtype, count=2)]
    if not job.shards.parameters or job.keeps_stages_whole:
        scatter.append(gradient_sum(job, "embedding", n_params, dtype))
    if job.layout.tp > 1:
        lookup.append(
            tp_comm(job, "reduce_scatter" if job.sequence_parallel else "all_reduce", job.model.hidden)
        )
        if job.sequence_parallel:
            scatter.insert(0, tp_comm(job, "all_gather", job.model.hidden))
    backward = () if job.lora_rank else tuple(scatter)  # a frozen embedding has nothing to do
    piece = Piece(tuple(lookup), backward, (), backward)
    return Block(
        name="embedding",
        layer=-1,
        params=n_params,
        expert_params=0,
        phases=phases([piece], ()),
    )


def head_block(job: Job) -> Block:
    """Return final norm, output matrix (cut by vocabulary over tp) and loss for one micro-batch.

    The output matrix counts as parameters of this rank unless it is the embedding of the same rank: tied,
    and not on another pipeline stage.
    """
    model, layout = job.model, job.layout
    own = not model.tied_embeddings or layout.pp > 1
    pieces = [
        norm(job, "head"),
        column_linear(job, "head", Linear("logits", model.hidden, share(model.vocab, layout.tp))),
        _loss(job),
    ]
    return Block(
        name="head",
        layer=-1,
        params=model.norm_params + (model.head_params(layout.tp) if own else 0),
        expert_params=0,
        phases=phases(pieces, ()),
    )


def _loss(job: Job) -> Piece:
    """Cross entropy over fp32 logits.

    With the vocabulary cut over tp, maximum, sum and the target's logit of each token are all-reduced
    (Megatron-LM, ``vocab_parallel_cross_entropy``).
    """
    n_tokens = tokens_per_rank(job)
    n_logits = n_tokens * share(job.model.vocab, job.layout.tp)
    loss, loss_backward = traffic(job, "loss", "loss", "head.loss", n_logits)
    if job.precision == "fp32":  # nothing to cast
        # Forward and backward each count a cast of the logits, one read and one write.
        cast_bytes = 2 * DTYPE_BYTES["fp32"] * n_logits
        loss, loss_backward = (
            replace(op, bytes_moved=op.bytes_moved - cast_bytes) for op in (loss, loss_backward)
        )
    forward: list[Op | Comm] = [replace(loss, dtype="fp32")]
    if job.layout.tp > 1:
        forward += [Comm("all_reduce", "tp", n_tokens * 4, 0, "fp32")] * 3
    backward = (replace(loss_backward, dtype="fp32"),)
    return Piece(tuple(forward), backward, backward)


def optimizer_ops(job: Job, n_params_local: int, layers: Sequence[int] = ()) -> tuple[Op, ...]:
    """Return gradient clipping and the update of the *n_params_local* parameters that this rank owns.

    Clipping reads every gradient for the norm and scales it in place. A fused update reads gradient, master
    weight and moments and writes all but the first; in mixed precision it writes the parameter in
    ``job.precision`` too, and without a master weight reads it. Separate kernels make so many more passes as
    those of Adam do.

    *layers*: layers that the rank has, whose matrices some optimizers multiply.
    """
    gradient, width = DTYPE_BYTES[job.gradient_dtype], DTYPE_BYTES[job.precision]
    clip = memory("optimizer.clip", 3 * gradient * n_params_local, job.gradient_dtype, count=2)
    matrices = job.updates.state_bytes if layers else job.updates.other_bytes
    weight = 4 if job.precision == "fp32" else job.master_bytes
    states = 2 * (weight + matrices)
    if is_separate(job, "optimizer"):
        states *= ADAM_EAGER_PASSES / ADAM_FUSED_PASSES
    copy = 0 if job.precision == "fp32" else width if job.master_bytes else 2 * width
    moved = gradient * job.updates.gradient_reads + states + copy
    update = memory("optimizer.update", round(moved * n_params_local), "fp32")
    return clip, *_orthogonalised(job, layers), update


def _orthogonalised(job: Job, layers: Sequence[int]) -> list[Op]:
    """Return the products that make the momentum of each matrix of *layers* nearly orthogonal.

    An iteration on ``X`` of ``(m, n)``, ``m <= n``, is ``A = X X^T``, ``A A`` and ``(b A + c A A) X``. Ranks
    that share states out take so many matrices each, and tensor-parallel ranks their own parts of them
    (Megatron-LM ``--muon-tp-mode blockwise``). Reference: Liu et al. 2025, arXiv:2502.16982, algorithm 1.
    """
    if not job.updates.iterations:
        return []
    model, layout, sizes = job.model, job.layout, Counter[tuple[str, int, int]]()
    for layer in layers:
        sizes.update(("dense", *_sides(linear)) for linear in model.linears(layer, layout.tp))
        if model.is_moe(layer):
            for linear in model.mlp_linears(model.moe_ffn_hidden, layout.etp):
                sizes["experts", *_sides(linear)] += share(model.n_experts, layout.ep)
    replicas = (job.shard_ranks or layout.dp * layout.cp) if job.shards.optimizer else 1
    of = {"dense": replicas, "experts": max(replicas * layout.tp // (layout.ep * layout.etp), 1)}
    found = []
    for (kind, m, n), number in sizes.items():
        # All matrices of a shape are one batch, once for each iteration.
        batch = math.ceil(number / of[kind]) * job.updates.iterations
        name = "optimizer.orthogonalise"
        found += [gemm(name, m, k, j, job.precision, batch=batch) for k, j in ((m, n), (m, m), (n, m))]
    return found


def _sides(linear: Linear) -> tuple[int, int]:
    """Return the sides of a matrix, the shorter one first."""
    return min(linear.n_in, linear.n_out), max(linear.n_in, linear.n_out)
