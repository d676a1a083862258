"""One word for all figures of a machine: two machines of one kind have the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from hashlib import sha256
from typing import Any, Final

WORDS: Final = frozenset({"name", "description", "sources"})
"""What a machine and its parts say of themselves that no time and no cost depends on."""

CALIBRATED: Final = frozenset({"factors", "transfer_factors"})
"""What a calibration puts on a machine, which stays the same machine."""

LENGTH: Final = 16
"""Hexadecimal digits of a digest."""


def digest(machine: Any) -> str:
    """Return the digest of a cluster: of its figures, measured tables included, and of its size."""
    text = json.dumps(_plain(machine), sort_keys=True)
    return sha256(text.encode()).hexdigest()[:LENGTH]


def _plain(value: Any) -> Any:
    """Return *value* as plain JSON types, without words."""
    if is_dataclass(value):
        said = (field.name for field in fields(value))
        return {name: _plain(getattr(value, name)) for name in said if name not in WORDS | CALIBRATED}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
