"""Small models of transformers' own modules, run: their parameters and FLOPs are those that we count."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from foretrace.simulator.models import hf_config
from foretrace.simulator.models.hf import model_from_config, readers
from foretrace.simulator.models.hf_plain import bert
from foretrace.simulator.models.hf_vision import TOWERS
from foretrace.simulator.models.kinds import KINDS
from foretrace.simulator.models.model import Model

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")
flop_counter = pytest.importorskip("torch.utils.flop_counter")

TOKENS = 256
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TWO_OF_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
GROUPED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_mtp_layers": 0,
}
LATENT: dict[str, Any] = {
    **{key: value for key, value in (SIZES | GROUPED).items() if key != "head_dim"},
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 16,
    "mamba_d_head": 8,
    "mamba_n_groups": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 64,
    "pad_token_id": None,
}
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
OF_FOUR: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
SHORT: dict[str, Any] = SIZES | {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2}
ALONE: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 4, "state_size": 16}
PLAIN: dict[str, Any] = {"vocab_size": 128, "pad_token_id": 0, "resid_pdrop": 0.0}
OF_GPT: dict[str, Any] = PLAIN | {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": TOKENS}
PADDED: dict[str, Any] = SIZES | {"pad_token_id": 0, "eos_token_id": 1}
ROUTED: dict[str, Any] = PADDED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DENSE_LATENT: dict[str, Any] = {key: value for key, value in LATENT.items() if key not in GROUPED}
CONFIGS: dict[str, dict[str, Any]] = {
    "afmoe": ROUTED | {"sliding_window": 2 * TOKENS, "num_shared_experts": 2, "num_dense_layers": 2},
    "codegen": OF_GPT | {"rotary_dim": 8},
    "cwm": PADDED | {"sliding_window": 2 * TOKENS},
    "exaone": PADDED,
    "flex_olmo": PADDED | {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_bigcode": OF_GPT,
    "gpt_neo": PLAIN
    | {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "window_size": 2 * TOKENS}
    | {"attention_types": [[["global", "local", "local"], 1], [["global"], 1]]},
    "gptj": OF_GPT | {"rotary_dim": 8},
    "helium": PADDED,
    "hunyuan_v1_moe": PADDED | {"num_experts": 4, "moe_topk": 2},
    "hy_v3": ROUTED | {"num_shared_experts": 2, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6},
    "hyperclovax": PADDED,
    "internlm3": PADDED,
    "iquestcoder": PADDED,
    "jais2": PADDED,
    "mellum": ROUTED
    | {"sliding_window": 2 * TOKENS, "layer_types": ["full_attention", "sliding_attention"] * 4}
    | {"mlp_layer_types": ["dense"] + ["sparse"] * 7},
    "minicpm3": DENSE_LATENT | {"pad_token_id": 0},
    "ministral": PADDED
    | {"sliding_window": 2 * TOKENS, "layer_types": ["full_attention"] + ["sliding_attention"] * 7},
    "mpt": {"vocab_size": 128, "d_model": 64, "n_heads": 4, "n_layers": 4},
    "opt": PADDED | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": PADDED,
    "stablelm": PADDED | {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    "vaultgemma": PADDED | {"sliding_window": 2 * TOKENS},
    "youtu": DENSE_LATENT | {"pad_token_id": 0},
    "apertus": SIZES,
    "apertus1p5_text": SIZES,
    "aria_text": PADDED | {"moe_num_experts": 4, "moe_topk": 2},
    "axk1": LATENT | {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6},
    "flint": ROUTED | {"sliding_window": 2 * TOKENS, "shared_expert_intermediate_size": 64},
    "gpt-sw3": OF_GPT,
    "granite_swa": SIZES | {"sliding_window": 2 * TOKENS},
    "granitemoe_swa": SIZES | TWO_OF_FOUR | {"sliding_window": 2 * TOKENS, "shared_intermediate_size": 192},
    "nanochat": SIZES,
    "olmo": PADDED,
    "olmo_hybrid": PADDED | DELTA | {"linear_num_key_heads": 4},
    "persimmon": PADDED,
    "sarvam_mla": LATENT | {"pad_token_id": 0},
    "sarvam_moe": PADDED | GROUPED,
    "arcee": SIZES,
    # groups as many as heads: transformers multiplies B and C of a group again for each of its heads
    "bamba": SIZES | MAMBA | {"attn_layer_indices": [2, 5]},
    "cohere2": SIZES | {"sliding_window": 2 * TOKENS, "pad_token_id": None},
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT | {"index_topk": 2 * TOKENS, "index_n_heads": 4, "index_head_dim": 16},
    "dots1": SIZES | GROUPED,
    "ernie4_5": SIZES | {"use_bias": True},
    "ernie4_5_moe": SIZES
    | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2},
    "exaone4": SIZES | {"sliding_window": 2 * TOKENS},
    "exaone_moe": SIZES
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"sliding_window": 2 * TOKENS, "n_group": 1, "topk_group": 1},
    "falcon_h1": SIZES | MAMBA | {"mamba_d_ssm": 128, "mamba_rms_norm": True},
    "falcon_mamba": ALONE | {"expand": 16, "intermediate_size": 128},
    "gemma3_text": SIZES | {"sliding_window": 2 * TOKENS},
    "glm": SIZES | {"pad_token_id": 0},
    "glm4": SIZES | {"pad_token_id": 0},
    "glm4_moe_lite": {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
    "glm_moe_dsa": LATENT | {"index_topk": 2 * TOKENS, "index_n_heads": 4, "index_head_dim": 16},
    "granite": SIZES,
    "granitemoe": SIZES | TWO_OF_FOUR,
    "granitemoeshared": SIZES | TWO_OF_FOUR | {"shared_intermediate_size": 192},
    "granitemoehybrid": SIZES
    | MAMBA
    | {"layer_types": ["linear_attention", "full_attention"] * 4, "num_local_experts": 4}
    | {"num_experts_per_tok": 2, "shared_intermediate_size": 192, "intermediate_size": 96},
    "glm4_moe": SIZES | GROUPED | {"use_qk_norm": True, "attention_bias": True},
    "hunyuan_v1_dense": SIZES,
    "jamba": SIZES
    | {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 4, "pad_token_id": 0}
    | {"attn_layer_offset": 2, "use_mamba_kernels": False, "mamba_d_state": 8},
    "kimi_linear": {key: value for key, value in LATENT.items() if key not in ("n_group", "q_lora_rank")}
    | {"num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1, "pad_token_id": 0}
    | {"linear_head_dim": 16, "linear_num_heads": 4, "num_expert_group": 1},
    "lfm2": SHORT | {"pad_token_id": 0},
    "lfm2_moe": SHORT | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    # transformers sends every token to every expert, and scores with nothing those that it does not visit
    "llama4_text": SIZES
    | {"intermediate_size_mlp": 80, "num_local_experts": 2, "num_experts_per_tok": 2}
    | {"attention_chunk_size": 2 * TOKENS, "interleave_moe_layer_step": 2},
    "mamba": ALONE,
    "mamba2": ALONE | {"num_heads": 16, "head_dim": 8, "n_groups": 16, "chunk_size": 64},
    "minimax": SIZES | TWO_OF_FOUR | {"block_size": 64},
    "minimax_m2": SIZES | TWO_OF_FOUR,
    "ministral3": SIZES,
    "mistral": SIZES | {"sliding_window": 2 * TOKENS},
    "nemotron_h": SIZES
    | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention", "moe"]}
    | {"moe_shared_expert_intermediate_size": 64, "ssm_state_size": 16, "mamba_num_heads": 8}
    | {"mamba_head_dim": 8, "n_groups": 8, "chunk_size": 64}
    | {key: value for key, value in GROUPED.items() if key not in ("n_shared_experts", "num_mtp_layers")},
    "olmo2": SIZES | {"pad_token_id": 0, "eos_token_id": 1},
    "olmo3": SIZES | {"sliding_window": 2 * TOKENS, "pad_token_id": 0, "eos_token_id": 1},
    "olmoe": SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 1, "pad_token_id": 0},
    "phimoe": SIZES | TWO_OF_FOUR | {"lm_head_bias": True, "attention_bias": True},
    "qwen2_moe": SIZES | OF_FOUR | {"mlp_only_layers": [0]},
    "qwen3_5_moe_text": SIZES | DELTA | OF_FOUR,
    "qwen3_5_text": SIZES | DELTA,
    "qwen3_moe": SIZES | {key: value for key, value in OF_FOUR.items() if not key.startswith("shared")},
    "qwen3_next": SIZES | DELTA | OF_FOUR,
    "seed_oss": SIZES,
    "smollm3": SIZES | {"pad_token_id": 0},
    "solar_open": SIZES | GROUPED,
    "starcoder2": SIZES,
}

SMALL = {"hidden_size": 32, "intermediate_size": 48}
FLAT = SMALL | {"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64, "patch_size": 8}
FRAMES = SMALL | {"depth": 4, "num_heads": 4, "patch_size": 8, "out_hidden_size": 64}
ROTARY = {"rope_type": "default", "rope_theta": 1e4}
IN_THREE = {"rope_parameters": ROTARY | {"mrope_section": [2, 3, 3]}}
IN_HALF = {"rope_parameters": ROTARY | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}
SEEING: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": CONFIGS["gemma3_text"],
        "vision_config": FLAT | {"vision_use_head": False},  # else transformers computes it, for nothing
        "mm_tokens_per_image": 16,
    },
    "glm46v": {
        "text_config": {"model_type": "glm4v_moe_text", **SIZES, **GROUPED, **IN_HALF},
        "vision_config": FRAMES | {"image_size": 64},
    },
    "glm4v": {"text_config": SIZES | IN_HALF, "vision_config": FRAMES | {"image_size": 64}},
    "glm4v_moe": {"text_config": SIZES | GROUPED | IN_HALF, "vision_config": FRAMES | {"image_size": 64}},
    "llama4": {
        "text_config": CONFIGS["llama4_text"],
        "vision_config": FLAT
        | {"intermediate_size": 128, "projector_input_dim": 40, "projector_output_dim": 40}
        | {"vision_output_dim": 40},
    },
    "mistral3": {
        "text_config": SIZES | {"model_type": "mistral"},
        "vision_config": FLAT | {"model_type": "pixtral", "head_dim": 8},
        "tie_word_embeddings": False,
    },
    "qwen2_5_vl": {
        "text_config": SIZES | IN_THREE,
        "vision_config": FRAMES | {"window_size": 32, "fullatt_block_indexes": [1]},
    },
    "qwen2_vl": {
        "text_config": SIZES | IN_THREE,
        "vision_config": {"depth": 4, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "patch_size": 8},
    },
    "qwen3_5": {
        "text_config": SIZES | DELTA,
        "vision_config": FRAMES | {"num_position_embeddings": 64},
    },
    "qwen3_vl": {
        "text_config": SIZES | IN_THREE,
        "vision_config": FRAMES | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]},
    },
}
"""Images of 64 x 64: 64 patches, 16 tokens."""


def _solved(_a: list[int], b: list[int], *_rest: Any, **_named: Any) -> int:
    """FLOPs of the product with a triangular inverse, which is what kernels do instead of solving."""
    *batch, rows, columns = b
    return 2 * rows * rows * columns * math.prod(map(int, batch))


def _extra(model: Model) -> int:
    """Return forward FLOPs that transformers has over the paper's: results past the end, states by states.

    Its convolutions go over ``conv_kernel - 1`` places more at each end of what they keep, and its Mamba-2
    combines the states of all chunks with each other in one product instead of one after another.
    """
    found = 0
    for layer in range(model.n_layers):
        kind = model.mixer(layer)
        if not kind or (scan_of := KINDS[kind].scan) is None:
            continue
        scan = scan_of(model, 1, TOKENS)
        found += 2 * model.conv_kernel * (model.conv_kernel - 1) * scan.convolved
        inner = model.scan_heads * model.scan_value_dim
        if kind == "kimi":  # which transformers scores one product of numbers after another
            found -= 2 * 2 * TOKENS * scan.chunk * model.scan_heads * model.scan_key_dim
        if kind in {"mamba2", "both"}:
            chunks = TOKENS // model.scan_chunk
            found += 2 * (chunks + 1) ** 2 * inner * model.scan_key_dim
    return found


def _maker(kind: str) -> Any:
    """Return what transformers makes a model of *kind* with; encoders have no head."""
    if kind in TOWERS:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModel if readers().get(kind) is bert else transformers.AutoModelForCausalLM


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_a_model_has_the_parameters_and_flops_of_transformers_modules(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    config._attn_implementation = config._experts_implementation = "eager"
    network = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    ours = model_from_config({"model_type": kind, **CONFIGS[kind]})
    assert sum(parameter.numel() for parameter in network.parameters()) == ours.n_params
    solve = torch.ops.aten.linalg_solve_triangular
    counter = flop_counter.FlopCounterMode(display=False, custom_mapping={solve: _solved})
    with torch.no_grad(), counter:
        network(input_ids=torch.randint(2, 128, (1, TOKENS)), use_cache=False)
    assert counter.get_total_flops() == ours.flops_per_token(TOKENS) * TOKENS // 3 + _extra(ours)


def test_what_files_leave_out_is_what_the_classes_have() -> None:
    """Values of the table, each of its keys; which vision class a kind has is in the class of the whole."""
    table = tomllib.loads((Path(hf_config.__file__).parent / "hf_defaults.toml").read_text())
    for part, kinds in table.items():
        for kind, values in kinds.items():
            whole = transformers.AutoConfig.for_model(kind)
            own = type(whole) if part == "text" else type(whole.vision_config)
            names = {key: hf_config.SAVED_AS.get(key, key) for key in values}
            found = {key: getattr(own(), key, getattr(own(), name, None)) for key, name in names.items()}
            known = {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
            assert known == values, (part, kind)


UNUSABLE = {
    "dots1": "experts of a token are none",
    "hunyuan_v1_dense": "the width of a head is none",
    "hunyuan_v1_moe": "the width of a head is none",
    "ministral": "the width of a head is none",
    "lfm2_moe": "kinds of layers are none",
    "deepseek_v2": "experts of a token are none",
    "dbrx": "the class cannot be made",
    "gemma3": "an image has fewer patches than tokens",
    "granitemoehybrid": "no whole number of experts is as wide as the shared ones",
    "llama4": "four patches are not as wide as the matrix behind them",
    "nemotron": "the width of a head is none",
}
"""Kinds whose defaults are no model, and why."""


@pytest.mark.parametrize("kind", sorted({*readers(), *TOWERS} - {*UNUSABLE}))
def test_a_file_that_transformers_writes_has_the_parameters_of_its_modules(kind: str) -> None:
    """All that a kind has by default, saved, in whole and in what differs."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers has no model_type {kind}")
    whole = transformers.AutoConfig.for_model(kind)
    try:
        with torch.device("meta"):
            network = _maker(kind).from_config(whole)
    except ValueError:
        pytest.skip(f"transformers has no model of {kind} alone")
    for written in (whole.to_dict(), whole.to_diff_dict()):
        if "text_config" in written or kind not in TOWERS:
            ours = model_from_config(json.loads(json.dumps({**written, "model_type": kind})))
            assert ours.n_params == sum(parameter.numel() for parameter in network.parameters())


def _seen(network: Any, kind: str) -> None:
    """Let *network* make tokens of an image."""
    if "depth" in SEEING[kind]["vision_config"]:
        network.get_image_features(torch.randn(64, 3 * 2 * 8 * 8), torch.tensor([[1, 8, 8]]))
        return
    sizes = {"image_sizes": torch.tensor([[64, 64]])} if kind == "mistral3" else {}
    found = network.get_image_features(torch.randn(1, 3, 64, 64), **sizes)
    if kind == "llama4":  # whose projector is applied by the caller
        network.multi_modal_projector(found.last_hidden_state)


@pytest.mark.parametrize("kind", sorted(SEEING))
def test_a_tower_has_the_parameters_and_flops_of_transformers_modules(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **SEEING[kind])
    for one in (config, config.text_config, config.vision_config):
        one._attn_implementation = one._experts_implementation = "eager"
    network = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    text = {"model_type": config.text_config.model_type, **SEEING[kind]["text_config"]}
    ours = model_from_config({"model_type": kind, **SEEING[kind], "text_config": text})
    assert ours.tower is not None
    assert sum(parameter.numel() for parameter in network.parameters()) == ours.n_params
    counter = flop_counter.FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        _seen(network, kind)
    assert counter.get_total_flops() == ours.tower.flops(16)
