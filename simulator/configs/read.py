"""Reads configurations of other tools: which settings follow, what was used, what was left out and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from foretrace.simulator.config import read_config
from foretrace.simulator.configs import (
    accelerate,
    astra,
    calculon,
    deepspeed,
    megatron,
    nanotron,
    primus,
    simumax,
    torchtitan,
)
from foretrace.simulator.configs.documents import MODEL_CONFIG, NATIVE, Document, open_document
from foretrace.simulator.configs.rules import (
    MODEL,
    UNKNOWN,
    Ignored,
    Read,
    Reading,
    Rule,
    Used,
    apply,
    flattened,
    rules_in,
)
from foretrace.simulator.configs.settle import settled
from foretrace.simulator.errors import ConfigError
from foretrace.simulator.models.model import Model
from foretrace.simulator.settings import SHAPE

Flat = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]


class Tool(NamedTuple):
    """How the files of a tool are read.

    Attributes:
        title: what it is called.
        readers: its own, by heading of the table of its settings.
        finish: adds what the tool does where its file says nothing.
        flat: last changes to the settings by path.
        overrides: whether a document has settings that go before those of others of the tool.
    """

    title: str
    readers: Mapping[str, Read]
    finish: Callable[[Reading, Mapping[str, Any]], None]
    flat: Flat = lambda document, flat: flat
    overrides: Callable[[Mapping[str, Any]], bool] = lambda document: False


TOOLS: Final[Mapping[str, Tool]] = MappingProxyType(
    {
        "accelerate": Tool("Accelerate", accelerate.READERS, accelerate.finish),
        "astra": Tool("ASTRA-sim", astra.READERS, astra.finish),
        "calculon": Tool("Calculon", calculon.READERS, calculon.finish),
        "deepspeed": Tool("DeepSpeed", deepspeed.READERS, deepspeed.finish),
        "megatron": Tool("Megatron-LM", megatron.READERS, megatron.finish),
        "nanotron": Tool("nanotron", {}, nanotron.finish, nanotron.flat),
        "primus": Tool("Primus", primus.READERS, primus.finish, primus.flat, primus.is_training),
        "simumax": Tool("SimuMax", simumax.READERS, simumax.finish),
        "torchtitan": Tool("torchtitan", torchtitan.READERS, torchtitan.finish),
    }
)
"""Tools whose files are read, by name."""


@cache
def rules_of(tool: str) -> Mapping[str, Rule]:
    """Return what each setting of a *tool* means."""
    return MappingProxyType(rules_in(tool, TOOLS[tool].readers))


@dataclass(frozen=True, slots=True)
class Imported:
    """The settings that files of other tools result in.

    Attributes:
        settings: for ``simulator.config.job_from``.
        readings: what became of each setting, file by file; none of a ``run.toml`` or a ``config.json``.
    """

    settings: dict[str, Any]
    readings: tuple[Reading, ...]

    def describe(self) -> list[dict[str, Any]]:
        """Return the readings as plain JSON types."""
        return [
            {
                "file": reading.where,
                "tool": TOOLS[reading.tool].title,
                **{
                    name: [one._asdict() for one in getattr(reading, name)]
                    for name in ("used", "ignored", "assumed")
                },
            }
            for reading in self.readings
        ]


_SIZES: Final = ("gpus", "dp", "nodes", "gpus_per_node")

_SETTLES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "gpus": _SIZES,
        "dp": _SIZES,
        "virtual_stages": ("layers_per_virtual_stage",),
        "global_batch": ("accumulation",),
    }
)
"""What else a flag says, that a file then does not: see ``simulator.configs.settle``."""


def read_files(paths: Sequence[str | Path], given: Mapping[str, Any]) -> Imported:
    """Return the settings in files of any tool, with flags that were *given* in their place.

    Args:
        paths: a ``run.toml``, a model's ``config.json``, or what ``TOOLS`` have; several complete each other.
        given: settings by name that go before those of the files; None is not given.

    Raises:
        ConfigError: a file cannot be read, is nobody's, or contradicts itself, another, or a flag.
    """
    return read_documents([open_document(path) for path in paths], given)


def read_documents(documents: Sequence[Document], given: Mapping[str, Any]) -> Imported:
    """Return the settings in *documents*, as ``read_files`` does.

    Raises:
        ConfigError: a document contradicts itself, another, or a flag.
    """
    given = {name: value for name, value in given.items() if value is not None}
    known = {**given}
    for document in documents:
        if document.tool == MODEL_CONFIG:
            # Before any file is read: what tools assume depends on whether a model is given.
            known.setdefault("model", str(document.path))
    facts: dict[str, Any] = {}
    readings: list[Reading] = []
    above: dict[str, Reading] = {}
    # Those that go before others first, for the others to yield.
    for document in sorted(documents, key=lambda one: not _overrides(one)):
        if document.tool == MODEL_CONFIG:
            found: Mapping[str, Any] = {"model": known["model"]}
        elif document.tool == NATIVE:
            found = read_config(document.path)
        else:
            readings.append(_reading(document, known))
            found = readings[-1].facts
            if _overrides(document):
                above.setdefault(document.tool, readings[-1])
            elif document.tool in above:
                found = _overridden(readings[-1], above[document.tool])
        _join(facts, _yielding(readings, found, facts), document.path)
    if not readings:  # no file of another tool
        return Imported({**_replaced(facts, given), **given}, ())
    described = sorted(readings, key=lambda one: any(fact.startswith(MODEL) for fact in one.facts))
    where = ", ".join(reading.where for reading in described)  # the last one names its model
    settings = settled({**facts, **known}, given, where)
    _check_model(settings, readings, where)
    for reading in readings:
        _note_replaced(reading, given, settings)
    return Imported(settings, tuple(readings))


def _check_model(settings: Mapping[str, Any], readings: Sequence[Reading], where: str) -> None:
    """Raise ConfigError if the files describe a part of a model; keys not known may be the others."""
    missing = [name for name in _NEEDED if name not in settings.get(SHAPE, _NEEDED)]
    if not missing:
        return
    unknown = [one.key for reading in readings for one in reading.ignored if one.reason.startswith(UNKNOWN)]
    beside = f"; of these keys none is known: {', '.join(unknown)}" if unknown else ""
    titles = " and ".join(dict.fromkeys(TOOLS[reading.tool].title for reading in readings))
    raise ConfigError(
        f"{where}: read as {titles}, the model lacks {', '.join(missing)}: --model may name one{beside}"
    )


_NEEDED: Final = tuple(
    field.name for field in fields(Model) if field.default is MISSING and field.name != "name"
)
"""Fields of a model that have no default."""


def _note_replaced(reading: Reading, given: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Count what a flag replaces among what *reading* does not use."""
    # A list of its own: used ones are taken out meanwhile.
    for used in list(reading.used):
        for name in given:
            same = used.fact == name or used.fact in _SETTLES.get(name, ()) or _describes(used, name)
            if same and settings.get(used.fact) != used.gave:
                reading.used.remove(used)
                flag = f"--{name.replace('_', '-')} {given[name]}"
                reading.ignored.append(Ignored(used.key, used.value, f"the flag {flag} goes instead"))
                break


def _describes(used: Used, name: str) -> bool:
    """Return whether *used* describes a model where the flag *name* names one."""
    return name == "model" and used.fact.startswith(MODEL)


def _replaced(facts: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return *facts* without GPUs and replicas if a flag gives either: one follows from the other."""
    both = ("dp", "gpus")
    return {name: value for name, value in facts.items() if not (name in both and set(both) & set(given))}


def _reading(document: Document, known: Mapping[str, Any]) -> Reading:
    """Return what a file of a tool says, completed by the defaults of that tool."""
    tool = TOOLS[document.tool]
    content = document.content
    flat = tool.flat(content, flattened(content))
    reading = apply(rules_of(document.tool), flat, document.tool, document.path.name, known)
    tool.finish(reading, known)
    return reading


def _overrides(document: Document) -> bool:
    return document.tool in TOOLS and TOOLS[document.tool].overrides(document.content)


def _overridden(reading: Reading, above: Reading) -> Mapping[str, Any]:
    """Return the facts of *reading* without those that *above*, which goes before it, has otherwise.

    What *above* gives goes before all, and its defaults before those of *reading*.
    """
    given, assumed = {used.fact for used in above.used}, {one.fact for one in reading.assumed}
    gone = {
        name
        for name, value in reading.facts.items()
        if (name in given or (name in assumed and name in above.facts)) and above.facts.get(name) != value
    }
    reading.assumed = [one for one in reading.assumed if one.fact not in gone]
    reading.ignore(gone, f"{above.where} goes before it")
    return dict(reading.facts)


def _yielding(
    readings: Sequence[Reading], found: Mapping[str, Any], facts: dict[str, Any]
) -> Mapping[str, Any]:
    """Settle where files differ: a default of a tool gives way to what another file says.

    Args:
        readings: the readings of all files so far, the newest last.
        found: facts of the newest file.
        facts: facts of the files before it. Defaults that the newest file contradicts are deleted.

    Returns:
        *found* without the defaults that an earlier file contradicts.
    """
    found = dict(found)
    # Only where they differ: what two files say alike is no contradiction.
    for name in [name for name in found if name in facts and facts[name] != found[name]]:
        if older := _assumes(readings[:-1], name):
            del facts[name]
        elif older := _assumes(readings[-1:], name):
            del found[name]
        for reading in older:
            reading.assumed = [one for one in reading.assumed if one.fact != name]
    return found


def _assumes(readings: Sequence[Reading], name: str) -> list[Reading]:
    """Return the readings whose value of the fact *name* is a default, not one that their file gives."""
    return [reading for reading in readings if any(one.fact == name for one in reading.assumed)]


def _join(facts: dict[str, Any], more: Mapping[str, Any], path: Path) -> None:
    """Add *more* facts to *facts*. Raises ConfigError if another file has said something else."""
    for name, value in more.items():
        if name in facts and facts[name] != value:
            raise ConfigError(f"{path} says {name} is {value!r}, another file {facts[name]!r}: leave one out")
        facts[name] = value
