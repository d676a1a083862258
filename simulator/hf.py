"""Reads the shape of a model out of a Hugging Face ``config.json``.

Each reader takes what the ``transformers`` configuration class of that architecture declares; a key that the
class gives a default may be missing from the file, any other missing key is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from simulator.errors import ModelError
from simulator.model import Model


class _Config:
    """A config file whose keys are asked for by name and type."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self._where = where

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number; ``null`` and a missing key give *default*."""
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._where}: missing key {key!r}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self._where}: {key}={value!r}: a whole number is needed")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false; ``null`` and a missing key give *default*."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self._where}: {key}={value!r}: true or false is needed")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a number; ``null`` and a missing key give *default*."""
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self._where}: {key}={value!r}: a number is needed")
        return float(value)


def model_from_config(config: Mapping[str, object], *, where: str = "config.json") -> Model:
    """Return the model that a Hugging Face config describes.

    Args:
        config: the parsed JSON object.
        where: what to call the file in messages.

    Raises:
        ModelError: the architecture is unknown, or a key is missing or of the wrong type.
    """
    kind = config.get("model_type")
    if kind is None:
        raise ModelError(f"{where}: missing key 'model_type'; not a Hugging Face config of a language model")
    if not isinstance(kind, str) or kind not in READERS:
        raise ModelError(
            f"{where}: model_type={kind!r} is not supported; supported: {', '.join(sorted(READERS))}"
        )
    name = config.get("_name_or_path") or where
    shape = READERS[kind](_Config(config, where))
    return Model(name=str(name), source=f"{where} ({kind})", **shape)  # type: ignore[arg-type]  # keys are Model's


Shape = dict[str, int | bool | str]


def _llama(config: _Config) -> Shape:
    """Llama 1 to 3, and what all of its descendants share."""
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    attention_bias = config.flag("attention_bias", default=False)
    return {
        "n_layers": config.integer("num_hidden_layers"),
        "hidden": hidden,
        "n_heads": heads,
        "n_kv_heads": config.integer("num_key_value_heads", heads),
        "head_dim": config.integer("head_dim", hidden // max(heads, 1)),
        "ffn_hidden": config.integer("intermediate_size"),
        "vocab": config.integer("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", default=False),
        "qkv_bias": attention_bias,
        "proj_bias": attention_bias,
        "mlp_bias": config.flag("mlp_bias", default=False),
        "dropout": config.number("attention_dropout", 0.0) > 0,
    }


def _mixtral(config: _Config) -> Shape:
    return {
        **_llama(config),
        "n_experts": config.integer("num_local_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": config.integer("intermediate_size"),
    }


def _qwen2(config: _Config) -> Shape:
    return {**_llama(config), "qkv_bias": True, "proj_bias": False}


def _qwen3(config: _Config) -> Shape:
    return {**_llama(config), "head_dim": config.integer("head_dim", 128), "qk_norm": True}


def _qwen3_moe(config: _Config) -> Shape:
    return {
        **_qwen3(config),
        "n_experts": config.integer("num_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": config.integer("moe_intermediate_size"),
    }


def _gemma(config: _Config) -> Shape:
    return {
        **_llama(config),
        "head_dim": config.integer("head_dim", 256),
        "tied_embeddings": config.flag("tie_word_embeddings", default=True),
    }


def _gemma2(config: _Config) -> Shape:
    return {**_gemma(config), "norms_per_layer": 4}


def _gpt2(config: _Config) -> Shape:
    hidden, heads = config.integer("n_embd"), config.integer("n_head")
    return {
        "n_layers": config.integer("n_layer"),
        "hidden": hidden,
        "n_heads": heads,
        "n_kv_heads": heads,
        "head_dim": hidden // max(heads, 1),
        "ffn_hidden": config.integer("n_inner", 4 * hidden),
        "vocab": config.integer("vocab_size"),
        "gated": False,
        "tied_embeddings": config.flag("tie_word_embeddings", default=True),
        "norm": "layernorm",
        "qkv_bias": True,
        "proj_bias": True,
        "mlp_bias": True,
        "max_positions": config.integer("n_positions"),
        "dropout": config.number("resid_pdrop", 0.1) > 0,
    }


def _deepseek_v3(config: _Config) -> Shape:
    """DeepSeek-V3; its multi-token-prediction layer is not part of the model here."""
    nope_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    return {
        **_llama(config),
        "head_dim": nope_dim + rope_dim,
        "n_experts": config.integer("n_routed_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden": config.integer("moe_intermediate_size"),
        "n_shared_experts": config.integer("n_shared_experts"),
        "n_dense_layers": config.integer("first_k_dense_replace"),
        "kv_lora_rank": config.integer("kv_lora_rank"),
        "q_lora_rank": config.integer("q_lora_rank", 0),
        "rope_head_dim": rope_dim,
        "v_head_dim": config.integer("v_head_dim"),
    }


READERS: Mapping[str, Callable[[_Config], Shape]] = MappingProxyType(
    {
        "deepseek_v3": _deepseek_v3,
        "gemma": _gemma,
        "gemma2": _gemma2,
        "gpt2": _gpt2,
        "llama": _llama,
        "mistral": _llama,
        "mixtral": _mixtral,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "qwen3_moe": _qwen3_moe,
    }
)
"""Reader of each supported ``model_type``."""
