"""Reads sizes as people write them."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

from foretrace.tracer.errors import RecordError

_UNITS: Final = MappingProxyType(
    {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
)


def parse_sizes(text: str) -> list[int]:
    """Return the bytes of sizes between commas; a bare number is refused.

    Raises:
        RecordError: a size is not one.

    >>> parse_sizes("64 KiB,1MiB")
    [65536, 1048576]
    """
    return [_parsed(part.strip()) for part in text.split(",")]


def _parsed(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]+)", text)
    if found is None or found[2] not in _UNITS or not float(found[1]):
        raise RecordError(f"size {text!r}: a number and one of {', '.join(_UNITS)}, e.g. '16 MiB'")
    return int(float(found[1]) * _UNITS[found[2]])
