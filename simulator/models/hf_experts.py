"""Reads configs of mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from foretrace.simulator.models.hf_config import Config, Shape
from foretrace.simulator.models.hf_llama import llama, mixers, pattern, qwen3, sinks


def _mixtral(config: Config) -> Shape:
    return {
        **llama(config),
        "n_experts": config.integer("num_local_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": config.integer("intermediate_size"),
    }


def _qwen3_moe(config: Config) -> Shape:
    return {
        **qwen3(config),
        "n_experts": config.integer("num_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": config.integer("moe_intermediate_size"),
    }


def _qwen2_moe(config: Config) -> Shape:
    """Qwen 1.5 and 2 with experts: a gated shared one beside those that are routed."""
    n, step = config.integer("num_hidden_layers"), config.integer("decoder_sparse_step", 1)
    dense = set(config.items("mlp_only_layers", int))
    routed = [i not in dense and (i + 1) % step == 0 for i in range(n)]
    inner = config.integer("moe_intermediate_size")
    shared = config.integer("shared_expert_intermediate_size")
    return {
        **llama(config),
        "qkv_bias": config.flag("qkv_bias", default=True),
        # Empty where all are alike, as in every published one.
        "pattern": "" if all(routed) else pattern([f"attention+{'moe' if one else 'mlp'}" for one in routed]),
        "n_experts": config.integer("num_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": inner,
        "n_shared_experts": config.multiple("shared_expert_intermediate_size", shared, inner),
        "shared_gate": True,
    }


def _olmoe(config: Config) -> Shape:
    """OLMoE: norms of queries and keys go over all heads."""
    return {
        **llama(config),
        "qk_norm": True,
        "qk_norm_weights": "all",
        "n_experts": config.integer("num_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": config.integer("intermediate_size"),
    }


def _phimoe(config: Config) -> Shape:
    """Phi-3.5-MoE: layer norms; the head may have a bias."""
    bias = config.flag("lm_head_bias", default=False)
    extra = config.integer("vocab_size") if bias else 0
    return {**_mixtral(config), "norm": "layernorm", "extra_params": extra}


def _granitemoe(config: Config) -> Shape:
    """Granite 3 with experts, and with shared ones beside them."""
    inner, shared = config.integer("intermediate_size"), config.integer("shared_intermediate_size", 0)
    n_shared = config.multiple("shared_intermediate_size", shared, inner)
    return {**_mixtral(config), "n_shared_experts": n_shared}


def _granitemoe_swa(config: Config) -> Shape:
    """Granite with experts and windows but for every fourth layer, the first one among them; a sink each."""
    n = config.integer("num_hidden_layers")
    found = mixers(config, n, lambda i: "sliding_attention" if i % 4 else "full_attention")
    return {
        **_granitemoe(config),
        "window": config.integer("sliding_window"),
        "pattern": pattern([f"{kind}+moe" for kind in found]),
        "extra_params": sinks(config),
    }


def _aria(config: Config) -> Shape:
    """Aria: shared experts as wide as the others, no gate."""
    return {
        **llama(config),
        "n_experts": config.integer("moe_num_experts"),
        "top_k": config.integer("moe_topk"),
        "moe_ffn_hidden": config.integer("intermediate_size"),
        "n_shared_experts": config.integer("moe_num_shared_experts"),
    }


def _ernie(config: Config) -> Shape:
    """ERNIE 4.5: experts from one layer on to the last; their router keeps a bias for each."""
    n, first = config.integer("num_hidden_layers"), config.integer("moe_layer_start_index", 1)
    last, step = config.integer("moe_layer_end_index", -1), config.integer("moe_layer_interval", 1)
    config.need(step == 1 and last in (-1, n - 1), "experts in every layer from the first of them are known")
    bias, experts = config.flag("use_bias", default=False), config.integer("moe_num_experts")
    return {
        **llama(config),
        **dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), bias),
        "n_experts": experts,
        "top_k": config.integer("moe_k"),
        "moe_ffn_hidden": config.integer("moe_intermediate_size"),
        "n_shared_experts": config.integer("moe_num_shared_experts"),
        "n_dense_layers": first,
        "extra_params": (n - first) * experts,
    }


def _latent(config: Config) -> Shape:
    """Youtu and MiniCPM 3: latent attention of DeepSeek without experts."""
    nope_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    shape = llama(config)
    return {
        **shape,
        "head_dim": nope_dim + rope_dim,
        "kv_lora_rank": config.integer("kv_lora_rank"),
        "q_lora_rank": config.integer("q_lora_rank", 0),
        "rope_head_dim": rope_dim,
        "v_head_dim": config.integer("v_head_dim", int(shape["hidden"]) // max(int(shape["n_heads"]), 1)),
    }


def _deepseek(config: Config) -> Shape:
    """DeepSeek V2 and V3; multi-token prediction of V3 is left out, as transformers do: set ``n_mtp``."""
    return {
        **_latent(config),
        "n_experts": config.integer("n_routed_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": config.integer("moe_intermediate_size"),
        "n_shared_experts": config.integer("n_shared_experts"),
        "n_dense_layers": config.integer("first_k_dense_replace", 1),
    }


def _deepseek_v32(config: Config) -> Shape:
    """DeepSeek-V3.2: an indexer chooses the keys that a query sees."""
    return {
        **_deepseek(config),
        "index_heads": config.integer("index_n_heads"),
        "index_head_dim": config.integer("index_head_dim"),
        "index_top_k": config.integer("index_topk"),
    }


def _n_dense(config: Config, default: int = 1) -> int:
    """Return how many layers, the first ones, are dense."""
    listed = config.items("mlp_layer_types", str)
    dense = listed.count("dense") if listed else config.integer("first_k_dense_replace", default)
    known = [*["dense"] * dense, *["sparse"] * (len(listed) - dense)]
    config.need(
        listed == known or not listed, "mlp_layer_types: dense layers come first, all others are sparse"
    )
    return dense


def _glm4_moe_lite(config: Config) -> Shape:
    """GLM-4.7-Flash: that of DeepSeek-V3, which layers are dense listed."""
    return {**_deepseek(config), "n_dense_layers": _n_dense(config)}


def _axk1(config: Config) -> Shape:
    """A.X K1: that of GLM-4.7-Flash, what experts answer normalised."""
    shape = _glm4_moe_lite(config)
    n_norms = int(shape["n_layers"]) - int(shape["n_dense_layers"])
    return {**shape, "extra_params": n_norms * int(shape["hidden"])}


def _glm_moe_dsa(config: Config) -> Shape:
    """GLM-5: that of DeepSeek-V3.2, which layers are dense listed."""
    shared = {"shared", "S"} & {*config.items("indexer_types", str), *config.word("index_topk_pattern", "")}
    every = config.integer("index_topk_freq", 1)
    config.need(not shared and every <= 1, "an indexer that several layers share is not supported")
    return {**_deepseek_v32(config), "n_dense_layers": _n_dense(config)}


def _minimax_m2(config: Config) -> Shape:
    """MiniMax-M2: norms of queries and keys go over all heads."""
    return {
        **_mixtral(config),
        "qk_norm": config.flag("use_qk_norm", default=True),
        "qk_norm_weights": "all",
    }


def _glm4_moe(config: Config, ffn: int | None = None) -> Shape:
    """GLM-4.5: biases on queries, keys and values alone; multi-token prediction is left out, as in V3."""
    return {
        **llama(config, ffn=ffn),
        "qkv_bias": config.flag("attention_bias", default=False),
        "proj_bias": False,
        "qk_norm": config.flag("use_qk_norm", default=False),
        "n_experts": config.integer("n_routed_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": config.integer("moe_intermediate_size"),
        "n_shared_experts": config.integer("n_shared_experts"),
        "n_dense_layers": config.integer("first_k_dense_replace", None if ffn is None else 0),
    }


def _dots1(config: Config) -> Shape:
    """dots.llm1: that of GLM-4.5, all matrices of attention with biases or none."""
    return {
        **_glm4_moe(config),
        "proj_bias": config.flag("attention_bias", default=False),
        "qk_norm": True,
    }


def _windowed(config: Config, every: int, dense: int) -> Shape:
    """Return that of Qwen 3 with experts but in *dense* layers, of which every so many sees everything."""
    n = config.integer("num_hidden_layers")
    found = mixers(config, n, lambda i: "full_attention" if (i + 1) % every == 0 else "sliding_attention")
    return {
        **_qwen3_moe(config),
        "window": config.integer("sliding_window"),
        "pattern": pattern([f"{kind}+{'mlp' if i < dense else 'moe'}" for i, kind in enumerate(found)]),
        "n_shared_experts": config.integer("num_shared_experts", 0),
    }


def _exaone_moe(config: Config) -> Shape:
    """K-EXAONE: every fourth layer sees everything, experts but in the first ones."""
    every = 4 if config.items("layer_types", str) else config.integer("sliding_window_pattern", 4)
    return _windowed(config, every, _n_dense(config))


def _mellum(config: Config) -> Shape:
    """Mellum 2: layers that see everything and those that do not are listed."""
    return _windowed(config, 1, _n_dense(config, 0))


def _afmoe(config: Config) -> Shape:
    """Trinity: as K-EXAONE, outputs gated and normalised; routers keep a bias for each expert."""
    n, dense = config.integer("num_hidden_layers"), config.integer("num_dense_layers")
    return {
        **_windowed(config, config.integer("global_attn_every_n_layers", 4), dense),
        "attention_gate": True,
        "norms_per_layer": 4,
        "extra_params": (n - dense) * config.integer("num_experts"),
    }


def _flint(config: Config) -> Shape:
    """Flint: the first two layers, every fourth one and the last see everything, a sink for each head."""
    n, shape = config.integer("num_hidden_layers"), _qwen3_moe(config)
    found = mixers(
        config, n, lambda i: "full_attention" if i < 2 or i % 4 == 1 or i == n - 1 else "sliding_attention"
    )
    dense, inner = set(config.items("mlp_only_layers", int) or (0, 1)), int(shape["moe_ffn_hidden"])
    shared = config.integer("shared_expert_intermediate_size")
    return {
        **shape,
        "window": config.integer("sliding_window"),
        "pattern": pattern([f"{kind}+{'mlp' if i in dense else 'moe'}" for i, kind in enumerate(found)]),
        "n_shared_experts": config.multiple("shared_expert_intermediate_size", shared, inner),
        "extra_params": sinks(config),
    }


def _hy_v3(config: Config) -> Shape:
    """Hunyuan 3: Qwen 3 with a shared expert, and dense first layers."""
    return {
        **_qwen3_moe(config),
        "n_shared_experts": config.integer("num_shared_experts"),
        "n_dense_layers": _n_dense(config),
    }


def _hunyuan_v1_moe(config: Config) -> Shape:
    """Hunyuan-A13B: a shared expert; what may be listed is equal in all layers."""
    shape = qwen3(config)
    return {
        **shape,
        "n_experts": config.alike("num_experts"),
        "top_k": config.alike("moe_topk"),
        "moe_ffn_hidden": shape["ffn_hidden"],
        "n_shared_experts": 1,
    }


def _solar_open(config: Config) -> Shape:
    """Solar Open: that of GLM-4.5 without a dense layer."""
    bias = config.flag("attention_bias", default=False)
    return {**_glm4_moe(config, ffn=0), "proj_bias": bias, "n_dense_layers": 0}


def _dbrx(config: Config) -> Shape:
    """DBRX: sizes of attention and of experts are objects of their own; layer norms without bias."""
    attention, ffn = config.within("attn_config"), config.within("ffn_config")
    hidden, heads = config.integer("d_model"), config.integer("n_heads")
    inner = ffn.integer("ffn_hidden_size")
    return {
        "n_layers": config.integer("n_layers"),
        "hidden": hidden,
        "n_heads": heads,
        "n_kv_heads": attention.integer("kv_n_heads"),
        "head_dim": hidden // max(heads, 1),
        "ffn_hidden": inner,
        "vocab": config.integer("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", default=False),
        "norm": "layernorm",
        "norm_bias": False,
        "n_experts": ffn.integer("moe_num_experts"),
        "top_k": ffn.integer("moe_top_k"),
        "moe_ffn_hidden": inner,
    }


def _gpt_oss(config: Config) -> Shape:
    """gpt-oss: every second layer sees everything; routers have biases, heads a sink each."""
    shape, experts = llama(config), config.integer("num_local_experts")
    return {
        **shape,
        "mlp_bias": True,
        "clamped": True,
        "scaled_rotary": config.within("rope_scaling", {}).word("rope_type", "") == "yarn",
        "window": config.integer("sliding_window", 128),
        "global_every": 2,
        "extra_params": sinks(config) + config.integer("num_hidden_layers") * experts,
        "n_experts": experts,
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": config.integer("intermediate_size"),
    }


EXPERTS: Mapping[str, Callable[[Config], Shape]] = MappingProxyType(
    {
        "afmoe": _afmoe,
        "aria_text": _aria,
        "axk1": _axk1,
        "dbrx": _dbrx,
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
        "deepseek_v32": _deepseek_v32,
        "dots1": _dots1,
        "ernie4_5_moe": _ernie,
        "exaone_moe": _exaone_moe,
        "flex_olmo": _olmoe,
        "flint": _flint,
        "glm4_moe": _glm4_moe,
        "glm4_moe_lite": _glm4_moe_lite,
        "glm4v_moe_text": _glm4_moe,
        "glm_moe_dsa": _glm_moe_dsa,
        "gpt_oss": _gpt_oss,
        "granitemoe": _granitemoe,
        "granitemoe_swa": _granitemoe_swa,
        "granitemoeshared": _granitemoe,
        "hunyuan_v1_moe": _hunyuan_v1_moe,
        "hy_v3": _hy_v3,
        "kimi_k2": _deepseek,
        "mellum": _mellum,
        "minicpm3": _latent,
        "minimax_m2": _minimax_m2,
        "mistral4": _deepseek,
        "mixtral": _mixtral,
        "olmoe": _olmoe,
        "phimoe": _phimoe,
        "qwen2_moe": _qwen2_moe,
        "qwen3_moe": _qwen3_moe,
        "qwen3_omni_moe_text": _qwen3_moe,
        "qwen3_vl_moe_text": _qwen3_moe,
        "sarvam_mla": _deepseek,
        "sarvam_moe": _glm4_moe,
        "solar_open": _solar_open,
        "youtu": _latent,
    }
)
"""Reader of each ``model_type`` that has experts."""
