"""Which names a function uses, as its code tells."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType


def names_of(code: CodeType) -> Iterator[str]:
    """Yield the names that *code*, and the functions defined in it, use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_of(constant)
