"""Keeps a rehearsed script from removing or overwriting files that it has not created itself.

A script that keeps only its last checkpoints would remove real ones if it is rehearsed in the folder of a
real training. Files from before the rehearsal do not change: removing or renaming them does nothing, and
writing to one writes to a copy, which the script gets when it opens the file again. Files that the script
creates are real; those that it creates after its first step are hidden from other ranks, and removed in the
end (``late``).

This replaces functions of Python that all libraries end up calling. What other processes (``rm``) or C
libraries do to files is not seen.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.replacing import replaces
from foretrace.tracer.rehearse.world import late

COPIED_BYTES: Final = 256 * 2**20
"""Largest file that is copied because a script changes a part of it: our choice, a second on a disk."""

_WRITES: Final = os.O_WRONLY | os.O_RDWR
_ELSEWHERE: Final = ("/dev/", "/proc/", "/sys/")
"""Folders that contain no permanent files."""

Function = Callable[..., Any]


class Files:
    """The files that the script has created, and copies of files that it must not change.

    Args:
        folder: of the rehearsal; it holds the copies, and the list of files that its ranks have created.
        rank: the rank whose script it is.
        is_late: whether its first step is over.
    """

    def __init__(self, folder: Path, rank: int, is_late: Callable[[], bool]) -> None:
        self._folder = folder.resolve()
        self._copies_at = self._folder / f"files-{rank:05d}"
        self._made = late.Made(self._folder, is_late, os.getpid())
        self._written: dict[str, None] = {}
        self._left: dict[str, None] = {}
        self._copies: dict[str, str] = {}
        self._n_copies = 0
        self._removed: set[str] = set()
        self.moved: Callable[[str, str], None] = lambda old, new: None  # told of a path that gets another one
        # The originals: ``late.hide`` replaces them for the script, and this has to see what is hidden.
        self._lexists, self._isfile = os.path.lexists, os.path.isfile

    def install(self) -> None:
        """Replace the functions that open, create, rename and remove files."""
        replaces(builtins, io, name="open")(self._open_file)
        acts: dict[str, Function] = {
            "open": self._open_low,
            "mkdir": self._make,
            "rmdir": self._remove,
            "truncate": self._cut,
        }
        acts |= dict.fromkeys(("rename", "replace"), self._rename)
        acts |= dict.fromkeys(("symlink", "link"), self._link)
        for name, act in acts.items():
            replaces(os, name=name)(act)
        os.unlink = replaces(os, name="remove")(self._remove)
        replaces(shutil, name="rmtree")(self._remove)
        late.hide(lambda path: self._made.may_hide() and self._hides(self._at(path)))

    def said(self) -> list[str]:
        """Return a line about files that were protected, nothing if there were none."""
        found = [("removed or renamed", self._left), ("written to (a copy was)", self._written)]
        parts = [f"{_shown(paths)} would have been {what}" for what, paths in found if paths]
        notes = [f"files from before the rehearsal were not changed: {'; '.join(parts)}"] if parts else []
        if made := self._made.late():
            notes.append(f"made after the first step, and removed: {_shown(made)}")
        return notes

    @contextmanager
    def cleared(self, notes: list[str]) -> Iterator[None]:
        """After this context, add to *notes*, and remove what the script has made after its first step."""
        try:
            yield
        finally:
            notes += self.said()
            self._made.clear()

    def _open_file(self, original: Function, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file, but none from before the rehearsal to change it."""
        writes = not set(mode).isdisjoint("wax+")
        # ``w`` and ``x`` begin with an empty file.
        keeps = not set(mode).isdisjoint("ar")
        # For this script it is not there: it may take a lock again that it has removed.
        if "x" in mode and (self._at(file) in self._removed or self._hides(self._at(file))):
            mode = mode.replace("x", "w")
        if "x" in mode and self._lexists(self._at(file)):
            return original(file, mode, *args, **kwargs)  # which says that it is there
        instead = self._instead(file, writes=writes, keeps=keeps)
        # 0 is no path but a descriptor, of which nothing is noted.
        with self._noted(file if writes else 0):
            return original(instead, mode, *args, **kwargs)

    def _open_low(
        self, original: Function, path: Any, flags: int, *args: Any, dir_fd: int | None = None, **kwargs: Any
    ) -> int:
        """Do the same for ``os.open``."""
        if dir_fd is None and flags & os.O_EXCL:
            at = self._at(path)
            if at in self._removed or self._hides(at):  # it is not there, for this script
                flags &= ~os.O_EXCL
        if dir_fd is None and not flags & os.O_EXCL:
            writes = bool(flags & (_WRITES | os.O_TRUNC))
            path = self._instead(path, writes=writes, keeps=not flags & os.O_TRUNC)
        creates = dir_fd is None and flags & os.O_CREAT
        with self._noted(path if creates else 0):
            return int(original(path, flags, *args, dir_fd=dir_fd, **kwargs))

    def _instead(self, file: Any, *, writes: bool, keeps: bool) -> Any:
        """Return the path to open for *file*: that of a copy if the script changes it, or has changed it."""
        if self._hides(at := self._at(file)):
            if not writes:
                raise late.missing(file)
            return self._copy_hidden(at)
        if not (writes or self._copies):
            return file
        # Links are followed: what they lead to would be changed.
        at = os.path.realpath(at) if at else ""
        if not at or at in self._copies:
            return self._copies.get(at, file)
        if not writes or not self._isfile(at):
            return file
        if self._is_ours(at):
            return file
        return self._copy(at, keeps=keeps)

    def _copy(self, at: str, *, keeps: bool) -> str:
        """Return the path of a new copy of the file *at*, with its contents if *keeps*, else empty."""
        if keeps and Path(at).stat().st_size > COPIED_BYTES:
            raise RehearsalError(
                f"the script opens {at} for writing, but it is larger than the {COPIED_BYTES >> 20} MiB "
                "that a rehearsal copies: open it read-only (numpy.memmap: mode='r')"
            )
        # A folder per copy: a file that is written, removed and written again is another one.
        own = self._copies_at / str(self._n_copies)
        own.mkdir(parents=True, exist_ok=True)
        copy, self._n_copies = str(own / Path(at).name), self._n_copies + 1
        self._written[at] = None
        self._removed.discard(at)
        if keeps:
            shutil.copyfile(at, copy)
        self._copies[at] = copy
        return copy

    def _copy_hidden(self, at: str) -> str:
        """Return the path of a new empty file in place of *at*, which another rank has made for itself."""
        copy = self._copy(at, keeps=False)
        del self._written[at]
        return copy

    def _make(self, original: Function, path: Any, *args: Any, **kwargs: Any) -> None:
        """Make a folder, and remember it."""
        at = self._at(path)
        if at in self._removed:
            self._removed.discard(at)
        else:
            if not self._hides(at) or not self._lexists(at):
                original(path, *args, **kwargs)
            self._note(at)

    def _remove(self, original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Remove files of this script only."""
        at = "" if kwargs.get("dir_fd") is not None else self._at(path)
        if at in self._removed or self._hides(at):
            # ``ignore_errors`` of rmtree, which may be told by position.
            if kwargs.get("ignore_errors") or any(args):
                return None
            raise late.missing(path)
        if at and self._made.hides(at):
            del self._copies[at]
            return None
        if at and self._made.is_shared(at):
            return self._made.give_up(at)
        if not at or not self._lexists(at) or self._is_ours(at):
            return original(path, *args, **kwargs)
        self._leave(at)
        return None

    def _rename(self, original: Function, source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        """Move and replace files of this script only."""
        old, new = self._at(source), self._at(target)
        if self._hides(old):
            raise late.missing(source)
        copy = self._copies.pop(old, None)
        if self._isfile(new) and self._made.hides(new):
            original(copy or source, self._copies.get(new) or self._copy_hidden(new))
        elif copy is None and self._lexists(old) and not self._is_ours(old):
            self._leave(old)
        elif self._isfile(new) and not self._is_ours(new):
            original(copy or source, self._copies.get(new) or self._copy(new, keeps=False))
        elif new not in self._removed:
            is_new = not self._lexists(new)
            original(copy or source, target, *args, **kwargs)
            if is_new:
                self._note(new, instead_of=old)

    def _link(self, original: Function, source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        """Make a link that replaces no file."""
        at = self._at(target)
        if at in self._removed:
            self._removed.discard(at)
            return
        if not self._hides(at):
            original(source, target, *args, **kwargs)
        self._note(at)

    def _cut(self, original: Function, path: Any, length: int) -> None:
        """Shorten a copy."""
        original(self._instead(path, writes=True, keeps=True), length)

    def _leave(self, at: str) -> None:
        """Remember that the script has removed the file *at*, which stays."""
        self._removed.add(at)
        if self._copies.pop(at, None) is None:
            self._left[at] = None

    def _note(self, at: str, *, instead_of: str = "") -> None:
        """Remember that the script has created *at*, or renamed *instead_of*; other ranks are told."""
        if at and not self._is_elsewhere(at):
            self._made.note(at, instead_of=instead_of)
        if instead_of:
            self.moved(instead_of, at)

    @contextmanager
    def _noted(self, path: Any) -> Iterator[None]:
        """After this context, remember that the script has created the file *path* if it has."""
        at = self._at(path)
        is_new = bool(at) and not self._lexists(at := os.path.realpath(at))
        yield
        if is_new:
            self._note(at)

    def removes(self, path: Path) -> None:
        """Remove *path*, which the script has saved, at the end; other ranks see it if it was made early."""
        if (at := self._at(path)) not in self._copies and not self._is_elsewhere(at):
            self._made.note(at, goes=True)

    def _hides(self, at: str) -> bool:
        """Whether *at* is not there for this rank: others made it after their first step."""
        return bool(at) and at not in self._copies and self._made.hides(at)

    def _is_ours(self, at: str) -> bool:
        """Whether a rank of this rehearsal has created the file *at*, or a folder that contains it."""
        return self._is_elsewhere(at) or self._made.makers(at) is not None

    def _is_elsewhere(self, at: str) -> bool:
        return at.startswith(_ELSEWHERE) or Path(at).is_relative_to(self._folder)

    @staticmethod
    def _at(path: Any) -> str:
        """Return the absolute *path* with links in its folders resolved, empty if it is a file descriptor."""
        if isinstance(path, int):
            return ""
        path = Path(os.fsdecode(path))
        if path.name == "..":
            return str(os.path.realpath(path))
        return str(Path(os.path.realpath(path.parent), path.name))


def _shown(paths: Iterable[str]) -> str:
    """Return the first of *paths*, relative if possible, and how many others there are."""
    first, *others = paths
    here = Path.cwd()
    name = str(Path(first).relative_to(here)) if Path(first).is_relative_to(here) else first
    return f"{name} and {len(others)} more" if others else name
