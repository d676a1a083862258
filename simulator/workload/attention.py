"""The block that mixes tokens on one rank: projections around attention or a recurrence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from foretrace.simulator.compute.fusion import elementwise_piece, is_separate
from foretrace.simulator.job import Job
from foretrace.simulator.models.kinds import KINDS, Scan, scan_flops
from foretrace.simulator.models.sizes import Sizes
from foretrace.simulator.workload.linear import (
    column_linear,
    norm,
    replicated_linear,
    residual_in,
    residual_out,
    row_linear,
    tokens_per_rank,
    tokens_per_shard,
)
from foretrace.simulator.workload.lora import adapted
from foretrace.simulator.workload.ops import (
    DTYPE_BYTES,
    Addressed,
    Block,
    Comm,
    Op,
    Phase,
    Piece,
    both_ways,
    elementwise,
    gemm,
    memory,
    phases,
    replayed,
)
from foretrace.simulator.workload.recompute import recompute_phase

# How context-parallel ranks, each with a part of every sequence, attend to all of it.

Core = tuple[tuple[Op, ...], tuple[Op, ...]]
"""Forward and backward of attention."""

Shape = tuple[int, int, int]
"""Query heads, key and value heads, and queries of a sequence on this rank."""


def shape(job: Job, heads: int, kv_heads: int) -> Shape:
    """Return what of *heads* and *kv_heads* a rank works on, and over how many queries.

    Where heads are dealt out, a rank has whole sequences of its share of them.
    """
    if job.layout.cp > 1 and job.profile.context == "ulysses":
        return heads // job.layout.cp, max(1, kv_heads // job.layout.cp), job.seq_len
    return heads, kv_heads, job.seq_len // job.layout.cp


def with_context(job: Job, core: Core, heads: int, kv_heads: int) -> Piece:
    """Return attention with what context-parallel ranks exchange around it.

    Every rank holds an equal share of the causal triangle (the sequence is cut into ``2 cp`` parts and dealt
    from both ends), or whole sequences of its heads.
    """
    forward, backward = core
    if job.layout.cp == 1:
        return elementwise(forward, backward)
    return CONTEXTS[job.profile.context](job, forward, backward, (heads, kv_heads))


def _all_gather(job: Job, forward: tuple[Op, ...], backward: tuple[Op, ...], heads: tuple[int, int]) -> Piece:
    """Keys and values are gathered, again in backward, and their gradients reduce-scattered.

    Reference: Llama 3, arXiv:2407.21783, section 3.3.2.
    """
    gather, scatter = _of_keys(job, heads[1])
    back: Phase = (gather, *backward, scatter)
    return Piece((gather, *forward), back, back)


def _ring(job: Job, forward: tuple[Op, ...], backward: tuple[Op, ...], heads: tuple[int, int]) -> Piece:
    """Parts of keys and values go around while the products with the part that is there run.

    In backward their gradients go around too. A kernel runs per part. Reference: Liu et al. 2023, Ring
    Attention, arXiv:2310.01889; Transformer Engine ``AttnFuncWithCPAndKVP2P``.
    """
    gather, scatter = _of_keys(job, heads[1])
    parts = job.layout.cp
    # A kernel for each part: fixed times and launches are paid so many times, the work is the same.
    ahead = tuple(replace(op, count=parts * op.count) for op in forward)
    back = tuple(replace(op, count=parts * op.count) for op in backward)
    beside: Phase = (
        replace(gather, overlap_ops=len(back)),
        replace(scatter, overlap_ops=len(back)),
        *back,
    )
    return Piece((replace(gather, overlap_ops=len(ahead)), *ahead), beside, beside)


def _ulysses(job: Job, forward: tuple[Op, ...], backward: tuple[Op, ...], heads: tuple[int, int]) -> Piece:
    """Queries, keys and values change from parts of sequences to parts of heads, results back again.

    Reference: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509.
    """
    tokens = job.micro_batch * job.seq_len // job.layout.cp
    width, (n_query, n_key) = DTYPE_BYTES[job.precision], heads
    # Fewer key heads than ranks are copied, one for each of them.
    keys = max(n_key, job.layout.cp) * (job.model.head_dim + job.model.value_head_dim)
    into = tokens * (n_query * job.model.head_dim + keys) * width
    out = tokens * n_query * job.model.value_head_dim * width
    first, last = (Comm("all_to_all", "cp", size, 0, job.precision) for size in (into, out))
    back: Phase = (last, *backward, first)
    return Piece((first, *forward, last), back, back)


def _of_keys(job: Job, kv_heads: int) -> tuple[Comm, Comm]:
    """Return the gathering of keys and values, and the reduce-scatter of their gradients."""
    width = kv_heads * (job.model.head_dim + job.model.value_head_dim)
    size_bytes = job.micro_batch * job.seq_len * width * DTYPE_BYTES[job.precision]
    gather = Comm("all_gather", "cp", size_bytes, 0, job.precision)
    return gather, replace(gather, kind="reduce_scatter")


CONTEXTS: dict[str, Callable[[Job, tuple[Op, ...], tuple[Op, ...], tuple[int, int]], Piece]] = {
    "all_gather": _all_gather,
    "ring": _ring,
    "ulysses": _ulysses,
}
"""Ways of context parallelism by the name of the convention."""


# A recurrence along the sequence on one rank: its convolution, products over chunks, gate and norm.

Pieces = list[Piece]


def scan_pieces(job: Job, scan_of: Callable[[Sizes, int, int], Scan]) -> tuple[Pieces, Pieces, Pieces]:
    """Return what comes before the scan of a block, the scan, and what comes after it.

    Context-parallel ranks change from parts of sequences to parts of heads for all of it, and back: the state
    runs along whole sequences. Reference: Megatron-LM ``ssm/mamba_context_parallel.py``.
    """
    scan, n_tokens = scan_of(job.model, job.layout.tp, job.seq_len), tokens_per_rank(job)
    narrow = n_tokens * DTYPE_BYTES[job.precision]
    # taps and activation in one kernel; backward reads its input and a gradient, and writes one
    convolution = memory("attention.convolution", 2 * scan.convolved * narrow, job.precision)
    taps = 2 * n_tokens * scan.convolved * job.model.conv_kernel
    convolution = replace(convolution, flops=taps)
    before = both_ways(convolution, flops=2 * taps, bytes_moved=3 * scan.convolved * narrow)
    # norm of the result times a gate; backward reads both and a gradient, and writes two
    gate = memory("attention.gate", 3 * scan.result * narrow, job.precision)
    after = both_ways(gate, bytes_moved=5 * scan.result * narrow)
    if job.layout.cp == 1:
        return [before], [_scan(job, scan)], [after]
    into, out = (
        Comm("all_to_all", "cp", job.layout.cp * width * narrow, 0, job.precision)
        for width in (scan.convolved, scan.result)
    )
    first, last = Piece((into,), (into,), (into,)), Piece((out,), (out,), (out,))
    return [first, before], [_scan(job, scan)], [last, after]


def _scan(job: Job, scan: Scan) -> Piece:
    """Every product of a chunk as one batched kernel; each has two in backward, of gradients.

    Each reads and writes its operands: what kernels of mamba-ssm (``ssd_combined.py``) and of
    flash-linear-attention (``ops/gated_delta_rule/chunk.py``) do, which hand states and scores of chunks on.
    """
    if scan.streamed:
        one = memory(
            "attention.scan", scan.streamed * tokens_per_rank(job) * DTYPE_BYTES[job.precision], job.precision
        )
        one = replace(one, flops=round(scan_flops(scan) * tokens_per_rank(job)))
        # Backward reads all of it again with a gradient of the result, and writes gradients of the inputs.
        return both_ways(one, flops=2 * one.flops, bytes_moved=2 * one.bytes_moved)
    chunks = -(-tokens_per_rank(job) // scan.chunk)
    products = [(one, scan.groups) for one in scan.per_group] + [(one, scan.heads) for one in scan.per_head]
    forward: list[Op] = []
    backward: list[Op] = []
    for product, n_heads in products:
        one = gemm("attention.scan", *product, job.precision, batch=chunks * n_heads)
        forward.append(one)
        backward += [replace(one, name=f"{one.name}.{way}") for way in ("dgrad", "wgrad")]
    return elementwise(tuple(forward), tuple(reversed(backward)))


def attention_block(job: Job, layer: int) -> Block:
    """Return the block of *layer* that mixes tokens, for one micro-batch on one rank."""
    kind = job.model.mixer(layer)
    *inputs, proj = KINDS[kind].linears(job.model, job.layout.tp)
    pieces = [residual_in(job, "attention")]
    if job.model.norms_per_layer > 1:  # else the norm of the MLP serves both
        pieces.append(norm(job, "attention"))
    for linear in inputs:
        whole = replicated_linear if linear.is_whole else column_linear
        pieces.append(whole(job, "attention", linear))
        if linear.is_normed:
            pieces.append(norm(job, "attention", linear.n_out, tokens_per_shard(job), f"{linear.name}_norm"))
    before: Pieces = []
    cores: Pieces = []
    after: Pieces = []
    if scan := KINDS[kind].scan:
        before, cores, after = scan_pieces(job, scan)
    if scan is None or KINDS[kind].attends:
        before, cores, after = [*before, *_position(job)], [*cores, *_core(job, layer)], [*after, *_gate(job)]
    pieces += [*before, *cores, *after, row_linear(job, "attention", proj)]
    if job.model.norms_per_layer > 2:
        pieces.append(norm(job, "attention", name="post_norm"))
    if not job.model.parallel_blocks:
        pieces.append(residual_out(job, "attention"))
    if "attention" in job.profile.graphed:
        pieces, cores = replayed(pieces), replayed(cores)
    full = tuple(op for piece in pieces for op in piece.forward)
    core = tuple(op for piece in cores for op in piece.forward)
    return Block(
        name="attention",
        layer=layer,
        params=job.model.block_params(kind, job.layout.tp),
        expert_params=0,
        phases=phases(pieces, recompute_phase(job, full, core)),
        **adapted(job, (*inputs, proj)),
    )


def _gate(job: Job) -> list[Piece]:
    """The result of attention times a gate that came with the query, if the model has one."""
    if not job.model.attention_gate:
        return []
    size = tokens_per_rank(job) * _heads(job)[0] * job.model.head_dim * DTYPE_BYTES[job.precision]
    return [both_ways(memory("attention.gate", 3 * size, job.precision), bytes_moved=5 * size)]


def _heads(job: Job) -> tuple[int, int]:
    """Query heads and key/value heads on one rank."""
    return job.model.n_heads // job.layout.tp, job.model.kv_heads_per_rank(job.layout.tp)


def _position(job: Job) -> list[Piece]:
    """Norm and rotation of queries and keys, and copies of shared keys and values where kernels need them."""
    model, (heads, kv_heads) = job.model, _heads(job)
    width, n_tokens = (heads + kv_heads) * model.head_dim, tokens_per_rank(job)
    found = [norm(job, "attention", width, n_tokens, "qk_norm")] if model.qk_norm else []
    if not model.max_positions:
        # Of latent attention only a part of each head is rotated.
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
    copy = replace(copy, launches=job.profile.latent_launches)
    return both_ways(copy)


def _core(job: Job, layer: int) -> list[Piece]:
    """Attention between all tokens of a sequence, with what context-parallel ranks exchange for it."""
    core = _fused_core(job, layer) if job.flash_attention else _unfused_core(job)
    index = [_indexer(job)] if job.model.mixer(layer) == "sparse" else []
    return [*index, with_context(job, core, *_heads(job))]


def _indexer(job: Job) -> Piece:
    """Scores of all keys for every query, of which the best are kept, in fp32; heads are summed on the way.

    Backward is over the keys that were kept. Reference: DeepSeek-V3.2, arXiv:2512.02556, section 2.1.
    """
    model, seq_len, width = job.model, job.seq_len, DTYPE_BYTES[job.precision]
    each = 2 * job.micro_batch * model.index_heads * (model.index_head_dim + 1)
    n_scores = job.micro_batch * _seen(seq_len, seq_len, 0, causal=model.causal)
    kept = _seen(seq_len, seq_len, model.index_top_k, causal=model.causal)
    operands = job.micro_batch * seq_len * (model.index_heads + 1) * model.index_head_dim * width
    sides, members = (seq_len, seq_len, model.index_head_dim), job.micro_batch * model.index_heads
    product = gemm("attention.index", *sides, job.precision, batch=members)
    flops = each * n_scores // job.micro_batch
    forward = replace(product, flops=flops, bytes_moved=operands + 4 * n_scores)
    backward = replace(
        forward, name="attention.index.backward", flops=2 * each * kept, bytes_moved=2 * operands
    )
    select = memory("attention.select", 4 * (n_scores + job.micro_batch * kept), "fp32")
    return elementwise((forward, select), (backward,))


def _fused_core(job: Job, layer: int) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Forward and backward of a fused kernel, which skips what masks hide.

    Forward is two matrix products, of the width of a key and of a value; backward five, for the scores are
    computed again: three of the former and two of the latter.
    Dropout draws a random number for each score, and the same ones again in backward.
    Reference: FlashAttention-2, arXiv:2307.08691, section 4.1 (its FLOP count).
    """
    model, keys = job.model, job.seq_len
    heads, kv_heads, queries = shape(job, *_heads(job))
    width = model.head_dim + model.value_head_dim
    window, chunks = job.window_of(layer), 1
    # A layer in chunks is many short sequences, none of which sees another.
    if KINDS[model.mixer(layer)].in_chunks and window < keys:
        keys, window, chunks = window, 0, max(queries // window, 1)
    n_scores = job.micro_batch * heads * _seen(queries, keys, window, causal=model.causal)
    flops = 2 * width * n_scores
    # Queries and results of every head; keys and values of each key head.
    read = queries * heads + keys * chunks * kv_heads
    operands = job.micro_batch * read * width * DTYPE_BYTES[job.precision]
    # Queries of one chunk: the chunks are members of the batch.
    queries //= chunks
    forward = Op(
        *("attention.core", "attention", flops, operands, queries, keys, model.head_dim, job.precision),
        batch=job.micro_batch * heads * chunks,
        v_dim=model.value_head_dim,
        causal=model.causal,
        # A window as long as the sequence is none.
        window=window if window < keys else 0,
        kernel=_kernel(job),
        n_random=n_scores if model.dropout else 0,
    )
    backward = replace(
        forward,
        name="attention.core.backward",
        kind="attention_backward",
        flops=2 * (3 * model.head_dim + 2 * model.value_head_dim) * n_scores,
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
