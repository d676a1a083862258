"""Whether a file can be written, asked before what takes long."""

from __future__ import annotations

import os
from pathlib import Path

from tracer.errors import RecordError


def check_can_write(path: Path | None) -> None:
    """Raise RecordError unless a file *path* can be made, its folder with it; None is no file."""
    if path is None:
        return
    probe = path.parent / f".{path.name}.{os.getpid()}.probe"
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "Is a directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror or error}; nothing was measured") from error
