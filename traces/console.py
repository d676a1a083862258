"""Where verbs print for people: one rule of how wide a line is, in a terminal and in a file or a pipe."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Final, cast

from rich.console import Console

from foretrace.door import counted

FILE_WIDTH: Final = 160  # columns of what goes to a file or a pipe, unless the environment says ``COLUMNS``
TOLD_EVERY_S: Final = 5.0  # seconds between two lines on the progress of long work, in a file or a pipe

_PADDING: Final = re.compile(r" +(?=\n)")


def stdout(*, highlight: bool = False) -> Console:
    """Return a console as wide as the terminal; what is no terminal gets ``FILE_WIDTH`` columns, unpadded.

    A table that is cut or wrapped at 80 columns is of no use to ``grep`` or a page of documentation.
    ``COLUMNS`` in the environment is obeyed in both cases. With *highlight* rich colours numbers and paths
    in a terminal. Names of pictures (``:100:``) are not replaced: a line of a script may be written so.
    """
    if sys.stdout.isatty():
        return Console(width=shutil.get_terminal_size().columns, highlight=highlight, emoji=False)
    file = cast("IO[str]", _Unpadded(sys.stdout))
    asked = os.environ.get("COLUMNS", "")
    width = None if counted(asked) > 0 else FILE_WIDTH
    return Console(file=file, width=width, highlight=highlight, emoji=False)


@contextmanager
def telling(what: str, *, quiet: bool = False) -> Iterator[Callable[[str], None] | None]:
    """Show in a terminal *what* is being done; yield the function that changes these words.

    They go to the error stream, so that what is printed can be piped. Where there is no terminal, a line of
    them is written every ``TOLD_EVERY_S``. If *quiet*, nothing is shown and None is yielded.
    """
    console = Console(stderr=True)
    if quiet:
        yield None
    elif console.is_terminal:
        with console.status(what) as status:
            yield status.update
    else:
        yield _Lines(what).update


class _Lines:
    """Writes what is being done to the error stream, a line every few seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._told_s = time.monotonic()

    def update(self, words: str) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= TOLD_EVERY_S:
            self._told_s = now_s
            sys.stderr.write(f"{self._what}: {words}\n")


class _Unpadded:
    """A text stream that leaves out the spaces with which tables fill their lines."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        self._file.write(_PADDING.sub("", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:  # whatever a stream has
        return getattr(self._file, name)
