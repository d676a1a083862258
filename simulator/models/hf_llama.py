"""What readers of configs are made of: Llama, from which most start, fields by key, kinds of layers."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from foretrace.door import own_table
from foretrace.simulator.models.hf_config import Config, Shape

Reader = Callable[[Config], Shape]
"""Returns the shape that a config describes."""

Field = Callable[[Config], Any]
"""Returns a field of a shape, or what several readers need to know of a config."""


def of(base: Reader, **fields: Any) -> Reader:
    """Return the reader of models that are as *base* but for *fields*: their values, or what reads those."""
    return lambda config: {
        **base(config),
        **{name: value(config) if callable(value) else value for name, value in fields.items()},
    }


def integer(key: str, default: int | None = None) -> Field:
    """Return the reader of a whole number."""
    return lambda config: config.integer(key, default)


def flag(key: str, *, default: bool = False) -> Field:
    """Return the reader of true or false."""
    return lambda config: config.flag(key, default=default)


def integers(**keys: str) -> dict[str, Field]:
    """Return the readers of whole numbers, one for each field, with their keys."""
    return {name: integer(key) for name, key in keys.items()}


def experts(n: str, width: str, top_k: str = "num_experts_per_tok", **others: Any) -> dict[str, Any]:
    """Return the fields of a mixture of experts, with the keys of how many there are and how wide one is."""
    return {**integers(n_experts=n, top_k=top_k, moe_ffn_hidden=width), **others}


def as_wide_as(key: str, width: str, default: int | None = None) -> Field:
    """Return the reader of how many experts shared ones are together as wide as, *width* the key of one's."""
    return lambda config: config.multiple(key, config.integer(key, default), config.integer(width))


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


def latent(config: Config) -> Shape:
    """Youtu and MiniCPM 3: latent attention of DeepSeek without experts."""
    nope_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    shape = llama(config)
    return {
        **shape,
        "head_dim": nope_dim + rope_dim,
        "kv_lora_rank": config.integer("kv_lora_rank"),
        "q_lora_rank": config.integer("q_lora_rank", 0),
        "rope_head_dim": rope_dim,
        "v_head_dim": config.integer("v_head_dim", int(shape["hidden"]) // max(int(shape["n_heads"]), 1)),
    }


@cache
def families() -> Mapping[str, Mapping[str, Any]]:
    """Return what ``hf_families.toml`` says of each family that is like another."""
    return MappingProxyType(own_table("simulator/models/hf_families.toml"))


def family(name: str) -> Reader:
    """Return the reader of a family that is like another, which is looked up when it reads."""

    def read(config: Config) -> Shape:
        return _like_another(name)(config)

    return read


@cache
def _like_another(name: str) -> Reader:
    said = dict(families()[name])
    base = said.pop("like")
    fields = experts(*said.pop("experts")) if "experts" in said else {}
    fields |= {field: _read_as(value) for field, value in said.items()}
    return of({"llama": llama, "latent": latent}.get(base) or _like_another(base), **fields)


def _read_as(said: Any) -> Any:
    """Return the value of a field, or what reads it."""
    if not isinstance(said, Mapping):
        return said
    if "wide" in said:
        return as_wide_as(*said["wide"])
    if "flag" in said:
        return flag(said["flag"], default=said.get("default", False))
    return integer(said["integer"], said.get("default"))


qwen3 = family("qwen3")

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


def stack(kinds: Sequence[str], routed: Container[int] = ()) -> str:
    """Return the pattern of layers of a mixer each, with an MLP, or experts where the layer is *routed*."""
    return pattern([f"{kind}+{'moe' if i in routed else 'mlp'}" for i, kind in enumerate(kinds)])


def mixers(
    config: Config,
    default: Callable[[int], str],
    kinds: Mapping[str, str] = MappingProxyType({}),
    *,
    n: int | None = None,
    key: str = "layer_types",
) -> list[str]:
    """Return the kind of mixer of each layer: as *key* lists them, else *default* of each index.

    *kinds*: what names stand for in this architecture, beside ``MIXERS``. *n*: layers that must be listed;
    None: as many as the config says there are.
    """
    n_layers = config.integer("num_hidden_layers") if n is None else n
    listed = config.items(key, str) or [default(i) for i in range(n_layers)]
    known = {**MIXERS, **kinds}
    config.need(len(listed) == n_layers, f"{key} has {len(listed)} entries for {n_layers} layers")
    for name in dict.fromkeys(listed):
        config.need(name in known, f"{key} has {name!r}; known: {', '.join(known)}")
    return [known[name] for name in listed]


def every(step: int, other: str = "sliding_attention") -> Callable[[int], str]:
    """Return the names of layers of which every so many sees everything, and the others are *other*."""
    return lambda i: other if (i + 1) % step else "full_attention"


def sparse_layers(config: Config) -> set[int]:
    """Return the layers of Qwen that have experts: every so many, but those that are listed as dense."""
    step, dense = config.integer("decoder_sparse_step", 1), config.items("mlp_only_layers", int)
    return {i for i in range(config.integer("num_hidden_layers")) if i not in dense and (i + 1) % step == 0}
