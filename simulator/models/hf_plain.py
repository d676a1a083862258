"""Reads configs of models with layer norms and plain MLPs: GPT-2, GPT-NeoX, Falcon, BLOOM, BERT."""

from __future__ import annotations

from typing import NamedTuple

from foretrace.simulator.models.hf_config import Config, Shape


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


def _sizes(config: Config, names: Names, *, tied: bool, attention_bias: bool, mlp_bias: bool) -> Shape:
    """Return the fields that every model of this kind has, with as many key heads as query heads."""
    hidden, heads = config.integer(names.hidden), config.integer(names.heads)
    inner = config.integer(names.ffn, None if names.ffn_given else 4 * hidden) if names.ffn else 4 * hidden
    return {
        "n_layers": config.integer(names.layers),
        "hidden": hidden,
        "n_heads": heads,
        "n_kv_heads": heads,
        # Zero heads are refused later, with a message; here they would only divide by zero.
        "head_dim": hidden // max(heads, 1),
        "ffn_hidden": inner,
        "vocab": config.integer("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", default=tied),
        "gated": False,
        "norm": "layernorm",
        "qkv_bias": attention_bias,
        "proj_bias": attention_bias,
        "mlp_bias": mlp_bias,
    }


def gpt2(config: Config) -> Shape:
    """GPT-2: learned positions, dropout."""
    names = Names("n_layer", "n_embd", "n_head", "n_inner", ffn_given=False)
    return {
        **_sizes(config, names, tied=True, attention_bias=True, mlp_bias=True),
        "max_positions": config.integer("n_positions"),
        "dropout": config.number("resid_pdrop", 0.1) > 0,
    }


def gpt_neox(config: Config) -> Shape:
    """GPT-NeoX and Pythia: both blocks side by side."""
    bias = config.flag("attention_bias", default=True)
    return {
        **_sizes(config, Names(), tied=False, attention_bias=bias, mlp_bias=True),
        "parallel_blocks": config.flag("use_parallel_residual", default=True),
    }


def falcon(config: Config) -> Shape:
    """Falcon: 7B has one key head and one norm, the later ones grouped heads and a norm per block."""
    new, parallel = (
        config.flag(key, default=default)
        for key, default in (("new_decoder_architecture", False), ("parallel_attn", True))
    )
    bias = config.flag("bias", default=False)
    names = Names(ffn="ffn_hidden_size", ffn_given=False)
    shape = _sizes(config, names, tied=True, attention_bias=bias, mlp_bias=bias)
    heads = int(shape["n_heads"])
    old_kv_heads = 1 if config.flag("multi_query", default=True) else heads
    return {
        **shape,
        "n_kv_heads": config.integer("num_kv_heads", heads) if new else old_kv_heads,
        "parallel_blocks": new or parallel,
        "norms_per_layer": 2 if new or not parallel else 1,
    }


def bloom(config: Config) -> Shape:
    """BLOOM: ALiBi needs no positions, and the embedding is normalised."""
    names = Names("n_layer", "hidden_size", "n_head", "")
    shape = _sizes(config, names, tied=True, attention_bias=True, mlp_bias=True)
    # Weight and bias of the norm behind the embedding.
    return {**shape, "extra_params": 2 * int(shape["hidden"])}


def bert(config: Config) -> Shape:
    """BERT and its descendants: an encoder with token types, a norm after the embedding and a pooler."""
    shape = _sizes(config, Names(), tied=True, attention_bias=True, mlp_bias=True)
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
