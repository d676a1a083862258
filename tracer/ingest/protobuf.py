"""Messages of protobuf, field by field, without their schema (https://protobuf.dev/programming-guides/encoding)."""

from __future__ import annotations

Fields = list[tuple[int, "int | bytes"]]
"""Number and value of each field of a message: integers as they are, all else as bytes."""


def fields(data: bytes) -> Fields:
    """Return the fields of a message; raises IndexError or ValueError if it is cut off, or is none."""
    found: Fields = []
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = varint(data, at)
            found.append((key >> 3, value))
            continue
        # Type 2 says its length, 1 is 8 bytes and 5 is 4. No other type is in use any more: -1 is refused.
        size, at = varint(data, at) if wire == 2 else ({1: 8, 5: 4}[wire] if wire in {1, 5} else -1, at)
        if size < 0 or size > len(data) - at:
            raise IndexError
        found.append((key >> 3, data[at : at + size]))
        at += size
    return found


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the variable-length integer at *at*, and where it ends; raises as ``fields`` does."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("not a number")


def packed(data: bytes) -> list[int]:
    """Return integers that are packed one after another; raises as ``fields`` does."""
    found: list[int] = []
    at = 0
    while at < len(data):
        value, at = varint(data, at)
        found.append(value)
    return found


def number_of(message: Fields, tag: int) -> int:
    """Return the ``int64`` that field *tag* of a message is, 0 if it lacks it.

    >>> number_of([(2, 5), (3, 2**64 - 3)], 3), number_of([], 3)
    (-3, 0)

    Raises:
        ValueError: the field is written as something else.
    """
    value = next((value for one, value in message if one == tag), 0)
    if not isinstance(value, int):
        raise ValueError("not a number")
    return value - (1 << 64) if value >= 1 << 63 else value


def text_of(value: int | bytes) -> str:
    """Return the text of a field; what is no character is replaced."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""
