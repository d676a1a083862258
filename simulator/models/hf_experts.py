"""Reads configs of mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from foretrace.simulator.models.hf_config import Config, Shape
from foretrace.simulator.models.hf_llama import llama, qwen3


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


def _deepseek(config: Config) -> Shape:
    """DeepSeek V2 and V3; multi-token prediction of V3 is left out, as transformers do: set ``n_mtp``."""
    nope_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    return {
        **llama(config),
        "head_dim": nope_dim + rope_dim,
        "n_experts": config.integer("n_routed_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": config.integer("moe_intermediate_size"),
        "n_shared_experts": config.integer("n_shared_experts"),
        "n_dense_layers": config.integer("first_k_dense_replace", 1),
        "kv_lora_rank": config.integer("kv_lora_rank"),
        "q_lora_rank": config.integer("q_lora_rank", 0),
        "rope_head_dim": rope_dim,
        "v_head_dim": config.integer("v_head_dim"),
    }


def _deepseek_v32(config: Config) -> Shape:
    """DeepSeek-V3.2: an indexer chooses the keys that a query sees."""
    return {
        **_deepseek(config),
        "index_heads": config.integer("index_n_heads"),
        "index_head_dim": config.integer("index_head_dim"),
        "index_top_k": config.integer("index_topk"),
    }


def _glm4_moe_lite(config: Config) -> Shape:
    """GLM-4.7-Flash: that of DeepSeek-V3, which layers are dense listed."""
    listed = config.items("mlp_layer_types", str)
    dense = listed.count("dense") if listed else config.integer("first_k_dense_replace", 1)
    known = [*["dense"] * dense, *["sparse"] * (len(listed) - dense)]
    config.need(
        listed == known or not listed, "mlp_layer_types: dense layers come first, all others are sparse"
    )
    return {**_deepseek(config), "n_dense_layers": dense}


def _minimax_m2(config: Config) -> Shape:
    """MiniMax-M2: norms of queries and keys go over all heads."""
    return {
        **_mixtral(config),
        "qk_norm": config.flag("use_qk_norm", default=True),
        "qk_norm_weights": "all",
    }


def _glm4_moe(config: Config) -> Shape:
    """GLM-4.5: biases on queries, keys and values alone; multi-token prediction is left out, as in V3."""
    return {
        **llama(config),
        "qkv_bias": config.flag("attention_bias", default=False),
        "proj_bias": False,
        "qk_norm": config.flag("use_qk_norm", default=False),
        "n_experts": config.integer("n_routed_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": config.integer("moe_intermediate_size"),
        "n_shared_experts": config.integer("n_shared_experts"),
        "n_dense_layers": config.integer("first_k_dense_replace"),
    }


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
        "extra_params": config.integer("num_hidden_layers")
        * (experts + config.integer("num_attention_heads")),
        "n_experts": experts,
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": config.integer("intermediate_size"),
    }


EXPERTS: Mapping[str, Callable[[Config], Shape]] = MappingProxyType(
    {
        "dbrx": _dbrx,
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
        "deepseek_v32": _deepseek_v32,
        "glm4_moe": _glm4_moe,
        "glm4_moe_lite": _glm4_moe_lite,
        "glm4v_moe_text": _glm4_moe,
        "gpt_oss": _gpt_oss,
        "kimi_k2": _deepseek,
        "minimax_m2": _minimax_m2,
        "mixtral": _mixtral,
        "qwen3_moe": _qwen3_moe,
        "qwen3_vl_moe_text": _qwen3_moe,
    }
)
"""Reader of each ``model_type`` that has experts."""
