"""How files of a user are written: all of it or nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foretrace.traces.errors import RunError, reason


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give the path of a new file, which takes the place of *target* when all of it is written.

    Until then, and if writing fails, *target* stays as it was. Where it is a link, what it leads to is
    replaced. A pipe, a terminal or a device such as ``/dev/null`` has no place to take: it is written itself.
    Folders on the way to *target* that do not exist are made.

    Raises:
        OSError: the file cannot be made or put in its place.
    """
    if target.exists() and not target.is_file() and not target.is_dir():
        yield target
        return
    final = target.resolve() if target.is_symlink() else target
    fresh = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    _make_folder(final.parent)
    try:
        yield fresh
        fresh.replace(final)
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)


def check_can_write(target: Path | None) -> None:
    """Raise RunError unless a file *target*, None for no file, can be written; ask before long work.

    Folders on the way to it may be missing, as ``replacing`` makes them; none is made here.
    """
    if target is None:
        return
    folder = next(one for one in target.absolute().parents if one.exists())
    probe = folder / f".{target.name}.{os.getpid()}.probe"
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RunError(f"cannot write {target}: {reason(error)}; nothing was done") from error


def _make_folder(folder: Path) -> None:
    """Make *folder* and those above it; a file in its place is an error that says so."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
