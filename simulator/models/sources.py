"""Where models come from: presets by name, the user's own TOML files, and Hugging Face ``config.json``."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final, NamedTuple

from foretrace.door import ShapeError, load, own_table, shaped
from foretrace.simulator.errors import ModelError
from foretrace.simulator.models.hf import model_from_config
from foretrace.simulator.models.model import Model, Tower
from foretrace.simulator.nearest import near_name
from foretrace.topologies.units import parse_count


def names() -> list[str]:
    """Return the names of the presets, sorted."""
    return list(_names())


@cache
def _names() -> tuple[str, ...]:
    """Return the names of the presets, whose folder does not change; every job asks for them."""
    folder = resources.files("foretrace.simulator") / "presets"
    found = [entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return tuple(sorted(found))


def load_model(name_or_path: str | Path) -> Model:
    """Return a preset, or the model that a file describes.

    Args:
        name_or_path: a preset (see ``names``), by one of its ``other_names`` too; or a Hugging Face
            ``config.json`` or the directory that holds one; or a ``.toml`` file with the fields of ``Model``,
            where ``base = "<preset>"`` takes the rest from a preset.

    Raises:
        ModelError: no such preset or file, or one that does not describe a model.

    >>> load_model("llama3-70b").n_params
    70553706496
    """
    text = str(name_or_path)
    # A preset goes before a file of the same name.
    if text in names():
        return _preset(text)
    path = Path(text)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        if preset := _named(text):
            return _preset(preset)
        raise ModelError(_unknown(text, path))
    return _from_toml(path) if path.suffix == ".toml" else _from_json(path)


EXACT: Final = 9
"""Decimals of a billion that a number of parameters has."""


@cache
def other_names() -> Mapping[str, str]:
    """Return the preset that each other name means: ids of the hub, and models of the same shape."""
    return {other: name for name in names() for other in _read(name).get("names", ())}


@cache
def _known() -> Mapping[str, str]:
    """Return the preset that each name means, in lower case: its own, its ids, with and without owner."""
    owned = {other.lower(): name for other, name in other_names().items()}
    tails = Counter((other.rpartition("/")[2], name) for other, name in owned.items())
    means = Counter(tail for tail, _ in tails)
    # An id without its owner is a name where it means one preset alone.
    bare = {tail: name for tail, name in tails if means[tail] == 1}
    return {**bare, **owned, **{name: name for name in names()}}


def _named(text: str) -> str:
    """Return the preset that *text* names, by whichever of its names; empty if none."""
    return _known().get(text.lower(), "")


def _unknown(text: str, path: Path) -> str:
    """Return in words that *text* is no model, where *path* is the file that it may have meant."""
    begin = [name for name in names() if name.startswith(text.lower())]
    known = {name.lower(): name for name in (*names(), *other_names())}
    close = begin or [known[name] for name in difflib.get_close_matches(text.lower(), known, n=3, cutoff=0.5)]
    if near := ", ".join(close[:3]):
        beside = "; its config.json would work" if "/" in text and not path.suffix else ""
        more = f"; foretrace model list {text} shows all {len(begin)}" if len(begin) > 3 else ""
        return f"unknown model {text!r}: not a file, not a preset; near: {near}{beside}{more}"
    if path.suffix:
        return f"unknown model {text!r}: there is no file {path}, and no preset of that name"
    return f"unknown model {text!r}: not a file, not a preset; foretrace model list shows all {len(names())}"


SHAPE_FIELDS: Final = tuple(field.name for field in fields(Model) if field.name != "name")
"""Fields of a model beside its name, as files give them."""


def is_preset(model: Model) -> bool:
    """Return whether *model* equals the preset of its name, so that the name is description enough."""
    # A preset that was changed may still have its name: all fields are compared.
    return model.name in names() and _preset(model.name) == model


def model_fields(model: Model) -> dict[str, object]:
    """Return the fields of *model* that differ from the defaults of ``Model``, without its name."""
    return {
        field.name: {"name": value.name, **model_fields(value)} if isinstance(value, Tower) else value
        for field in fields(model)
        if field.name != "name" and (value := getattr(model, field.name)) != field.default
    }


def model_from_fields(values: Mapping[str, object], *, where: str) -> Model:
    """Return the model with *values*, each key a field of ``Model``.

    Raises:
        ModelError: a key is unknown, a value of the wrong type, or one that is needed is missing.
    """
    return _model(dict(values), where=where)


def published(name: str) -> dict[str, Any]:
    """Return the settings with which the model of a preset was trained, its ``[recipe]``; none if not known.

    Beside settings of a job, ``source`` says where they were read, and ``model`` holds fields of the model
    that the preset leaves out.
    """
    return dict(_read(name).get("recipe", {})) if name in names() else {}


class Published(NamedTuple):
    """What is published about the number of parameters of a model.

    Attributes:
        source: where.
        params: as the checkpoint counts them, or a number as it was written.
        decimals: of a billion, where the number is rounded to so many.
        beside: of those, parameters that our model does not have.
        what: what they are.
    """

    source: str
    params: int
    decimals: int = EXACT
    beside: int = 0
    what: str = ""

    def agrees(self, n_params: int) -> bool:
        """Return whether *n_params* are within a thousandth of what is published, or round to it."""
        return self.is_every_digit(n_params) or self.is_near(n_params)

    def is_every_digit(self, n_params: int) -> bool:
        """Return whether *n_params* have every digit that is published."""
        with_all = n_params + self.beside
        return with_all == self.params or (
            self.decimals < EXACT and round(with_all / 1e9, self.decimals) == self.params / 1e9
        )

    def is_near(self, n_params: int) -> bool:
        """Return whether *n_params* are within a thousandth of what is published."""
        return abs(n_params + self.beside - self.params) <= self.params / 1000


def count_of(text: str) -> Published | None:
    """Return a count as people write it, such as ``8.03B``; None if *text* is no number.

    Raises:
        ModelError: it is below one.
    """
    found = parse_count(text)
    if found and round(found[0]) < 1:
        raise ModelError(f"{text} parameters: at least 1, such as 8030261248 or 8.03B")
    return Published("as given", round(found[0]), found[1]) if found else None


def published_params(name: str) -> Published | None:
    """Return what is published about the parameters of a preset; None if its file has nothing."""
    found = _read(name).get("published") if name in names() else None
    return Published(**found) if found else None


_NO_FIELDS: Final = ("recipe", "names", "published")
"""What files of presets have beside fields of a model."""


@cache
def _preset(name: str) -> Model:
    return _model({"name": name, **{k: v for k, v in _read(name).items() if k not in _NO_FIELDS}}, where=name)


@cache
def _read(name: str) -> dict[str, Any]:
    return own_table(f"simulator/presets/{name}.toml")


def _from_json(path: Path) -> Model:
    return model_from_config(load(path, "JSON", ModelError), where=str(path))


def _from_toml(path: Path) -> Model:
    given = load(path, "TOML", ModelError)
    base: dict[str, object] = {}
    if (preset := given.pop("base", None)) is not None:
        if not isinstance(preset, str) or not (named := _named(preset)):
            raise ModelError(f"{path}: base={preset!r}: one of {', '.join(names())}")
        base = model_fields(_preset(named))
    return _model({**base, "name": path.stem, **given}, where=str(path))


def _model(values: dict[str, object], *, where: str, kind: type[Model] = Model) -> Model:
    """Return the model with *values*, each key a field of *kind*."""
    known = {field.name: field for field in fields(kind)}
    if unknown := sorted(set(values) - set(known)):
        raise ModelError(f"{where}: unknown key {unknown[0]!r}; {near_name(unknown[0], known, 'known:')}")
    tower = values.get("tower")
    if isinstance(tower, dict):
        values = {**values, "tower": None}
    try:
        found: Model = shaped(kind, values)
    except ShapeError as error:
        raise ModelError(f"{where}: {error}") from None
    if not isinstance(tower, dict):
        return found
    made = _model({"name": f"tower of {found.name}", **tower}, where=f"{where}: tower", kind=Tower)
    return replace(found, tower=made)  # type: ignore[arg-type]  # of kind Tower
