"""The one door through which everything from outside comes in: files, documents in them, and their values.

Whatever is read is a regular file of bounded size. A document (JSON, TOML, YAML) is bounded in depth and in
what aliases of YAML multiply it to; its numbers are finite and fit 64 bits, its text is Unicode. ``shaped``
then turns it into the dataclass that says of what types it is. Errors are of the class that the caller names.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import date, time
from functools import cache
from pathlib import Path
from typing import IO, Any, Final, Never, Union, get_args, get_origin, get_type_hints

Error = type[ValueError]

MOST_BYTES: Final = 1 << 28  # largest document: the description of a run of a million ranks is half of it
MOST_YAML_BYTES: Final = 1 << 19  # PyYAML reads 0.1 MB a second
MOST_DEPTH: Final = 64  # of tables in tables; no format that is read here goes beyond ten
MOST_VALUES: Final = 10_000_000  # in a document, aliases expanded
MOST_FILES: Final = 100_000  # of a folder that is searched
MOST_WHOLE: Final = 2**63 - 1
"""Largest whole number: what Arrow, and every other reader of JSON, can hold."""

MOST_RANKS: Final = 1 << 20
"""Ranks of a world, and thus the largest parallel degree: ten times the largest training known."""

SHOWN_CHARACTERS: Final = 60
"""Most characters of a wrong value that an error shows, so that it stays one line."""

_MOST_DIGITS: Final = 18
_STRING: Final = "tag:yaml.org,2002:str"
_CHECKSUM: Final = re.compile(r', "checksum": "([0-9a-f]{8})"\}\s*\Z')
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def read_bytes(path: str | Path, error: Error, most_bytes: int = MOST_BYTES) -> bytes:
    """Return what the regular file *path* holds; raise *error* if it is none, or too large, or unreadable."""
    try:
        with open_regular(path, error) as file:
            # One byte more than allowed tells that there is more, whatever size the file system states.
            # Nothing comes of what would wait for somebody to write: files of the system that are no pipes.
            data: bytes = file.read(most_bytes + 1) or b""
    except OSError as failed:
        raise error(f"{path} cannot be read: {failed.strerror or failed}") from None
    if len(data) > most_bytes:
        raise error(f"{path} is larger than {_size(most_bytes)}, the most that is read of such a file")
    return data


def open_regular(path: str | Path, error: Error) -> IO[bytes]:
    """Open a file for reading. Raises *error* for a device, a pipe or a socket, OSError as ``open``."""
    try:
        return open(path, "rb", opener=opener(path, error))
    except ValueError as failed:
        if isinstance(failed, error):
            raise
        raise error(f"{str(path)!r}: no path holds the character NUL") from None


def opener(path: str | Path, error: Error) -> Callable[[str, int], int]:
    """Return what opens *path* for ``open_regular``, or for a class of files of ``io``."""

    def opened(name: str, flags: int) -> int:
        # Before it is opened, as that may do something to a device. And what is open then: others may have
        # put another in its place, and to open a pipe is to wait for its writer unless told otherwise.
        _check_regular(os.stat(name), path, error)  # noqa: PTH116 - a name may be bytes
        handle = os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            _check_regular(os.fstat(handle), path, error)
        except BaseException:
            os.close(handle)
            raise
        return handle

    return opened


def _check_regular(found: os.stat_result, path: str | Path, error: Error) -> None:
    # A folder passes: opening it fails with the system's own words.
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise error(f"{path} is a device, a pipe or a socket; give a file")


def read_text(path: str | Path, error: Error, most_bytes: int = MOST_BYTES) -> str:
    """Return the text in a file; raise *error* if it cannot be read, or is not UTF-8."""
    try:
        return read_bytes(path, error, most_bytes).decode("utf-8")
    except UnicodeDecodeError as failed:
        raise error(f"{path} is not text: {failed}") from None


def load(path: str | Path, kind: str, error: Error) -> dict[str, Any]:
    """Return the names and values in a file; *kind* is one of ``PARSERS``. Raises *error*."""
    most_bytes = MOST_YAML_BYTES if kind == "YAML" else MOST_BYTES
    return as_table(parse(read_text(path, error, most_bytes), kind, str(path), error), str(path), error)


def own_table(name: str) -> dict[str, Any]:
    """Return the data of this program in its TOML file *name*, ``"simulator/settings.toml"``."""
    import tomllib  # noqa: PLC0415 - as below
    from importlib import resources  # noqa: PLC0415

    top, _, rest = name.partition("/")
    return tomllib.loads((resources.files(f"foretrace.{top}") / rest).read_text(encoding="utf-8"))


def as_table(value: Any, name: str, error: Error) -> dict[str, Any]:
    """Return *value* if it is an object, or raise *error*."""
    if not isinstance(value, dict):
        raise error(
            f"{name}: names and values are needed, this is {_WORDS.get(type(value), 'something else')}"
        )
    return value


def parse(text: str, kind: str, name: str, error: Error) -> Any:
    """Return what *text* says; raise *error*, which calls it *name*, if it is not *kind* or out of bounds."""
    try:
        value = PARSERS[kind](text)
    except ImportError:
        raise error(f"{name}: reading {kind} needs PyYAML: pip install pyyaml") from None
    # The parsers recurse: what is nested very deeply ends here, before `check` can count it.
    except RecursionError:
        raise error(f"{name} cannot be read: more than {MOST_DEPTH} tables in tables") from None
    except ValueError as failed:
        raise error(f"{name} is not {kind}: {' '.join(str(failed).split())}") from None
    try:
        check(value)
    except ValueError as failed:
        raise error(f"{name}: {failed}") from None
    return value


def sealed_text(document: str) -> str:
    """Return the JSON object *document* with its CRC-32 as the last key."""
    return f'{document[:-1]}, "checksum": "{zlib.crc32(document.encode()):08x}"}}\n'


def is_as_sealed(text: str, document: Mapping[str, Any]) -> bool:
    """Return whether *text*, which says *document*, is as ``sealed_text`` wrote it, or has no checksum."""
    found = _CHECKSUM.search(text)
    # The checksum was taken before its key was there: of the text up to the key, and the closing brace.
    whole = found is not None and int(found[1], 16) == zlib.crc32(f"{text[: found.start()]}}}".encode())
    return whole or "checksum" not in document


def check(document: Any, *, is_ours: bool = True) -> None:
    """Raise ValueError unless *document* is bounded in depth and values; if it *is_ours*, in each value."""
    # The document is the one value of a list, so that it is looked at itself. No path shows that index.
    waiting: list[tuple[Any, int, str]] = [([document], 0, "")]
    n_values = 0
    while waiting:
        values, depth, where = waiting.pop()
        if depth > MOST_DEPTH:
            raise ValueError(f"more than {MOST_DEPTH} tables in tables")
        n_values += len(values)
        if n_values > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values")
        for name, one in values.items() if isinstance(values, dict) else enumerate(values):
            if isinstance(one, dict | list):
                waiting.append((one, depth + 1, f"{where}.{name}".lstrip(".") if depth else ""))
            # A list has places for names, and YAML may have whole numbers.
            if is_ours and (wrong := _wrong(one) or ("" if type(name) is int else _wrong_name(name))):
                raise ValueError(f"{where}.{name}".lstrip(".") + wrong)


def _wrong(value: Any) -> str:
    """Return what is wrong with a value that is no table and no list, "" if nothing is."""
    kind = type(value)
    if kind is int and not -MOST_WHOLE <= value <= MOST_WHOLE:
        return f" is a whole number of more than 64 bits: at most {MOST_WHOLE:,}"
    if kind is float and not math.isfinite(value):
        return f" = {value}: must be a number, a finite one"
    return " is not Unicode text" if kind is str and not _is_text(value) else ""


def _wrong_name(name: Any) -> str:
    return (
        ""
        if isinstance(name, str) and _is_text(name)
        else ": a name must be Unicode text (in quotes, if it is another word of YAML)"
    )


def _is_text(value: str) -> bool:
    """Whether *value* has no half of a surrogate pair, which JSON and YAML can write and UTF-8 cannot."""
    return value.isascii() or not _SURROGATE.search(value)


def _json(text: str) -> Any:
    def refuse(constant: str) -> Never:
        raise ValueError(f"{constant} is not a number in JSON")

    return json.loads(text, parse_constant=refuse, object_pairs_hook=_once)


def _toml(text: str) -> Any:
    import tomllib  # noqa: PLC0415 - the recorder, which reads numbers here, is in the process of a script

    if _DEEP_KEY.search(text):  # it would be made first, and take gigabytes
        raise RecursionError
    return tomllib.loads(text)


_DEEP_KEY: Final = re.compile(rf"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){{{MOST_DEPTH}}}""")
"""A key of TOML with dots that stands for too many tables in tables; found in a time linear in the text."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return names and values as a dictionary. Raises ValueError if a name has two values."""
    found = dict(pairs)
    if len(found) < len(pairs):
        for name, value in pairs:
            if found[name] != value:
                raise ValueError(f"{shown(name)} stands there with two values: leave one")
    return found


def _yaml(text: str) -> Any:
    """Return what YAML says; what aliases make of it is counted before any of it is made."""
    import yaml  # noqa: PLC0415 - only YAML needs it

    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        sizes: dict[int, int] = {}

        def size(of: Any) -> int:
            if id(of) not in sizes:
                sizes[id(of)] = MOST_VALUES  # an alias within what it stands for has no end
                parts = of.value if isinstance(of, yaml.SequenceNode) else []
                if isinstance(of, yaml.MappingNode):
                    parts = [one for pair in of.value for one in pair]
                    # Of one name there is one value; tables that are merged (``<<``) have names of their own.
                    _once([(name.value, one.value) for name, one in of.value if name.tag == _STRING])
                sizes[id(of)] = 1 + sum(map(size, parts))
            return sizes[id(of)]

        if node is not None and size(node) >= MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values, aliases expanded")
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except (LookupError, AttributeError, ArithmeticError, TypeError):
        raise ValueError("a value is not what its tag says") from None
    finally:
        if loader is not None:
            loader.dispose()


PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {"JSON": _json, "TOML": _toml, "YAML": _yaml}
"""Kinds of documents, and what reads them."""


def files_in(folder: Path, error: Error, most: int = MOST_FILES) -> Iterator[Path]:
    """Yield the regular files below *folder*; raise *error* if there are more than *most*.

    Links to folders are not followed, and what must not be listed is left out.
    """
    waiting, n_seen = [folder], 0
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    n_seen += 1
                    if n_seen > most:
                        raise error(
                            f"{folder} holds more than {most:,} files and folders: give the folder of one run"
                        )
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry))
                    elif entry.is_file():
                        yield Path(entry)
        except OSError:
            continue


def counted(text: str) -> int:
    """Return the number that *text* says in digits, -1 if it says another, or one of more than 18 of them.

    >>> counted("12"), counted("1.5"), counted("\N{SUPERSCRIPT TWO}")
    (12, -1, -1)
    """
    # 18 digits fit 64 bits for sure; Python refuses to read thousands.
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else -1


_WORDS: Final[Mapping[Any, str]] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    tuple: "a list",
    dict: "an object",
    type(None): "null",
}
"""What a person who reads JSON calls these types."""


class ShapeError(ValueError):
    """A value is of another type than is needed."""


def shaped(kind: Any, value: Any, where: str = "") -> Any:  # noqa: PLR0911 - one per sort of type
    """Return *value*, of a document, as *kind*: a type, a dataclass, or lists and mappings of them.

    Keys that a dataclass does not have are left out; those that it has no default for must be there.

    Raises:
        ShapeError: it is something else; *where* and the value are in the message.
        ValueError: a dataclass refuses its values.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        options = [one for one in inner if one is not type(None)]
        return None if value is None and len(options) < len(inner) else shaped(options[0], value, where)
    wanted = origin or kind
    if is_dataclass(wanted):
        return _object(wanted, value, where)
    # JSON has one kind of number, and 1.0 may come as 1. A bool is an int to Python, but no number here.
    if wanted is float and type(value) is int:
        return float(value)
    if wanted is tuple:
        _need(isinstance(value, list | tuple), where, value, kind)
        return tuple(shaped(inner[0], one, f"{where}[{at}]") for at, one in enumerate(value))
    if wanted in (dict, Mapping, _MAPPING):
        _need(isinstance(value, dict), where, value, dict)
        names, values = inner or (str, Any)
        return {
            shaped(names, _key(name, names), where): shaped(values, one, f"{where}.{name}")
            for name, one in value.items()
        }
    _need(type(value) is wanted, where, value, kind)
    return value


def check_known(given: Mapping[str, Any] | None, kinds: Mapping[str, Any], where: str) -> None:
    """Raise ShapeError if a key of *given* that *kinds* knows, and that is not null, has another type."""
    for name, kind in kinds.items():
        if (value := (given or {}).get(name)) is not None:
            shaped(kind, value, f"{where}.{name}")


_MAPPING: Final = get_origin(Mapping[str, Any])


def _key(name: Any, kind: Any) -> Any:
    """Return a name of an object, which JSON has only as text, as *kind*."""
    # 18 digits fit 64 bits for sure. A longer name stays a text, which is then refused as one.
    return int(name) if kind is int and isinstance(name, str) and re.fullmatch(r"-?\d{1,18}", name) else name


def _object(kind: Any, value: Any, where: str) -> Any:
    _need(isinstance(value, dict), where, value, dict)
    hints, found = _hints(kind), {}
    for one in fields(kind):
        if one.name in value:
            found[one.name] = shaped(hints[one.name], value[one.name], f"{where}.{one.name}".lstrip("."))
        elif one.default is MISSING and one.default_factory is MISSING:
            raise ShapeError(f"no {one.name!r} in {where or 'it'}")
    return kind(**found)


_hints = cache(get_type_hints)


def _need(is_so: bool, where: str, value: Any, kind: Any) -> None:  # noqa: FBT001
    if not is_so:
        words = _WORDS.get(get_origin(kind) or kind, "another value")
        if inner := get_args(kind):
            words += f" of {_WORDS.get(inner[0], 'an object').partition(' ')[2]}s"
        raise ShapeError(f"{where or 'it'} is {shown(value)}, but {words} is needed")


def shown(value: Any) -> str:
    """Return *value* as an error shows it."""
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def json_text(value: Any) -> str:
    """Return *value* as JSON: null stands for numbers that are not finite, text for dates, bytes and paths.

    Raises TypeError for what has no place in JSON.

    >>> json_text({"a": float("inf"), "b": Path("c"), "d": date(2026, 1, 1)})
    '{"a": null, "b": "c", "d": "2026-01-01"}'
    """
    # Tried as it is: nearly all documents have no such number, and need no copy.
    try:
        return json.dumps(value, allow_nan=False, default=_plain)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    """Return *value*, of a type that JSON has not, as one that it has."""
    if isinstance(value, date | time | bytes | os.PathLike):
        return str(value)
    if isinstance(value, set):
        return sorted(value, key=str)
    # A scalar of numpy, or a number of its own kind.
    if callable(item := getattr(value, "item", None)):
        return _finite(item())
    raise TypeError(f"{type(value).__name__} has no place in JSON")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def _size(n_bytes: int) -> str:
    return f"{n_bytes >> 20} MiB" if n_bytes >= 1 << 20 else f"{n_bytes >> 10} KiB"
