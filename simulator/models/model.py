"""The network to train: its shapes, its parameters and its FLOPs.

A ``Model`` is a transformer, a decoder or an encoder: attention (multi-head, grouped-query, or multi-head
latent; over the whole sequence or a window), an MLP (dense or a mixture of experts), embedding and head.
Every matrix is listed once, as a ``Linear`` with the shape that one tensor-parallel rank holds; parameter
counts, FLOPs and the operations of ``simulator.workload.micro_batch`` all come from these lists.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
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
    """

    name: str
    n_in: int
    n_out: int
    bias: bool = False

    @property
    def params(self) -> int:
        """Number of weights and biases."""
        return self.n_in * self.n_out + (self.n_out if self.bias else 0)


def share(n: int, parts: int) -> int:
    """Return the largest share when *n* items are dealt to *parts* ranks, so ``ceil(n / parts)``."""
    return -(-n // parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A transformer with one stack of layers, a decoder unless ``causal`` is false.

    Attributes:
        name: as a person would say it.
        n_layers: transformer layers.
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
        norms_per_layer: 2; 4 where outputs are normalised too (Gemma 2); 1 where attention and MLP read the
            same normalised input (Falcon 7B, Command R).
        parallel_blocks: attention and MLP read the same input (GPT-NeoX).
        qk_norm: queries and keys are normalised per head.
        qkv_bias, proj_bias, mlp_bias: which matrices have biases.
        max_positions: learned position embeddings; 0: rotary.
        scaled_rotary: rotations also scale queries and keys (YaRN).
        window: keys that a query of a local layer sees at most (sliding window); 0 means all.
        global_every: with a window, every so many layers the last one sees everything; 0 means none does.
        causal: a token sees only those before it; false for encoders.
        extra_params: others outside the layers: token types, a norm after the embedding, a pooler.
        n_mtp: modules behind the last layer that predict tokens further ahead (multi-token prediction), each
            with a layer like the last; published parameter counts leave them out, and so does ``n_params``.
        dropout: whether dropout is on, so that its masks are kept for backward.
        n_experts: routed experts of a mixture-of-experts layer; 0 means a dense model.
        top_k: routed experts that each token visits.
        moe_ffn_hidden: inner width of one expert.
        n_shared_experts: experts that every token visits.
        n_dense_layers: first layers that are dense although the model has experts.
        expert_tp: ranks that the published recipe of the model cuts every expert over; 0: it does not say.
        kv_lora_rank: width of the compressed key/value of multi-head latent attention; 0 means none of it.
        q_lora_rank: width of the compressed query of MLA; 0 means that queries are not compressed.
        rope_head_dim: rotary part of an MLA head; its key is shared by all heads.
        v_head_dim: width of an MLA value head.
        source: where the shape comes from.

    Raises:
        ModelError: a size is missing, not positive, or contradicts another.
    """

    name: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab: int
    gated: bool = True
    clamped: bool = False
    tied_embeddings: bool = False
    norm: str = "rmsnorm"
    norm_bias: bool = True
    norms_per_layer: int = 2
    parallel_blocks: bool = False
    qk_norm: bool = False
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
    n_shared_experts: int = 0
    n_dense_layers: int = 0
    expert_tp: int = field(default=0, compare=False)
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    rope_head_dim: int = 0
    v_head_dim: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        check(self)

    @property
    def value_head_dim(self) -> int:
        """Width of one value head."""
        return self.v_head_dim if self.kv_lora_rank else self.head_dim

    @property
    def norm_params(self) -> int:
        """Parameters of one norm over the residual stream."""
        return self.hidden * (2 if self.norm == "layernorm" and self.norm_bias else 1)

    @property
    def shared_ffn_hidden(self) -> int:
        """Inner width of the shared experts together; they run as one MLP."""
        return self.n_shared_experts * self.moe_ffn_hidden

    def window_of(self, layer: int) -> int:
        """Return how many keys a query of *layer* (from 0) sees at most; 0 means all."""
        if self.global_every and (layer + 1) % self.global_every == 0:
            return 0
        return self.window

    def is_moe(self, layer: int) -> bool:
        """Return whether *layer* (from 0) has experts."""
        return self.n_experts > 0 and layer >= self.n_dense_layers

    def kv_heads_per_rank(self, tp: int) -> int:
        """Return key/value heads on each of *tp* ranks; fewer heads than ranks are replicated.

        With latent attention every query head has its own key and value once they are expanded.
        """
        return share(self.n_heads if self.kv_lora_rank else self.n_kv_heads, tp)

    def attention_linears(self, tp: int = 1) -> tuple[Linear, ...]:
        """Return the matrices of one attention block on each of *tp* ranks; the last is row-parallel.

        Compressions of MLA are replicated: they are small, and their outputs are needed whole.
        Reference: DeepSeek-V2, arXiv:2405.04434, section 2.1.
        """
        heads = share(self.n_heads, tp)
        proj = Linear("proj", heads * self.value_head_dim, self.hidden, self.proj_bias)
        if not self.kv_lora_rank:
            n_qkv = (heads + 2 * self.kv_heads_per_rank(tp)) * self.head_dim
            return Linear("qkv", self.hidden, n_qkv, self.qkv_bias), proj
        nope_dim = self.head_dim - self.rope_head_dim
        down = (Linear("q_down", self.hidden, self.q_lora_rank),) if self.q_lora_rank else ()
        return (
            *down,
            Linear("q_up", self.q_lora_rank or self.hidden, heads * self.head_dim),
            Linear("kv_down", self.hidden, self.kv_lora_rank + self.rope_head_dim),
            Linear("kv_up", self.kv_lora_rank, heads * (nope_dim + self.v_head_dim)),
            proj,
        )

    def mlp_linears(self, ffn_hidden: int, tp: int = 1) -> tuple[Linear, Linear]:
        """Return up (with gate) and down of an MLP of inner width *ffn_hidden* on each of *tp* ranks."""
        inner = share(ffn_hidden, tp)
        return (
            Linear("up", self.hidden, inner * (2 if self.gated else 1), self.mlp_bias),
            Linear("down", inner, self.hidden, self.mlp_bias),
        )

    def attention_params(self, tp: int = 1) -> int:
        """Return parameters of one attention block, norms included, on each of *tp* ranks."""
        norms = self.norm_params * (self.norms_per_layer // 2)
        if self.qk_norm:
            norms += 2 * self.head_dim
        if self.kv_lora_rank:
            norms += self.q_lora_rank + self.kv_lora_rank
        return norms + sum(linear.params for linear in self.attention_linears(tp))

    def mlp_params(self, layer: int, tp: int = 1) -> int:
        """Return parameters of the MLP of *layer* outside its routed experts, on each of *tp* ranks."""
        norms = self.norm_params * (self.norms_per_layer - self.norms_per_layer // 2)
        if not self.is_moe(layer):
            return norms + sum(linear.params for linear in self.mlp_linears(self.ffn_hidden, tp))
        router = self.hidden * self.n_experts
        shared = self.mlp_linears(self.shared_ffn_hidden, tp) if self.n_shared_experts else ()
        return norms + router + sum(linear.params for linear in shared)

    def expert_params(self, layer: int, etp: int = 1, ep: int = 1) -> int:
        """Return parameters of the routed experts of *layer* on each of *etp* x *ep* ranks; 0 if dense."""
        if not self.is_moe(layer):
            return 0
        return share(self.n_experts, ep) * sum(
            linear.params for linear in self.mlp_linears(self.moe_ffn_hidden, etp)
        )

    def layer_params(self, layer: int, tp: int = 1, ep: int = 1, etp: int = 0) -> int:
        """Return parameters of *layer* on a rank; by default, of the whole layer.

        Args:
            layer: from 0.
            tp: ranks that matrices are cut over.
            ep: ranks that experts are dealt out to.
            etp: ranks that an expert is cut over; 0: *tp*.
        """
        dense = self.attention_params(tp) + self.mlp_params(layer, tp)
        return dense + self.expert_params(layer, etp or tp, ep)

    def embedding_params(self, tp: int = 1) -> int:
        """Return parameters of the embeddings, and what belongs to no layer, on each of *tp* ranks."""
        return (share(self.vocab, tp) + self.max_positions) * self.hidden + self.extra_params

    def head_params(self, tp: int = 1) -> int:
        """Return parameters of the output matrix on each of *tp* ranks, tied or not; no final norm."""
        return share(self.vocab, tp) * self.hidden

    @property
    def n_params(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        layers = sum(self.layer_params(layer) for layer in range(self.n_layers))
        head = 0 if self.tied_embeddings else self.head_params()
        return self.embedding_params() + layers + self.norm_params + head

    @property
    def n_mtp_params(self) -> int:
        """Parameters of the modules for multi-token prediction, beside ``n_params``; they share both ends.

        Each has two norms, a matrix that joins two hidden states, a layer like the last one, and a norm.
        """
        join = 2 * self.hidden * self.hidden
        return self.n_mtp * (3 * self.norm_params + join + self.layer_params(self.n_layers - 1))

    @property
    def n_active_params(self) -> int:
        """Number of parameters that one token meets, embedding included: ``top_k`` of the routed experts."""
        idle = sum(self.expert_params(layer) for layer in range(self.n_layers))
        return self.n_params - (idle * (self.n_experts - self.top_k) // self.n_experts if idle else 0)

    def matmul_params(self, layer: int) -> int:
        """Return the weights of *layer* that one token is multiplied by: active experts, no norms."""
        linears = list(self.attention_linears())
        if not self.is_moe(layer):
            linears += self.mlp_linears(self.ffn_hidden)
        else:
            linears.append(Linear("router", self.hidden, self.n_experts))
            linears += self.mlp_linears(self.moe_ffn_hidden) * self.top_k
            linears += self.mlp_linears(self.shared_ffn_hidden) if self.n_shared_experts else ()
        return sum(linear.n_in * linear.n_out for linear in linears)

    def flops_per_token(self, seq_len: int, *, causal: bool = False, frozen: bool = False) -> int:
        """Return model FLOPs of forward and backward per token, without any recomputation.

        Modules for multi-token prediction count, each with its matrix, its layer and its pass of the head.
        ``6 N + 12 L H Q T``: N the weights a token is multiplied by (output matrix included, embedding lookup
        not), L layers, H heads, Q head width, T = *seq_len*. Backward costs twice the forward.

        Args:
            seq_len: tokens per sequence; of a layer with a window, what the window lets a token see.
            causal: count only the half of the attention matrix that a causal mask keeps. The default counts
                it whole, as PaLM (arXiv:2204.02311, appendix B) and Megatron-LM (arXiv:2104.04473, eq. 3) do;
                MFU is stated with the default.
            frozen: weights have no gradients of their own (adapters are trained beside them): ``4 N``.
        """
        layers = [*range(self.n_layers), *[self.n_layers - 1] * self.n_mtp]
        weights = sum(self.matmul_params(layer) for layer in layers)
        weights += (1 + self.n_mtp) * self.head_params() + self.n_mtp * 2 * self.hidden * self.hidden
        per_key = 2 * self.n_heads * (self.head_dim + self.value_head_dim)
        seen = 0.0
        for layer in layers:
            window = min(self.window_of(layer) or seq_len, seq_len)
            seen += window * (1 - window / (2 * seq_len)) if causal and seq_len else window
        return (4 if frozen else 6) * weights + round(3 * per_key * seen)

    def describe(self) -> dict[str, object]:
        """Return the shape and the counts derived from it, as written to ``run.json``."""
        return {**asdict(self), "n_params": self.n_params, "n_active_params": self.n_active_params}


_AT_LEAST_ONE: Final = ("n_layers", "hidden", "n_heads", "n_kv_heads", "head_dim", "vocab")
_NOT_NEGATIVE: Final = (
    *("ffn_hidden", "n_experts", "top_k", "moe_ffn_hidden", "n_shared_experts", "n_dense_layers"),
    *("q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim", "max_positions"),
    *("window", "global_every", "extra_params", "n_mtp", "expert_tp"),
)


def check(model: Model) -> None:
    """Raise ModelError if a size of *model* is missing, not positive, or contradicts another."""
    _check_sizes(model)
    if model.n_heads % model.n_kv_heads:
        raise ModelError(
            f"{model.name}: n_kv_heads={model.n_kv_heads} does not divide n_heads={model.n_heads}; "
            f"{near_divisors(model.n_heads, model.n_kv_heads)} would work"
        )
    if model.norm not in ("rmsnorm", "layernorm"):
        raise ModelError(f"{model.name}: norm={model.norm!r}: one of rmsnorm, layernorm")
    if model.norms_per_layer not in (1, 2, 4):
        raise ModelError(f"{model.name}: norms_per_layer={model.norms_per_layer}: one of 1, 2, 4")
    if model.n_experts and not (model.moe_ffn_hidden and 1 <= model.top_k <= model.n_experts):
        raise ModelError(
            f"{model.name}: n_experts={model.n_experts} needs moe_ffn_hidden (is {model.moe_ffn_hidden}) "
            f"and top_k (is {model.top_k}) between 1 and n_experts"
        )
    if not model.ffn_hidden and (not model.n_experts or model.n_dense_layers):
        raise ModelError(f"{model.name}: ffn_hidden=0, but the model has dense layers")
    if model.kv_lora_rank and not (model.v_head_dim and 0 < model.rope_head_dim < model.head_dim):
        raise ModelError(
            f"{model.name}: kv_lora_rank={model.kv_lora_rank} needs v_head_dim (is {model.v_head_dim}) "
            f"and rope_head_dim (is {model.rope_head_dim}) below head_dim={model.head_dim}"
        )


def _check_sizes(model: Model) -> None:
    """Raise ModelError if a size is no whole number, or too small."""
    for least, names in ((1, _AT_LEAST_ONE), (0, _NOT_NEGATIVE)):
        for name in names:
            value = getattr(model, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ModelError(f"{model.name}: {name}={value!r}: a whole number of at least {least}")
