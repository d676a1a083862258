"""The ends of the model on one rank: embedding, head with loss, and the optimizer."""

from __future__ import annotations

from dataclasses import replace

from foretrace.simulator.compute.fusion import ADAM_EAGER_PASSES, ADAM_FUSED_PASSES, is_separate, traffic
from foretrace.simulator.job import Job
from foretrace.simulator.models.model import Linear, share
from foretrace.simulator.workload.linear import (
    gradient_sum,
    norm,
    residual_dtype,
    tokens_per_rank,
    tp_comm,
)
from foretrace.simulator.workload.ops import DTYPE_BYTES, Block, Comm, Op, Piece, memory, phases
from foretrace.simulator.workload.tensor import column_linear


def embedding_block(job: Job) -> Block:
    """Return the embedding, cut by vocabulary over tp, for one micro-batch on the first stage.

    Forward reads a row per token and writes it; learned positions are added in a second pass. Backward sets a
    gradient of the whole matrix to zero, adds a row per token, and adds it to the sums (those are of
    shards where parameters are sharded). It has no input gradient.
    """
    dtype = residual_dtype(job)
    size = tokens_per_rank(job) * job.model.hidden * DTYPE_BYTES[dtype]
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
        cast_bytes = 2 * DTYPE_BYTES["fp32"] * n_logits
        loss, loss_backward = (
            replace(op, bytes_moved=op.bytes_moved - cast_bytes) for op in (loss, loss_backward)
        )
    forward: list[Op | Comm] = [replace(loss, dtype="fp32")]
    if job.layout.tp > 1:
        forward += [Comm("all_reduce", "tp", n_tokens * 4, 0, "fp32")] * 3
    backward = (replace(loss_backward, dtype="fp32"),)
    return Piece(tuple(forward), backward, backward)


def optimizer_ops(job: Job, n_params_local: int) -> tuple[Op, ...]:
    """Return gradient clipping and the Adam update of the *n_params_local* parameters that this rank owns.

    Clipping reads every gradient for the norm and scales it in place. Fused Adam reads gradient, master
    weight and two moments, all fp32, and writes the last three; in mixed precision it writes the
    parameter in ``job.precision`` too.
    """
    gradient = DTYPE_BYTES[job.gradient_dtype]
    clip = memory("optimizer.clip", 3 * gradient * n_params_local, job.gradient_dtype, count=2)
    copy = DTYPE_BYTES[job.precision] if job.precision != "fp32" else 0
    states = 4 * (ADAM_EAGER_PASSES if is_separate(job, "optimizer") else ADAM_FUSED_PASSES)
    update = memory("optimizer.adam", (gradient + states + copy) * n_params_local, "fp32")
    return clip, update
