"""How files of a user are written: all of it or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give the path of a new file, which takes the place of *target* when all of it is written.

    Until then, and if writing fails, *target* stays as it was. Where it is a link, what it leads to is
    replaced. A pipe, a terminal or a device such as ``/dev/null`` has no place to take: it is written itself.

    Raises:
        OSError: the file cannot be made or put in its place.
    """
    if target.exists() and not target.is_file() and not target.is_dir():
        yield target
        return
    final = target.resolve() if target.is_symlink() else target
    fresh = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        yield fresh
        fresh.replace(final)
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
