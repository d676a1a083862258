"""How context-parallel ranks, each with a part of every sequence, attend to all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from foretrace.simulator.job import Job
from foretrace.simulator.workload.ops import DTYPE_BYTES, Comm, Op, Phase, Piece, elementwise

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
    return KINDS[job.profile.context](job, forward, backward, (heads, kv_heads))


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


KINDS: dict[str, Callable[[Job, tuple[Op, ...], tuple[Op, ...], tuple[int, int]], Piece]] = {
    "all_gather": _all_gather,
    "ring": _ring,
    "ulysses": _ulysses,
}
"""Ways of context parallelism by the name of the convention."""
