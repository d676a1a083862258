"""Turns the columns of a table of training runs that describe a model into one."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from foretrace.simulator.errors import TableError
from foretrace.simulator.models.model import Model
from foretrace.simulator.models.sources import load_model, names
from foretrace.simulator.validate.spelling import fused_attention
from foretrace.simulator.validate.table import Row

GPT_LIKE: Final = re.compile(r"gpt|\bopt\b|bloom|mpt|bert|megatron")
"""Architectures with layer norms, biases, learned positions and no gate, unless a column says otherwise."""

OTHERS: Final = re.compile(
    r"\bt5|mamba|ssm|hybrid|\bvit\b|diffusion|\bdit\b|unet|encoder-decoder|rwkv|whisper"
)
"""Architectures that are not one stack of attention and MLP."""


PACKED: Final = re.compile(
    r"\bpacked\b|packed[ _]sequence|sequence packing|recipe v[\d.]+:\w*_(?:sft|lora|peft)_config"
)
"""Words for sequences that are filled with documents, each of which attends to itself alone; and recipes for
fine-tuning that do so, NVIDIA-NeMo/Megatron-Bridge ``scripts/performance/configs/llama``,
``packed_sequence_specs.packed_sequence_size``."""

DOCUMENT: Final = 512
"""Tokens of such a document where no more is said. Anything short gives the same step: at 512 of 4,096
tokens seven eighths of the scores are gone."""


def is_packed(row: Row) -> bool:
    """Return whether *row* says that its sequences are packed with documents shorter than they are."""
    words = f"{row.text('task')} {row.text('notes')}".lower()
    return bool(PACKED.search(words)) and row.integer("seq_len") > DOCUMENT


def model_of(row: Row) -> Model:
    """Return the model of *row*, with what attention sees of sequences that are packed.

    A token of a document sees half of it on average: as many scores as in a window of that half.
    """
    model = _shaped(row)
    return replace(model, window=DOCUMENT // 2, global_every=0) if is_packed(row) else model


def _shaped(row: Row) -> Model:
    """Return the columns of *row* over the preset that the name of its model begins with, if there is one."""
    name = row.text("model", "a model")
    base = _preset(name)
    if base is not None and not row.text("heads"):
        layers = row.integer("layers", base.n_layers)
        return replace(base, name=name, n_layers=layers, n_mtp=_mtp(base, layers))
    arch, hidden, heads = row.text("arch").lower(), row.count("hidden"), row.count("heads")
    layers = row.integer("layers", base.n_layers if base is not None else None)
    if OTHERS.search(arch):
        raise TableError(
            f"arch {row.text('arch')!r}: one stack of transformer layers, gpt, llama, moe or bert"
        )
    if "mla" in arch:
        return _with_latent_attention(base, row, name, layers)
    if base is not None and (base.hidden, base.n_heads) == (hidden, heads):
        return _over(base, row, name=name, n_layers=layers)
    gpt = bool(GPT_LIKE.search(arch))
    biases: dict[str, Any] = dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), gpt)
    return Model(
        name=name,
        n_layers=layers,
        hidden=hidden,
        n_heads=heads,
        n_kv_heads=row.integer("kv_heads", heads) or heads,
        head_dim=row.integer("head_dim", hidden // heads) or hidden // heads,
        ffn_hidden=row.integer("ffn_hidden"),
        vocab=row.integer("vocab"),
        gated=row.flag("gated", default=not gpt),
        tied_embeddings=row.flag("tied_emb", default=gpt),
        norm="layernorm" if gpt else "rmsnorm",
        **biases,
        max_positions=row.integer("seq_len") if gpt else 0,
        dropout=gpt and fused_attention(row.text("flash_attention")) is False,
        causal="bert" not in arch,
        **_experts(row, layers),
    )


def _with_latent_attention(base: Model | None, row: Row, name: str, layers: int) -> Model:
    """Return the model of *row*, whose latent attention is that of *base* or of a preset of its width."""
    if base is None or not base.kv_lora_rank:
        base = _latent(row.count("hidden"), row.count("heads"))
    if base is None:
        raise TableError(f"model {name!r}: the widths of its latent attention are not given")
    dense = layers - row.integer("moe_layers", layers)
    return replace(base, name=name, n_layers=layers, n_dense_layers=dense, n_mtp=_mtp(base, layers))


def _mtp(base: Model, layers: int) -> int:
    """Return the modules for multi-token prediction: a model cut to fewer layers is cut before them."""
    return base.n_mtp if layers == base.n_layers else 0


def _over(base: Model, row: Row, *, name: str, n_layers: int) -> Model:
    """Return the preset *base* with what *row* says of sizes: windows, norms and biases are in no column."""
    sizes: dict[str, Any] = {
        "n_kv_heads": row.integer("kv_heads", base.n_kv_heads),
        "head_dim": row.integer("head_dim", base.head_dim),
        "ffn_hidden": row.integer("ffn_hidden", base.ffn_hidden),
        "vocab": row.integer("vocab", base.vocab),
        "tied_embeddings": row.flag("tied_emb", default=base.tied_embeddings),
    }
    experts: dict[str, Any] = _experts(row, n_layers)
    return replace(base, name=name, n_layers=n_layers, n_mtp=_mtp(base, n_layers), **sizes, **experts)


def _experts(row: Row, layers: int) -> dict[str, Any]:
    """Return what a model with experts has beside its dense parts."""
    experts = row.integer("experts", 0)
    width = row.integer("moe_ffn_hidden", 0) or row.integer("ffn_hidden", 0)
    if experts < 2:
        return {}
    return {
        "n_experts": experts,
        "top_k": row.integer("top_k", 0),
        "moe_ffn_hidden": width,
        "n_shared_experts": row.integer("shared_expert_ffn", 0) // width if width else 0,
        "n_dense_layers": layers - row.integer("moe_layers", layers),
    }


def _preset(name: str) -> Model | None:
    """Return the preset that *name* begins with, unless it goes on to state another size.

    >>> _preset("llama3-70b cut to 12 layers").n_layers, _preset("gpt2 52B")
    (80, None)
    """
    plain = re.sub(r"[_ ]", "-", name.lower().strip())
    found = [preset for preset in names() if plain.startswith(preset)]
    longest = max(found, key=len, default="")
    if not longest or re.search(r"\d+(\.\d+)?b\b", plain.removeprefix(longest)):
        return None
    return load_model(longest)


def _latent(hidden: int, heads: int) -> Model | None:
    """Return the preset with latent attention that is as wide; None if there is none.

    >>> _latent(7168, 128).name, _latent(4096, 32)
    ('deepseek-v3', None)
    """
    known = (load_model(name) for name in names())
    return next(
        (one for one in known if one.kv_lora_rank and (one.hidden, one.n_heads) == (hidden, heads)), None
    )
