"""How files of a user are written: all of it or nothing."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from foretrace.traces.errors import LeftoverWarning, RunError, reason
from foretrace.traces.info import Process
from foretrace.traces.private import held, held_folder, is_held


@contextmanager
def replacing(target: Path, *, is_of_run: bool = False) -> Iterator[BinaryIO]:
    """Give a new file, open to be written, which takes the place of *target* when all of it is written.

    Until then, and if writing fails, *target* stays as it was. Where it is a link, what it leads to is
    replaced. A pipe, a terminal or a device such as ``/dev/null`` has no place to take: it is written itself.
    Folders on the way to *target* that do not exist are made. Every file that a verb writes where its user
    says comes through here, so a part of a run is replaced only by who records or makes that run, which
    *is_of_run* says. Raises OSError: it is one, the file cannot be made or put in its place, or a link of
    another user's leads to it.
    """
    if not is_of_run:
        spare_runs(target)
    if not target.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    if _is_stream(target):
        with target.open("wb") as file:
            yield file
        return
    with held(target) as final:
        fresh = _beside(final)
        try:
            # Made and opened in one: who can write to the folder could put a link in place of a name.
            with fresh.open("xb") as file:
                yield file
            fresh.replace(final)
        except OSError as error:
            if error.filename in (None, str(fresh)):  # None: as where the disk is full
                error.filename = str(target)
            raise
        finally:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)


def _is_stream(target: Path) -> bool:
    return target.exists() and not target.is_file() and not target.is_dir()


@contextmanager
def replacing_by_name(target: Path) -> Iterator[Path]:
    """Give a path at which what is to take the place of *target* is made, by a library that takes paths.

    As ``replacing`` else, but where *target* is a link, the link is replaced.
    """
    with scratch_folder(target) as (scratch, place):
        made = scratch / target.name
        yield made
        made.replace(place)


@contextmanager
def scratch_folder(target: Path) -> Iterator[tuple[Path, Path]]:
    """Give a new folder of this user's alone beside *target*, in which it is made, and where that is to go.

    Both are paths that others cannot lead elsewhere (``held``). Folders on the way to *target* that do not
    exist are made. The folder is removed in the end, and so are those of processes that were killed before
    they could. Raises OSError: the folder cannot be made.
    """
    with held(target, follows=False) as final:
        folder = _beside(final)
        folder.mkdir(mode=0o700)
        with held_folder(folder) as scratch:
            try:
                yield scratch, final
            finally:
                _discard(folder, scratch, final)


NEW: Final = "new"  # the part of a scratch folder that takes the place of its target

_OLD: Final = "old"
_THEIRS: Final = "theirs"


def take_place(scratch: Path, target: Path, own: Collection[str]) -> None:
    """Put the part ``NEW`` of a scratch folder where *target* is.

    Entries of *target* that are not in *own* are the user's, and stay in it. Who is killed on the way leaves
    the rest to the next one that makes a scratch folder for *target*. Raises OSError: it cannot be put there,
    and *target* is as it was; or something of the user's cannot be put back, and is kept in *scratch*.
    """
    if not target.exists():
        (scratch / NEW).rename(target)
        return
    (scratch / _THEIRS).mkdir()
    try:
        for entry in target.iterdir():
            if entry.name not in own:
                entry.rename(scratch / _THEIRS / entry.name)
        target.rename(scratch / _OLD)
        _complete(scratch, target)
    except OSError:
        if not target.exists():
            (scratch / _OLD).rename(target)
        raise


def _complete(scratch: Path, target: Path) -> None:
    """Do what ``take_place`` has not done yet: nothing is lost, wherever it was interrupted."""
    if (scratch / _OLD).exists() and not target.exists():
        (scratch / NEW).rename(target)
    theirs = scratch / _THEIRS
    for entry in theirs.iterdir() if theirs.is_dir() else ():
        if (target / entry.name).exists():  # made since: the newer one stays, and the older one in scratch
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target / entry.name))
        entry.rename(target / entry.name)


def _discard(folder: Path, scratch: Path, target: Path) -> None:
    """Remove *folder*, held as *scratch*; it stays where something of the user's cannot be put back."""
    with suppress(OSError):
        _complete(scratch, target)
        # What is in it, and then it: by its name others could have another one of this user's removed.
        for entry in scratch.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()
        folder.rmdir()


def _beside(target: Path) -> Path:
    """Return a path beside *target* that nobody has, and remove what killed processes left there.

    What those of other machines, or of this one before it was started anew, have there is only named; so is
    what others may have given such a name.
    """
    here = Process.here()
    where = hashlib.blake2b(f"{here.host} {here.namespace}".encode(), digest_size=6).hexdigest()
    owner = f"{re.sub(r'[^A-Za-z0-9_-]', '-', here.host)[:32]}-{where}"
    name = target.name.encode(errors="ignore")[:64].decode(errors="ignore")  # a name has at most 255 bytes
    for left in target.parent.glob(f".{glob.escape(name)}.*.tmp"):
        if not (made := _MADE.fullmatch(left.name.removeprefix(f".{name}."))):
            continue
        path = left.parent.resolve() / left.name
        if made["owner"] != owner:
            there = made["owner"].rpartition("-")[0]
            _name(f"{path} is written on {there}, which cannot be seen from here: remove it if nobody does")
        elif _runs(int(made["pid"])):
            continue
        elif is_held(left):
            _name(f"{path} is what a killed process has left, if nobody has renamed it: look and remove it")
        else:
            with suppress(OSError):  # that of another user
                if left.is_dir() and not left.is_symlink():
                    with held_folder(left) as scratch:
                        _discard(left, scratch, target)
                else:
                    left.unlink()
    return target.with_name(f".{name}.{owner}-{here.pid}-{secrets.token_hex(4)}.tmp")


def _name(leftover: str) -> None:
    with suppress(LeftoverWarning):  # where warnings are errors
        warnings.warn(LeftoverWarning(leftover), stacklevel=4)


_MADE: Final = re.compile(r"(?P<owner>[A-Za-z0-9_-]*-[0-9a-f]{12})-(?P<pid>\d+)-[0-9a-f]{8}\.tmp")
"""What follows the name of a target: who makes it."""


def _runs(pid: int) -> bool:
    """Return whether there is a process *pid* on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # that of another user, or a number that no process has: not ours
        return True
    return True


PARTS_OF_A_RUN: Final = frozenset({"run.json", "memory.arrow", "links.arrow"})
FOLDERS_OF_A_RUN: Final = frozenset({"spans", "ranks"})

_KEPT: Final = PARTS_OF_A_RUN | FOLDERS_OF_A_RUN | {"rehearsal", "kineto", "kernels"}
_DEEPEST: Final = 3  # parts of a path in a run, as of a file of a rank of a rehearsal


def spare_runs(target: Path) -> None:
    """Raise OSError if *target*, or what it leads to, is a part of a run: what was recorded stays."""
    final = Path(os.path.realpath(target))
    for run in list(final.parents)[:_DEEPEST]:
        # A recording that was killed has folders and no description.
        is_run = (run / "run.json").is_file() or all((run / one).is_dir() for one in FOLDERS_OF_A_RUN)
        if is_run and final.relative_to(run).parts[0] in _KEPT:
            raise FileExistsError(errno.EEXIST, "it is a part of a run", str(target))


def check_can_write(*files: Path | None, folder: Path | None = None) -> None:
    """Raise RunError unless *files*, and *folder*, can be written, None for none; ask before long work.

    None of them may have the name of another one. Folders on the way to them may be missing, as ``replacing``
    makes them; none is made here. What killed processes have left is named by who writes.
    """
    taken: set[str] = set()
    for target in (folder, *files):
        if target is None or (target is not folder and _is_stream(target)):
            continue
        if (place := os.path.realpath(target)) in taken:
            raise RunError(f"{target} would be two things: give each a name of its own; nothing was done")
        taken.add(place)
        try:
            spare_runs(target)
            where = Path(place) if target is folder else target.absolute()
            if (target.is_dir() and target is not folder) or not where.name:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            above = next(one for one in where.parents if one.exists())
            with warnings.catch_warnings(action="ignore", category=LeftoverWarning):
                probe = _beside(above / where.name)
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            raise RunError(f"cannot write {target}: {reason(error)}; nothing was done") from error
