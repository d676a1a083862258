"""The network to train: the kinds of its layers, its parameters and its FLOPs.

Every matrix is listed once, by the kind of its block (``simulator.models.kinds``), as a ``Linear`` with the
shape that one tensor-parallel rank holds; parameter counts, FLOPs and the operations of
``simulator.workload.micro_batch`` all come from these lists.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cache

from foretrace.simulator.errors import ModelError
from foretrace.simulator.models.kinds import KINDS, gate_params, mlp_linears, router, scan_flops
from foretrace.simulator.models.sizes import Linear, Sizes, check, share

__all__ = ["Linear", "Model", "share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Sizes):
    """A stack of layers between an embedding and a head; see ``Sizes`` for what it is given by.

    Attributes:
        tower: what makes tokens of images, if the model has it.

    Raises:
        ModelError: a size is missing, not positive, or contradicts another.
    """

    tower: Tower | None = None

    def __post_init__(self) -> None:
        check(self)
        check_pattern(self)

    def kinds(self, layer: int) -> tuple[str, ...]:
        """Return the kinds of blocks that *layer* (from 0) is made of, in order, keys of ``KINDS``."""
        if self.pattern:
            layers = _layers(self.pattern)
            return layers[layer % len(layers)]
        if self.kv_lora_rank:
            mixer = "sparse" if self.index_heads else "latent"
        else:
            # Counted from 1: every *global_every*-th layer is the last of its turn.
            is_global = self.global_every and (layer + 1) % self.global_every == 0
            mixer = "window" if self.window and not is_global else "attention"
        return mixer, "moe" if self.n_experts and layer >= self.n_dense_layers else "mlp"

    def mixer(self, layer: int) -> str:
        """Return the kind of *layer* that mixes tokens; empty if none does."""
        return next((kind for kind in self.kinds(layer) if not KINDS[kind].is_mlp), "")

    def window_of(self, layer: int) -> int:
        """Return how many keys a query of *layer* (from 0) sees at most; 0 means all."""
        return KINDS[mixer].reach(self) if (mixer := self.mixer(layer)) else 0

    def is_moe(self, layer: int) -> bool:
        """Return whether *layer* (from 0) has experts."""
        return "moe" in self.kinds(layer)

    def kv_heads_per_rank(self, tp: int) -> int:
        """Return key/value heads on each of *tp* ranks; fewer heads than ranks are replicated.

        With latent attention every query head has its own key and value once they are expanded.
        """
        return share(self.n_heads if self.kv_lora_rank else self.n_kv_heads, tp)

    def linears(self, layer: int, tp: int = 1) -> list[Linear]:
        """Return the matrices of *layer* outside its routed experts, and without their router."""
        return [linear for kind in self.kinds(layer) for linear in KINDS[kind].linears(self, tp)]

    def mlp_linears(self, ffn_hidden: int, tp: int = 1) -> tuple[Linear, Linear]:
        """Return up (with gate) and down of an MLP of inner width *ffn_hidden* on each of *tp* ranks."""
        return mlp_linears(self, ffn_hidden, tp)

    def block_params(self, kind: str, tp: int = 1) -> int:
        """Return parameters of a block of *kind* per rank of *tp*, with norms, without routed experts."""
        # Of two norms each block has one before it, of four another one behind; a single one counts with the
        # MLP.
        one, before = KINDS[kind], self.norms_per_layer // 2
        norms = self.norm_params * (self.norms_per_layer - before if one.is_mlp else before)
        return norms + one.others(self, tp) + sum(linear.params for linear in one.linears(self, tp))

    def dense_params(self, layer: int, tp: int = 1) -> int:
        """Return parameters of *layer* outside its routed experts on each of *tp* ranks."""
        return sum(self.block_params(kind, tp) for kind in self.kinds(layer))

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
        return self.dense_params(layer, tp) + self.expert_params(layer, etp or tp, ep)

    def embedding_params(self, tp: int = 1) -> int:
        """Return parameters of the embeddings, and what belongs to no layer, on each of *tp* ranks."""
        return (share(self.vocab, tp) + self.max_positions) * self.hidden + self.extra_params

    def head_params(self, tp: int = 1) -> int:
        """Return parameters of the output matrix on each of *tp* ranks, tied or not; no final norm."""
        return share(self.vocab, tp) * self.hidden

    def tower_params(self, tp: int = 1) -> int:
        """Return parameters of the tower on each of *tp* ranks; 0 without one."""
        return self.tower.params(tp) if self.tower else 0

    @property
    def n_params(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        layers = sum(self.layer_params(layer) for layer in range(self.n_layers))
        head = 0 if self.tied_embeddings else self.head_params()
        return self.tower_params() + self.embedding_params() + layers + self.norm_params + head

    @property
    def n_active_params(self) -> int:
        """Number of parameters that one token meets, embedding included: ``top_k`` of the routed experts."""
        idle = sum(self.expert_params(layer) for layer in range(self.n_layers))
        # A token leaves all but ``top_k`` experts of a layer idle.
        return self.n_params - (idle * (self.n_experts - self.top_k) // self.n_experts if idle else 0)

    def matmul_params(self, layer: int) -> int:
        """Return the weights of *layer* that one token is multiplied by: active experts, no norms."""
        linears = self.linears(layer)
        if self.is_moe(layer):
            linears += [router(self), *self.mlp_linears(self.moe_ffn_hidden) * self.top_k]
        gate = gate_params(self) if self.is_moe(layer) else 0
        return gate + sum(linear.n_in * linear.n_out for linear in linears)

    def flops_per_token(self, seq_len: int, *, causal: bool = False, frozen: bool = False) -> int:
        """Return model FLOPs of forward and backward per token, without any recomputation.

        Modules for multi-token prediction count, each with its matrix, its layer and its pass of the head.
        Of a plain transformer ``6 N + 12 L H Q T``: N the weights a token is multiplied by (output matrix
        included, embedding lookup not), L layers, H heads, Q head width, T = *seq_len*. Backward costs twice
        the forward.

        Args:
            seq_len: tokens per sequence; of a layer with a window, what the window lets a token see.
            causal: count only the half of the attention matrix that a causal mask keeps. The default counts
                it whole, as PaLM (arXiv:2204.02311, appendix B) and Megatron-LM (arXiv:2104.04473, eq. 3) do;
                MFU is stated with the default.
            frozen: weights have no gradients of their own (adapters are trained beside them): ``4 N``.
        """
        layers = [*range(self.n_layers), *[self.n_layers - 1] * self.n_mtp]
        weights = sum(self.matmul_params(layer) for layer in layers)
        # Each such module has a pass of the head and the matrix that joins two hidden states, beside the
        # model's own.
        weights += (1 + self.n_mtp) * self.head_params() + self.n_mtp * 2 * self.hidden * self.hidden
        mixed = sum(self._mixing_flops(self.mixer(layer), seq_len, causal=causal) for layer in layers)
        # Weights: 2 forward and 4 backward, or 2 where no weight has a gradient. Mixing: forward and twice
        # that.
        return (4 if frozen else 6) * weights + round(3 * mixed)

    def _mixing_flops(self, kind: str, seq_len: int, *, causal: bool) -> float:
        """Return forward FLOPs of a mixer of *kind* per token, beside its matrices."""
        if not kind:
            return 0.0
        one, found = KINDS[kind], 0.0
        if one.scan is not None:
            scan = one.scan(self, 1, seq_len)
            found = scan_flops(scan) + 2 * scan.convolved * self.conv_kernel
            if not one.attends:
                return found
        window = min(one.reach(self) or seq_len, seq_len)
        # Chunks see nothing of each other, so that the mask cuts each in half; a window slides over the whole
        # sequence.
        rows = window if one.in_chunks else seq_len
        # In the mean over all rows: the first ones of a window, or of a chunk, see less than all of it.
        seen = window * (1 - window / (2 * rows)) if causal and seq_len else window
        found += 2 * self.n_heads * (self.head_dim + self.value_head_dim) * seen
        if kind == "sparse":
            scores = seq_len * (0.5 if causal else 1)
            found += 2 * self.index_heads * (self.index_head_dim + 1) * scores  # and their sum over heads
        return found

    def describe(self) -> dict[str, object]:
        """Return the shape and the counts derived from it, as written to ``run.json``."""
        fields = {name: value for name, value in asdict(self).items() if name != "tower" or value}
        return {**fields, "n_params": self.n_params, "n_active_params": self.n_active_params}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower(Model):
    """A stack of layers that makes tokens of images: its embedding is of patches, and it has no head.

    ``vocab`` is the number of values in a patch, ``max_positions`` that of learned positions.

    Attributes:
        patches_per_token: neighbouring patches that become one token.
        patches_beside: those that go through the layers beside an image's, as a class token does.
        image_tokens: tokens of an image where all are of one size; 0: of any size.
        projector: rows and columns of the matrices that tokens go through behind the layers.

    Raises:
        ModelError: as ``Model``, or a matrix of the projector is none.
    """

    patches_per_token: int = 1
    patches_beside: int = 0
    image_tokens: int = 0
    projector: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        super(Tower, self).__post_init__()  # a class with slots is made twice, and super() means the first
        if min(self.patches_per_token, self.patches_beside + 1, self.image_tokens + 1) < 1:
            raise ModelError(f"{self.name}: patches_per_token is at least 1, other numbers at least 0")
        for sides in self.projector:
            if len(sides) != 2 or min(sides) < 1:
                raise ModelError(f"{self.name}: projector has {list(sides)}: rows and columns of a matrix")

    @property
    def n_params(self) -> int:
        """Number of parameters, the projector among them."""
        return self.params()

    def params(self, tp: int = 1) -> int:
        """Return parameters on each of *tp* ranks that cut its layers; patches and tokens stay whole."""
        layers = sum(self.layer_params(layer, tp) for layer in range(self.n_layers))
        return layers + self.ends_params

    @property
    def ends_params(self) -> int:
        """Parameters outside the layers."""
        return self.embedding_params() + self.norm_params + sum(map(math.prod, self.projector))

    def patches(self, tokens: int = 0) -> int:
        """Return how many patches an image of *tokens* has in the layers."""
        return (tokens or self.image_tokens) * self.patches_per_token + self.patches_beside

    def flops(self, tokens: int = 0) -> float:
        """Return forward FLOPs of an image of *tokens*."""
        patches, tokens = self.patches(tokens), tokens or self.image_tokens
        each = sum(
            2 * self.matmul_params(layer) + self._mixing_flops(self.mixer(layer), patches, causal=self.causal)
            for layer in range(self.n_layers)
        )
        # Patches beside an image's, such as a class token, are not made from pixels.
        embedded = 2 * (patches - self.patches_beside) * self.vocab * self.hidden
        return patches * each + embedded + 2 * tokens * sum(map(math.prod, self.projector))


@cache
def _layers(pattern: str) -> tuple[tuple[str, ...], ...]:
    """Return the kinds of each layer of *pattern*."""
    return tuple(tuple(item.split("+")) for item in pattern.split())


def check_pattern(model: Model) -> None:
    """Raise ModelError if the pattern of *model* has an unknown kind, or one that a size is missing for."""
    if not model.pattern:
        return
    for name in ("global_every", "n_dense_layers"):
        if getattr(model, name):
            raise ModelError(f"{model.name}: pattern and {name} both say which layers differ: give one")
    for kinds in dict.fromkeys(_layers(model.pattern)):
        _check_kinds(model, kinds)
    if model.n_mtp and len(last := model.kinds(model.n_layers - 1)) == 1:
        raise ModelError(
            f"{model.name}: n_mtp={model.n_mtp}: a module is like the last layer, {last[0]} alone"
        )


def _check_kinds(model: Model, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        if kind not in KINDS:
            raise ModelError(f"{model.name}: pattern has {kind!r}; one of {', '.join(KINDS)}, joined by +")
    if [KINDS[kind].is_mlp for kind in kinds] not in ([False], [True], [False, True]):
        raise ModelError(f"{model.name}: pattern has {'+'.join(kinds)}: a mixer, an MLP, or mixer+MLP")
    for kind in kinds:
        if missing := [name for name in KINDS[kind].needs if not getattr(model, name)]:
            raise ModelError(f"{model.name}: {kind} layers need {', '.join(missing)}")
