"""Reads configs of models with layer norms and plain MLPs: GPT-2 to Phi-2, Falcon, BLOOM, OPT, BERT."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from foretrace.simulator.models.hf_config import Config, Shape
from foretrace.simulator.models.hf_llama import Field, Reader, flag, integer, mixers, of, stack


class Names(NamedTuple):
    """Keys under which an architecture has the sizes that all of them have.

    Attributes:
        layers, hidden, heads: its keys for the number of layers, the hidden size and the attention heads.
        ffn: width inside the MLP; empty where it is four times the hidden size always.
        ffn_given: the key may not be missing; else four times the hidden size is what it is then.
    """

    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    ffn: str = "intermediate_size"
    ffn_given: bool = True


NAMED: Final = Names()


def _sized(
    names: Names = NAMED, *, tied: bool, attention_bias: bool | Field = True, mlp_bias: bool | Field = True
) -> Reader:
    """Return the reader of what every model of this kind has, with as many key heads as query heads."""

    def read(config: Config) -> Shape:
        hidden, heads = config.integer(names.hidden), config.integer(names.heads)
        wide = None if names.ffn_given else 4 * hidden
        return {
            "n_layers": config.integer(names.layers),
            "hidden": hidden,
            "n_heads": heads,
            "n_kv_heads": heads,
            # Zero heads are refused later, with a message; here they would only divide by zero.
            "head_dim": hidden // max(heads, 1),
            "ffn_hidden": config.integer(names.ffn, wide) if names.ffn else 4 * hidden,
            "vocab": config.integer("vocab_size"),
            "tied_embeddings": config.flag("tie_word_embeddings", default=tied),
            "gated": False,
            "norm": "layernorm",
        }

    return of(read, qkv_bias=attention_bias, proj_bias=attention_bias, mlp_bias=mlp_bias)


def _drops(key: str, default: float) -> Field:
    """Return the reader of whether there is dropout."""
    return lambda config: config.number(key, default) > 0


_BESIDE: Final[Mapping[str, int | bool]] = MappingProxyType({"parallel_blocks": True, "norms_per_layer": 1})
_OF_GPT: Final = Names("n_layer", "n_embd", "n_head", "n_inner", ffn_given=False)


# GPT-2: learned positions, dropout.
_GPT2: Final = of(
    _sized(_OF_GPT, tied=True), max_positions=integer("n_positions"), dropout=_drops("resid_pdrop", 0.1)
)


def _gpt_bigcode(config: Config) -> Shape:
    """StarCoder: GPT-2 whose query heads have one key head."""
    shape = _GPT2(config)
    return {**shape, "n_kv_heads": 1 if config.flag("multi_query", default=True) else shape["n_heads"]}


# GPT-J and CodeGen: one norm for both blocks, side by side; biases in the MLPs and of the head.
_GPTJ: Final = of(
    _sized(_OF_GPT, tied=False, attention_bias=False),
    **_BESIDE,
    extra_params=integer("vocab_size"),
    dropout=_drops("resid_pdrop", 0.0),
)


def _phi(config: Config) -> Shape:
    """Phi-1 to Phi-2: as GPT-J, with biases everywhere and grouped keys."""
    config.need(not config.flag("qk_layernorm", default=False), "qk_layernorm: not supported")
    shape = _sized(tied=False)(config)
    return {
        **shape,
        **_BESIDE,
        "n_kv_heads": config.integer("num_key_value_heads", int(shape["n_heads"])),
        "extra_params": config.integer("vocab_size"),
        "dropout": config.number("resid_pdrop", 0.0) > 0,
    }


def _persimmon(config: Config) -> Shape:
    """Persimmon: one block after the other, layer norms of queries and keys alike in all heads."""
    shape = _sized(tied=False)(config)
    is_normed = config.flag("qk_layernorm", default=True)
    # Those norms have biases beside their weights.
    biases = 2 * int(shape["n_layers"]) * int(shape["head_dim"]) if is_normed else 0
    return {
        **shape,
        "qk_norm": is_normed,
        "extra_params": biases,
        "dropout": config.number("hidden_dropout", 0.0) > 0,
    }


def _gpt_neo(config: Config) -> Shape:
    """GPT-Neo: every second layer has a window, or as ``attention_types`` has the turns."""
    names = Names("num_layers", "hidden_size", "num_heads", "intermediate_size", ffn_given=False)
    shape = _sized(names, tied=True, attention_bias=False)(config)
    n = int(shape["n_layers"])
    turns = config.items("attention_types", list) or [[["global", "local"], n // 2]]
    config.need(
        all(len(turn) == 2 and isinstance(turn[0], list) and turn[1] in range(n + 1) for turn in turns),
        "attention_types: lists of kinds, and how often each comes",
    )
    drawn = [kind for kinds, times in turns for kind in kinds * times]
    config.need(len(drawn) == n, f"attention_types are of {len(drawn)} layers, not of {n}")
    known = {"global": "attention", "local": "window"}
    found = mixers(config, lambda i: str(drawn[i]), known, n=n, key="attention_layers")
    return {
        **shape,
        "proj_bias": True,
        "max_positions": config.integer("max_position_embeddings"),
        "window": config.integer("window_size", 256),
        "pattern": stack(found),
        "dropout": config.number("resid_dropout", 0.0) > 0,
    }


def _opt(config: Config) -> Shape:
    """OPT: learned positions, of which the first two are no token's."""
    bias = config.flag("enable_bias", default=True)
    shape = _sized(Names(ffn="ffn_dim"), tied=True, attention_bias=bias, mlp_bias=bias)(config)
    width = config.integer("word_embed_proj_dim", int(shape["hidden"]))
    config.need(width == shape["hidden"], f"word_embed_proj_dim={width}: not supported")
    for key in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        config.need(config.flag(key, default=True), f"{key}=false: not supported")
    return {
        **shape,
        "max_positions": config.integer("max_position_embeddings") + 2,
        "dropout": config.number("dropout", 0.1) > 0,
    }


def _mpt(config: Config) -> Shape:
    """MPT: ALiBi needs no positions; neither matrices nor norms have biases, and MLPs are of four widths."""
    names = Names("n_layers", "d_model", "n_heads", "")
    shape = _sized(names, tied=True, attention_bias=False, mlp_bias=False)(config)
    times = config.integer("expansion_ratio", 4)
    config.need(times == 4, f"expansion_ratio={times}: transformers has 4 always")
    return {**shape, "norm_bias": False}


def _falcon(config: Config) -> Shape:
    """Falcon: 7B has one key head and one norm, the later ones grouped heads and a norm per block."""
    new, parallel = (
        config.flag(key, default=default)
        for key, default in (("new_decoder_architecture", False), ("parallel_attn", True))
    )
    bias = config.flag("bias", default=False)
    names = Names(ffn="ffn_hidden_size", ffn_given=False)
    shape = _sized(names, tied=True, attention_bias=bias, mlp_bias=bias)(config)
    heads = int(shape["n_heads"])
    old_kv_heads = 1 if config.flag("multi_query", default=True) else heads
    return {
        **shape,
        "n_kv_heads": config.integer("num_kv_heads", heads) if new else old_kv_heads,
        "parallel_blocks": new or parallel,
        "norms_per_layer": 2 if new or not parallel else 1,
    }


def _bloom(config: Config) -> Shape:
    """BLOOM: ALiBi needs no positions, and the embedding is normalised."""
    names = Names("n_layer", "hidden_size", "n_head", "")
    shape = _sized(names, tied=True)(config)
    # Weight and bias of the norm behind the embedding.
    return {**shape, "extra_params": 2 * int(shape["hidden"])}


def bert(config: Config) -> Shape:
    """BERT and RoBERTa: an encoder with token types, a norm after the embedding and a pooler."""
    shape = _sized(tied=True)(config)
    hidden = int(shape["hidden"])
    return {
        **shape,
        "tied_embeddings": True,
        "max_positions": config.integer("max_position_embeddings", 512),
        # Token types, and the matrix and bias of the pooler.
        "extra_params": config.integer("type_vocab_size", 2) * hidden + hidden * hidden + hidden,
        "dropout": config.number("hidden_dropout_prob", 0.1) > 0,
        "causal": False,
    }


PLAIN: Mapping[str, Reader] = MappingProxyType(
    {
        "bert": bert,
        "bloom": _bloom,
        "camembert": bert,
        "codegen": _GPTJ,
        "falcon": _falcon,
        "gpt-sw3": _GPT2,
        "gpt2": _GPT2,
        "gpt_bigcode": _gpt_bigcode,
        "gpt_neo": _gpt_neo,
        # both blocks side by side
        "gpt_neox": of(
            _sized(tied=False, attention_bias=flag("attention_bias", default=True)),
            parallel_blocks=flag("use_parallel_residual", default=True),
        ),
        "gptj": _GPTJ,
        "mpt": _mpt,
        "opt": _opt,
        "persimmon": _persimmon,
        "phi": _phi,
        "roberta": bert,
        "xlm-roberta": bert,
    }
)
"""Reader of each ``model_type`` with layer norms and plain MLPs."""
