"""Reads the tower of a model that sees, ``vision_config``: a stack of layers, and what makes tokens of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from foretrace.simulator.models.hf_config import Config, with_defaults
from foretrace.simulator.models.model import Tower

Reader = Callable[[Config, Config, int], dict[str, Any]]
"""Returns fields of a tower: of ``vision_config``, the config around it, and the width of the text."""


def tower_of(kind: str, config: Mapping[str, object], hidden: int, where: str) -> Tower | None:
    """Return the tower of a model; None if it has none, or one of an architecture that is not known.

    Args:
        kind: ``model_type`` of the whole.
        config: the whole.
        hidden: width of the layers that its tokens go to.
        where: what to call the file in messages.

    Raises:
        ModelError: a key of the tower is missing or of the wrong type.
    """
    given = config.get("vision_config")
    if not isinstance(given, Mapping) or kind not in TOWERS:
        return None
    known = with_defaults(given, kind, "vision")
    fields = TOWERS[kind](Config(known, f"{where}: vision_config"), Config(config, where), hidden)
    return Tower(**{"name": f"tower of {kind}", "source": f"{where} ({kind})", **_ALL, **fields})


_ALL: Mapping[str, Any] = MappingProxyType({"causal": False, "tied_embeddings": True, "gated": False})
"""What towers have in common: every patch sees all others, and there is no head."""

_BIASED: Mapping[str, Any] = MappingProxyType(
    {**dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), True), "norm": "layernorm"}
)


def _sizes(vision: Config, layers: str, *, frames: bool, ffn: int = 0) -> dict[str, Any]:
    """Return the sizes that all have, with *layers* the key of their number; patches of several *frames*.

    *ffn* is the width inside the MLPs where none is given.
    """
    hidden, heads = (
        vision.integer("hidden_size"),
        vision.integer("num_heads" if frames else "num_attention_heads"),
    )
    side, deep = vision.integer("patch_size"), vision.integer("temporal_patch_size", 2) if frames else 1
    return {
        "n_layers": vision.integer(layers),
        "hidden": hidden,
        "n_heads": heads,
        "n_kv_heads": heads,
        "head_dim": vision.integer("head_dim", hidden // max(heads, 1)),
        "ffn_hidden": ffn or vision.integer("intermediate_size"),
        "vocab": vision.integer("in_channels" if frames else "num_channels", 3) * deep * side * side,
    }


def _gemma3(vision: Config, whole: Config, hidden: int) -> dict[str, Any]:
    """SigLIP of images of one size, whose patches are averaged to as many tokens as the file says."""
    shape = _sizes(vision, "num_hidden_layers", frames=False)
    n_patches = (vision.integer("image_size") // vision.integer("patch_size")) ** 2
    tokens, width = whole.integer("mm_tokens_per_image", 256), int(shape["hidden"])
    inner = int(shape["ffn_hidden"])
    # attention of a single query and an MLP, which SigLIP ends in and no token goes through
    pooled = (
        (2 * inner + 4 * width + 8) * width + inner if vision.flag("vision_use_head", default=True) else 0
    )
    return {
        **shape,
        **_BIASED,
        "max_positions": n_patches,
        "extra_params": 2 * width + pooled,  # bias of the patches, norm before the projector
        "patches_per_token": n_patches // max(tokens, 1),
        "image_tokens": tokens,
        "projector": ((width, hidden),),
    }


def _llama4(vision: Config, _whole: Config, hidden: int) -> dict[str, Any]:
    """A class token and learned positions; tokens of four patches each go through an MLP and a matrix."""
    shape = _sizes(vision, "num_hidden_layers", frames=False)
    n_patches = (vision.integer("image_size") // vision.integer("patch_size")) ** 2
    per_token = round(vision.number("pixel_shuffle_ratio", 0.5) ** -2)
    inner, width = vision.integer("projector_input_dim"), int(shape["hidden"])
    out = vision.integer("projector_output_dim")
    return {
        **shape,
        **_BIASED,
        "max_positions": n_patches + 1,
        "extra_params": 3 * width,  # the class token, and a norm before the layers
        "patches_per_token": per_token,
        "patches_beside": 1,
        "image_tokens": n_patches // per_token,
        "projector": (
            (per_token * width, inner),
            (inner, out),
            (vision.integer("vision_output_dim"), hidden),
        ),
    }


def _mistral3(vision: Config, whole: Config, hidden: int) -> dict[str, Any]:
    """Pixtral: rotary positions, so that images are of any size; four patches to a token."""
    shape = _sizes(vision, "num_hidden_layers", frames=False)
    width, side = int(shape["hidden"]), whole.integer("spatial_merge_size", 2)
    return {
        **shape,
        "gated": True,
        "extra_params": width,  # a norm before the layers, and one before the projector
        "patches_per_token": side * side,
        "projector": ((side * side * width, width), (width, hidden), (hidden, hidden)),
    }


def _qwen2_5_vl(vision: Config, _whole: Config, hidden: int) -> dict[str, Any]:
    """Windows but for a few layers."""
    shape = _sizes(vision, "depth", frames=True)
    width, side = int(shape["hidden"]), vision.integer("spatial_merge_size", 2)
    window = (vision.integer("window_size", 112) // vision.integer("patch_size") // side * side) ** 2
    whole = set(vision.items("fullatt_block_indexes", int))
    kinds = ("attention+mlp" if layer in whole else "chunk+mlp" for layer in range(int(shape["n_layers"])))
    inner, out = side * side * width, vision.integer("out_hidden_size", hidden)
    return {
        **shape,
        **dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), True),
        "gated": True,
        "pattern": " ".join(kinds),
        "window": window,
        "extra_params": inner + out,
        "patches_per_token": side * side,
        "projector": ((inner, inner), (inner, out)),
    }


def _qwen2_vl(vision: Config, _whole: Config, hidden: int) -> dict[str, Any]:
    """Rotary positions, plain MLPs; ``hidden_size`` is the width of its tokens."""
    width, out = vision.integer("embed_dim"), vision.integer("hidden_size", hidden)
    shape = _sizes(vision, "depth", frames=True, ffn=round(vision.number("mlp_ratio", 4.0) * width))
    side = vision.integer("spatial_merge_size", 2)
    inner = side * side * width
    return {
        **shape,
        **_BIASED,
        "hidden": width,
        "head_dim": width // max(int(shape["n_heads"]), 1),
        "extra_params": inner + out,
        "patches_per_token": side * side,
        "projector": ((inner, inner), (inner, out)),
    }


def _qwen3_vl(vision: Config, _whole: Config, hidden: int) -> dict[str, Any]:
    """Learned positions; results of some layers go through projectors of their own (DeepStack)."""
    shape = _sizes(vision, "depth", frames=True)
    width, side = int(shape["hidden"]), vision.integer("spatial_merge_size", 2)
    inner, out = side * side * width, vision.integer("out_hidden_size", hidden)
    deep = len(vision.items("deepstack_visual_indexes", int))
    biases = (1 + deep) * (inner + out)
    return {
        **shape,
        **_BIASED,
        "max_positions": vision.integer("num_position_embeddings"),
        "extra_params": width + biases + deep * 2 * inner,  # bias of the patches, norms of the others
        "patches_per_token": side * side,
        "projector": ((inner, inner), (inner, out)) * (1 + deep),
    }


def _glm4v(vision: Config, _whole: Config, hidden: int) -> dict[str, Any]:
    """Patches are joined by a convolution, and tokens go through a gated MLP."""
    shape = _sizes(vision, "depth", frames=True)
    width, side = int(shape["hidden"]), vision.integer("spatial_merge_size", 2)
    out, inner = vision.integer("out_hidden_size", hidden), vision.integer("intermediate_size")
    n_patches = (vision.integer("image_size") // vision.integer("patch_size")) ** 2
    return {
        **shape,
        "gated": True,
        "qkv_bias": vision.flag("attention_bias", default=False),
        "ffn_hidden": out,
        "max_positions": n_patches,
        # biases of patches and of the convolution, norms before the layers and within the projector
        "extra_params": width + out + width + 2 * out,
        "patches_per_token": side * side,
        "projector": ((side * side * width, out), (out, out), (out, 2 * inner), (inner, out)),
    }


TOWERS: Mapping[str, Reader] = MappingProxyType(
    {
        "gemma3": _gemma3,
        "glm46v": _glm4v,
        "glm4v": _glm4v,
        "glm4v_moe": _glm4v,
        "llama4": _llama4,
        "mistral3": _mistral3,
        "qwen2_5_vl": _qwen2_5_vl,
        "qwen2_vl": _qwen2_vl,
        "qwen3_5": _qwen3_vl,
        "qwen3_5_moe": _qwen3_vl,
        "qwen3_vl": _qwen3_vl,
        "qwen3_vl_moe": _qwen3_vl,
    }
)
"""Reader of the tower by ``model_type`` of the whole."""
