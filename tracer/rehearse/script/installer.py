"""Stands for a program that installs packages: a program of its own, which imports nothing of foretrace.

    python installer.py ASKED NAME REAL [what the program is told]

REAL is the program itself, as a list of words in JSON. What would change the packages of the machine is only
written to the file ASKED, a line each; everything else is handed to the program.
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
"""Programs, and with which words at their beginning they change what is installed."""


def changes(name: str, told: Sequence[str]) -> bool:
    """Return whether the program of that *name* changes what is installed, where it is *told* these words."""
    words = " ".join(word for word in told if not word.startswith("-"))
    return any(words == how or words.startswith(f"{how} ") for how in CHANGING[name])


def note(asked: Path, name: str, told: Sequence[str]) -> None:
    """Write down a command that is not run."""
    with asked.open("a", encoding="utf-8") as file:
        file.write(f"{shlex.join([name, *told])}\n")


if __name__ == "__main__":
    _, path, program, real, *rest = sys.argv
    if changes(program, rest):
        note(Path(path), program, rest)
    else:
        command = [*json.loads(real), *rest]
        os.execv(command[0], command)
