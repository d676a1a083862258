"""Folders in which ranks leave what they know while they are rehearsed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path


def scratch_in(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder in *folder*, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=".rehearsal-", dir=folder)


def emptied(folder: Path) -> None:
    """Take away all that is in *folder*: a rehearsal begins anew."""
    for one in folder.iterdir():
        shutil.rmtree(one) if one.is_dir() else one.unlink()
