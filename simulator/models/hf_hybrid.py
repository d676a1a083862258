"""Reads configs of models whose layers are of several kinds, or of kinds beside plain attention."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foretrace.simulator.models.hf_config import Config, Shape
from foretrace.simulator.models.hf_llama import (
    MIXERS,
    Reader,
    as_wide_as,
    every,
    experts,
    flag,
    integers,
    latent,
    llama,
    mixers,
    of,
    pattern,
    sparse_layers,
    stack,
)


def _llama4(config: Config) -> Shape:
    """Llama 4: chunks but for every fourth layer, experts in every or every second layer.

    Norms of queries and keys have no weights (``Llama4TextL2Norm``).
    """
    n, step = config.integer("num_hidden_layers"), config.integer("no_rope_layer_interval", 4)
    rotated = config.items("no_rope_layers", int) or [int((i + 1) % step != 0) for i in range(n)]
    apart, listed = config.integer("interleave_moe_layer_step", 1), config.items("moe_layers", int)
    routed = set(listed or range(apart - 1, n, apart))
    found = mixers(config, lambda i: "chunked_attention" if rotated[i] else "full_attention")
    return {
        **_LLAMA4(config),
        "pattern": stack(found, routed),
        "ffn_hidden": config.integer("intermediate_size_mlp"),
        "window": config.integer("attention_chunk_size"),
        "qk_norm": config.flag("use_qk_norm", default=True),
    }


_LLAMA4: Final = of(
    llama, **experts("num_local_experts", "intermediate_size"), n_shared_experts=1, qk_norm_weights="none"
)


def _turns(config: Config) -> list[str]:
    """Return the mixers of Qwen3.5: gated delta nets but for every fourth layer, which has attention."""
    step = config.integer("full_attention_interval", 4)
    return mixers(config, every(step, "linear_attention"), {"linear_attention": "delta"})


_DELTA: Final[dict[str, Any]] = {
    "pattern": lambda config: stack(_turns(config)),
    "qk_norm": True,
    "attention_gate": True,
    "scan_chunk": 64,  # chunk_size of torch_chunk_gated_delta_rule, and of flash-linear-attention
    **integers(
        scan_heads="linear_num_value_heads",
        scan_key_heads="linear_num_key_heads",
        scan_key_dim="linear_key_head_dim",
        scan_value_dim="linear_value_head_dim",
        conv_kernel="linear_conv_kernel_dim",
    ),
}
_QWEN3_5: Final = of(llama, **_DELTA)
# Qwen3-Next, and Qwen3.5 with experts: a gated shared one beside those that are routed.
_QWEN3_NEXT: Final = of(
    lambda config: llama(config, ffn=0),
    **_DELTA
    | {
        "pattern": lambda config: stack(_turns(config), sparse_layers(config)),
        **experts("num_experts", "moe_intermediate_size"),
        "n_shared_experts": as_wide_as("shared_expert_intermediate_size", "moe_intermediate_size"),
        "shared_gate": True,
    },
)


def _minimax(config: Config) -> Shape:
    """MiniMax-Text-01 and M1: lightning attention where ``attn_type_list`` has a 0, experts everywhere."""
    n = config.integer("num_hidden_layers")
    full = config.items("attn_type_list", int) or [(i + 1) % 2 for i in range(n)]
    config.need(len(full) == n, f"attn_type_list has {len(full)} entries for {n} layers")
    found = mixers(config, lambda i: "full_attention" if full[i] else "linear_attention")
    shape = of(llama, **experts("num_local_experts", "intermediate_size"))(config)
    return {**shape, "pattern": stack(found, range(n)), "scan_chunk": config.integer("block_size", 256)}


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
    shape = {
        **of(lambda config: llama(config, len(layers)), **_NEMOTRON_SCAN)(config),
        "n_layers": len(layers),
        "pattern": pattern(layers),
        "gated": False,
    }
    if "moe" not in layers:
        return shape
    narrow = config.integer("moe_latent_size", 0)
    config.need(not narrow, f"moe_latent_size={narrow}: experts of a narrower input are not supported")
    shared = as_wide_as("moe_shared_expert_intermediate_size", "moe_intermediate_size")
    own = experts("n_routed_experts", "moe_intermediate_size", n_shared_experts=shared)
    return of(lambda _: shape, **own)(config)


_NEMOTRON_SCAN: Final = integers(
    scan_heads="mamba_num_heads",
    scan_key_heads="n_groups",
    scan_key_dim="ssm_state_size",
    scan_value_dim="mamba_head_dim",
    scan_chunk="chunk_size",
    conv_kernel="conv_kernel",
) | {"conv_bias": flag("use_conv_bias", default=True)}
_BESIDE_ATTENTION: Final = of(
    llama,
    **integers(
        scan_heads="mamba_n_heads",
        scan_key_heads="mamba_n_groups",
        scan_key_dim="mamba_d_state",
        scan_chunk="mamba_chunk_size",
        conv_kernel="mamba_d_conv",
    ),
    conv_bias=flag("mamba_conv_bias", default=True),
)
"""Reads Llama with the sizes of Mamba-2 mixers under the names that most have."""


def _bamba(config: Config) -> Shape:
    """Bamba and Granite 4: Mamba-2 mixers but for a few layers of attention, each with an MLP."""
    full, shape = set(config.items("attn_layer_indices", int)), _BESIDE_ATTENTION(config)
    names = dict.fromkeys(("mamba", "linear_attention"), "mamba2")
    key = "layers_block_type" if config.items("layers_block_type", str) else "layer_types"
    found = mixers(config, lambda i: "attention" if i in full else "mamba", names, key=key)
    inner = config.integer("mamba_expand", 2) * int(shape["hidden"])
    return {
        **shape,
        "pattern": stack(found),
        "scan_value_dim": inner // max(int(shape["scan_heads"]), 1),
    }


def _granite(config: Config) -> Shape:
    """Granite 4: the MLP is that of the shared experts, with or without routed ones beside it."""
    shape, shared = _bamba(config), config.integer("shared_intermediate_size")
    if not config.integer("num_local_experts", 0):
        return {**shape, "ffn_hidden": shared}
    shape |= {"pattern": str(shape["pattern"]).replace("mlp", "moe")}
    beside = as_wide_as("shared_intermediate_size", "intermediate_size")
    own = experts("num_local_experts", "intermediate_size", n_shared_experts=beside)
    return of(lambda _: shape, **own)(config)


def _kimi_linear(config: Config) -> Shape:
    """Kimi Linear: Kimi delta attention but for some layers of latent attention, experts as DeepSeek-V3."""
    linear, n = config.within("linear_attn_config", {}), config.integer("num_hidden_layers")
    listed, dense = linear.items("full_attn_layers", int), config.items("mlp_layer_types", str)
    # Counted from 1 in the files of checkpoints.
    full = {i - 1 for i in listed} if listed else set(range(4, n, 4))
    kinds = {"full_attention": "latent", "linear_attention": "kimi"}
    found = mixers(config, lambda i: "full_attention" if i in full else "linear_attention", kinds)
    config.need(len(dense) in (0, n), f"mlp_layer_types has {len(dense)} entries for {n} layers")
    dense = dense or ["dense"] * config.integer("first_k_dense_replace", 1)
    routed = {i for i in range(n) if i >= len(dense) or dense[i] != "dense"}
    heads = linear.integer("num_heads", config.integer("linear_num_heads", 32))
    width = linear.integer("head_dim", config.integer("linear_head_dim", 128))
    taps = config.integer("linear_conv_kernel_dim", 4)
    own = experts("num_experts", "moe_intermediate_size", "num_experts_per_token")
    return {
        **of(latent, **own)(config),
        "pattern": stack(found, routed),
        "n_shared_experts": config.integer("num_shared_experts"),
        "v_head_dim": config.integer("v_head_dim"),
        "scan_heads": heads,
        "scan_key_heads": heads,
        "scan_key_dim": width,
        "scan_value_dim": width,
        "scan_chunk": 64,  # chunk_size of chunk_kimi_delta_attention, and of flash-linear-attention
        "conv_kernel": linear.integer("short_conv_kernel_size", taps),
    }


def _falcon_h1(config: Config) -> Shape:
    """Falcon-H1: every layer has attention and a Mamba-2 mixer side by side."""
    for key in ("mamba_proj_bias", "projectors_bias"):
        config.need(not config.flag(key, default=False), f"{key}: not supported")
    shape = _BESIDE_ATTENTION(config)
    inner = config.integer("mamba_d_ssm", config.integer("mamba_expand", 2) * int(shape["hidden"]))
    is_normed = config.flag("mamba_rms_norm", default=False)
    return {
        **shape,
        "pattern": "both+mlp",
        "scan_value_dim": inner // max(int(shape["scan_heads"]), 1),
        "extra_params": int(shape["n_layers"]) * inner if is_normed else 0,
    }


def _mamba_sizes(config: Config, names: Mapping[str, str]) -> Shape:
    """Return the sizes of Mamba-1 mixers, *names* the keys for them in this architecture."""
    hidden = config.integer("hidden_size")
    return {
        "scan_heads": config.integer(names["expand"], 2) * hidden,
        "scan_key_dim": config.integer(names["state"], 16),
        "scan_chunk": SELECTIVE_CHUNK,
        "time_step_rank": config.automatic(names["rank"], -(-hidden // 16)),
        "conv_kernel": config.integer(names["taps"], 4),
        "conv_bias": config.flag(names["bias"], default=True),
    }


SELECTIVE_CHUNK: Final = 2048
"""Tokens between states that are kept (mamba-ssm, ``csrc/selective_scan/selective_scan.cpp``: n_chunks)."""


def _jamba(config: Config) -> Shape:
    """Jamba: Mamba-1 mixers with norms inside but for a few layers of attention, experts in some layers."""
    names = {"expand": "mamba_expand", "state": "mamba_d_state", "rank": "mamba_dt_rank"}
    sizes = _mamba_sizes(config, {**names, "taps": "mamba_d_conv", "bias": "mamba_conv_bias"})
    config.need(not config.flag("mamba_proj_bias", default=False), "mamba_proj_bias: not supported")
    n, n_experts = config.integer("num_hidden_layers"), config.integer("num_experts")
    (full, first), (step, start) = (
        (config.integer(f"{of}_layer_period"), config.integer(f"{of}_layer_offset"))
        for of in ("attn", "expert")
    )
    config.need(full > 0 and step > 0, "attn_layer_period and expert_layer_period are at least 1")
    found = ["attention" if i % full == first else "mamba" for i in range(n)]
    routed = {i for i in range(n) if n_experts > 1 and i % step == start}
    # Norms of the narrow time step, of B and of C.
    normed = int(sizes["time_step_rank"]) + 2 * int(sizes["scan_key_dim"])
    return {
        **of(llama, **experts("num_experts", "intermediate_size"))(config),
        **sizes,
        "pattern": stack(found, routed),
        "extra_params": found.count("mamba") * normed,
        "n_experts": n_experts if routed else 0,
    }


def _mamba(config: Config) -> Shape:
    """Mamba and Falcon Mamba: every layer is a Mamba-1 mixer alone."""
    names = {"expand": "expand", "state": "state_size", "rank": "time_step_rank", "taps": "conv_kernel"}
    sizes = _mamba_sizes(config, {**names, "bias": "use_conv_bias"})
    # Falcon Mamba says an expansion that it does not have, and the width beside it, which counts.
    inner = config.integer("intermediate_size", int(sizes["scan_heads"]))
    return {**_alone(config, "mamba"), **sizes, "scan_heads": inner}


def _alone(config: Config, kind: str) -> Shape:
    """Return what models of one *kind* of mixer alone share, which have neither heads nor an MLP."""
    config.need(not config.flag("use_bias", default=False), "use_bias: not supported")
    return {
        "n_layers": config.integer("num_hidden_layers"),
        "hidden": config.integer("hidden_size"),
        **dict.fromkeys(("n_heads", "n_kv_heads", "head_dim"), 1),
        "ffn_hidden": 0,
        "vocab": config.integer("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", default=True),
        "pattern": kind,
    }


_MAMBA2: Final = of(
    lambda config: _alone(config, "mamba2"),
    **_NEMOTRON_SCAN | integers(scan_heads="num_heads", scan_key_dim="state_size", scan_value_dim="head_dim"),
)


def _lfm2(config: Config) -> Shape:
    """LFM2: gated short convolutions but for some layers of attention."""
    inner = config.integer("block_ff_dim", config.integer("intermediate_size"))
    if config.flag("block_auto_adjust_ff_dim", default=True):
        unit, times = config.integer("block_multiple_of", 256), config.number("block_ffn_dim_multiplier", 1.0)
        config.need(unit > 0, f"block_multiple_of={unit}: at least 1")
        inner = unit * -(-int(times * int(2 * inner / 3)) // unit)
    full = config.items("full_attn_idxs", int)
    found = mixers(config, lambda i: "full_attention" if i in full or not full else "conv", {"conv": "short"})
    return {
        **llama(config),
        "tied_embeddings": config.flag(
            "tie_embedding", default=config.flag("tie_word_embeddings", default=True)
        ),
        "pattern": stack(found),
        "ffn_hidden": inner,
        "qk_norm": True,
        "conv_kernel": config.integer("conv_L_cache", 3),
        "conv_bias": config.flag("conv_bias", default=False),
    }


def _lfm2_moe(config: Config) -> Shape:
    """LFM2 with experts but in the first layers, whose MLPs are as wide as the file says."""
    n, dense = config.integer("num_hidden_layers"), config.integer("num_dense_layers")
    found = mixers(config, lambda _: "full_attention", {"conv": "short"})
    return {
        **of(_lfm2, **experts("num_experts", "moe_intermediate_size"))(config),
        "pattern": stack(found, range(dense, n)),
        "ffn_hidden": config.integer("intermediate_size"),
    }


HYBRIDS: Mapping[str, Reader] = MappingProxyType(
    {
        "bamba": _bamba,
        "falcon_h1": _falcon_h1,
        "falcon_mamba": _mamba,
        "granitemoehybrid": _granite,
        "jamba": _jamba,
        "kimi_linear": _kimi_linear,
        "lfm2": _lfm2,
        "lfm2_moe": _lfm2_moe,
        "llama4_text": _llama4,
        "mamba": _mamba,
        "mamba2": _MAMBA2,
        "minimax": _minimax,
        "minimax_m1": _minimax_m1,
        "minimax_text_01": _minimax_m1,
        "nemotron_h": _nemotron_h,
        # attention without a gate, norms of queries and keys over all heads
        "olmo_hybrid": of(_QWEN3_5, attention_gate=False, qk_norm_weights="all"),
        "qwen3_5_moe_text": _QWEN3_NEXT,
        "qwen3_5_text": _QWEN3_5,
        "qwen3_next": _QWEN3_NEXT,
    }
)
"""Reader of each ``model_type`` that mixes kinds of layers."""
