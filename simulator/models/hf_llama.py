"""Reads configs of Llama and of Qwen 3, from which most other readers start, and lists of kinds of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from foretrace.simulator.models.hf_config import Config, Shape


def llama(config: Config, layers: int | None = None, ffn: int | None = None) -> Shape:
    """Return the shape of Llama 1 to 3, and what all of its descendants share."""
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    attention_bias = config.flag("attention_bias", default=False)
    return {
        "n_layers": config.integer("num_hidden_layers", layers),
        "hidden": hidden,
        "n_heads": heads,
        "n_kv_heads": config.integer("num_key_value_heads", heads),
        "head_dim": config.integer("head_dim", hidden // max(heads, 1)),
        "ffn_hidden": config.integer("intermediate_size", ffn),
        "vocab": config.integer("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", default=False),
        "qkv_bias": attention_bias,
        "proj_bias": attention_bias,
        "mlp_bias": config.flag("mlp_bias", default=False),
        "dropout": config.number("attention_dropout", 0.0) > 0,
    }


def sinks(config: Config) -> int:
    """Return the parameters of attention sinks, one for each head of each layer."""
    return config.integer("num_hidden_layers") * config.integer("num_attention_heads")


def qwen3(config: Config) -> Shape:
    """Return the shape of Qwen 3: queries and keys are normalised."""
    return {**llama(config), "qk_norm": True}


MIXERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "full_attention": "attention",
        "attention": "attention",
        "sliding_attention": "window",
        "chunked_attention": "chunk",
        "linear_attention": "linear",
    }
)
"""Kinds of mixers by what ``layer_types`` calls them; what linear attention is depends on the model."""


def pattern(layers: Sequence[str]) -> str:
    """Return *layers* as the shortest text that gives them again when it is repeated.

    >>> pattern(["window+mlp", "attention+mlp"] * 13)
    'window+mlp attention+mlp'
    """
    n = len(layers)
    period = next(p for p in range(1, n + 1) if all(layers[i] == layers[i % p] for i in range(n)))
    return " ".join(layers[:period])


def mixers(
    config: Config, n_layers: int, default: Callable[[int], str], key: str = "layer_types", **kinds: str
) -> list[str]:
    """Return the kind of mixer of each layer: as *key* lists them, else *default* of each index.

    Args:
        config: of the model.
        n_layers: layers that must be listed.
        default: names as *key* has them.
        key: of the list.
        **kinds: what names stand for in this architecture, beside ``MIXERS``.
    """
    listed = config.items(key, str) or [default(i) for i in range(n_layers)]
    known = {**MIXERS, **kinds}
    config.need(len(listed) == n_layers, f"{key} has {len(listed)} entries for {n_layers} layers")
    for name in dict.fromkeys(listed):
        config.need(name in known, f"{key} has {name!r}; known: {', '.join(known)}")
    return [known[name] for name in listed]
