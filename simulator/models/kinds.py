"""The kinds of blocks that layers are made of: what each multiplies by, keeps, and looks back at.

A layer is a mixer of tokens, an MLP, or both. ``KINDS`` has one entry for each; parameters, FLOPs, operations
and memory all follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from foretrace.door import own_table
from foretrace.simulator.models.sizes import Linear, Sizes, share

Product = tuple[int, int, int]
"""Rows, columns and inner side of a matrix product."""


class Scan(NamedTuple):
    """A recurrence along the sequence that is computed in chunks, on one rank.

    Attributes:
        heads: states that run along the sequence.
        groups: heads of keys, each of which serves ``heads / groups`` of them.
        state: elements of the state of a head, which is kept in fp32 for every chunk.
        chunk: tokens of a chunk.
        per_group: products of a chunk, of each head of keys.
        per_head: products of a chunk, of each head.
        convolved: features that go through a causal convolution and an activation first.
        result: features of a token that come out; a gate and a norm go over them.
        kept: features of a token that backward needs, beside inputs of the block and of its last matrix.
        streamed: features of a token that one kernel reads and writes, where no products are batched: what is
            said of products then is FLOPs alone.
    """

    heads: int
    groups: int
    state: int
    chunk: int
    per_group: tuple[Product, ...]
    per_head: tuple[Product, ...]
    convolved: int
    result: int
    kept: int
    streamed: int = 0


class Kind(NamedTuple):
    """A kind of block.

    Attributes:
        linears: its matrices outside routed experts, as one of so many tensor-parallel ranks holds them; the
            last of a mixer is row-parallel.
        others: parameters on a rank that are no matrix, norms of the residual stream left out.
        source: where its shapes and products are from.
        reach: keys that a query sees at most; 0 means all.
        in_chunks: ``reach`` is the size of chunks of a sequence, none of which sees another.
        scan: the recurrence instead of attention, on a rank, in chunks of at most so many tokens; 0: in whole
            chunks.
        attends: attention runs beside the recurrence.
        needs: sizes that it cannot be without.
        is_mlp: it works on each token alone.
        is_cut: it is known how tensor- and context-parallel ranks share it.
        assumed: what a prediction with it rests on without evidence.
    """

    linears: Callable[[Sizes, int], tuple[Linear, ...]]
    others: Callable[[Sizes, int], int] = lambda _sizes, _tp: 0
    source: str = ""
    reach: Callable[[Sizes], int] = lambda _sizes: 0
    in_chunks: bool = False
    scan: Callable[[Sizes, int, int], Scan] | None = None
    attends: bool = False
    needs: tuple[str, ...] = ()
    is_mlp: bool = False
    is_cut: bool = True
    assumed: str = ""


def _plain(sizes: Sizes, tp: int) -> tuple[Linear, ...]:
    """Multi-head and grouped-query attention; a gate of its result comes out of the query's matrix."""
    heads = share(sizes.n_heads, tp)
    # The gate is as wide as the query, and comes out of the same matrix.
    n_query = heads * (2 if sizes.attention_gate else 1)
    n_qkv = (n_query + 2 * share(sizes.n_kv_heads, tp)) * sizes.head_dim
    proj = Linear("proj", heads * sizes.head_dim, sizes.hidden, sizes.proj_bias)
    return Linear("qkv", sizes.hidden, n_qkv, sizes.qkv_bias), proj


def _qk_norms(sizes: Sizes, tp: int) -> int:
    """Weights of the norms of queries and keys."""
    heads = {"head": 2, "all": share(sizes.n_heads, tp) + share(sizes.n_kv_heads, tp)}
    return heads.get(sizes.qk_norm_weights, 0) * sizes.head_dim if sizes.qk_norm else 0


def _latent(sizes: Sizes, tp: int) -> tuple[Linear, ...]:
    """Compressions are replicated: they are small, and their outputs are needed whole."""
    heads = share(sizes.n_heads, tp)
    nope_dim, rank = sizes.head_dim - sizes.rope_head_dim, sizes.q_lora_rank
    down = (Linear("q_down", sizes.hidden, rank, is_whole=True, is_normed=True),) if rank else ()
    width = sizes.kv_lora_rank + sizes.rope_head_dim
    return (
        *down,
        Linear("q_up", rank or sizes.hidden, heads * sizes.head_dim),
        # One key part with rotation serves all heads, and is not compressed.
        Linear("kv_down", sizes.hidden, width, is_whole=True, is_normed=True),
        Linear("kv_up", sizes.kv_lora_rank, heads * (nope_dim + sizes.v_head_dim)),
        Linear("proj", heads * sizes.value_head_dim, sizes.hidden, sizes.proj_bias),
    )


def _latent_others(sizes: Sizes, tp: int) -> int:
    return _qk_norms(sizes, tp) + sizes.q_lora_rank + sizes.kv_lora_rank


def _indexed(sizes: Sizes, tp: int) -> tuple[Linear, ...]:
    """Latent attention, and an indexer with queries out of the compressed ones, one key, and head weights."""
    width = sizes.index_heads * sizes.index_head_dim
    index = (
        Linear("index_q", sizes.q_lora_rank or sizes.hidden, width, is_whole=True),
        Linear("index_k", sizes.hidden, sizes.index_head_dim, is_whole=True, is_normed=True),
        Linear("index_weights", sizes.hidden, sizes.index_heads, is_whole=True),
    )
    *inputs, proj = _latent(sizes, tp)
    return *inputs, *index, proj


def _indexed_others(sizes: Sizes, tp: int) -> int:
    """The norm of the key has weight and bias."""
    return _latent_others(sizes, tp) + 2 * sizes.index_head_dim


def _mamba2(sizes: Sizes, tp: int) -> tuple[Linear, ...]:
    """One matrix makes gate, input, both projections of the state (B, C), and a time step per head."""
    heads, scan = share(sizes.scan_heads, tp), _mamba2_scan(sizes, tp)
    inner = heads * sizes.scan_value_dim
    return (
        # Gate; what is convolved, which is the input and B and C; a time step for each head.
        Linear("in", sizes.hidden, inner + scan.convolved + heads),
        Linear("out", inner, sizes.hidden),
    )


def _mamba2_others(sizes: Sizes, tp: int) -> int:
    """Decay, skip and bias of the time step of every head, the norm of the result, the convolution."""
    heads = share(sizes.scan_heads, tp)
    # Decay, skip and bias of the time step: three for each head.
    return 3 * heads + heads * sizes.scan_value_dim + _convolution(sizes, _mamba2_scan(sizes, tp))


def _mamba2_scan(sizes: Sizes, tp: int, most: int = 0) -> Scan:
    """Products: C B^T of a group; that with the input, the state of a chunk, and C with the last state."""
    heads, groups = share(sizes.scan_heads, tp), share(sizes.scan_key_heads, tp)
    c, n, p = _chunk(sizes, most), sizes.scan_key_dim, sizes.scan_value_dim
    inner = heads * p
    convolved = inner + 2 * groups * n
    return Scan(
        heads=heads,
        groups=groups,
        state=n * p,
        chunk=c,
        per_group=((c, c, n),),
        per_head=((c, p, c), (n, p, c), (c, p, n)),
        convolved=convolved,
        result=inner,
        kept=inner + convolved + heads + inner,
    )


def _both(sizes: Sizes, tp: int) -> tuple[Linear, ...]:
    """Both read one input; the sum of what they make is one product with what comes out of both."""
    qkv, proj = _plain(sizes, tp)
    scanned, out = _mamba2(sizes, tp)
    return qkv, scanned, proj._replace(n_in=proj.n_in + out.n_in)


def _both_others(sizes: Sizes, tp: int) -> int:
    """Those of Mamba-2 without the norm of the result."""
    scan = _mamba2_scan(sizes, tp)
    return _qk_norms(sizes, tp) + _mamba2_others(sizes, tp) - scan.result


def _delta(sizes: Sizes, tp: int) -> tuple[Linear, ...]:
    """Queries, keys, values and a gate as wide as values; a rate of learning and a decay per head."""
    heads, scan = share(sizes.scan_heads, tp), _delta_scan(sizes, tp)
    return (
        Linear("qkvz", sizes.hidden, scan.convolved + scan.result),
        Linear("ba", sizes.hidden, 2 * heads),
        Linear("out", scan.result, sizes.hidden),
    )


def _delta_others(sizes: Sizes, tp: int) -> int:
    """Decay and bias of the time step of every head, the norm of a head's result, the convolution."""
    heads = share(sizes.scan_heads, tp)
    return 2 * heads + sizes.scan_value_dim + _convolution(sizes, _delta_scan(sizes, tp))


def _delta_scan(sizes: Sizes, tp: int, most: int = 0) -> Scan:
    """Products: K K^T, Q K^T, the triangular inverse with values and keys, and four with states.

    Those are keys and queries with the last state, Q K^T with new values, and the new state.
    """
    heads, groups = share(sizes.scan_heads, tp), share(sizes.scan_key_heads, tp)
    c, k, v = _chunk(sizes, most), sizes.scan_key_dim, sizes.scan_value_dim
    within = ((c, c, k), (c, c, k), (c, v, c), (c, k, c))
    convolved, result = 2 * groups * k + heads * v, heads * v
    return Scan(
        heads=heads,
        groups=groups,
        state=k * v,
        chunk=c,
        per_group=(),
        per_head=(*within, (c, v, k), (c, v, k), (c, v, c), (k, v, c)),
        convolved=convolved,
        result=result,
        # out of the matrices, out of the convolution, the inverse of a chunk, and the result before its norm
        kept=convolved + result + 2 * heads + convolved + heads * c + result,
    )


def _kimi(sizes: Sizes, tp: int) -> tuple[Linear, ...]:
    """Queries, keys, values; a rate of learning per head; decays and a gate by way of a head's width."""
    inner, narrow = share(sizes.scan_heads, tp) * sizes.scan_key_dim, sizes.scan_key_dim
    return (
        Linear("qkv", sizes.hidden, 3 * inner),
        Linear("b", sizes.hidden, share(sizes.scan_heads, tp)),
        Linear("decay_down", sizes.hidden, narrow, is_whole=True),
        Linear("decay_up", narrow, inner),
        Linear("gate_down", sizes.hidden, narrow, is_whole=True),
        Linear("gate_up", narrow, inner),
        Linear("out", inner, sizes.hidden),
    )


def _kimi_others(sizes: Sizes, tp: int) -> int:
    """Decay of every head and bias of each of its features, norm of a head's result, the convolution."""
    heads, scan = share(sizes.scan_heads, tp), _delta_scan(sizes, tp)
    return heads + heads * sizes.scan_key_dim + sizes.scan_value_dim + _convolution(sizes, scan)


def _kimi_scan(sizes: Sizes, tp: int, most: int = 0) -> Scan:
    """Products: those of the gated delta rule; a decay for each feature of a key is kept, too."""
    scan = _delta_scan(sizes, tp, most)
    return scan._replace(kept=scan.kept + 2 * scan.heads * sizes.scan_key_dim)


def _mamba(sizes: Sizes, tp: int) -> tuple[Linear, ...]:
    """Input and gate; a narrow time step, B and C out of the convolved input; a time step per feature."""
    inner = share(sizes.scan_heads, tp)
    return (
        Linear("in", sizes.hidden, 2 * inner),
        Linear("x", inner, sizes.time_step_rank + 2 * sizes.scan_key_dim),
        Linear("dt", sizes.time_step_rank, inner, bias=True),
        Linear("out", inner, sizes.hidden),
    )


def _mamba_others(sizes: Sizes, tp: int) -> int:
    """Decay of every state, skip of every feature, the convolution."""
    inner = share(sizes.scan_heads, tp)
    return inner * (sizes.scan_key_dim + 1) + _convolution(sizes, _mamba_scan(sizes, tp))


def _mamba_scan(sizes: Sizes, tp: int, most: int = 0) -> Scan:
    """One kernel reads input, time step and gate, and writes the result; its product is of C and states."""
    inner, n, c = share(sizes.scan_heads, tp), sizes.scan_key_dim, _chunk(sizes, most)
    return Scan(
        heads=inner,
        groups=inner,
        state=n,
        chunk=c,
        per_group=(),
        per_head=((c, 1, n),),
        convolved=inner,
        result=inner,
        # input and gate, the convolved input, the time step narrow and wide, B and C, the result
        kept=5 * inner + sizes.time_step_rank + 2 * n,
        streamed=4 * inner,
    )


def _short(sizes: Sizes, tp: int) -> tuple[Linear, ...]:
    """Input, and gates before and behind the convolution."""
    inner = share(sizes.hidden, tp)
    bias = sizes.conv_bias
    return Linear("in", sizes.hidden, 3 * inner, bias), Linear("out", inner, sizes.hidden, bias)


def _short_scan(sizes: Sizes, tp: int, most: int = 0) -> Scan:
    """No recurrence; the gate before the convolution reads two and writes one."""
    inner = share(sizes.hidden, tp)
    return Scan(
        heads=inner,
        groups=inner,
        state=0,
        chunk=max(most, 1),
        per_group=(),
        per_head=(),
        convolved=inner,
        result=inner,
        kept=5 * inner,
        streamed=3 * inner,
    )


def _lightning(sizes: Sizes, tp: int) -> tuple[Linear, ...]:
    """As many heads of keys and values as of queries, and a gate as wide as the result."""
    inner = share(sizes.n_heads, tp) * sizes.head_dim
    return (
        Linear("qkv", sizes.hidden, 3 * inner),
        Linear("gate", sizes.hidden, inner),
        Linear("out", inner, sizes.hidden),
    )


def _lightning_scan(sizes: Sizes, tp: int, most: int = 0) -> Scan:
    """Products: Q K^T and that with values in a chunk, Q with the last state, the new state."""
    heads, c, d = share(sizes.n_heads, tp), _chunk(sizes, most), sizes.head_dim
    inner = heads * d
    return Scan(
        heads=heads,
        groups=heads,
        state=d * d,
        chunk=c,
        per_group=(),
        per_head=((c, c, d), (c, d, c), (c, d, d), (d, d, c)),
        convolved=3 * inner,
        result=inner,
        kept=2 * 3 * inner + inner + inner,  # before and after the activation, the gate, the result
    )


def _chunk(sizes: Sizes, most: int) -> int:
    return min(sizes.scan_chunk, most) if most else sizes.scan_chunk


def _convolution(sizes: Sizes, scan: Scan) -> int:
    # A tap for each feature: the convolution goes over every feature alone.
    return scan.convolved * (sizes.conv_kernel + (1 if sizes.conv_bias else 0))


def mlp_linears(sizes: Sizes, ffn_hidden: int, tp: int = 1) -> tuple[Linear, Linear]:
    """Return up (with gate) and down of an MLP of inner width *ffn_hidden* on each of *tp* ranks."""
    inner = share(ffn_hidden, tp)
    return (
        Linear("up", sizes.hidden, inner * (2 if sizes.gated else 1), sizes.mlp_bias),
        Linear("down", inner, sizes.hidden, sizes.mlp_bias),
    )


def _shared(sizes: Sizes, tp: int) -> tuple[Linear, ...]:
    return mlp_linears(sizes, sizes.shared_ffn_hidden, tp) if sizes.n_shared_experts else ()


def router(sizes: Sizes) -> Linear:
    """Return the matrix that scores experts."""
    return Linear("router", sizes.hidden, sizes.n_experts, is_whole=True)


def gate_params(sizes: Sizes) -> int:
    """Return the weights of the gate of shared experts: a column, if there is one."""
    return sizes.hidden if sizes.shared_gate else 0


_COMPUTED: Final[Mapping[str, Kind]] = {
    "attention": Kind(_plain, _qk_norms),
    "window": Kind(_plain, _qk_norms, reach=lambda sizes: sizes.window),
    "chunk": Kind(_plain, _qk_norms, reach=lambda sizes: sizes.window),
    "latent": Kind(_latent, _latent_others),
    "sparse": Kind(_indexed, _indexed_others, reach=lambda sizes: sizes.index_top_k),
    "linear": Kind(
        _lightning, lambda sizes, tp: share(sizes.n_heads, tp) * sizes.head_dim, scan=_lightning_scan
    ),
    "delta": Kind(_delta, _delta_others, scan=_delta_scan),
    "mamba2": Kind(_mamba2, _mamba2_others, scan=_mamba2_scan),
    "kimi": Kind(_kimi, _kimi_others, scan=_kimi_scan),
    "mamba": Kind(_mamba, _mamba_others, scan=_mamba_scan),
    "short": Kind(_short, lambda sizes, tp: _convolution(sizes, _short_scan(sizes, tp)), scan=_short_scan),
    "both": Kind(_both, _both_others, scan=_mamba2_scan),
    "mlp": Kind(lambda sizes, tp: mlp_linears(sizes, sizes.ffn_hidden, tp)),
    "moe": Kind(_shared, lambda sizes, _tp: router(sizes).params + gate_params(sizes)),
}


def _kinds() -> dict[str, Kind]:
    """Return every kind with what ``kinds.toml`` says of it."""
    said = own_table("simulator/models/kinds.toml")
    shared = {"of_chunks": said.pop("of_chunks")}
    return {
        name: _COMPUTED[name]._replace(
            **{
                **about,
                "needs": tuple(about.get("needs", ())),
                "assumed": shared.get(about.get("assumed"), about.get("assumed", "")),
            }
        )
        for name, about in said.items()
    }


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(_kinds())
"""Every kind of block by its name in ``Sizes.pattern``."""


def scan_flops(scan: Scan) -> float:
    """Return forward FLOPs of *scan* per token.

    >>> scan_flops(Scan(2, 1, 0, 4, ((4, 4, 8),), ((4, 4, 4),), 0, 0, 0))
    128.0
    """
    groups = ((scan.groups, one) for one in scan.per_group)
    heads = ((scan.heads, one) for one in scan.per_head)
    # Products are those of a chunk; FLOPs are said of a token.
    return sum(n * 2 * a * b * c for n, (a, b, c) in (*groups, *heads)) / max(scan.chunk, 1)
