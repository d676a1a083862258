"""Programs that install packages: they do nothing and report success, so that the machine does not change.

A replacement of each such program comes first on ``PATH`` (module ``programs``), for the script and for its
shells. A call by other means, such as ``python -m pip`` or a full path, is changed to call the replacement.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any, Final

from foretrace.tracer.rehearse.script import installer, started
from foretrace.tracer.rehearse.script.libraries import when_imported

OWN: Final = ("pip", "pip3")
"""Programs that every Python has, at least as ``python -m pip``."""

SAID: Final = (
    "the script starts {command}, which is not run and counts as successful: a rehearsal installs nothing; "
    "install what the script needs beforehand"
)
"""Note about a command that would change the packages of this machine."""

_PLACE: Final = r"(^|[;&|(\n]|\b(?:then|do)\s)(\s*(?:\w+=\S*\s+)*)(?:sudo\s+(?:-\w+\s+)*)?"
_PYTHON: Final = r"[\"']?[\w./~-]*python[\d.]*[\"']?\s+(?:-\w+\s+)*?-m\s+(?P<module>pip3?)"
_PATHS: Final = (
    rf"[\w./~-]*/(?P<path>{'|'.join(installer.CHANGING)})|(?P<name>{'|'.join(installer.CHANGING)})"
)
_COMMAND: Final = re.compile(rf"{_PLACE}(?:{_PYTHON}|{_PATHS})(?=\s)")
"""An installing program where a shell expects a command: at the beginning, or after another command."""


def put(program: Path, words: Sequence[str]) -> None:
    """Create the executable *program*, which runs *words* followed by its own arguments."""
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)


class Installers:
    """Replaces programs that install packages, for the script of one rank.

    Args:
        folder: of the replacements; ``Programs`` creates it and puts it on ``PATH``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._asked = folder, folder / "installed"
        self._made: set[str] = set()
        self._not_run: list[str] = []

    def install(self) -> None:
        """Put the replacements into the folder, which must exist, and change calls of the real programs."""
        own = Path(installer.__file__).resolve()
        for name in installer.CHANGING:
            found = shutil.which(name)
            real = [found] if found else [sys.executable, "-m", "pip"] if name in OWN else []
            if real:
                asked = str(self._asked)
                put(self._folder / name, [sys.executable, "-I", str(own), asked, name, json.dumps(real)])
                self._made.add(name)
        self._watch()
        self._kept = when_imported("pip._internal.cli.main", self._inside)

    def said(self) -> list[str]:
        """Return notes about commands that were not run."""
        lines = self._asked.read_text(encoding="utf-8").splitlines() if self._asked.exists() else []
        return [SAID.format(command=line) for line in dict.fromkeys([*lines, *self._not_run])]

    def _watch(self) -> None:
        """Change calls of installing programs so that they start the replacements."""
        anywhere: Any = subprocess.Popen
        starts, shell = anywhere.__init__, os.system

        def init(self_: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
            starts(self_, args if kwargs.get("executable") else self.replaced(args), *rest, **kwargs)

        anywhere.__init__ = init
        os.system = lambda command: shell(self.replaced(command))
        for name in ("execv", "execve", "execvp", "execvpe"):
            setattr(os, name, self._becoming(getattr(os, name)))

    def _becoming(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def become(file: Any, args: Sequence[Any], *env: Any) -> None:
            words = self.replaced([file, *args[1:]])
            original(words[0], args if words[0] == file else words, *env)

        return become

    def replaced(self, command: Any) -> Any:
        """Return *command*, words or a shell line, with installing programs replaced."""
        if isinstance(command, str):
            return _COMMAND.sub(self._stand_in, command)
        if not isinstance(command, Sequence) or isinstance(command, bytes) or not command:
            return command
        name, words = _installer_of([str(word) for word in command])
        return [str(self._folder / name), *words] if name in self._made else command

    def _stand_in(self, found: re.Match[str]) -> str:
        name = found["module"] or found["path"] or found["name"]
        if name not in self._made:
            return found[0]
        return f"{found[1]}{found[2]}{shlex.quote(str(self._folder / name))}"

    def _inside(self, module: Any) -> None:
        """Do the same for calls of pip in this process; *module* is pip's own."""
        original = module.main

        def main(args: list[str] | None = None) -> Any:
            words = sys.argv[1:] if args is None else args
            if not installer.changes("pip", words):
                return original(args)
            self._not_run.append(shlex.join(["pip", *words]))
            return 0

        module.main = main


def _installer_of(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the name of the program that *command* starts, also by ``sudo``, and its arguments.

    >>> _installer_of(["sudo", "-E", "/usr/bin/apt-get", "install", "x"])
    ('apt-get', ['install', 'x'])
    >>> _installer_of(["python3", "-I", "-m", "pip", "install", "x"]), _installer_of(["python3", "train.py"])
    (('pip', ['install', 'x']), ('', []))
    """
    words = list(command)
    if Path(words[0]).name == "sudo":
        words = list(dropwhile(lambda word: word.startswith("-"), words[1:])) or words
    name, told = Path(words[0]).name, words[1:]
    if not started.is_interpreter(words[0]):
        return name, told
    told = started.past_options(told)
    return (told[1], told[2:]) if told[:1] == ["-m"] and told[1:2] and told[1] in OWN else ("", [])
