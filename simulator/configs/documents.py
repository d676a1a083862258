"""Opens a file and tells whose configuration it is, by what is in it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from foretrace.simulator.configs.shell import arguments
from foretrace.simulator.errors import ConfigError

NATIVE: Final = "foretrace"
MODEL_CONFIG: Final = "huggingface"

_TOML: Final = (("torchtitan", ("parallelism", "training.local_batch_size", "activation_checkpoint")),)
_JSON: Final = (
    (MODEL_CONFIG, ("model_type", "text_config", "architectures")),
    (
        "deepspeed",
        (
            *("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"),
            "gradient_accumulation_steps",
        ),
    ),
    ("accelerate", ("distributed_type", "fsdp_config")),
)
_YAML: Final = (
    ("accelerate", ("distributed_type", "fsdp_config", "deepspeed_config")),
    ("nanotron", ("parallelism", "data_stages", "tokens")),
)


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
    if path.is_dir() and (path / "config.json").is_file():
        path /= "config.json"
    text = _text(path)
    if path.suffix == ".toml":
        content = _parsed(path, text, "TOML")
        return Document(_whose(content, _TOML) or NATIVE, path, content)
    if path.suffix == ".json":
        return _recognised(path, _parsed(path, text, "JSON"), _JSON)
    if path.suffix in (".yaml", ".yml"):
        return _recognised(path, _parsed(path, text, "YAML"), _YAML)
    found = arguments(text)
    if not found:
        raise ConfigError(
            f"{path}: no arguments such as --num-layers 32 in it, and not a .toml, .json or .yaml"
        )
    return Document("megatron", path, found)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}") from None


def _parsed(path: Path, text: str, kind: str) -> Mapping[str, Any]:
    parsers: dict[str, Callable[[str], Any]] = {
        "TOML": tomllib.loads,
        "JSON": json.loads,
        "YAML": parse_yaml,
    }
    try:
        content = parsers[kind](text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not {kind}: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: names and values are needed, this is a {type(content).__name__}")
    return content


def parse_yaml(text: str) -> Any:
    """Return what *text* holds; the only place that reads YAML.

    Raises:
        ConfigError: PyYAML is not installed.
        ValueError: the text is not YAML.
    """
    try:
        import yaml  # noqa: PLC0415 - only YAML needs it
    except ImportError:
        raise ConfigError("reading YAML needs PyYAML: pip install pyyaml") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _recognised(path: Path, content: Mapping[str, Any], known: Any) -> Document:
    tool = _whose(content, known)
    if tool is None:
        signs = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in known)
        raise ConfigError(
            f"{path}: whose configuration is this? None of the keys that tell ({signs}) is in it"
        )
    return Document(tool, path, content)


def _whose(content: Mapping[str, Any], known: Any) -> str | None:
    for tool, keys in known:
        for key in keys:
            outer, _, inner = key.partition(".")
            if outer in content and (not inner or inner in content[outer]):
                return str(tool)
    return None
