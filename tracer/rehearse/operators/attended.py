"""The work of fused attention: over sequences of equal length, or over packed sequences of many lengths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any, Final

from foretrace.tracer.operators import dtype_name, tensor_bytes
from foretrace.tracer.rehearse.operators.calls import Call, total_bytes
from foretrace.tracer.rehearse.operators.work import Work, shapes_of

BACKWARD_PRODUCTS: Final = 5
"""Matrix products of a fused attention backward; a forward has two (FlashAttention-2, arXiv:2307.08691)."""

_FLASH: Final = ("cum_seq_q", "cum_seq_k")
_EFFICIENT: Final = ("cu_seqlens_q", "cu_seqlens_k")

VARLEN: Final = MappingProxyType(
    {
        "aten._flash_attention_forward": _FLASH,
        "aten._flash_attention_backward": _FLASH,
        "aten._efficient_attention_forward": _EFFICIENT,
        "aten._efficient_attention_backward": _EFFICIENT,
    }
)
"""Operators on tensors of shape (batch, tokens, heads, width), or (tokens, heads, width) for packed
sequences, and the arguments with the bounds of the sequences of queries and of keys."""


def attention(call: Call) -> Work:
    """Return the work of a fused attention, forward or backward."""
    backward = "backward" in call.name
    named = call.named
    q, k, v = call.args[1:4] if backward else call.args[:3]
    heads, lengths = _sequences(call, q, k) if call.name in VARLEN else _alike(q, k)
    tokens, seen_tokens = (sum(one[side] for one in lengths) for side in (0, 1))
    n_seen = sum(queries * keys for queries, keys in lengths)
    m, n = _mean(n_seen, seen_tokens), _mean(n_seen, tokens)
    causal = bool(named.get("is_causal", named.get("custom_mask_type", 0)))
    flops = 2 * heads * (n_seen // 2 if causal else n_seen) * (q.shape[-1] + v.shape[-1])
    moved = total_bytes([q, k, v]) + tensor_bytes(q) // q.shape[-1] * v.shape[-1]
    return Work(
        name=call.name,
        kind="attention_backward" if backward else "attention",
        shapes=shapes_of(call),
        dtype=dtype_name(q),
        flops=flops * BACKWARD_PRODUCTS // 2 if backward else flops,
        bytes_moved=2 * moved if backward else moved,
        m=m,
        n=n,
        k=q.shape[-1],
        batch=round(heads * tokens / m) if m else heads,
        v_dim=v.shape[-1],
        causal=causal,
    )


def _mean(n_seen: int, tokens: int) -> int:
    """Return the length of equal sequences that have the same number of scores and of *tokens*."""
    return round(n_seen / tokens) if tokens else 0


def _alike(q: Any, k: Any) -> tuple[int, Sequence[tuple[int, int]]]:
    """Return the heads of all sequences, and queries and keys, for shape (batch, heads, tokens, width)."""
    return prod(q.shape[:-2]), [(q.shape[-2], k.shape[-2])]


def _sequences(call: Call, q: Any, k: Any) -> tuple[int, Sequence[tuple[int, int]]]:
    """Return heads, and queries and keys of each sequence: as the call says, else of equal length."""
    bounds = call.named.get(VARLEN[call.name][0])
    n_queries, n_keys, heads = prod(q.shape[:-2]), prod(k.shape[:-2]), q.shape[-2]
    if bounds is None:
        return heads * q.shape[0], [(q.shape[1], k.shape[1])]
    n_sequences = max(bounds.shape[0] - 1, 1)
    half = len(call.ends) // 2
    if half == n_sequences + 1:
        sides = (call.ends[:half], call.ends[half:])
        return heads, list(zip(*(tuple(b - a for a, b in pairwise(one)) for one in sides), strict=True))
    return heads, [(n_queries // n_sequences, n_keys // n_sequences)] * n_sequences
