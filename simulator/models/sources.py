"""Where models come from: presets by name, the user's own TOML files, and Hugging Face ``config.json``."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final

from foretrace.simulator.errors import ModelError
from foretrace.simulator.models.hf import model_from_config
from foretrace.simulator.models.model import Model
from foretrace.simulator.nearest import near_name


def names() -> list[str]:
    """Return the names of the presets, sorted."""
    folder = resources.files("foretrace.simulator") / "presets"
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def load_model(name_or_path: str | Path) -> Model:
    """Return a preset, or the model that a file describes.

    Args:
        name_or_path: a preset (see ``names``); or a Hugging Face ``config.json`` or the directory that holds
            one; or a ``.toml`` file with the fields of ``Model``, where ``base = "<preset>"`` takes the rest
            from a preset.

    Raises:
        ModelError: no such preset or file, or one that does not describe a model.

    >>> load_model("llama3-70b").n_params
    70553706496
    """
    text = str(name_or_path)
    if text in names():
        return _preset(text)
    path = Path(text)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise ModelError(_unknown(text, path))
    return _from_toml(path) if path.suffix == ".toml" else _from_json(path)


def _unknown(text: str, path: Path) -> str:
    """Return in words that *text* is no model, where *path* is the file that it may have meant."""
    if near := difflib.get_close_matches(text, names(), n=3, cutoff=0.5):
        return f"unknown model {text!r}: not a file, not a preset; near: {', '.join(near)}"
    if path.suffix:
        return f"unknown model {text!r}: there is no file {path}, and no preset of that name"
    return f"unknown model {text!r}: not a file, and not one of {', '.join(names())}"


SHAPE_FIELDS: Final = tuple(field.name for field in fields(Model) if field.name != "name")
"""Fields of a model beside its name, as files give them."""


def is_preset(model: Model) -> bool:
    """Return whether *model* equals the preset of its name, so that the name is description enough."""
    return model.name in names() and _preset(model.name) == model


def model_fields(model: Model) -> dict[str, object]:
    """Return the fields of *model* that differ from the defaults of ``Model``, without its name."""
    return {
        field.name: value
        for field in fields(Model)
        if field.name != "name" and (value := getattr(model, field.name)) != field.default
    }


def model_from_fields(values: Mapping[str, object], *, where: str) -> Model:
    """Return the model with *values*, each key a field of ``Model``.

    Raises:
        ModelError: a key is unknown, a value of the wrong type, or one that is needed is missing.
    """
    return _model(dict(values), where=where)


@cache
def _preset(name: str) -> Model:
    text = (resources.files("foretrace.simulator") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    return _model({"name": name, **tomllib.loads(text)}, where=name)


def _from_json(path: Path) -> Model:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not a JSON file that can be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: a Hugging Face config is a JSON object, this is a {type(config).__name__}")
    return model_from_config(config, where=str(path))


def _from_toml(path: Path) -> Model:
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not a TOML file that can be read: {error}") from error
    base: dict[str, object] = {}
    if (preset := given.pop("base", None)) is not None:
        if preset not in names():
            raise ModelError(f"{path}: base={preset!r}: one of {', '.join(names())}")
        base = {field.name: getattr(_preset(preset), field.name) for field in fields(Model)}
    return _model({**base, "name": path.stem, **given}, where=str(path))


def _model(values: dict[str, object], *, where: str) -> Model:
    """Return the model with *values*, each key a field of ``Model``."""
    known = {field.name: field for field in fields(Model)}
    if unknown := sorted(set(values) - set(known)):
        raise ModelError(f"{where}: unknown key {unknown[0]!r}; {near_name(unknown[0], known, 'known:')}")
    for field in known.values():
        if field.default is MISSING and field.name not in values:
            raise ModelError(f"{where}: missing key {field.name!r}")
        kind = {"int": int, "bool": bool, "str": str}[str(field.type)]
        if field.name in values and type(values[field.name]) is not kind:
            raise ModelError(f"{where}: {field.name}={values[field.name]!r}: {_KIND_NAME[kind]} is needed")
    return Model(**values)  # type: ignore[arg-type]  # checked above, field by field


_KIND_NAME = {int: "a whole number", bool: "true or false", str: "text"}
