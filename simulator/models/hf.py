"""Reads the shape of a model out of a Hugging Face ``config.json``.

Each reader takes what the ``transformers`` configuration class of that architecture declares; a key that the
class gives a default (``hf_defaults.toml``) may be missing from the file, any other missing key is an error
that names it. A ``null`` stands for none, not for the default.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from foretrace.simulator.errors import ModelError
from foretrace.simulator.models.hf_config import Config, Shape, with_defaults
from foretrace.simulator.models.hf_experts import EXPERTS
from foretrace.simulator.models.hf_hybrid import HYBRIDS, local_and_global
from foretrace.simulator.models.hf_llama import llama, mixers, pattern, qwen3, sinks
from foretrace.simulator.models.hf_plain import PLAIN
from foretrace.simulator.models.hf_vision import tower_of
from foretrace.simulator.models.kinds import KINDS
from foretrace.simulator.models.model import Model


def model_from_config(config: Mapping[str, object], *, where: str = "config.json") -> Model:
    """Return the model that a Hugging Face config describes.

    Args:
        config: the parsed JSON object.
        where: what to call the file in messages.

    Raises:
        ModelError: the architecture is unknown, or a key is missing or of the wrong type.
    """
    kind, text = config.get("model_type"), config.get("text_config")
    if isinstance(text, Mapping):
        of_whole = {key: config.get(key) for key in ("_name_or_path", "tie_word_embeddings")}
        whole = {**text, **{key: value for key, value in of_whole.items() if value is not None}}
        return _that_sees(model_from_config(whole, where=where), str(kind), config, where)
    if kind is None:
        raise ModelError(f"{where}: missing key 'model_type'; not a Hugging Face config of a language model")
    if not isinstance(kind, str) or kind not in READERS:
        near = difflib.get_close_matches(str(kind), READERS, n=3)
        beside = f"near: {', '.join(near)}" if near else f"{len(READERS)} others are"
        raise ModelError(
            f"{where}: model_type={kind!r} is not read ({beside}); a .toml file of its sizes would work "
            f"if its layers are of these kinds: {', '.join(KINDS)}"
        )
    name = config.get("_name_or_path") or where
    sizes = with_defaults(config, kind)
    shape = READERS[kind](Config(sizes, where))
    further = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers")
    left_out = "multi-token prediction (n_mtp = 1 adds it)" if further else ""
    absent = ", ".join(sorted(sizes.keys() - config.keys()))
    said = f"; defaults of transformers for {absent}" if absent else ""
    shape |= {"name": str(name), "source": f"{where} ({kind}{said})", "left_out": left_out}
    return _that_sees(Model(**shape), kind, config, where)  # type: ignore[arg-type]  # keys are Model's


def _that_sees(model: Model, kind: str, config: Mapping[str, object], where: str) -> Model:
    """Return *model* with the tower that *config*, of *kind*, has around it, what is not known left out."""
    tower = tower_of(kind, config, model.hidden, where)
    found = [key.removesuffix("_config") for key, part in config.items() if _is_beside(key, part)]
    others = [
        f"{name} tower" if name in _TOWERS else name
        for name in sorted(found, reverse=True)
        if not (tower and name == "vision")
    ]
    if not found and "text_config" in config:
        others = ["what is beside the language model"]
    if others:
        return replace(model, tower=tower, left_out=f"{' and '.join(others)} of {kind}")
    return replace(model, tower=tower)


_TOWERS: Final = ("vision", "audio")
"""What models have towers for."""


def _is_beside(key: str, part: object) -> bool:
    """Return whether *part* of a config is a network beside the language model; others say how that is run."""
    name = key.removesuffix("_config")
    if name in (key, "text") or not isinstance(part, Mapping) or not part:
        return False
    return name in _TOWERS or "model_type" in part


def _qwen2(config: Config) -> Shape:
    return {**llama(config), "qkv_bias": True, "proj_bias": False}


def _gemma2(config: Config) -> Shape:
    """Gemma 2: every second layer sees everything."""
    return {
        **llama(config),
        "norms_per_layer": 4,
        "window": config.integer("sliding_window", 4096),
        "global_every": 2,
    }


def _gemma3_text(config: Config) -> Shape:
    """Gemma 3, its language model: every sixth layer sees everything."""
    every = config.integer("sliding_window_pattern", 6)
    return {
        **llama(config),
        "norms_per_layer": 4,
        "qk_norm": True,
        "window": config.integer("sliding_window", 4096),
        **local_and_global(config, config.integer("num_hidden_layers"), every),
    }


def _glm(config: Config) -> Shape:
    """GLM-4-9B: biases on queries, keys and values alone."""
    return {**llama(config), "proj_bias": False}


def _glm4(config: Config) -> Shape:
    """GLM-4 of 2025: outputs are normalised too."""
    return {**_glm(config), "norms_per_layer": 4}


def _glm4v_text(config: Config) -> Shape:
    """GLM-4 that sees: the biases cannot be switched off."""
    return {**_glm4(config), "qkv_bias": True}


def _mistral(config: Config) -> Shape:
    """Mistral, Phi-3 and Phi-4: all layers have the window, if there is one."""
    return {**llama(config), "window": config.integer("sliding_window", 0)}


def _listed(config: Config, every: int) -> Shape:
    """Return the shape of Llama whose first layer of so many sees everything, or those that are listed."""
    window = config.integer("sliding_window", 0)
    found = mixers(
        config,
        config.integer("num_hidden_layers"),
        lambda i: "sliding_attention" if window and (not every or i % every) else "full_attention",
    )
    return {**llama(config), "window": window, "pattern": pattern([f"{kind}+mlp" for kind in found])}


def _cwm(config: Config) -> Shape:
    """Code World Model: every fourth layer sees everything, the first one among them."""
    return _listed(config, 4)


def _granite_swa(config: Config) -> Shape:
    """Granite with windows: as Code World Model, a sink for each head."""
    return {**_cwm(config), "extra_params": sinks(config)}


def _ministral(config: Config) -> Shape:
    """Ministral 8B: all layers have the window, but those that are listed."""
    return _listed(config, 0)


def _vaultgemma(config: Config) -> Shape:
    """VaultGemma: Gemma 2 without norms behind the blocks."""
    return {**_gemma2(config), "norms_per_layer": 2}


def _hyperclovax(config: Config) -> Shape:
    """HyperCLOVA X: outputs are normalised too."""
    return {**llama(config), "norms_per_layer": 4 if config.flag("use_post_norm", default=True) else 2}


def _internlm3(config: Config) -> Shape:
    """InternLM 3, whose checkpoints have two other names for biases."""
    for key in ("qkv_bias", "bias"):
        config.need(not config.flag(key, default=False), f"{key}=true: not supported")
    return llama(config)


def _exaone(config: Config) -> Shape:
    """EXAONE 3: the files of checkpoints call their layers otherwise than transformers does."""
    return llama(config) | {"n_layers": config.integer("num_layers", config.integer("num_hidden_layers"))}


def _stablelm(config: Config) -> Shape:
    """StableLM 2: layer norms, and one for every head of queries and keys."""
    parallel = config.flag("use_parallel_residual", default=False)
    return {
        **llama(config),
        "qkv_bias": config.flag("use_qkv_bias", default=False),
        "norm": "layernorm",
        "parallel_blocks": parallel,
        "norms_per_layer": 1 if parallel else 2,
        "qk_norm": config.flag("qk_layernorm", default=False),
        "qk_norm_weights": "all",
        "dropout": config.number("hidden_dropout", 0.0) > 0,
    }


def _jais2(config: Config) -> Shape:
    """Jais 2: Nemotron with biases."""
    bias = config.flag("attention_bias", default=True)
    mlp_bias = config.flag("mlp_bias", default=True)
    return {**_nemotron(config), "qkv_bias": bias, "proj_bias": bias, "mlp_bias": mlp_bias}


def _cohere(config: Config) -> Shape:
    """Command R: one layer norm without bias for both blocks, tied embeddings."""
    return {
        **llama(config),
        "norm": "layernorm",
        "norm_bias": False,
        "norms_per_layer": 1,
        "parallel_blocks": True,
    }


def _cohere2(config: Config) -> Shape:
    """Command R7B and Command A: every fourth layer sees everything."""
    every = config.integer("sliding_window_pattern", 4)
    window = {"window": config.integer("sliding_window", 4096)}
    return {
        **_cohere(config),
        **window,
        **local_and_global(config, config.integer("num_hidden_layers"), every),
    }


def _olmo(config: Config) -> Shape:
    """OLMo 1: layer norms without weights."""
    return {**llama(config), "norm": "layernorm", "norm_weights": False}


def _olmo2(config: Config) -> Shape:
    """OLMo 2: norms of queries and keys go over all heads, those of the stream behind the blocks."""
    return {**llama(config), "qk_norm": True, "qk_norm_weights": "all"}


def _olmo3(config: Config) -> Shape:
    """OLMo 3: every fourth layer sees everything."""
    window = {"window": config.integer("sliding_window", 4096)}
    return {**_olmo2(config), **window, **local_and_global(config, config.integer("num_hidden_layers"), 4)}


def _exaone4(config: Config) -> Shape:
    """EXAONE 4: every fourth layer sees everything, all of them in the small one."""
    window = config.integer("sliding_window", 0)
    if not window:
        return qwen3(config)
    # Files that draw the turns (LLLG) list the layers, too.
    every = 4 if config.items("layer_types", str) else config.integer("sliding_window_pattern", 4)
    turns = local_and_global(config, config.integer("num_hidden_layers"), every)
    return {**qwen3(config), "window": window, **turns}


def _ernie(config: Config) -> Shape:
    """ERNIE 4.5: all matrices have biases, or none has."""
    bias = config.flag("use_bias", default=False)
    return {**llama(config), **dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), bias)}


def _starcoder2(config: Config) -> Shape:
    """StarCoder 2: biases, layer norms and a plain MLP, as GPT-2, with rotations and grouped keys."""
    return {**_ernie(config), "gated": False, "norm": "layernorm"}


def _seed_oss(config: Config) -> Shape:
    """Seed-OSS: whether the result of attention has a bias is said apart."""
    return {**llama(config), "proj_bias": config.flag("attention_out_bias", default=False)}


def _apertus(config: Config) -> Shape:
    """Apertus: an activation with two weights of its own instead of a gate."""
    return {**qwen3(config), "gated": False, "extra_params": 2 * config.integer("num_hidden_layers")}


def _arcee(config: Config) -> Shape:
    """AFM-4.5B: squared ReLU instead of a gate."""
    return {**llama(config), "gated": False}


def _nanochat(config: Config) -> Shape:
    """Nanochat: squared ReLU, queries and keys normalised; no norm has weights."""
    return {**qwen3(config), "gated": False, "norm_weights": False, "qk_norm_weights": "none"}


def _nemotron(config: Config) -> Shape:
    """Nemotron-4 and Minitron: squared ReLU, layer norms."""
    return {**llama(config), "gated": False, "norm": "layernorm"}


READERS: Mapping[str, Callable[[Config], Shape]] = MappingProxyType(
    {
        **EXPERTS,
        **HYBRIDS,
        **PLAIN,
        "apertus": _apertus,
        "apertus1p5_text": _apertus,
        "arcee": _arcee,
        "cohere": _cohere,
        "cohere2": _cohere2,
        "cosmos3_edge_text": _arcee,
        "cwm": _cwm,
        "emu3_text_model": llama,
        "ernie4_5": _ernie,
        "exaone": _exaone,
        "exaone4": _exaone4,
        "gemma": llama,
        "gemma2": _gemma2,
        "gemma3_text": _gemma3_text,
        "glm": _glm,
        "glm4": _glm4,
        "glm4v_text": _glm4v_text,
        "glm_ocr_text": _glm4,
        "granite": llama,
        "granite_docling_text": llama,
        "granite_swa": _granite_swa,
        "helium": llama,
        "hunyuan_v1_dense": qwen3,
        "hyperclovax": _hyperclovax,
        "internlm3": _internlm3,
        "iquestcoder": llama,
        "jais2": _jais2,
        "llama": llama,
        "ministral": _ministral,
        "ministral3": _mistral,
        "mistral": _mistral,
        "nanochat": _nanochat,
        "nemotron": _nemotron,
        "olmo": _olmo,
        "olmo2": _olmo2,
        "olmo3": _olmo3,
        "paddleocr_vl_text": _ernie,
        "phi3": _mistral,
        "qwen2": _qwen2,
        "qwen2_5_omni_text": _qwen2,
        "qwen2_5_vl": _qwen2,
        "qwen2_5_vl_text": _qwen2,
        "qwen2_vl": _qwen2,
        "qwen2_vl_text": _qwen2,
        "qwen3": qwen3,
        "qwen3_vl_text": qwen3,
        "seed_oss": _seed_oss,
        "smollm3": llama,
        "stablelm": _stablelm,
        "starcoder2": _starcoder2,
        "vaultgemma": _vaultgemma,
    }
)
"""Reader of each supported ``model_type``."""
