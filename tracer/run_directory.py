"""The directory that a recording goes to: what may be in it before, and what processes leave in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tracer.errors import RecordError

REFUSED: Final = ".not-recording"
"""File of the run directory in which a process says why it is not recorded; the recorder takes it away."""

RESTART: Final = "-restart"
"""What, with a number behind it, is added to the name of a run directory when torchrun starts ranks again."""


def check_new(path: Path) -> None:
    """Raise RecordError if *path* is something else than a directory of this very recording, or nothing."""
    if path.exists() and not path.is_dir():
        raise RecordError(f"{path} is a file; give a directory that is new or empty")
    if path.is_dir() and any(
        entry.name not in {"spans", "ranks", "run.json"} and not entry.name.startswith(".")
        for entry in path.iterdir()
    ):
        raise RecordError(f"{path} has files in it; give a directory that is new or empty")


@contextmanager
def no_empty_folders(path: Path) -> Iterator[None]:
    """Take away the folder *path*, and those above it, if they were made meanwhile and end up empty."""
    path = path.absolute()
    missing = [one for one in (path, *path.parents) if not one.exists()]
    try:
        yield
    finally:
        for one in missing:
            with suppress(OSError):  # something is in it, or it was never made
                one.rmdir()
