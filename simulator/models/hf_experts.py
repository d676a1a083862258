"""Reads configs of mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from foretrace.simulator.models.hf_config import Config, Shape
from foretrace.simulator.models.hf_llama import (
    Reader,
    as_wide_as,
    every,
    experts,
    family,
    flag,
    integer,
    llama,
    mixers,
    of,
    qwen3,
    sinks,
    sparse_layers,
    stack,
)

_MIXTRAL: Final = family("mixtral")
_QWEN3_MOE: Final = family("qwen3_moe")


def _sparse_pattern(config: Config) -> str:
    """Return the pattern of Qwen 2, empty where all layers have experts, as in every published one."""
    routed, n = sparse_layers(config), config.integer("num_hidden_layers")
    return "" if len(routed) == n else stack(["attention"] * n, routed)


# A gated shared expert beside those that are routed.
_QWEN2_MOE: Final = of(
    llama,
    **experts("num_experts", "moe_intermediate_size"),
    qkv_bias=flag("qkv_bias", default=True),
    pattern=_sparse_pattern,
    n_shared_experts=as_wide_as("shared_expert_intermediate_size", "moe_intermediate_size"),
    shared_gate=True,
)


def _ernie(config: Config) -> Shape:
    """ERNIE 4.5: experts from one layer on to the last; their router keeps a bias for each."""
    n, first = config.integer("num_hidden_layers"), config.integer("moe_layer_start_index", 1)
    last, step = config.integer("moe_layer_end_index", -1), config.integer("moe_layer_interval", 1)
    config.need(step == 1 and last in (-1, n - 1), "experts in every layer from the first of them are known")
    shape = of(llama, **experts("moe_num_experts", "moe_intermediate_size", "moe_k"))(config)
    return {
        **shape,
        **dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), config.flag("use_bias", default=False)),
        "n_shared_experts": config.integer("moe_num_shared_experts"),
        "n_dense_layers": first,
        "extra_params": (n - first) * int(shape["n_experts"]),
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


_GROUPED: Final = experts(
    "n_routed_experts", "moe_intermediate_size", n_shared_experts=integer("n_shared_experts")
)
_GLM4_MOE_LITE: Final = of(family("deepseek_v3"), n_dense_layers=_n_dense)


def _glm_moe_dsa(config: Config) -> Shape:
    """GLM-5: that of DeepSeek-V3.2, which layers are dense listed."""
    shared = {"shared", "S"} & {*config.items("indexer_types", str), *config.word("index_topk_pattern", "")}
    step = config.integer("index_topk_freq", 1)
    config.need(not shared and step <= 1, "an indexer that several layers share is not supported")
    return {**family("deepseek_v32")(config), "n_dense_layers": _n_dense(config)}


def _windowed(config: Config, step: int, dense: int) -> Shape:
    """Return that of Qwen 3 with experts but in *dense* layers, of which every so many sees everything."""
    n, found = config.integer("num_hidden_layers"), mixers(config, every(step))
    return {
        **_QWEN3_MOE(config),
        "window": config.integer("sliding_window"),
        "pattern": stack(found, range(dense, n)),
        "n_shared_experts": config.integer("num_shared_experts", 0),
    }


def _exaone_moe(config: Config) -> Shape:
    """K-EXAONE: every fourth layer sees everything, experts but in the first ones."""
    step = 4 if config.items("layer_types", str) else config.integer("sliding_window_pattern", 4)
    return _windowed(config, step, _n_dense(config))


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
    n, shape = config.integer("num_hidden_layers"), _QWEN3_MOE(config)
    found = mixers(
        config, lambda i: "full_attention" if i < 2 or i % 4 == 1 or i == n - 1 else "sliding_attention"
    )
    dense = config.items("mlp_only_layers", int) or (0, 1)
    return {
        **shape,
        "window": config.integer("sliding_window"),
        "pattern": stack(found, set(range(n)) - set(dense)),
        "n_shared_experts": as_wide_as("shared_expert_intermediate_size", "moe_intermediate_size")(config),
        "extra_params": sinks(config),
    }


def _granitemoe_swa(config: Config) -> Shape:
    """Granite with experts and windows but for every fourth layer, the first one among them; a sink each."""
    found = mixers(config, lambda i: "sliding_attention" if i % 4 else "full_attention")
    return {
        **family("granitemoe")(config),
        "window": config.integer("sliding_window"),
        "pattern": stack(found, range(len(found))),
        "extra_params": sinks(config),
    }


def _axk1(config: Config) -> Shape:
    """A.X K1: that of GLM-4.7-Flash, what experts answer normalised."""
    shape = _GLM4_MOE_LITE(config)
    n_norms = int(shape["n_layers"]) - int(shape["n_dense_layers"])
    return {**shape, "extra_params": n_norms * int(shape["hidden"])}


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
    shape = _MIXTRAL(config)
    return {
        **shape,
        "mlp_bias": True,
        "clamped": True,
        "scaled_rotary": config.within("rope_scaling", {}).word("rope_type", "") == "yarn",
        "window": config.integer("sliding_window", 128),
        "global_every": 2,
        "extra_params": sinks(config) + int(shape["n_layers"]) * int(shape["n_experts"]),
    }


EXPERTS: Mapping[str, Reader] = MappingProxyType(
    {
        "afmoe": _afmoe,
        "axk1": _axk1,
        "dbrx": _dbrx,
        "ernie4_5_moe": _ernie,
        "exaone_moe": _exaone_moe,
        "flint": _flint,
        "glm4_moe_lite": _GLM4_MOE_LITE,  # GLM-4.7-Flash
        "glm_moe_dsa": _glm_moe_dsa,
        "gpt_oss": _gpt_oss,
        "granitemoe_swa": _granitemoe_swa,
        "hunyuan_v1_moe": _hunyuan_v1_moe,
        # Hunyuan 3
        "hy_v3": of(_QWEN3_MOE, n_shared_experts=integer("num_shared_experts"), n_dense_layers=_n_dense),
        # Mellum 2: layers that see everything and those that do not are listed
        "mellum": lambda config: _windowed(config, 1, _n_dense(config, 0)),
        # Phi-3.5-MoE: layer norms; the head may have a bias
        "phimoe": of(
            _MIXTRAL,
            norm="layernorm",
            extra_params=lambda config: (
                config.integer("vocab_size") if config.flag("lm_head_bias", default=False) else 0
            ),
        ),
        "qwen2_moe": _QWEN2_MOE,
        # as GLM-4.5 without a dense layer
        "solar_open": of(
            lambda config: llama(config, ffn=0), **_GROUPED, qk_norm=flag("use_qk_norm"), n_dense_layers=0
        ),
    }
)
"""Reader of each ``model_type`` that has experts, but for those that are like another."""
