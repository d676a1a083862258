"""Reads the shape of a model out of a Hugging Face ``config.json``.

Each reader takes what the ``transformers`` configuration class of that architecture declares; a key that the
class gives a default (``hf_defaults.toml``) may be missing from the file, any other missing key is an error
that names it. A ``null`` stands for none, not for the default.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from foretrace.simulator.errors import ModelError
from foretrace.simulator.models.hf_config import Config, Shape, with_defaults
from foretrace.simulator.models.hf_experts import EXPERTS
from foretrace.simulator.models.hf_hybrid import HYBRIDS
from foretrace.simulator.models.hf_llama import (
    Reader,
    every,
    flag,
    integer,
    llama,
    mixers,
    of,
    qwen3,
    sinks,
    stack,
)
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
    """Return whether *part* of a config is a network beside the language model, not how that is run."""
    name = key.removesuffix("_config")
    if name in (key, "text") or not isinstance(part, Mapping) or not part:
        return False
    return name in _TOWERS or "model_type" in part


def _local_and_global(step: int, step_key: str = "", base: Reader = llama, window: int = 4096) -> Reader:
    """Return the reader of *base* with a window but in every so many layers, or as ``layer_types`` has it.

    *step_key*: where a file may say every how many.
    """

    def read(config: Config) -> Shape:
        period = config.integer(step_key, step) if step_key else step
        n, found = config.integer("num_hidden_layers"), mixers(config, every(period))
        regular = ["window" if (i + 1) % period else "attention" for i in range(n)]
        turns: Shape = {"global_every": period} if found == regular else {"pattern": stack(found)}
        return {**base(config), "window": config.integer("sliding_window", window), **turns}

    return read


def _listed(step: int) -> Reader:
    """Return the reader of Llama whose first layer of so many sees everything, or those that are listed."""

    def read(config: Config) -> Shape:
        window = config.integer("sliding_window", 0)
        found = mixers(
            config, lambda i: "sliding_attention" if window and (not step or i % step) else "full_attention"
        )
        return {**llama(config), "window": window, "pattern": stack(found)}

    return read


def _internlm3(config: Config) -> Shape:
    """InternLM 3, whose checkpoints have two other names for biases."""
    for key in ("qkv_bias", "bias"):
        config.need(not config.flag(key, default=False), f"{key}=true: not supported")
    return llama(config)


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


def _exaone4(config: Config) -> Shape:
    """EXAONE 4: every fourth layer sees everything, all of them in the small one."""
    if not config.integer("sliding_window", 0):
        return qwen3(config)
    # Files that draw the turns (LLLG) list the layers, too.
    step = "" if config.items("layer_types", str) else "sliding_window_pattern"
    return _local_and_global(4, step, qwen3)(config)


_QWEN2: Final = of(llama, qkv_bias=True, proj_bias=False)
_GEMMA2: Final = of(llama, norms_per_layer=4, window=integer("sliding_window", 4096), global_every=2)
_GLM: Final = of(llama, proj_bias=False)
_MISTRAL: Final = of(llama, window=integer("sliding_window", 0))
_NEMOTRON: Final = of(llama, gated=False, norm="layernorm")
_COHERE: Final = of(llama, norm="layernorm", norm_bias=False, norms_per_layer=1, parallel_blocks=True)
_OLMO2: Final = of(llama, qk_norm=True, qk_norm_weights="all")
_ERNIE: Final = of(llama, **dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), flag("use_bias")))
_NORMALISED: Final = {"norms_per_layer": 4}
"""Outputs of the blocks are normalised, too."""

_GLM4: Final = of(_GLM, **_NORMALISED)
# An activation with two weights of its own instead of a gate.
_APERTUS: Final = of(qwen3, gated=False, extra_params=lambda config: 2 * config.integer("num_hidden_layers"))

READERS: Mapping[str, Reader] = MappingProxyType(
    {
        **EXPERTS,
        **HYBRIDS,
        **PLAIN,
        "apertus": _APERTUS,
        "apertus1p5_text": _APERTUS,
        "arcee": of(llama, gated=False),  # squared ReLU instead of a gate
        "cohere": _COHERE,
        "cohere2": _local_and_global(4, "sliding_window_pattern", _COHERE),
        "cosmos3_edge_text": of(llama, gated=False),
        "cwm": _listed(4),
        "emu3_text_model": llama,
        "ernie4_5": _ERNIE,
        # files of checkpoints call their layers otherwise than transformers does
        "exaone": of(
            llama,
            n_layers=lambda config: config.integer("num_layers", config.integer("num_hidden_layers")),
        ),
        "exaone4": _exaone4,
        "gemma": llama,
        "gemma2": _GEMMA2,
        "gemma3_text": _local_and_global(6, "sliding_window_pattern", of(qwen3, **_NORMALISED)),
        "glm": _GLM,
        "glm4": _GLM4,
        "glm4v_text": of(_GLM, **_NORMALISED, qkv_bias=True),  # which cannot be switched off
        "glm_ocr_text": _GLM4,
        "granite": llama,
        "granite_docling_text": llama,
        "granite_swa": of(_listed(4), extra_params=sinks),
        "helium": llama,
        "hunyuan_v1_dense": qwen3,
        "hyperclovax": of(
            llama,
            norms_per_layer=lambda config: 4 if config.flag("use_post_norm", default=True) else 2,
        ),
        "internlm3": _internlm3,
        "iquestcoder": llama,
        "jais2": of(
            _NEMOTRON,
            **dict.fromkeys(("qkv_bias", "proj_bias"), flag("attention_bias", default=True)),
            mlp_bias=flag("mlp_bias", default=True),
        ),
        "llama": llama,
        "ministral": _listed(0),  # all layers have the window, but those that are listed
        "ministral3": _MISTRAL,
        "mistral": _MISTRAL,
        # squared ReLU; no norm has weights
        "nanochat": of(qwen3, gated=False, norm_weights=False, qk_norm_weights="none"),
        "nemotron": _NEMOTRON,  # squared ReLU
        "olmo": of(llama, norm="layernorm", norm_weights=False),
        "olmo2": _OLMO2,  # norms of the stream stand behind the blocks
        "olmo3": _local_and_global(4, base=_OLMO2),
        "paddleocr_vl_text": _ERNIE,
        "phi3": _MISTRAL,
        "qwen2": _QWEN2,
        "qwen2_5_omni_text": _QWEN2,
        "qwen2_5_vl": _QWEN2,
        "qwen2_5_vl_text": _QWEN2,
        "qwen2_vl": _QWEN2,
        "qwen2_vl_text": _QWEN2,
        "qwen3": qwen3,
        "qwen3_vl_text": qwen3,
        "seed_oss": of(llama, proj_bias=flag("attention_out_bias")),
        "smollm3": llama,
        "stablelm": _stablelm,
        "starcoder2": of(_ERNIE, gated=False, norm="layernorm"),  # rotations and grouped keys
        "vaultgemma": of(_GEMMA2, norms_per_layer=2),  # no norms behind the blocks
    }
)
"""Reader of each supported ``model_type``."""
