"""Primus' YAML of a training, and of a model: arguments of Megatron-LM, with underscores (AMD-AGI/Primus).

A value such as ``${PRIMUS_TP:8}`` stands for a variable of the environment, which is not read: its default
holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foretrace.simulator.configs import megatron
from foretrace.simulator.configs.rules import MODEL, Leave, Read, Reading, flag, flattened
from foretrace.simulator.errors import ConfigError

_VARIABLE: Final = re.compile(r"\$\{\w+(?::([^}]*))?\}")
_OVERRIDES: Final = "overrides."


def _only_attention(value: Any) -> Leave:
    if str(value) != "gpt":
        raise ValueError("gpt: layers of other kinds are read from a config.json, or --model names a preset")
    return Leave("a transformer, as its sizes say")


def _only_megatron(value: Any) -> Leave:
    if str(value) != "megatron":
        raise ValueError("megatron: of other trainers' settings only their own files are read")
    return Leave("whose arguments are below")


TRAINER: Final[Mapping[str, Any]] = MappingProxyType({"precision": "bf16", "distributed": True})
"""What its trainers are set to (primus/configs/modules/megatron: trainer_base, pre_trainer, sft_trainer)."""

READERS: Final[Mapping[str, Read]] = MappingProxyType(
    {
        **megatron.READERS,
        "hybrid": lambda value: _only_attention("hybrid") if flag(value) else None,
        "only_attention": _only_attention,
        "only_megatron": _only_megatron,
    }
)
"""Readers of its own, by heading of ``primus.toml``, and those of Megatron-LM."""


def flat(document: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainer's settings by the names of Megatron-LM's arguments.

    Raises:
        ConfigError: a variable has no default, or there are several trainers.
    """
    modules = document.get("modules")
    if isinstance(modules, Mapping):
        if len(modules) != 1:
            raise ConfigError(f"modules: {', '.join(map(str, modules))}: one trainer is needed")
        (trainer,) = modules.values()
        outside = {key: value for key, value in settings.items() if not key.startswith("modules.")}
        inside = flattened(trainer) if isinstance(trainer, Mapping) else {}
        settings = outside | {key.removeprefix(_OVERRIDES): value for key, value in inside.items()}
    return {key.replace("_", "-"): _default(value) for key, value in settings.items()}


def is_training(document: Mapping[str, Any]) -> bool:
    """Return whether *document* is of a training, whose overrides go before the file of its model."""
    return isinstance(document.get("modules"), Mapping)


def finish(reading: Reading, given: Mapping[str, Any]) -> None:
    """Add Megatron-LM's defaults; a training without a model's sizes leaves these to another file."""
    if not reading.facts.pop("adapts", True):
        reading.facts.pop("lora_rank", None)
    if (trainer := reading.facts.pop("trainer_file", None)) is not None:
        for fact, value in TRAINER.items():
            reading.assume(fact, value, f"{trainer} of Primus has it so")
    has_model = f"{MODEL}n_layers" in reading.facts
    # Without sizes another file has the model: a name stands for it, so that none is asked for here.
    megatron.finish(reading, given if has_model else {**given, "model": given.get("model", "elsewhere")})


def _default(value: Any) -> Any:
    """Return *value* with the defaults of its variables: a number, a word, or nothing."""
    if not isinstance(value, str) or not (found := _VARIABLE.search(value)):
        return value
    if found.group(1) is None:
        raise ConfigError(f"{value}: a variable of the environment without a default; write its value")
    # Variables may stand in the midst of a text.
    text = _VARIABLE.sub(lambda one: one.group(1) or "", value)
    return {"null": None, "true": True, "false": False}.get(text, text)
