"""Reads the shape of a model out of a Hugging Face ``config.json``.

Each reader takes what the ``transformers`` configuration class of that architecture declares; a key that the
class gives a default may be missing from the file, any other missing key is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from foretrace.simulator.errors import ModelError
from foretrace.simulator.models.hf_config import Config, Shape
from foretrace.simulator.models.hf_experts import EXPERTS
from foretrace.simulator.models.hf_llama import llama, qwen3
from foretrace.simulator.models.hf_plain import bert, bloom, falcon, gpt2, gpt_neox
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
    if kind not in READERS and isinstance(text, Mapping):  # a model that sees: its language model
        return model_from_config({"_name_or_path": config.get("_name_or_path"), **text}, where=where)
    if kind is None:
        raise ModelError(f"{where}: missing key 'model_type'; not a Hugging Face config of a language model")
    if not isinstance(kind, str) or kind not in READERS:
        raise ModelError(
            f"{where}: model_type={kind!r} is not supported; supported: {', '.join(sorted(READERS))}"
        )
    name = config.get("_name_or_path") or where
    shape = READERS[kind](Config(config, where))
    return Model(name=str(name), source=f"{where} ({kind})", **shape)  # type: ignore[arg-type]  # keys are Model's


def _phi3(config: Config) -> Shape:
    """Phi-3 and Phi-4."""
    return {**llama(config), "window": config.integer("sliding_window", 0)}


def _qwen2(config: Config) -> Shape:
    return {**llama(config), "qkv_bias": True, "proj_bias": False}


def _gemma(config: Config) -> Shape:
    return {
        **llama(config),
        "head_dim": config.integer("head_dim", 256),
        "tied_embeddings": config.flag("tie_word_embeddings", default=True),
    }


def _gemma2(config: Config) -> Shape:
    """Gemma 2: every second layer sees everything."""
    return {
        **_gemma(config),
        "norms_per_layer": 4,
        "window": config.integer("sliding_window", 4096),
        "global_every": 2,
    }


def _gemma3_text(config: Config) -> Shape:
    """Gemma 3, its language model: every sixth layer sees everything."""
    return {
        **_gemma2(config),
        "qk_norm": True,
        "window": config.integer("sliding_window", 4096),
        "global_every": config.integer("sliding_window_pattern", 6),
    }


def _mistral(config: Config) -> Shape:
    return {**llama(config), "window": config.integer("sliding_window", 0)}


def _cohere(config: Config) -> Shape:
    """Command R: one layer norm without bias for both blocks, tied embeddings."""
    return {
        **llama(config),
        "tied_embeddings": config.flag("tie_word_embeddings", default=True),
        "norm": "layernorm",
        "norm_bias": False,
        "norms_per_layer": 1,
        "parallel_blocks": True,
    }


def _nemotron(config: Config) -> Shape:
    """Nemotron-4 and Minitron: squared ReLU, layer norms."""
    return {**llama(config), "gated": False, "norm": "layernorm"}


READERS: Mapping[str, Callable[[Config], Shape]] = MappingProxyType(
    {
        **EXPERTS,
        "bert": bert,
        "bloom": bloom,
        "cohere": _cohere,
        "falcon": falcon,
        "gemma": _gemma,
        "gemma2": _gemma2,
        "gemma3_text": _gemma3_text,
        "gpt2": gpt2,
        "gpt_neox": gpt_neox,
        "llama": llama,
        "mistral": _mistral,
        "nemotron": _nemotron,
        "phi3": _phi3,
        "qwen2": _qwen2,
        "qwen3": qwen3,
    }
)
"""Reader of each supported ``model_type``."""
