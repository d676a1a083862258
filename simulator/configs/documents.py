"""Opens a file and tells whose configuration it is, by what is in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from foretrace.door import load, own_table, read_text
from foretrace.simulator.configs.astra import workload
from foretrace.simulator.configs.shell import arguments, listed
from foretrace.simulator.errors import ConfigError

NATIVE: Final = "foretrace"
MODEL_CONFIG: Final = "huggingface"

MOST_SCRIPT_BYTES: Final = 1 << 20
"""Largest launch script."""

MOST_EXTENDED: Final = 16
"""Files that one extends, and that those extend, at most."""

_SIGNS: Final[Mapping[str, Mapping[str, Sequence[str]]]] = own_table("simulator/configs/signs.toml")
_ARGUMENTS: Final = "MODEL_ARGS"
"""Key under which a YAML file lists the arguments of Megatron-LM, as its own tests do."""


class Document(NamedTuple):
    """A file that has been opened.

    Attributes:
        tool: whose it is.
        path: the file.
        content: its settings; empty where another reader opens the file itself.
    """

    tool: str
    path: Path
    content: Mapping[str, Any]


def open_document(path: str | Path) -> Document:
    """Return what is in the file *path*, and whose it is.

    Raises:
        ConfigError: the file cannot be read or parsed, or nobody known has such a file.
    """
    path = Path(path)
    # A folder of a model of the hub.
    if path.is_dir() and (path / "config.json").is_file():
        path /= "config.json"
    if path.suffix == ".toml":
        content = load(path, "TOML", ConfigError)
        return Document(_whose(content, "TOML") or NATIVE, path, content)
    if path.suffix == ".json":
        return _recognised(path, load(path, "JSON", ConfigError), "JSON")
    if path.suffix in (".yaml", ".yml"):
        settings = _extended(path)
        if isinstance(given := settings.get(_ARGUMENTS), Mapping):
            variables = settings.get("ENV_VARS")
            return Document(
                "megatron", path, listed(given, variables if isinstance(variables, Mapping) else {})
            )
        return _recognised(path, settings, "YAML")
    if path.suffix == ".et":
        raise ConfigError(
            f"{path}: a graph of work, no settings: foretrace ingest {path.parent} -o RUN, "
            "then foretrace simulate --rehearsal RUN --cluster dgx-h100"
        )
    text = read_text(path, ConfigError, MOST_SCRIPT_BYTES)
    if (layers := workload(text)) is not None:
        return Document("astra", path, layers)
    found = arguments(text)
    if not found:
        raise ConfigError(
            f"{path}: no arguments such as --num-layers 32 in it, and not a .toml, .json or .yaml"
        )
    return Document("megatron", path, found)


def _extended(path: Path, read: list[Path] | None = None) -> Mapping[str, Any]:
    """Return the settings of the YAML file *path* and of those beside it that it ``extends``, its own first.

    Raises:
        ConfigError: a file cannot be read or parsed, extends itself, or extends too many.
    """
    read = [] if read is None else read
    if len(read) > MOST_EXTENDED:
        raise ConfigError(f"{read[0]}: extends itself, or more than {MOST_EXTENDED} files")
    read.append(path)
    content = load(path, "YAML", ConfigError)
    names = content.get("extends")
    if not isinstance(names, str | list):
        return content
    found: dict[str, Any] = {}
    for name in [names] if isinstance(names, str) else names:
        # Later ones go before earlier ones, and the file itself before all.
        found |= _extended(path.parent / str(name), read)
    return found | {key: value for key, value in content.items() if key != "extends"}


def _recognised(path: Path, content: Mapping[str, Any], kind: str) -> Document:
    tool = _whose(content, kind)
    if tool is None:
        signs = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in _SIGNS[kind].items())
        raise ConfigError(
            f"{path}: whose configuration is this? None of the keys that tell ({signs}) is in it"
        )
    return Document(tool, path, content)


def _whose(content: Mapping[str, Any], kind: str) -> str | None:
    for tool, keys in _SIGNS[kind].items():
        for key in keys:
            outer, _, inner = key.partition(".")
            table = content.get(outer)
            # A key with a point is in a table of that name.
            if outer in content and (not inner or (isinstance(table, Mapping) and inner in table)):
                return tool
    return None
