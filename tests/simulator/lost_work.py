"""Work that ends its process. It imports nothing heavy, so that new processes are there at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def kill_once(argument: tuple[str, int]) -> int:
    """Return the square of a number; 1 ends this process without a word, unless that was done before."""
    flag, number = argument
    if number == 1 and not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def dies(argument: object) -> None:
    """End this process without a word."""
    del argument
    os.kill(os.getpid(), signal.SIGKILL)


def pid(argument: object) -> int:
    """Return the number of this process."""
    del argument
    return os.getpid()
