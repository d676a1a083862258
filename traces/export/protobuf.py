"""Protocol buffers by NumPy: many messages of one shape at once, without the protobuf package.

The wire format allows a varint to be longer than it needs to be. With every varint of a field padded to the
same length, all messages of one kind have the same size, and a million of them are one matrix of bytes.
Reference: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ByteMatrix = NDArray[np.uint8]

VARINT, FIXED64, LENGTH = 0, 1, 2  # wire types


def varint(value: int) -> bytes:
    """Return *value*, not negative, in as few bytes as it needs.

    >>> varint(300).hex()
    'ac02'
    """
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(field: int, wire_type: int) -> bytes:
    """Return what precedes a value: its field number and wire type."""
    return varint(field << 3 | wire_type)


def number(field: int, value: int) -> bytes:
    """Return a field with a number."""
    return tag(field, VARINT) + varint(value)


def message(field: int, contents: bytes | str) -> bytes:
    """Return a field with a message, bytes or text."""
    body = contents.encode() if isinstance(contents, str) else contents
    return tag(field, LENGTH) + varint(len(body)) + body


def width(largest: int) -> int:
    """Return how many bytes a varint needs for *largest*.

    >>> width(127), width(128)
    (1, 2)
    """
    return max(1, -(-int(largest).bit_length() // 7))


def numbers(field: int, values: NDArray[np.integer], n_bytes: int = 0) -> ByteMatrix:
    """Return a field with a number per row; shape ``(n_rows, len(tag) + n_bytes)``.

    Each is padded to *n_bytes*, or where none are given to what the largest needs.
    """
    unsigned = np.asarray(values).astype(np.uint64)
    n_bytes = n_bytes or width(int(unsigned.max()))
    shifts = np.arange(n_bytes, dtype=np.uint64) * np.uint64(7)
    digits = (unsigned[:, None] >> shifts & np.uint64(0x7F)).astype(np.uint8)
    # Every byte but the last says that another one follows.
    digits[:, :-1] |= 0x80
    return np.hstack([_repeated(tag(field, VARINT), len(unsigned)), digits])


def fixed64s(field: int, values: NDArray[np.uint64]) -> ByteMatrix:
    """Return a field with a 64-bit number per row; shape ``(n_rows, len(tag) + 8)``."""
    raw = np.ascontiguousarray(values, "<u8").view(np.uint8).reshape(-1, 8)
    return np.hstack([_repeated(tag(field, FIXED64), len(values)), raw])


def messages(field: int, parts: Sequence[ByteMatrix | bytes], n_rows: int) -> ByteMatrix:
    """Return a field with a message per row, made of *parts*: bytes are the same in every row."""
    body = np.hstack([_repeated(part, n_rows) if isinstance(part, bytes) else part for part in parts])
    return np.hstack([_repeated(tag(field, LENGTH) + varint(body.shape[1]), n_rows), body])


def interleaved(records: Sequence[tuple[NDArray[np.intp], ByteMatrix]], n_rows: int) -> bytes:
    """Return records of different sizes one after another.

    Args:
        records: the rows, and the bytes of each; together every row once.
        n_rows: number of rows.
    """
    size = np.zeros(n_rows, np.int64)
    for rows, matrix in records:
        size[rows] = matrix.shape[1]
    offset = np.cumsum(size) - size
    out = np.empty(int(size.sum()), np.uint8)
    for rows, matrix in records:
        out[(offset[rows][:, None] + np.arange(matrix.shape[1])).ravel()] = matrix.ravel()
    return out.tobytes()


def _repeated(row: bytes, n_rows: int) -> ByteMatrix:
    """Return *row* in every row."""
    return np.broadcast_to(np.frombuffer(row, np.uint8), (n_rows, len(row)))
