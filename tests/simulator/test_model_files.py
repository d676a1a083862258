"""Models out of files: Hugging Face configs and TOML, and what is said about those that are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretrace.simulator.errors import ModelError
from foretrace.simulator.models.hf import model_from_config, readers
from foretrace.simulator.models.hf_config import with_defaults
from foretrace.simulator.models.sources import load_model, names

LLAMA3_8B: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MINIMAX: dict[str, object] = {
    "head_dim": 128,
    "hidden_size": 6144,
    "intermediate_size": 9216,
    "num_attention_heads": 64,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "vocab_size": 200064,
}
CONFIGS: dict[str, dict[str, object]] = {
    "apertus": {"intermediate_size": 21504, "num_key_value_heads": 8},
    "cohere2": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
    },
    "dots1": {
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_size": 4096,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
    },
    "falcon_mamba": {
        "expand": 16,
        "hidden_size": 4096,
        "intermediate_size": 8192,
        "num_hidden_layers": 64,
        "tie_word_embeddings": False,
        "time_step_rank": "auto",
        "vocab_size": 65024,
    },
    "granite": {
        "intermediate_size": 12800,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "vocab_size": 49155,
    },
    "kimi_linear": {
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        }
    },
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "num_hidden_layers": 16},
    "lfm2_moe": {
        "num_hidden_layers": 24,
        "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
    },
    "mamba": {"hidden_size": 2560, "num_hidden_layers": 64},
    "olmo2": {"vocab_size": 100352},
    "olmo3": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 40,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "vocab_size": 100278,
    },
    "olmoe": {"intermediate_size": 1024},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "seed_oss": {"hidden_size": 5120},
    "llama": LLAMA3_8B,
    "glm4": LLAMA3_8B
    | {"intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2, "vocab_size": 151552}
    | {"attention_bias": True},
    "mistral": LLAMA3_8B | {"vocab_size": 32000, "sliding_window": 4096},
    "mixtral": LLAMA3_8B | {"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "qwen3": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3_moe": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "glm4_moe": {
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "vocab_size": 151552,
    },
    "gpt2": {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
    "gemma": {
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 256000,
    },
    "gemma2": {
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_attention_heads": 16,
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "vocab_size": 256000,
    },
    "deepseek_v3": {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "deepseek_v2": {
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 27,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "dbrx": {
        "d_model": 6144,
        "n_heads": 48,
        "n_layers": 40,
        "vocab_size": 100352,
        "attn_config": {"kv_n_heads": 8},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "gpt_oss": {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0},
        "sliding_window": 128,
        "vocab_size": 201088,
    },
    "phi3": {
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "num_hidden_layers": 40,
        "vocab_size": 100352,
    },
    "bert": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "vocab_size": 30522,
    },
    "bloom": {"hidden_size": 14336, "n_head": 112, "n_layer": 70, "vocab_size": 250880},
    "cohere": {
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_attention_heads": 64,
        "num_hidden_layers": 40,
        "vocab_size": 256000,
    },
    "falcon": {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "vocab_size": 65024},
    "gemma3_text": {
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        "vocab_size": 262144,
    },
    "gpt_neox": {
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_attention_heads": 64,
        "num_hidden_layers": 44,
        "vocab_size": 50432,
    },
    "nemotron": {
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_attention_heads": 48,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 256000,
    },
    # what the configuration class of each has by default is left out
    "llama4_text": {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False},
    "qwen3_next": {"intermediate_size": 5120},
    "minimax_m2": {},
    "deepseek_v32": {},
    "nemotron_h": {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"},
    "minimax_text_01": MINIMAX | {"attn_type_list": ([0] * 7 + [1]) * 10},
    "minimax_m1": MINIMAX | {"attn_type_list": ([0] * 7 + [1]) * 10},
    "minimax": MINIMAX | {"layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10},
    "glm": {},
    "glm4_moe_lite": {},
    "ministral3": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "bamba": {"attn_layer_indices": [9, 18, 27], "mamba_d_state": 128, "vocab_size": 128256},
    "granitemoehybrid": {
        "hidden_size": 1536,
        "intermediate_size": 512,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
        "mamba_d_state": 128,
        "mamba_n_heads": 48,
        "num_attention_heads": 12,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 40,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "tie_word_embeddings": True,
        "vocab_size": 100352,
    },
}
CONFIGS["kimi_k2"] = CONFIGS["deepseek_v3"] | {
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 163840,
}
PARAMS = {
    "apertus": 8_053_338_176,
    "cohere2": 8_028_033_024,
    "dots1": 142_774_373_888,
    "falcon_mamba": 7_272_665_088,
    "granite": 8_170_848_256,
    "kimi_linear": 49_122_675_072,
    "lfm2": 1_170_340_608,
    "lfm2_moe": 8_339_929_856,
    "mamba": 2_768_345_600,
    "olmo2": 7_298_617_344,
    "olmo3": 32_233_522_176,
    "olmoe": 6_919_161_856,
    "phimoe": 41_873_153_344,
    "seed_oss": 36_151_104_512,
    "bamba": 9_780_235_392,
    "glm": 9_399_951_360,
    "glm4_moe_lite": 29_943_390_976,
    "granitemoehybrid": 6_939_037_248,
    "kimi_k2": 1_026_408_209_408,
    "ministral3": 8_489_553_920,
    "qwen3_5_moe_text": 34_660_610_688,
    "qwen3_5_text": 8_953_803_264,
    "glm4": 9_400_279_040,
    "llama": 8_030_261_248,
    "mistral": 7_241_732_096,
    "mixtral": 46_702_792_704,
    "qwen2": 7_615_616_512,
    "qwen3": 8_190_735_360,
    "qwen3_moe": 30_532_122_624,
    "deepseek_v32": 671_877_929_216,
    "glm4_moe": 106_852_245_504,
    "llama4_text": 400_711_848_960,
    "minimax": 456_089_655_296,
    "minimax_m1": 456_089_655_296,
    "minimax_m2": 228_689_748_992,
    "minimax_text_01": 456_089_655_296,
    "nemotron_h": 8_100_852_736,
    "qwen3_next": 79_674_391_296,
    "gpt2": 124_439_808,
    "gemma": 2_506_172_416,
    "gemma2": 9_241_705_984,
    "deepseek_v3": 671_026_404_352,
    "bert": 109_482_240,
    "bloom": 176_247_271_424,
    "cohere": 34_980_831_232,
    "falcon": 6_921_720_704,
    "gemma3_text": 999_885_952,
    "gpt_neox": 20_554_567_680,
    "nemotron": 15_628_775_424,
    "deepseek_v2": 15_706_484_224,
    "dbrx": 131_596_523_520,
    "gpt_oss": 20_914_757_184,
    "phi3": 14_659_507_200,
}
DEFAULTS = {
    "afmoe": 19_232_600_000,
    "apertus1p5_text": 8_091_086_912,
    "arcee": 4_022_766_080,
    "aria_text": 18_517_069_824,
    "axk1": 518_983_052_288,
    "camembert": 109_482_240,
    "codegen": 6_050_882_784,
    "cosmos3_edge_text": 1_946_273_792,
    "cwm": 32_581_097_472,
    "emu3_text_model": 8_492_011_520,
    "ernie4_5": 360_748_032,
    "ernie4_5_moe": 21_825_437_888,
    "exaone": 7_818_448_896,
    "exaone4": 9_429_069_824,
    "exaone_moe": 28_550_639_616,
    "falcon_h1": 8_514_961_408,
    "flex_olmo": 33_270_665_216,
    "flint": 39_785_287_456,
    "glm_moe_dsa": 743_911_199_232,
    "glm_ocr_text": 373_359_616,
    "gpt-sw3": 124_439_808,
    "gpt_bigcode": 111_446_784,
    "gpt_neo": 1_315_575_808,
    "gptj": 6_050_882_784,
    "granite_docling_text": 386_630_656,
    "granite_swa": 2_144_463_840,
    "granitemoe": 37_039_116_288,
    "granitemoe_swa": 37_039_117_312,
    "granitemoeshared": 37_039_116_288,
    "helium": 2_172_643_840,
    "hunyuan_v1_dense": 8_859_684_864,
    "hunyuan_v1_moe": 13_188_337_664,
    "hy_v3": 295_033_528_320,
    "hyperclovax": 6_738_677_760,
    "internlm3": 8_804_241_408,
    "iquestcoder": 39_794_283_520,
    "jais2": 8_090_401_280,
    "jamba": 51_570_323_328,
    "mamba2": 7_285_403_648,
    "mellum": 12_149_923_072,
    "minicpm3": 4_073_875_968,
    "ministral": 7_241_732_096,
    "mistral4": 118_972_826_624,
    "mpt": 1_311_213_568,
    "nanochat": 256_573_440,
    "olmo": 6_888_095_744,
    "olmo_hybrid": 7_430_870_688,
    "opt": 125_239_296,
    "paddleocr_vl_text": 360_748_032,
    "persimmon": 9_397_175_296,
    "phi": 1_418_270_720,
    "qwen2_5_omni_text": 7_070_619_136,
    "qwen2_moe": 14_315_784_192,
    "qwen3_omni_moe_text": 17_201_485_816,
    "roberta": 124_644_864,
    "sarvam_mla": 106_031_763_456,
    "sarvam_moe": 32_152_648_064,
    "smollm3": 3_075_098_624,
    "solar_open": 102_651_793_408,
    "stablelm": 2_795_443_200,
    "starcoder2": 3_030_371_328,
    "vaultgemma": 2_614_222_080,
    "xlm-roberta": 109_482_240,
    "youtu": 1_961_560_064,
}
"""Parameters of what transformers 5.24 makes of a configuration that says nothing."""

SAME_AS = {
    "falcon_mamba": "falcon-mamba-7b",
    "glm_moe_dsa": "glm5",
    "jamba": "jamba-v0.1",
    "kimi_linear": "kimi-linear-48b-a3b",
    "lfm2": "lfm2-1.2b",
    "olmo2": "olmo2-7b",
    "olmo3": "olmo3-32b",
    "olmoe": "olmoe-1b-7b",
    "qwen2_moe": "qwen1.5-moe-a2.7b",
    "seed_oss": "seed-oss-36b",
    "smollm3": "smollm3-3b",
    "kimi_k2": "kimi-k2",
    "deepseek_v32": "deepseek-v3.2",
    "glm4_moe": "glm4.5-air",
    "llama4_text": "llama4-maverick",
    "minimax": "minimax-text-01",
    "minimax_m1": "minimax-text-01",
    "minimax_m2": "minimax-m2",
    "minimax_text_01": "minimax-text-01",
    "nemotron_h": "nemotron-h-8b",
    "qwen3_next": "qwen3-next-80b-a3b",
    "llama": "llama3-8b",
    "mistral": "mistral-7b",
    "mixtral": "mixtral-8x7b",
    "qwen2": "qwen2.5-7b",
    "qwen3": "qwen3-8b",
    "qwen3_moe": "qwen3-30b-a3b",
    "deepseek_v3": "deepseek-v3",
    "bloom": "bloom-176b",
    "cohere": "command-r-35b",
    "falcon": "falcon-7b",
    "gemma2": "gemma2-9b",
    "gpt_neox": "gpt-neox-20b",
    "nemotron": "nemotron4-15b",
    "deepseek_v2": "deepseek-v2-lite",
    "dbrx": "dbrx",
    "gpt_oss": "gpt-oss-20b",
    "phi3": "phi4",
    "bert": "bert-base",
    "gpt2": "gpt2",
    "gemma": "gemma-2b",
    "gemma3_text": "gemma3-1b",
}
LIKE = {
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
"""Language models of models that see, and the kind that each is."""


def config(kind: str) -> dict[str, object]:
    return {**CONFIGS.get(kind, {}), "model_type": kind}


def test_every_reader_has_a_known_count() -> None:
    assert set(PARAMS) == set(CONFIGS)
    assert set(readers()) - set(LIKE) == set(PARAMS) | set(DEFAULTS)


@pytest.mark.parametrize("kind", sorted(DEFAULTS))
def test_counts_of_an_empty_config_are_those_of_transformers_modules(kind: str) -> None:
    assert model_from_config({"model_type": kind}).n_params == DEFAULTS[kind]


@pytest.mark.parametrize("kind", sorted(LIKE))
def test_a_language_model_that_sees_is_the_one_that_does_not(kind: str) -> None:
    """What hears is left out, which is said."""
    plain_config = config(LIKE[kind]) | {"tie_word_embeddings": False}
    found = model_from_config(plain_config | {"model_type": kind, "audio_config": {"depth": 32}})
    plain = model_from_config(plain_config)
    assert replace(found, source=plain.source) == plain
    assert found.left_out == f"audio tower of {kind}"


@pytest.mark.parametrize("kind", sorted(PARAMS))
def test_counts_of_configs_are_those_of_the_checkpoints(kind: str) -> None:
    assert model_from_config(config(kind)).n_params == PARAMS[kind]


@pytest.mark.parametrize("kind", sorted(SAME_AS))
def test_a_config_reads_as_the_preset(kind: str) -> None:
    """But for what a configuration does not say: the name, its source, and on what groups of experts lie."""
    preset = load_model(SAME_AS[kind])
    own: dict[str, Any] = {"name": preset.name, "source": preset.source, "route_nodes": preset.route_nodes}
    assert replace(model_from_config(config(kind)), **own) == preset


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *(("dbrx", key) for key in ("attn_config", "ffn_config")),
        *(("minimax_m1", key) for key in sorted(MINIMAX) if key not in ("head_dim", "num_key_value_heads")),
        ("deepseek_v2", "num_experts_per_tok"),
    ],
)
def test_a_missing_key_is_named(kind: str, key: str) -> None:
    """Where the class of transformers has no default, or there is no class."""
    incomplete = {name: value for name, value in config(kind).items() if name != key}
    with pytest.raises(ModelError, match=f"missing key '{key}'"):
        model_from_config(incomplete, where="mine.json")


def test_what_a_file_leaves_out_is_what_transformers_has_and_named() -> None:
    """A null is no such thing: a window of none is no window, and heads of no width share the model's."""
    found = model_from_config(LLAMA3_8B | {"model_type": "mistral"} | {"num_hidden_layers": 2})
    assert found.window == 4096
    assert found.source == "config.json (mistral; defaults of transformers for sliding_window)"
    none = model_from_config(LLAMA3_8B | {"model_type": "mistral", "sliding_window": None})
    assert (none.window, none.source) == (0, "config.json (mistral)")
    wide = {"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 32}
    assert model_from_config(wide).head_dim == 128
    assert model_from_config(wide | {"head_dim": None}).head_dim == 32


def test_experts_are_counted_under_the_name_that_transformers_5_writes() -> None:
    found = config("qwen3_moe")
    later = {"num_local_experts" if key == "num_experts" else key: value for key, value in found.items()}
    assert model_from_config(later) == model_from_config(found)
    assert with_defaults({"num_local_experts": 8}, "qwen3_moe").get("num_experts") is None


@pytest.mark.parametrize("tied", [True, False, None])
def test_a_model_that_sees_is_tied_as_the_whole_says(tied: bool | None) -> None:
    """Where it does not say, as its text does."""
    text = config("mistral") | {"tie_word_embeddings": False}
    whole = {"model_type": "mistral3", "text_config": text, "tie_word_embeddings": tied}
    assert model_from_config(whole).tied_embeddings is bool(tied)


@pytest.mark.parametrize("listed", [["sparse"] + ["dense"] * 46, ["dense"] * 46 + ["other"]])
def test_dense_layers_come_first(listed: list[str]) -> None:
    with pytest.raises(ModelError, match="mlp_layer_types: dense layers come first"):
        model_from_config(config("glm4_moe_lite") | {"mlp_layer_types": listed})


def test_a_granite_without_routed_experts_has_the_mlp_of_the_shared_ones() -> None:
    dense = model_from_config(config("granitemoehybrid") | {"num_local_experts": 0})
    assert (dense.n_experts, dense.ffn_hidden) == (0, 1024)
    assert "moe" not in dense.pattern


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"model_type": "gemma4_text"},
            "model_type='gemma4_text' is not read (near: gemma3_text, ",
        ),
        ({"model_type": 8}, "model_type=8 is not read"),
        ({"model_type": "rwkv"}, "if its layers are of these kinds: attention, window, "),
        ({}, "missing key 'model_type'"),
        (LLAMA3_8B | {"hidden_size": "4096"}, 'hidden_size is "4096", but a whole number'),
        (LLAMA3_8B | {"tie_word_embeddings": 1}, "tie_word_embeddings is 1, but true or false"),
        (LLAMA3_8B | {"attention_dropout": "no"}, 'attention_dropout is "no", but a number'),
        (LLAMA3_8B | {"num_attention_heads": 0}, "n_heads=0"),
    ],
)
def test_a_config_that_is_wrong_is_one_clear_error(given: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        model_from_config(given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_sees_counts_as_its_language_model() -> None:
    config = {"model_type": "gemma3", "text_config": {**CONFIGS["gemma3_text"], "model_type": "gemma3_text"}}
    assert model_from_config(config).n_params == PARAMS["gemma3_text"]


def test_an_object_within_a_config_is_asked_for_by_name() -> None:
    flat = config("dbrx") | {"attn_config": 8}
    with pytest.raises(ModelError, match="attn_config is 8, but an object"):
        model_from_config(flat)


def test_a_config_is_found_in_its_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))
    assert load_model(tmp_path) == load_model(tmp_path / "config.json")


@pytest.mark.parametrize("text", ["{", "\x80", "[1, 2]"])
def test_a_file_that_is_no_config_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json( is not|: names)"):
        load_model(path)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("llama-3-70b", "llama3-70b"),
        ("Qwen3", "near: qwen3-0.6b, qwen3-1.7b, qwen3-14b; foretrace model list Qwen3 shows all "),
        ("zzz", f"foretrace model list shows all {len(names())}"),
        ("zzz.json", "there is no file zzz.json"),
    ],
)
def test_an_unknown_name_lists_near_ones(name: str, near: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(name)
    assert near in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_toml_file_changes_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text('base = "llama3-8b"\nn_layers = 4\n')
    preset = load_model("llama3-8b")
    assert load_model(path) == replace(preset, name="small", n_layers=4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n_layers = ", "is not TOML"),
        ("n_layers = 4", "no 'hidden' in it"),
        ('base = "llama9"', "base='llama9': one of"),
        ('base = "llama3-8b"\nn_layer = 4', "unknown key 'n_layer'; did you mean n_layers?"),
        ('base = "llama3-8b"\nn_layers = "4"', 'n_layers is "4", but a whole number'),
        ('base = "llama3-8b"\ngated = 1', "gated is 1, but true or false"),
    ],
)
def test_a_toml_file_that_is_wrong_is_one_clear_error(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert words in str(caught.value)


def test_names_that_checkpoints_have_beside_those_of_transformers_are_read() -> None:
    """Not the default of the class: that is of another size."""
    assert model_from_config({"model_type": "exaone", "num_layers": 30}).n_layers == 30
    listed = {"model_type": "hunyuan_v1_moe", "num_experts": [8] * 32, "moe_topk": [2] * 32}
    assert (model_from_config(listed).n_experts, model_from_config(listed).top_k) == (8, 2)
    with pytest.raises(ModelError, match=r"moe_topk has \[2, 4\]: equal in all layers is supported"):
        model_from_config(listed | {"moe_topk": [2, 4] * 16})


@pytest.mark.parametrize("times", [10**12, -1, "12", [1]])
def test_turns_that_are_not_those_of_the_layers_are_refused(times: object) -> None:
    with pytest.raises(ModelError, match="attention_types: lists of kinds, and how often each comes"):
        model_from_config({"model_type": "gpt_neo", "attention_types": [[["global"], times]]})
