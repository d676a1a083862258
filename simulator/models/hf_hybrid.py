"""Reads configs of models whose layers are of several kinds, or of kinds beside plain attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from foretrace.simulator.models.hf_config import Config, Shape
from foretrace.simulator.models.hf_llama import llama

MIXERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "full_attention": "attention",
        "attention": "attention",
        "sliding_attention": "window",
        "chunked_attention": "chunk",
        "linear_attention": "linear",
    }
)
"""Kinds of mixers by what ``layer_types`` calls them; what linear attention is depends on the model."""


def pattern(layers: Sequence[str]) -> str:
    """Return *layers* as the shortest text that gives them again when it is repeated.

    >>> pattern(["window+mlp", "attention+mlp"] * 13)
    'window+mlp attention+mlp'
    """
    n = len(layers)
    period = next(p for p in range(1, n + 1) if all(layers[i] == layers[i % p] for i in range(n)))
    return " ".join(layers[:period])


def mixers(
    config: Config, n_layers: int, default: Callable[[int], str], key: str = "layer_types", **kinds: str
) -> list[str]:
    """Return the kind of mixer of each layer: as *key* lists them, else *default* of each index.

    Args:
        config: of the model.
        n_layers: layers that must be listed.
        default: names as *key* has them.
        key: of the list.
        **kinds: what names stand for in this architecture, beside ``MIXERS``.
    """
    listed = config.items(key, str) or [default(i) for i in range(n_layers)]
    known = {**MIXERS, **kinds}
    config.need(len(listed) == n_layers, f"{key} has {len(listed)} entries for {n_layers} layers")
    for name in dict.fromkeys(listed):
        config.need(name in known, f"{key} has {name!r}; known: {', '.join(known)}")
    return [known[name] for name in listed]


def local_and_global(config: Config, n_layers: int, every: int) -> Shape:
    """Return which layers see everything: every so many, or as ``layer_types`` lists them."""
    found = mixers(config, n_layers, lambda i: "sliding_attention" if (i + 1) % every else "full_attention")
    regular = ["attention" if (i + 1) % every == 0 else "window" for i in range(n_layers)]
    if found == regular:
        return {"global_every": every}
    return {"pattern": pattern([f"{kind}+mlp" for kind in found])}


def _llama4(config: Config) -> Shape:
    """Llama 4: chunks but for every fourth layer, experts in every or every second layer.

    Norms of queries and keys have no weights (``Llama4TextL2Norm``).
    """
    n, every = config.integer("num_hidden_layers"), config.integer("no_rope_layer_interval", 4)
    rotated = config.items("no_rope_layers", int) or [int((i + 1) % every != 0) for i in range(n)]
    step, listed = config.integer("interleave_moe_layer_step", 1), config.items("moe_layers", int)
    routed = set(listed or range(step - 1, n, step))
    found = mixers(config, n, lambda i: "chunked_attention" if rotated[i] else "full_attention")
    return {
        **llama(config),
        "pattern": pattern([f"{kind}+{'moe' if i in routed else 'mlp'}" for i, kind in enumerate(found)]),
        "ffn_hidden": config.integer("intermediate_size_mlp"),
        "window": config.integer("attention_chunk_size"),
        "qk_norm": config.flag("use_qk_norm", default=True),
        "qk_norm_weights": "none",
        "n_experts": config.integer("num_local_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": config.integer("intermediate_size"),
        "n_shared_experts": 1,
    }


def _qwen3_5(config: Config, ffn: int | None = None) -> Shape:
    """Qwen3.5: gated delta nets but for every fourth layer, which has gated attention."""
    n, every = config.integer("num_hidden_layers"), config.integer("full_attention_interval", 4)
    found = mixers(
        config,
        n,
        lambda i: "linear_attention" if (i + 1) % every else "full_attention",
        linear_attention="delta",
    )
    return {
        **llama(config, ffn=ffn),
        "pattern": pattern([f"{kind}+mlp" for kind in found]),
        "qk_norm": True,
        "attention_gate": True,
        "scan_heads": config.integer("linear_num_value_heads"),
        "scan_key_heads": config.integer("linear_num_key_heads"),
        "scan_key_dim": config.integer("linear_key_head_dim"),
        "scan_value_dim": config.integer("linear_value_head_dim"),
        "scan_chunk": 64,  # chunk_size of torch_chunk_gated_delta_rule, and of flash-linear-attention
        "conv_kernel": config.integer("linear_conv_kernel_dim"),
    }


def _qwen3_next(config: Config) -> Shape:
    """Qwen3-Next, and Qwen3.5 with experts: a gated shared one beside those that are routed."""
    shape = _qwen3_5(config, ffn=0)
    step, dense = config.integer("decoder_sparse_step", 1), set(config.items("mlp_only_layers", int))
    kinds, n = str(shape["pattern"]).split(), int(shape["n_layers"])
    routed = [i not in dense and (i + 1) % step == 0 for i in range(n)]
    layers = [kinds[i % len(kinds)].replace("mlp", "moe" if routed[i] else "mlp") for i in range(n)]
    inner, shared = (
        config.integer(key) for key in ("moe_intermediate_size", "shared_expert_intermediate_size")
    )
    return {
        **shape,
        "pattern": pattern(layers),
        "n_experts": config.integer("num_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": inner,
        "n_shared_experts": config.multiple("shared_expert_intermediate_size", shared, inner),
        "shared_gate": True,
    }


def _minimax(config: Config) -> Shape:
    """MiniMax-Text-01 and M1: lightning attention where ``attn_type_list`` has a 0, experts everywhere."""
    n = config.integer("num_hidden_layers")
    full = config.items("attn_type_list", int) or [(i + 1) % 2 for i in range(n)]
    config.need(len(full) == n, f"attn_type_list has {len(full)} entries for {n} layers")
    found = mixers(config, n, lambda i: "full_attention" if full[i] else "linear_attention")
    return {
        **llama(config),
        "pattern": pattern([f"{kind}+moe" for kind in found]),
        "scan_chunk": config.integer("block_size", 256),
        "n_experts": config.integer("num_local_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": config.integer("intermediate_size"),
    }


def _minimax_m1(config: Config) -> Shape:
    """The configuration that came with the checkpoints: which layers are which has no default."""
    config.need(bool(config.items("attn_type_list", int)), "missing key 'attn_type_list'")
    return _minimax(config)


def _nemotron_h(config: Config) -> Shape:
    """Nemotron-H and Nemotron Nano: each layer is a Mamba-2 mixer, attention, an MLP or experts alone."""
    letters = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}
    names = {"linear_attention": "mamba2", "mamba": "mamba2", "moe": "moe", "mlp": "mlp"}
    drawn = config.word("hybrid_override_pattern", "")
    config.need(set(drawn) <= set(letters), f"hybrid_override_pattern={drawn!r}: of {', '.join(letters)}")
    listed = config.items("layers_block_type", str) or config.items("layer_types", str)
    layers = [letters[letter] for letter in drawn] or [{**MIXERS, **names}.get(one, one) for one in listed]
    config.need(bool(layers), "missing key 'hybrid_override_pattern' or 'layers_block_type'")
    shape: Shape = {
        **llama(config, len(layers)),
        "n_layers": len(layers),
        "pattern": pattern(layers),
        "gated": False,
        "scan_heads": config.integer("mamba_num_heads"),
        "scan_key_heads": config.integer("n_groups"),
        "scan_key_dim": config.integer("ssm_state_size"),
        "scan_value_dim": config.integer("mamba_head_dim"),
        "scan_chunk": config.integer("chunk_size"),
        "conv_kernel": config.integer("conv_kernel"),
        "conv_bias": config.flag("use_conv_bias", default=True),
    }
    if "moe" not in layers:
        return shape
    latent = config.integer("moe_latent_size", 0)
    config.need(not latent, f"moe_latent_size={latent}: experts of a narrower input are not supported")
    inner, shared = (
        config.integer(key) for key in ("moe_intermediate_size", "moe_shared_expert_intermediate_size")
    )
    return {
        **shape,
        "n_experts": config.integer("n_routed_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": inner,
        "n_shared_experts": config.multiple("moe_shared_expert_intermediate_size", shared, inner),
    }


def _bamba(config: Config) -> Shape:
    """Bamba and Granite 4: Mamba-2 mixers but for a few layers of attention, each with an MLP."""
    n, hidden, heads = (config.integer(k) for k in ("num_hidden_layers", "hidden_size", "mamba_n_heads"))
    full, names = (
        set(config.items("attn_layer_indices", int)),
        dict.fromkeys(("mamba", "linear_attention"), "mamba2"),
    )
    key = "layers_block_type" if config.items("layers_block_type", str) else "layer_types"
    found = mixers(config, n, lambda i: "attention" if i in full else "mamba", key=key, **names)
    return {
        **llama(config),
        "pattern": pattern([f"{kind}+mlp" for kind in found]),
        "scan_heads": heads,
        "scan_key_heads": config.integer("mamba_n_groups"),
        "scan_key_dim": config.integer("mamba_d_state"),
        "scan_value_dim": config.integer("mamba_expand", 2) * hidden // max(heads, 1),
        "scan_chunk": config.integer("mamba_chunk_size"),
        "conv_kernel": config.integer("mamba_d_conv"),
        "conv_bias": config.flag("mamba_conv_bias", default=True),
    }


def _granite(config: Config) -> Shape:
    """Granite 4: the MLP is that of the shared experts, with or without routed ones beside it."""
    shape, shared = _bamba(config), config.integer("shared_intermediate_size")
    if not (n_experts := config.integer("num_local_experts", 0)):
        return {**shape, "ffn_hidden": shared}
    inner = config.integer("intermediate_size")
    return {
        **shape,
        "pattern": str(shape["pattern"]).replace("mlp", "moe"),
        "n_experts": n_experts,
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": inner,
        "n_shared_experts": config.multiple("shared_intermediate_size", shared, inner),
    }


HYBRIDS: Mapping[str, Callable[[Config], Shape]] = MappingProxyType(
    {
        "bamba": _bamba,
        "granitemoehybrid": _granite,
        "llama4_text": _llama4,
        "minimax": _minimax,
        "minimax_m1": _minimax_m1,
        "minimax_text_01": _minimax_m1,
        "nemotron_h": _nemotron_h,
        "qwen3_5_moe_text": _qwen3_next,
        "qwen3_5_text": _qwen3_5,
        "qwen3_next": _qwen3_next,
    }
)
"""Reader of each ``model_type`` that mixes kinds of layers."""
