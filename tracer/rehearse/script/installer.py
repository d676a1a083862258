"""Replaces a program that installs packages. It runs by itself and imports nothing of foretrace.

    python installer.py ASKED NAME REAL [arguments of the program]

REAL is the real program, as a JSON list of words. A command that would change the installed packages is only
written to the file ASKED, one line each. Every other command is passed to the real program.
"""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

_SYSTEM = ("install", "remove", "purge", "upgrade", "dist-upgrade", "full-upgrade", "update", "build-dep")
_CONDA = ("install", "update", "upgrade", "remove", "uninstall", "create", "env create", "env update")

CHANGING = {
    **dict.fromkeys(("pip", "pip3"), ("install", "uninstall")),
    "uv": ("pip install", "pip uninstall", "pip sync", "add", "remove", "sync"),
    **dict.fromkeys(("conda", "mamba", "micromamba"), _CONDA),
    **dict.fromkeys(("apt-get", "apt"), _SYSTEM),
}
"""By program, the first arguments with which it changes the installed packages."""


def changes(name: str, told: Sequence[str]) -> bool:
    """Return whether the program *name* changes the installed packages if called with the words *told*."""
    words = " ".join(word for word in told if not word.startswith("-"))
    return any(words == how or words.startswith(f"{how} ") for how in CHANGING[name])


def note(asked: Path, name: str, told: Sequence[str]) -> None:
    """Write a command that is not run to the file *asked*."""
    with asked.open("a", encoding="utf-8") as file:
        file.write(f"{shlex.join([name, *told])}\n")


if __name__ == "__main__":
    _, path, program, real, *rest = sys.argv
    if changes(program, rest):
        note(Path(path), program, rest)
    else:
        command = [*json.loads(real), *rest]
        os.execv(command[0], command)
