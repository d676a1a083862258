"""Reads the shape of a model out of a Hugging Face ``config.json``.

Each reader takes what the ``transformers`` configuration class of that architecture declares; a key that the
class gives a default may be missing from the file, any other missing key is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from simulator.errors import ModelError
from simulator.models.hf_config import Config, Shape
from simulator.models.hf_experts import EXPERTS
from simulator.models.hf_llama import llama, qwen3
from simulator.models.model import Model


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


def _gpt2(config: Config) -> Shape:
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


def _gpt_neox(config: Config) -> Shape:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    bias = config.flag("attention_bias", default=True)
    return {
        "n_layers": config.integer("num_hidden_layers"),
        "hidden": hidden,
        "n_heads": heads,
        "n_kv_heads": heads,
        "head_dim": hidden // max(heads, 1),
        "ffn_hidden": config.integer("intermediate_size"),
        "vocab": config.integer("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", default=False),
        "parallel_blocks": config.flag("use_parallel_residual", default=True),
        "gated": False,
        "norm": "layernorm",
        "qkv_bias": bias,
        "proj_bias": bias,
        "mlp_bias": True,
    }


def _falcon(config: Config) -> Shape:
    """Falcon: 7B has one key head and one norm, the later ones grouped heads and a norm per block."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    new = config.flag("new_decoder_architecture", default=False)
    multi_query = config.flag("multi_query", default=True)
    bias = config.flag("bias", default=False)
    return {
        "n_layers": config.integer("num_hidden_layers"),
        "hidden": hidden,
        "n_heads": heads,
        "n_kv_heads": config.integer("num_kv_heads", heads) if new else 1 if multi_query else heads,
        "head_dim": hidden // max(heads, 1),
        "ffn_hidden": config.integer("ffn_hidden_size", 4 * hidden),
        "vocab": config.integer("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", default=True),
        "parallel_blocks": new or config.flag("parallel_attn", default=True),
        "norms_per_layer": 2 if new or not config.flag("parallel_attn", default=True) else 1,
        "gated": False,
        "norm": "layernorm",
        "qkv_bias": bias,
        "proj_bias": bias,
        "mlp_bias": bias,
    }


def _bloom(config: Config) -> Shape:
    """BLOOM: ALiBi needs no positions, and the embedding is normalised."""
    hidden = config.integer("hidden_size")
    heads = config.integer("n_head")
    return {
        "n_layers": config.integer("n_layer"),
        "hidden": hidden,
        "n_heads": heads,
        "n_kv_heads": heads,
        "head_dim": hidden // max(heads, 1),
        "ffn_hidden": 4 * hidden,
        "vocab": config.integer("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", default=True),
        "extra_params": 2 * hidden,
        "gated": False,
        "norm": "layernorm",
        "qkv_bias": True,
        "proj_bias": True,
        "mlp_bias": True,
    }


def _bert(config: Config) -> Shape:
    """BERT and its descendants: an encoder with token types, a norm after the embedding and a pooler."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    return {
        "n_layers": config.integer("num_hidden_layers"),
        "hidden": hidden,
        "n_heads": heads,
        "n_kv_heads": heads,
        "head_dim": hidden // max(heads, 1),
        "ffn_hidden": config.integer("intermediate_size"),
        "vocab": config.integer("vocab_size"),
        "tied_embeddings": True,
        "max_positions": config.integer("max_position_embeddings", 512),
        "extra_params": config.integer("type_vocab_size", 2) * hidden + hidden * hidden + hidden,
        "dropout": config.number("hidden_dropout_prob", 0.1) > 0,
        "causal": False,
        "gated": False,
        "norm": "layernorm",
        "qkv_bias": True,
        "proj_bias": True,
        "mlp_bias": True,
    }


READERS: Mapping[str, Callable[[Config], Shape]] = MappingProxyType(
    {
        **EXPERTS,
        "bert": _bert,
        "bloom": _bloom,
        "cohere": _cohere,
        "falcon": _falcon,
        "gemma": _gemma,
        "gemma2": _gemma2,
        "gemma3_text": _gemma3_text,
        "gpt2": _gpt2,
        "gpt_neox": _gpt_neox,
        "llama": llama,
        "mistral": _mistral,
        "nemotron": _nemotron,
        "phi3": _phi3,
        "qwen2": _qwen2,
        "qwen3": qwen3,
    }
)
"""Reader of each supported ``model_type``."""
