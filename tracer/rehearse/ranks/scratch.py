"""Folders in which ranks write their results while they are rehearsed, and the one that these go to."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.script import late
from foretrace.traces.errors import reason
from foretrace.traces.rehearsal import FOLDER
from foretrace.traces.store import holds_recording


def scratch_in(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder in *folder*, which is created if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=".rehearsal-", dir=folder)


def emptied(folder: Path) -> None:
    """Delete everything in *folder*, before a rehearsal starts again."""
    late.clear(folder)
    for one in folder.iterdir():
        shutil.rmtree(one) if one.is_dir() else one.unlink()


def checked_target(output: Path) -> Path:
    """Return the run directory *output* made absolute. Raises RehearsalError if no rehearsal may go there."""
    target = output.absolute()
    try:
        str(target).encode()  # as Arrow will
    except UnicodeEncodeError as error:
        raise RehearsalError(f"cannot write {output}: {reason(error)}") from error
    if holds_recording(target):
        raise RehearsalError(f"{output} holds a recording: give a new directory")
    known = {FOLDER, "run.json", "spans", "memory.arrow", "links.arrow", "ranks"}
    if target.exists() and (not target.is_dir() or {entry.name for entry in target.iterdir()} - known):
        raise RehearsalError(f"{output} has other files in it: give a directory that is new, empty or a run")
    return target
