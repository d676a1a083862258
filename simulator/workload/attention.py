"""The attention block on one rank: projections, rotary embedding, fused core, context parallelism."""

from __future__ import annotations

from dataclasses import replace

from foretrace.simulator.compute.fusion import elementwise_piece, is_separate
from foretrace.simulator.job import Job
from foretrace.simulator.workload.context import shape, with_context
from foretrace.simulator.workload.linear import (
    norm,
    replicated_linear,
    residual_in,
    residual_out,
    tokens_per_rank,
    tokens_per_shard,
)
from foretrace.simulator.workload.lora import adapted
from foretrace.simulator.workload.ops import (
    DTYPE_BYTES,
    Addressed,
    Block,
    Op,
    Piece,
    elementwise,
    gemm,
    memory,
    phases,
)
from foretrace.simulator.workload.recompute import recompute_phase
from foretrace.simulator.workload.tensor import column_linear, row_linear


def attention_block(job: Job, layer: int) -> Block:
    """Return the attention block of *layer* for one micro-batch on one rank."""
    *inputs, proj = job.model.attention_linears(job.layout.tp)
    pieces = [residual_in(job, "attention")]
    if job.model.norms_per_layer > 1:  # else the norm of the MLP serves both
        pieces.append(norm(job, "attention"))
    for linear in inputs:
        if linear.name.endswith("_down"):
            pieces.append(replicated_linear(job, "attention", linear))
            pieces.append(norm(job, "attention", linear.n_out, tokens_per_shard(job), f"{linear.name}_norm"))
        else:
            pieces.append(column_linear(job, "attention", linear))
    pieces += [*_position(job), *_core(job, layer), row_linear(job, "attention", proj)]
    if job.model.norms_per_layer > 2:
        pieces.append(norm(job, "attention", name="post_norm"))
    if not job.model.parallel_blocks:
        pieces.append(residual_out(job, "attention"))
    full = tuple(op for piece in pieces for op in piece.forward)
    core = tuple(op for piece in _core(job, layer) for op in piece.forward)
    params = job.model.attention_params(job.layout.tp)
    return Block(
        name="attention",
        layer=layer,
        params=params,
        expert_params=0,
        phases=phases(pieces, recompute_phase(job, full, core)),
        **adapted(job, (*inputs, proj)),
    )


def _heads(job: Job) -> tuple[int, int]:
    """Query heads and key/value heads on one rank."""
    return job.model.n_heads // job.layout.tp, job.model.kv_heads_per_rank(job.layout.tp)


def _position(job: Job) -> list[Piece]:
    """Norm and rotation of queries and keys, and copies of shared keys and values where kernels need them."""
    model, (heads, kv_heads) = job.model, _heads(job)
    width, n_tokens = (heads + kv_heads) * model.head_dim, tokens_per_rank(job)
    found = [norm(job, "attention", width, n_tokens, "qk_norm")] if model.qk_norm else []
    if not model.max_positions:
        rotated = width * model.rope_head_dim // model.head_dim if model.kv_lora_rank else width
        part = "scaled_rotary" if model.scaled_rotary and not is_separate(job, "rotary") else "rotary"
        form = "half_rotary" if part == "rotary" and job.profile.rotary == "halves" else part
        found.append(elementwise_piece(job, part, form, "attention.rotary", n_tokens * rotated))
    if model.kv_lora_rank:
        n_joined = kv_heads + (heads if is_separate(job, "rotary") else 0)
        found.append(_assembled(job, n_tokens * n_joined * model.head_dim))
    if kv_heads < heads and is_separate(job, "heads"):
        found.append(_repeated(job, n_tokens, heads, kv_heads))
    return found


def _repeated(job: Job, n_tokens: int, heads: int, kv_heads: int) -> Piece:
    """Copy keys and values for every query head, which reads them in no order; backward adds gradients up.

    Reference: ``repeat_kv`` of transformers ``integrations/sdpa_attention.py``.
    """
    width = n_tokens * (job.model.head_dim + job.model.value_head_dim)
    size = width * (heads + kv_heads) * DTYPE_BYTES[job.precision]
    add = memory("attention.repeat.backward", size, job.precision, count=2)
    copy = replace(add, name="attention.repeat", addressed=(Addressed(width * heads, size),))
    return elementwise((copy,), (add,))


def _assembled(job: Job, n_elements: int) -> Piece:
    """Join the rotated and the other part of latent queries and keys; backward takes their gradients apart.

    The rotated part of the key is one for all heads, so that it is copied for each; fused kernels rotate
    queries in place. Reference: Megatron-LM ``multi_latent_attention.py``, ``torch.cat`` of ``q_no_pe`` and
    ``q_pos_emb``, and ``fused_apply_mla_rope_for_kv``.
    """
    copy = memory("attention.assemble", 2 * n_elements * DTYPE_BYTES[job.precision], job.precision, count=2)
    return elementwise((copy,), (replace(copy, name="attention.assemble.backward"),))


def _core(job: Job, layer: int) -> list[Piece]:
    """Attention between all tokens of a sequence, with what context-parallel ranks exchange for it."""
    core = _fused_core(job, layer) if job.flash_attention else _unfused_core(job)
    return [with_context(job, core, *_heads(job))]


def _fused_core(job: Job, layer: int) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Forward and backward of a fused kernel, which skips what masks hide.

    Forward is two matrix products, backward five: the scores are computed again, so 2.5 times the forward.
    Reference: FlashAttention-2, arXiv:2307.08691, section 4.1 (its FLOP count).
    """
    model, keys = job.model, job.seq_len
    heads, kv_heads, queries = shape(job, *_heads(job))
    width = model.head_dim + model.value_head_dim
    window = job.window_of(layer)
    flops = 2 * job.micro_batch * heads * width * _seen(queries, keys, window, causal=model.causal)
    operands = job.micro_batch * (queries * heads + keys * kv_heads) * width * DTYPE_BYTES[job.precision]
    forward = Op(
        *("attention.core", "attention", flops, operands, queries, keys, model.head_dim, job.precision),
        batch=job.micro_batch * heads,
        v_dim=model.value_head_dim,
        causal=model.causal,
        window=window if window < keys else 0,
        kernel=_kernel(job),
    )
    backward = replace(
        forward,
        name="attention.core.backward",
        kind="attention_backward",
        flops=flops * 5 // 2,
        bytes_moved=2 * operands,
    )
    return (forward,), (backward,)


def _kernel(job: Job) -> str:
    """Return the kernel that the framework calls on this device; empty for the device's own choice."""
    listed = job.cluster.device.attention_kernels
    return next((name for name in job.profile.attention if name in listed), "")


def _seen(queries: int, keys: int, window: int, *, causal: bool) -> int:
    """Return how many scores of a head are computed for *queries* of a sequence of *keys*.

    Under a causal mask half of the matrix; under a window ``w`` of ``s`` keys ``w (2 s - w) / 2s`` of a row,
    on average; without a mask a window opens to both sides.

    >>> _seen(100, 100, 0, causal=True), _seen(100, 100, 0, causal=False), _seen(100, 100, 50, causal=True)
    (5000, 10000, 3750)
    """
    if window <= 0 or window >= keys:
        return queries * keys // 2 if causal else queries * keys
    return queries * window * (2 * keys - window) // (2 * keys) if causal else queries * window


def _unfused_core(job: Job) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Forward and backward of scores, softmax and weighted sum as batched GEMMs over the whole matrix.

    The fused masked softmax reads and writes the scores; dropout reads and writes them once more, with a byte
    of mask each. Backward reads scores and gradient and writes a gradient.
    """
    model, dtype = job.model, job.precision
    heads, _, queries = shape(job, *_heads(job))
    batch, keys = job.micro_batch * heads, job.seq_len
    width, n_scores = DTYPE_BYTES[dtype], batch * queries * keys
    products = [
        gemm(f"attention.{name}", queries, keys, dim, dtype, batch=batch)
        for name, dim in (("scores", model.head_dim), ("context", model.value_head_dim))
    ]
    masks = 2 * width + 1 if model.dropout else 0
    forward = memory("attention.softmax", n_scores * (2 * width + masks), dtype, count=2 if masks else 1)
    backward = memory("attention.softmax.backward", n_scores * (3 * width + masks), dtype)
    scores, context = (
        (replace(op, name=f"{op.name}.dgrad"), replace(op, name=f"{op.name}.wgrad")) for op in products
    )
    return (products[0], forward, products[1]), (*context, backward, *scores)
