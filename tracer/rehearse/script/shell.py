"""Lines for a shell: the commands in them, without what a shell does around them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from foretrace.tracer.rehearse.ranks.exported import started

SHELLS: Final = frozenset({"sh", "bash", "zsh", "dash"})
"""Shells, which take a line after ``-c``."""

BEFORE: Final = frozenset({"exec", "nohup", "time"})
"""Words before a command that change nothing about what it runs."""

_WORD: Final = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:\\.|[^"\\])*"|'[^']*')+|\n""", re.DOTALL)
_REDIRECTION: Final = re.compile(r"(?:\d*|&)(?:>>|>\||>|<)(?P<file>.*)", re.DOTALL)
_ENDS: Final = frozenset({"&&", "||", ";", "&", "\n"})


def commands(line: str) -> list[list[str]]:
    """Return the words of each command in *line*; of a pipeline, those of its first command only.

    Redirections are left out and variables are replaced. A line whose quotes do not close has no command.

    >>> commands("cd 'my runs' && A=1 torchrun a.py -n 2 > log 2>&1 | tee x; echo done")
    [['cd', 'my runs'], ['A=1', 'torchrun', 'a.py', '-n', '2'], ['echo', 'done']]
    >>> commands("echo 'open")
    []
    """
    try:
        shlex.split(line)
    except ValueError:
        return []
    found, is_piped, is_file = [list[str]()], False, False
    for raw in _WORD.findall(line.replace("\\\n", " ")):
        word = raw.removesuffix(";")
        if raw in _ENDS:
            found.append([])
            is_piped = False
        elif raw == "|":
            is_piped = True
        elif is_file:
            is_file = False
        elif match := _REDIRECTION.fullmatch(word):
            is_file = not match["file"]
        elif not is_piped:
            found[-1] += shlex.split(word if "'" in word else os.path.expandvars(word))
        if word != raw and word:
            found.append([])
            is_piped = False
    return [words for words in found if words]


def opened(command: Sequence[str]) -> list[list[str]]:
    """Return the commands that the words of a *command* run, which may be a shell that is given a line.

    >>> opened(["bash", "-lc", "nohup torchrun a.py"]), opened(["git", "status"])
    ([['torchrun', 'a.py']], [['git', 'status']])
    """
    if len(command) > 2 and Path(command[0]).name in SHELLS and re.fullmatch(r"-\w*c", command[1]):
        return [_bare(words) for words in commands(command[2])]
    return [_bare(command)] if command else []


def _bare(words: Sequence[str]) -> list[str]:
    """Return *words* without those before the command that change nothing, behind variables that are set."""
    at = len(words) - len(started(words))
    first = next((n for n in range(at, len(words)) if words[n] not in BEFORE), at)
    return [*words[:at], *words[first:]]
