"""Reads configs of models whose layers are of several kinds, or of kinds beside plain attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from foretrace.simulator.models.hf_config import Config, Shape
from foretrace.simulator.models.hf_llama import MIXERS, llama, mixers, pattern


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


def _olmo_hybrid(config: Config) -> Shape:
    """OLMo Hybrid: attention without a gate, norms of queries and keys over all heads."""
    return {**_qwen3_5(config), "attention_gate": False, "qk_norm_weights": "all"}


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


def _kimi_linear(config: Config) -> Shape:
    """Kimi Linear: Kimi delta attention but for some layers of latent attention, experts as DeepSeek-V3."""
    linear, n = config.within("linear_attn_config", {}), config.integer("num_hidden_layers")
    listed, dense = linear.items("full_attn_layers", int), config.items("mlp_layer_types", str)
    # Counted from 1 in the files of checkpoints.
    full = {i - 1 for i in listed} if listed else set(range(4, n, 4))
    found = mixers(
        config,
        n,
        lambda i: "full_attention" if i in full else "linear_attention",
        full_attention="latent",
        linear_attention="kimi",
    )
    config.need(len(dense) in (0, n), f"mlp_layer_types has {len(dense)} entries for {n} layers")
    dense = dense or ["dense"] * config.integer("first_k_dense_replace", 1)
    is_dense = [i < len(dense) and dense[i] == "dense" for i in range(n)]
    layers = [f"{kind}+{'mlp' if is_dense[i] else 'moe'}" for i, kind in enumerate(found)]
    heads = linear.integer("num_heads", config.integer("linear_num_heads", 32))
    width = linear.integer("head_dim", config.integer("linear_head_dim", 128))
    taps = config.integer("linear_conv_kernel_dim", 4)
    nope, rope = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    return {
        **llama(config),
        "pattern": pattern(layers),
        "head_dim": nope + rope,
        "kv_lora_rank": config.integer("kv_lora_rank"),
        "q_lora_rank": config.integer("q_lora_rank", 0),
        "rope_head_dim": rope,
        "v_head_dim": config.integer("v_head_dim"),
        "n_experts": config.integer("num_experts"),
        "top_k": config.integer("num_experts_per_token"),
        "moe_ffn_hidden": config.integer("moe_intermediate_size"),
        "n_shared_experts": config.integer("num_shared_experts"),
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
    heads, n = config.integer("mamba_n_heads"), config.integer("num_hidden_layers")
    inner = config.integer("mamba_d_ssm", config.integer("mamba_expand", 2) * config.integer("hidden_size"))
    return {
        **llama(config),
        "pattern": "both+mlp",
        "scan_heads": heads,
        "scan_key_heads": config.integer("mamba_n_groups"),
        "scan_key_dim": config.integer("mamba_d_state"),
        "scan_value_dim": inner // max(heads, 1),
        "scan_chunk": config.integer("mamba_chunk_size"),
        "conv_kernel": config.integer("mamba_d_conv"),
        "conv_bias": config.flag("mamba_conv_bias", default=True),
        "extra_params": n * inner if config.flag("mamba_rms_norm", default=False) else 0,
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
    n, experts = config.integer("num_hidden_layers"), config.integer("num_experts")
    (full, first), (step, start) = (
        (config.integer(f"{of}_layer_period"), config.integer(f"{of}_layer_offset"))
        for of in ("attn", "expert")
    )
    config.need(full > 0 and step > 0, "attn_layer_period and expert_layer_period are at least 1")
    found = ["attention" if i % full == first else "mamba" for i in range(n)]
    routed = [experts > 1 and i % step == start for i in range(n)]
    return {
        **llama(config),
        **sizes,
        "pattern": pattern([f"{kind}+{'moe' if routed[i] else 'mlp'}" for i, kind in enumerate(found)]),
        # Norms of the narrow time step, of B and of C.
        "extra_params": found.count("mamba")
        * (int(sizes["time_step_rank"]) + 2 * int(sizes["scan_key_dim"])),
        "n_experts": experts if any(routed) else 0,
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": config.integer("intermediate_size"),
    }


def _mamba(config: Config) -> Shape:
    """Mamba and Falcon Mamba: every layer is a Mamba-1 mixer alone."""
    names = {"expand": "expand", "state": "state_size", "rank": "time_step_rank", "taps": "conv_kernel"}
    sizes = _mamba_sizes(config, {**names, "bias": "use_conv_bias"})
    # Falcon Mamba says an expansion that it does not have, and the width beside it, which counts.
    inner = config.integer("intermediate_size", int(sizes["scan_heads"]))
    return {**_alone(config, "mamba"), **sizes, "scan_heads": inner}


def _mamba2(config: Config) -> Shape:
    """Mamba-2: every layer is such a mixer alone."""
    return {
        **_alone(config, "mamba2"),
        "scan_heads": config.integer("num_heads"),
        "scan_key_heads": config.integer("n_groups"),
        "scan_key_dim": config.integer("state_size"),
        "scan_value_dim": config.integer("head_dim"),
        "scan_chunk": config.integer("chunk_size"),
        "conv_kernel": config.integer("conv_kernel"),
        "conv_bias": config.flag("use_conv_bias", default=True),
    }


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


def _lfm2(config: Config) -> Shape:
    """LFM2: gated short convolutions but for some layers of attention."""
    n, inner = config.integer("num_hidden_layers"), config.integer("intermediate_size")
    inner = config.integer("block_ff_dim", inner)
    if config.flag("block_auto_adjust_ff_dim", default=True):
        unit, times = config.integer("block_multiple_of", 256), config.number("block_ffn_dim_multiplier", 1.0)
        config.need(unit > 0, f"block_multiple_of={unit}: at least 1")
        inner = unit * -(-int(times * int(2 * inner / 3)) // unit)
    listed = config.items("full_attn_idxs", int)
    full = set(listed) if listed else set(range(n))
    found = mixers(config, n, lambda i: "full_attention" if i in full else "conv", conv="short")
    return {
        **llama(config),
        "tied_embeddings": config.flag(
            "tie_embedding", default=config.flag("tie_word_embeddings", default=True)
        ),
        "pattern": pattern([f"{kind}+mlp" for kind in found]),
        "ffn_hidden": inner,
        "qk_norm": True,
        "conv_kernel": config.integer("conv_L_cache", 3),
        "conv_bias": config.flag("conv_bias", default=False),
    }


def _lfm2_moe(config: Config) -> Shape:
    """LFM2 with experts but in the first layers, whose MLPs are as wide as the file says."""
    n, dense = config.integer("num_hidden_layers"), config.integer("num_dense_layers")
    found = mixers(config, n, lambda _: "full_attention", conv="short")
    return {
        **_lfm2(config),
        "pattern": pattern([f"{kind}+{'mlp' if i < dense else 'moe'}" for i, kind in enumerate(found)]),
        "ffn_hidden": config.integer("intermediate_size"),
        "n_experts": config.integer("num_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": config.integer("moe_intermediate_size"),
    }


HYBRIDS: Mapping[str, Callable[[Config], Shape]] = MappingProxyType(
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
        "mamba2": _mamba2,
        "minimax": _minimax,
        "minimax_m1": _minimax_m1,
        "minimax_text_01": _minimax_m1,
        "nemotron_h": _nemotron_h,
        "olmo_hybrid": _olmo_hybrid,
        "qwen3_5_moe_text": _qwen3_next,
        "qwen3_5_text": _qwen3_5,
        "qwen3_next": _qwen3_next,
    }
)
"""Reader of each ``model_type`` that mixes kinds of layers."""
