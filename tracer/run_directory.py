"""The directory that a recording goes to: what may be in it before, and what processes leave in it."""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from foretrace.tracer.errors import RecordError

REFUSED: Final = ".not-recording"
"""File of the run directory in which a process says why it is not recorded; the recorder takes it away."""

RESTART: Final = "-restart"
"""What, with a number behind it, is added to the name of a run directory when torchrun starts ranks again."""

AGAIN: Final = "-again"
"""What, likewise, is added when a process has left its process group and joins another."""

ALONE: Final = "-alone"
"""What is added to the name of a run directory for what a process did before it joined its process group."""

_BESIDE: Final = re.compile(rf"({RESTART}\d+)?({AGAIN}\d+|{ALONE}|-task\d*|-process\d+)*")
"""All that is added to the name of a run directory, by what makes more than one run of a command."""


def check_new(path: Path) -> None:
    """Raise RecordError if *path* is something else than a directory of this very recording, or nothing."""
    if path.exists() and not path.is_dir():
        raise RecordError(f"{path} is a file; give a directory that is new or empty")
    if path.is_dir() and any(
        entry.name not in {"spans", "ranks", "run.json"} and not entry.name.startswith(".")
        for entry in path.iterdir()
    ):
        raise RecordError(f"{path} has files in it; give a directory that is new or empty")


def next_free(stem: str) -> Path:
    """Return the first of ``runs/STEM-1``, ``runs/STEM-2``, ... that is not there yet."""
    numbered = (Path("runs") / f"{stem}-{number}" for number in itertools.count(1))
    return next(path for path in numbered if not path.exists())


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


def with_words(path: Path, words: str) -> Path:
    """Return the run directory beside *path* whose name has *words* behind it."""
    return path.with_name(path.name + words)


def beside(path: Path) -> list[Path]:
    """Return the run directories beside *path* that the same command has filled, restarts in their order."""

    def order(one: Path) -> tuple[tuple[int, str], ...]:
        words = re.findall(r"(\D+)(\d*)", one.name.removeprefix(path.name))
        return tuple((int(number or 0), word) for word, number in words)

    found = (one for one in path.parent.glob(f"{glob.escape(path.name)}-*") if one.is_dir())
    return sorted((one for one in found if _BESIDE.fullmatch(one.name.removeprefix(path.name))), key=order)


def attempt(path: Path, one: Path) -> int:
    """Return how often torchrun had started ranks again when *one*, *path* or beside it, was filled."""
    found = re.match(rf"{RESTART}(\d+)", one.name.removeprefix(path.name))
    return int(found[1]) if found else 0
