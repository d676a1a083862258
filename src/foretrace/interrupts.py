"""What Ctrl-C does: it ends a process at once while that is loaded, and is an exception to a verb."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

INTERRUPTED = 130
"""Status of a command that Ctrl-C ended: 128 and the number of the signal, as shells have it."""


def end(*_: object) -> None:
    """End the process with nothing said and nothing cleaned up."""
    os._exit(INTERRUPTED)


def leave(status: int) -> NoReturn:
    """End the process with *status* once its output is written.

    Threads are not torn down: one in the midst of compiling would take the process with it (SIGABRT).
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def loading_begins() -> None:
    """Let Ctrl-C end the process, unless somebody has made it something else, or nothing.

    While a command is loaded there is nothing to clean up, and libraries do not bear an exception in the
    middle of their loading.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def verb_begins() -> None:
    """Let Ctrl-C be an exception again."""
    if signal.getsignal(signal.SIGINT) is end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
