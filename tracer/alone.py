"""Where a process records that is in no process group, and what becomes of that when it joins one or ends.

Nobody knows of several such processes whether they are ranks that will meet or trainings that never do. So
each has a directory of its own beside the one that was asked for, and at its end gets that one if nobody has.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from foretrace.tracer.launched import own_name
from foretrace.tracer.run_directory import ALONE, with_words


def folder(target: Path, *, is_shared: bool) -> Path:
    """Return the directory of what this process records while it is in no process group.

    Args:
        target: the run directory that was asked for.
        is_shared: several trainings of one command may record into *target*, one after the other.
    """
    name = own_name()
    if not name and is_shared and any(target.glob("spans/rank-00000.*")):
        name = _process()
    return with_words(target, f"-{name}" if name else "")


def set_aside(path: Path, target: Path, n_spans: int) -> None:
    """Keep what was recorded into *path* before this process joined its process group, if it is anything.

    Args:
        path: where it is.
        target: the run directory that was asked for, which is going to be that of the process group.
        n_spans: how many spans there are.

    Raises:
        OSError: it cannot be moved away.
    """
    if path == target:
        path = with_words(target, ALONE)
        if path.exists():
            path = with_words(target, f"-{_process()}")
        target.rename(path)
    if not n_spans:
        shutil.rmtree(path)


def settle(path: Path, target: Path) -> Path:
    """Move what was recorded into *path* to *target* unless another process has; return where it is.

    It was in no process group to its end.
    """
    if path == target:
        return target
    try:
        target.mkdir(exist_ok=True)  # there already where its recorder has claimed it
        (path / "spans").rename(target / "spans")  # which one process can: the first
        for rest in path.iterdir():
            rest.rename(target / rest.name)
        path.rmdir()
    except OSError:  # another process was there before
        sys.stderr.write(f"foretrace: recorded into {path}: {target.name} is of another process\n")
        return path
    return target


def _process() -> str:
    return f"process{os.getpid()}"
