"""The sizes of a network: every number that its layers, ends and parameters follow from, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from foretrace.simulator.errors import ModelError
from foretrace.simulator.nearest import near_divisors


class Linear(NamedTuple):
    """A matrix that one rank multiplies by: ``(tokens, n_in) -> (tokens, n_out)``.

    Attributes:
        name: what it does, e.g. ``"qkv"``.
        n_in: input features on this rank.
        n_out: output features on this rank.
        bias: whether ``n_out`` biases are added.
        is_whole: every tensor-parallel rank holds all of it, and applies it to its own tokens.
        is_normed: a norm goes over its output.
    """

    name: str
    n_in: int
    n_out: int
    bias: bool = False
    is_whole: bool = False
    is_normed: bool = False

    @property
    def params(self) -> int:
        """Number of weights and biases."""
        return self.n_in * self.n_out + (self.n_out if self.bias else 0)


def share(n: int, parts: int) -> int:
    """Return the largest share when *n* items are dealt to *parts* ranks, so ``ceil(n / parts)``."""
    return -(-n // parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a transformer or a hybrid with one stack of layers, a decoder unless ``causal`` is false.

    Attributes:
        name: as a person would say it.
        n_layers: layers.
        pattern: what each layer is made of, spaces between: kinds of ``simulator.models.kinds.KINDS`` joined
            by ``+``; from its start again where it ends. Empty: what ``window``, ``global_every``,
            ``kv_lora_rank``, ``index_heads``, ``n_experts`` and ``n_dense_layers`` say.
        hidden: width of the residual stream.
        n_heads, n_kv_heads: query heads, and key/value heads (fewer: grouped-query attention).
        head_dim: width of one query or key head; with MLA the rotary part is included.
        ffn_hidden: inner width of a dense MLP.
        gated: the MLP has a gate beside its up-projection (SwiGLU, GeGLU).
        clamped: the inputs of the gated activation are clamped (gpt-oss).
        vocab: number of tokens in the vocabulary, as embedded (with padding if the checkpoint is padded).
        tied_embeddings: embedding and head are one matrix.
        norm: ``"rmsnorm"`` (one weight per feature) or ``"layernorm"`` (weight and bias).
        norm_bias: layer norms have a bias.
        norm_weights: norms have weights at all (those of OLMo 1 have none).
        norms_per_layer: 2; 4 where outputs are normalised too (Gemma 2); 1 where attention and MLP read the
            same normalised input (Falcon 7B, Command R).
        parallel_blocks: attention and MLP read the same input (GPT-NeoX).
        qk_norm: queries and keys are normalised.
        qk_norm_weights: what has a weight in that: ``"head"``, each feature of a head, all heads alike;
            ``"all"``, each feature of each head; or ``"none"``.
        attention_gate: the result of attention is multiplied by a gate that comes with the query.
        qkv_bias, proj_bias, mlp_bias: which matrices have biases.
        max_positions: learned position embeddings; 0: rotary.
        scaled_rotary: rotations also scale queries and keys (YaRN).
        window: keys that a query of a local layer sees at most (sliding window), or tokens of a chunk where
            layers see their own chunk alone; 0 means all.
        global_every: with a window, every so many layers the last one sees everything; 0 means none does.
        causal: a token sees only those before it; false for encoders.
        extra_params: others outside the layers: token types, a norm after the embedding, a pooler.
        n_mtp: modules behind the last layer that predict tokens further ahead (multi-token prediction), each
            with a layer like the last; published parameter counts leave them out, and so does ``n_params``.
        dropout: whether dropout is on, so that its masks are kept for backward.
        n_experts: routed experts of a mixture-of-experts layer; 0 means a dense model.
        top_k: routed experts that each token visits.
        moe_ffn_hidden: inner width of one expert.
        route_nodes: nodes that the experts of a token may lie in at most (node-limited routing); 0: any.
        n_shared_experts: experts that every token visits.
        shared_gate: what they answer is multiplied by a gate.
        n_dense_layers: first layers that are dense although the model has experts.
        expert_tp: ranks that the published recipe of the model cuts every expert over; 0: it does not say.
        kv_lora_rank: width of the compressed key/value of multi-head latent attention; 0 means none of it.
        q_lora_rank: width of the compressed query of MLA; 0 means that queries are not compressed.
        rope_head_dim: rotary part of an MLA head; its key is shared by all heads.
        v_head_dim: width of an MLA value head.
        index_heads, index_head_dim: of the indexer that chooses the keys of sparse attention; 0: none.
        index_top_k: keys that it chooses for a query.
        scan_heads, scan_key_heads: heads of a recurrent mixer, and those of its keys (or groups).
        scan_key_dim, scan_value_dim: sides of the state of a head.
        scan_chunk: tokens of the chunks that the recurrence is computed in.
        time_step_rank: width of the compressed time step of Mamba-1.
        conv_kernel, conv_bias: taps of the convolution before it, and whether that has a bias.
        left_out: what of the published model is not in here, in words.
        source: where the shape comes from.

    """

    name: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab: int
    pattern: str = ""
    gated: bool = True
    clamped: bool = False
    tied_embeddings: bool = False
    norm: str = "rmsnorm"
    norm_bias: bool = True
    norm_weights: bool = True
    norms_per_layer: int = 2
    parallel_blocks: bool = False
    qk_norm: bool = False
    qk_norm_weights: str = "head"
    attention_gate: bool = False
    qkv_bias: bool = False
    proj_bias: bool = False
    mlp_bias: bool = False
    max_positions: int = 0
    scaled_rotary: bool = False
    window: int = 0
    global_every: int = 0
    causal: bool = True
    extra_params: int = 0
    n_mtp: int = 0
    dropout: bool = False
    n_experts: int = 0
    top_k: int = 0
    moe_ffn_hidden: int = 0
    route_nodes: int = 0
    n_shared_experts: int = 0
    shared_gate: bool = False
    n_dense_layers: int = 0
    expert_tp: int = field(default=0, compare=False)
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    rope_head_dim: int = 0
    v_head_dim: int = 0
    index_heads: int = 0
    index_head_dim: int = 0
    index_top_k: int = 0
    scan_heads: int = 0
    scan_key_heads: int = 0
    scan_key_dim: int = 0
    scan_value_dim: int = 0
    scan_chunk: int = 0
    time_step_rank: int = 0
    conv_kernel: int = 0
    conv_bias: bool = False
    left_out: str = field(default="", compare=False)
    source: str = ""

    @property
    def value_head_dim(self) -> int:
        """Width of one value head."""
        return self.v_head_dim if self.kv_lora_rank else self.head_dim

    @property
    def norm_params(self) -> int:
        """Parameters of one norm over the residual stream."""
        per_feature = 2 if self.norm == "layernorm" and self.norm_bias else 1
        return self.hidden * per_feature if self.norm_weights else 0

    @property
    def shared_ffn_hidden(self) -> int:
        """Inner width of the shared experts together; they run as one MLP."""
        return self.n_shared_experts * self.moe_ffn_hidden


_AT_LEAST_ONE: Final = ("n_layers", "hidden", "n_heads", "n_kv_heads", "head_dim", "vocab")
_NOT_NEGATIVE: Final = (
    *("ffn_hidden", "n_experts", "top_k", "moe_ffn_hidden", "n_shared_experts", "n_dense_layers"),
    *("q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim", "max_positions"),
    *("window", "global_every", "extra_params", "n_mtp", "expert_tp"),
    *("index_heads", "index_head_dim", "index_top_k", "conv_kernel", "time_step_rank"),
    *("scan_heads", "scan_key_heads", "scan_key_dim", "scan_value_dim", "scan_chunk"),
)


_LAYERS: Final = ("n_layers", "n_mtp", "n_dense_layers", "n_shared_experts", "n_experts", "top_k")
MOST_LAYERS: Final = 10_000  # the deepest transformer known, DeepNet (arXiv:2203.00555), has 1,000
_MOST_SIZE: Final = 10**12  # a side of a matrix; and parameters outside of the layers


def check(model: Sizes) -> None:
    """Raise ModelError if a size of *model* is missing, not positive, or contradicts another."""
    _check_sizes(model)
    if model.n_heads % model.n_kv_heads:
        raise ModelError(
            f"{model.name}: n_kv_heads={model.n_kv_heads} does not divide n_heads={model.n_heads}; "
            f"{near_divisors(model.n_heads, model.n_kv_heads)} would work"
        )
    if model.norm not in ("rmsnorm", "layernorm"):
        raise ModelError(f"{model.name}: norm={model.norm!r}: one of rmsnorm, layernorm")
    if model.qk_norm_weights not in ("head", "all", "none"):
        raise ModelError(f"{model.name}: qk_norm_weights={model.qk_norm_weights!r}: one of head, all, none")
    if model.norms_per_layer not in (1, 2, 4):
        raise ModelError(f"{model.name}: norms_per_layer={model.norms_per_layer}: one of 1, 2, 4")
    if model.n_experts and not (model.moe_ffn_hidden and 1 <= model.top_k <= model.n_experts):
        raise ModelError(
            f"{model.name}: n_experts={model.n_experts} needs moe_ffn_hidden (is {model.moe_ffn_hidden}) "
            f"and top_k (is {model.top_k}) between 1 and n_experts"
        )
    # A pattern says itself which layers are dense; ``check_pattern`` asks for their width.
    if not (model.ffn_hidden or model.pattern) and (not model.n_experts or model.n_dense_layers):
        raise ModelError(f"{model.name}: ffn_hidden=0, but the model has dense layers")
    if model.kv_lora_rank and not (model.v_head_dim and 0 < model.rope_head_dim < model.head_dim):
        raise ModelError(
            f"{model.name}: kv_lora_rank={model.kv_lora_rank} needs v_head_dim (is {model.v_head_dim}) "
            f"and rope_head_dim (is {model.rope_head_dim}) below head_dim={model.head_dim}"
        )


def _check_sizes(model: Sizes) -> None:
    """Raise ModelError if a size is no whole number, or too small."""
    for least, names in ((1, _AT_LEAST_ONE), (0, _NOT_NEGATIVE)):
        for name in names:
            value = getattr(model, name)
            # To Python True is an int.
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ModelError(f"{model.name}: {name}={value!r}: a whole number of at least {least}")
            if value > (most := MOST_LAYERS if name in _LAYERS else _MOST_SIZE):
                raise ModelError(f"{model.name}: {name}={value:,}: at most {most:,}")
