"""Folders in which ranks write their results while they are rehearsed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path


def scratch_in(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder in *folder*, which is created if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=".rehearsal-", dir=folder)


def emptied(folder: Path) -> None:
    """Delete everything in *folder*, before a rehearsal starts again."""
    for one in folder.iterdir():
        shutil.rmtree(one) if one.is_dir() else one.unlink()
