"""What is loaded or run: nobody but this user and root may be able to put something in its place."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from foretrace.traces.errors import RunError, reason

ONLY_OWNER: Final = 0o700
SAFE_PATH: Final = "PYTHONSAFEPATH"


CAN_HOLD: Final = hasattr(os, "O_PATH")
"""Whether a folder can be held open to go through it: on Linux. Elsewhere paths are gone through by name."""


def is_private(path: Path) -> bool:
    """Return whether nobody else can change what is at *path*, or put something else in its place.

    *path* and all that it leads through belong to this user or root. Others can write to none of it, but to a
    folder above it in which they can only replace what is theirs, such as ``/tmp``. What does not exist is
    judged by the folder in which it would be made.
    """
    if not CAN_HOLD:
        whole = path.resolve()
        there = [one.stat() for one in (whole, *whole.parents) if one.exists()]
        return _is_safe(there[0]) and all(map(_is_fixed, there))
    fixed: list[bool] = []
    try:
        folder, _, name = _walked(path, lambda found, **_: fixed.append(_is_fixed(found)))
    except OSError:
        return False
    try:
        end = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        end = os.fstat(folder)
    finally:
        os.close(folder)
    return all(fixed) and _is_safe(end)


@contextmanager
def held(target: Path, *, follows: bool = True) -> Iterator[Path]:
    """Give where *target* leads, as a path that leads there whatever others rename meanwhile.

    It is an ordinary path where nobody else can; else one through a folder that this process has open.
    Folders on the way that do not exist are made.

    Args:
        target: a file or folder, which need not exist.
        follows: if it is a link, give what it leads to.

    Raises:
        OSError: a folder cannot be made or gone through. A link of another user's is at the end, or in a
            folder in which everybody can make one.
    """
    if not CAN_HOLD:
        final = target.resolve() if follows else target.parent.resolve() / target.name
        final.parent.mkdir(parents=True, exist_ok=True)
        yield final
        return
    fixed: list[bool] = []

    def look(found: os.stat_result, *, above: os.stat_result, is_end: bool) -> None:
        is_theirs = stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.getuid())
        if is_theirs and (is_end or above.st_mode & stat.S_IWOTH):
            said = "a link of another user's; remove it or give another name"
            raise PermissionError(errno.EPERM, said, str(target))
        fixed.append(_is_fixed(found))

    folder, at, name = _walked(target, look, makes=True, follows=follows)
    try:
        yield (at if all(fixed) else _through(folder)) / name
    finally:
        os.close(folder)


@contextmanager
def held_folder(made: Path) -> Iterator[Path]:
    """Give *made*, a new folder of this user's alone, as a path that leads to it; as ``held``.

    Raises OSError: somebody has put another in its place.
    """
    if not CAN_HOLD:
        yield made
        return
    folder = os.open(made, os.O_PATH | os.O_NOFOLLOW)
    try:
        if os.fstat(folder).st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "somebody has put another in its place", str(made))
        yield made if is_private(made) else _through(folder)
    finally:
        os.close(folder)


def is_held(path: Path) -> bool:
    """Return whether *path*, as ``held`` gives it, goes through a folder in which others can rename."""
    return path.parts[1:2] == _HELD.parts[1:]


_HELD: Final = Path("/proc")


def _through(folder: int) -> Path:
    """Return the path of an open folder; processes that this one starts can use it, too."""
    return _HELD / str(os.getpid()) / "fd" / str(folder)


def _walked(
    path: Path, look: Callable[..., None], *, makes: bool = False, follows: bool = True
) -> tuple[int, Path, str]:
    """Go to *path* as the system does, each step from an open folder: what is looked at is gone through.

    Args:
        path: where to.
        look: called with the status of each folder and link before it is gone through, of the folder
            ``above`` it, and whether *path* ends there (``is_end``). May raise.
        makes: make folders that are missing. Else the first one that is missing is the end.
        follows: go through a link at the end.

    Returns:
        The folder of the end, open; its path, without links; the name in it, of what may not exist.
    """
    names, n_links, at = _names(str(path.absolute())), 0, Path("/")
    with ExitStack() as opened:

        def entered(name: str, above: int | None, flags: int = 0) -> int:
            handle = os.open(name, os.O_PATH | flags, dir_fd=above)
            opened.callback(os.close, handle)
            return handle

        folder = entered("/", None)
        while True:
            name, *names = names
            try:
                entry = entered(name, folder, os.O_NOFOLLOW)
            except FileNotFoundError:
                if not (names and makes):
                    return os.dup(folder), at, name
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=folder)
                entry = entered(name, folder, os.O_NOFOLLOW)
            found = os.fstat(entry)
            is_link = stat.S_ISLNK(found.st_mode)
            if not names and not (is_link and follows):
                return os.dup(folder), at, name
            look(found, above=os.fstat(folder), is_end=not names)
            n_links += is_link
            if n_links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            if not is_link:
                folder, at = entry, at / name
            elif names and _leads_where_it_is_open(found):
                folder, at = entered(name, folder), at / name
                look(os.fstat(folder), above=found, is_end=False)
            else:
                led = os.readlink("", dir_fd=entry)
                names = [*_names(led), *names]
                if led.startswith("/"):
                    folder, at = entered("/", None), Path("/")


_MOST_LINKS: Final = 40  # as the system follows


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name] or ["."]


def _leads_where_it_is_open(link: os.stat_result) -> bool:
    """Return whether *link* is one of ``/proc``, such as to an open file: the system goes where that is."""
    with suppress(OSError):
        return link.st_dev == _HELD.stat().st_dev
    return False


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


SPAWN: Final = get_context("spawn")


class Processes(ProcessPoolExecutor):
    """Fresh processes on this machine, which import nothing from the current folder.

    *begin*: what each of them does first.
    """

    def __init__(self, workers: int, begin: Callable[[], object] | None = None) -> None:
        with without_this_folder():  # locks have a process that removes them
            super().__init__(workers, mp_context=SPAWN, initializer=begin)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Hand over a call, as any executor; a process is started if none is free."""
        with without_this_folder():
            return super().submit(fn, *args, **kwargs)


def _is_fixed(found: os.stat_result) -> bool:
    """Return whether others can replace nothing of this user's in a folder, or turn no link."""
    return _is_safe(found) or (found.st_uid in (0, os.getuid()) and bool(found.st_mode & stat.S_ISVTX))


def _is_safe(found: os.stat_result) -> bool:
    if found.st_uid not in (0, os.getuid()):
        return False
    if stat.S_ISLNK(found.st_mode):
        return True  # the folder that it is in was looked at, and so is what it leads to
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
