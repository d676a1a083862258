"""Commands that pip has installed: files without a suffix whose first lines say that Python runs them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

MOST_READ: Final = 4096
"""Bytes of a file that are read: its first lines name who runs it, by way of a shell if the name is long."""


def is_python(file: Path) -> bool:
    """Whether *file* says in its first lines that Python runs it."""
    try:
        with file.open("rb") as text:
            first = text.read(MOST_READ).splitlines()[:2]
    except OSError:
        return False
    return first[:1] != [] and first[0].startswith(b"#!") and any(b"python" in line for line in first)


def command_file(word: str) -> str:
    """Return the file of a command that a shell finds on its PATH and Python runs, else *word* itself.

    A file of that name in the folder, or a name with folders in it, needs no PATH.
    """
    found = None if not word or "/" in word or Path(word).is_file() else shutil.which(word)
    return found if found and is_python(Path(found)) else word
