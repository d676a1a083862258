"""What is loaded or run: nobody but this user and root may be able to put something in its place."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from foretrace.traces.errors import RunError, reason

ONLY_OWNER: Final = 0o700
SAFE_PATH: Final = "PYTHONSAFEPATH"


def is_private(path: Path) -> bool:
    """Return whether nobody else can change what is at *path*, or put something else in its place.

    *path* and all that it leads through belong to this user or root. Others can write to none of it, but to a
    folder above it in which they can only replace what is theirs, such as ``/tmp``. What does not exist is
    judged by the folder in which it would be made.
    """
    whole = path.absolute()
    ways = {one for end in (whole, whole.resolve()) for one in (end, *end.parents)}
    return all(_is_safe(one, is_end=one in (whole, whole.resolve())) for one in ways)


def private_folder(folder: Path, why: str) -> Path:
    """Return *folder*, made if it is not there, that is this user's alone.

    Args:
        folder: in which files are kept that are loaded later.
        why: what to do about a folder that cannot be made.

    Raises:
        RunError: it cannot be made, or others can write to it or above it.
    """
    try:
        folder.parent.mkdir(mode=ONLY_OWNER, parents=True, exist_ok=True)
        folder.mkdir(mode=ONLY_OWNER, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise RunError(f"{folder}: {reason(error)}; {why}") from error
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not own or found.st_mode & 0o777 != ONLY_OWNER:  # where groups own folders, a bit of theirs stays
        raise RunError(
            f"{folder} must be a folder of yours that nobody else can write to, because its files are run: "
            f"chmod 700 {folder}, or remove it"
        )
    if not is_private(folder):
        raise RunError(f"{folder}: others can write to a folder above it, and its files are run; {why}")
    return folder


@contextmanager
def without_this_folder() -> Iterator[None]:
    """Have processes of Python that are started within import nothing from the current folder.

    They look there first unless told otherwise, and others may have put something there.
    """
    before = os.environ.pop(SAFE_PATH, None)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        del os.environ[SAFE_PATH]
        os.environ |= {} if before is None else {SAFE_PATH: before}


class Processes(ProcessPoolExecutor):
    """Fresh processes on this machine, which import nothing from the current folder."""

    def __init__(self, workers: int) -> None:
        with without_this_folder():  # locks have a process that removes them
            super().__init__(workers, mp_context=get_context("spawn"))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Hand over a call, as any executor; a process is started if none is free."""
        with without_this_folder():
            return super().submit(fn, *args, **kwargs)


def _is_safe(path: Path, *, is_end: bool) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return True  # it is not there: the folder above it counts
    if found.st_uid not in (0, os.getuid()):
        return False
    if stat.S_ISLNK(found.st_mode):
        return True  # what it leads to is looked at, too
    if found.st_mode & stat.S_ISVTX and not is_end:
        return True
    if found.st_mode & stat.S_IWOTH:
        return False
    return not found.st_mode & stat.S_IWGRP or _is_own_group(found.st_gid)


def _is_own_group(gid: int) -> bool:
    """Return whether *gid* is root's, or the group that many systems make for each user."""
    try:
        group = grp.getgrgid(gid)
        return gid == 0 or (group.gr_name == pwd.getpwuid(os.getuid()).pw_name and not group.gr_mem)
    except KeyError:
        return False
