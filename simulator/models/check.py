"""What the sizes of a model have to be, each on its own and beside the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from foretrace.simulator.errors import ModelError
from foretrace.simulator.nearest import near_divisors

if TYPE_CHECKING:
    from foretrace.simulator.models.model import Model

_AT_LEAST_ONE: Final = ("n_layers", "hidden", "n_heads", "n_kv_heads", "head_dim", "vocab")
_NOT_NEGATIVE: Final = (
    *("ffn_hidden", "n_experts", "top_k", "moe_ffn_hidden", "n_shared_experts", "n_dense_layers"),
    *("q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim", "max_positions"),
    *("window", "global_every", "extra_params", "n_mtp"),
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
