"""Reads the shape of a model out of a Hugging Face ``config.json``.

Each reader takes what the ``transformers`` configuration class of that architecture declares; a key that the
class gives a default (``hf_defaults.toml``) may be missing from the file, any other missing key is an error
that names it. A ``null`` stands for none, not for the default. Families that are like another but for some
fields are in ``hf_families.toml``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Final

from foretrace.simulator.errors import ModelError
from foretrace.simulator.models.hf_config import Config, Shape, with_defaults
from foretrace.simulator.models.hf_experts import EXPERTS
from foretrace.simulator.models.hf_hybrid import HYBRIDS
from foretrace.simulator.models.hf_llama import (
    Reader,
    every,
    families,
    family,
    llama,
    mixers,
    of,
    qwen3,
    sinks,
    stack,
)
from foretrace.simulator.models.hf_plain import PLAIN
from foretrace.simulator.models.hf_vision import tower_of
from foretrace.simulator.models.kinds import KINDS
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
    if isinstance(text, Mapping):
        of_whole = {key: config.get(key) for key in ("_name_or_path", "tie_word_embeddings")}
        whole = {**text, **{key: value for key, value in of_whole.items() if value is not None}}
        return _that_sees(model_from_config(whole, where=where), str(kind), config, where)
    if kind is None:
        raise ModelError(f"{where}: missing key 'model_type'; not a Hugging Face config of a language model")
    if not isinstance(kind, str) or kind not in readers():
        near = difflib.get_close_matches(str(kind), readers(), n=3)
        beside = f"near: {', '.join(near)}" if near else f"{len(readers())} others are"
        raise ModelError(
            f"{where}: model_type={kind!r} is not read ({beside}); a .toml file of its sizes would work "
            f"if its layers are of these kinds: {', '.join(KINDS)}"
        )
    name = config.get("_name_or_path") or where
    sizes = with_defaults(config, kind)
    shape = readers()[kind](Config(sizes, where))
    further = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers")
    left_out = "multi-token prediction (n_mtp = 1 adds it)" if further else ""
    absent = ", ".join(sorted(sizes.keys() - config.keys()))
    said = f"; defaults of transformers for {absent}" if absent else ""
    shape |= {"name": str(name), "source": f"{where} ({kind}{said})", "left_out": left_out}
    return _that_sees(Model(**shape), kind, config, where)  # type: ignore[arg-type]  # keys are Model's


def _that_sees(model: Model, kind: str, config: Mapping[str, object], where: str) -> Model:
    """Return *model* with the tower that *config*, of *kind*, has around it, what is not known left out."""
    tower = tower_of(kind, config, model.hidden, where)
    found = [key.removesuffix("_config") for key, part in config.items() if _is_beside(key, part)]
    others = [
        f"{name} tower" if name in _TOWERS else name
        for name in sorted(found, reverse=True)
        if not (tower and name == "vision")
    ]
    if not found and "text_config" in config:
        others = ["what is beside the language model"]
    if others:
        return replace(model, tower=tower, left_out=f"{' and '.join(others)} of {kind}")
    return replace(model, tower=tower)


_TOWERS: Final = ("vision", "audio")
"""What models have towers for."""


def _is_beside(key: str, part: object) -> bool:
    """Return whether *part* of a config is a network beside the language model, not how that is run."""
    name = key.removesuffix("_config")
    if name in (key, "text") or not isinstance(part, Mapping) or not part:
        return False
    return name in _TOWERS or "model_type" in part


def _local_and_global(step: int, step_key: str = "", base: Reader = llama, window: int = 4096) -> Reader:
    """Return the reader of *base* with a window but in every so many layers, or as ``layer_types`` has it.

    *step_key*: where a file may say every how many.
    """

    def read(config: Config) -> Shape:
        period = config.integer(step_key, step) if step_key else step
        n, found = config.integer("num_hidden_layers"), mixers(config, every(period))
        regular = ["window" if (i + 1) % period else "attention" for i in range(n)]
        turns: Shape = {"global_every": period} if found == regular else {"pattern": stack(found)}
        return {**base(config), "window": config.integer("sliding_window", window), **turns}

    return read


def _listed(step: int) -> Reader:
    """Return the reader of Llama whose first layer of so many sees everything, or those that are listed."""

    def read(config: Config) -> Shape:
        window = config.integer("sliding_window", 0)
        found = mixers(
            config, lambda i: "sliding_attention" if window and (not step or i % step) else "full_attention"
        )
        return {**llama(config), "window": window, "pattern": stack(found)}

    return read


def _internlm3(config: Config) -> Shape:
    """InternLM 3, whose checkpoints have two other names for biases."""
    for key in ("qkv_bias", "bias"):
        config.need(not config.flag(key, default=False), f"{key}=true: not supported")
    return llama(config)


def _stablelm(config: Config) -> Shape:
    """StableLM 2: layer norms, and one for every head of queries and keys."""
    parallel = config.flag("use_parallel_residual", default=False)
    return {
        **llama(config),
        "qkv_bias": config.flag("use_qkv_bias", default=False),
        "norm": "layernorm",
        "parallel_blocks": parallel,
        "norms_per_layer": 1 if parallel else 2,
        "qk_norm": config.flag("qk_layernorm", default=False),
        "qk_norm_weights": "all",
        "dropout": config.number("hidden_dropout", 0.0) > 0,
    }


def _exaone4(config: Config) -> Shape:
    """EXAONE 4: every fourth layer sees everything, all of them in the small one."""
    if not config.integer("sliding_window", 0):
        return qwen3(config)
    # Files that draw the turns (LLLG) list the layers, too.
    step = "" if config.items("layer_types", str) else "sliding_window_pattern"
    return _local_and_global(4, step, qwen3)(config)


# An activation with two weights of its own instead of a gate.
_APERTUS: Final = of(qwen3, gated=False, extra_params=lambda config: 2 * config.integer("num_hidden_layers"))

_OTHERS: Final[Mapping[str, Reader]] = MappingProxyType(
    {
        "apertus": _APERTUS,
        "apertus1p5_text": _APERTUS,
        "cohere2": _local_and_global(4, "sliding_window_pattern", family("cohere")),
        "cwm": _listed(4),
        # files of checkpoints call their layers otherwise than transformers does
        "exaone": of(
            llama,
            n_layers=lambda config: config.integer("num_layers", config.integer("num_hidden_layers")),
        ),
        "exaone4": _exaone4,
        "gemma3_text": _local_and_global(6, "sliding_window_pattern", of(qwen3, norms_per_layer=4)),
        "granite_swa": of(_listed(4), extra_params=sinks),
        "hyperclovax": of(
            llama,
            norms_per_layer=lambda config: 4 if config.flag("use_post_norm", default=True) else 2,
        ),
        "internlm3": _internlm3,
        "llama": llama,
        "ministral": _listed(0),  # all layers have the window, but those that are listed
        "olmo3": _local_and_global(4, base=family("olmo2")),
        "stablelm": _stablelm,
    }
)


@cache
def readers() -> Mapping[str, Reader]:
    """Return the reader of each supported ``model_type``."""
    like_others = {name: family(name) for name in families()}
    return MappingProxyType({**like_others, **EXPERTS, **HYBRIDS, **PLAIN, **_OTHERS})
