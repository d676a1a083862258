"""Reads configs of Llama and of Qwen 3, from which most other readers start."""

from __future__ import annotations

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


def qwen3(config: Config) -> Shape:
    """Return the shape of Qwen 3: queries and keys are normalised."""
    return {**llama(config), "qk_norm": True}
