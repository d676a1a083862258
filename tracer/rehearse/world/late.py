"""Folders that ranks of a rehearsal make after their first step: others do not see them, and none stays.

In a real run all ranks are at the same step. In a rehearsal one may save its first checkpoint while another
still begins and looks for checkpoints, and the next rehearsal would find them too. What is made before the
end of the first step, such as prepared data that others read, is seen by all and stays. So is a single file,
such as a table of results; a checkpoint, from which a script would resume, goes in the end.
"""

from __future__ import annotations

import errno
import genericpath
import json
import os
import posixpath
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from foretrace.tracer.rehearse.replacing import replaces

_LIST: Final = "made-by-scripts"
_EARLY: Final = 0
# The originals: ``hide`` replaces them for scripts.
_lexists, _isdir, _islink, _stat = os.path.lexists, os.path.isdir, os.path.islink, os.stat
_TESTS: Final = ("exists", "lexists", "isfile", "isdir", "islink")


class Made:
    """The files and folders that the ranks of a rehearsal have made, in a list that they share.

    Args:
        folder: of the rehearsal, which holds the list.
        is_late: whether the first step of this rank is over.
        own: number of the process of this rank.
    """

    def __init__(self, folder: Path, is_late: Callable[[], bool], own: int) -> None:
        self._list, self._is_late, self._own, self._open = folder / _LIST, is_late, own, open
        self._n_read = 0
        self._makers: dict[str, set[int]] = {}  # empty: made early
        self._gone: set[str] = set()
        self._any_hidden = False

    def note(self, at: str, *, instead_of: str = "", goes: bool = False) -> None:
        """Remember that the script has made *at*, or given it the name *at* in place of *instead_of*.

        Late are folders, what is in them, and what *goes* at the end in any case, as a checkpoint does.
        Another file in a folder from before stays.
        """
        goes = goes or instead_of in self._gone
        is_late = self._is_late() and self.makers(instead_of) != set()
        is_late = is_late and (goes or _isdir(at) or bool(self.makers(at)))
        with self._open(self._list, "a", encoding="utf-8") as file:
            file.write(json.dumps([self._own if is_late else _EARLY, at, goes]) + "\n")

    def makers(self, at: str) -> set[int] | None:
        """Return the processes that made *at*, or the folder it is in, late; None if none made it."""
        self._read()
        if not self._makers or not at:
            return None
        around = (at, *map(str, Path(at).parents))
        return next((self._makers[one] for one in around if one in self._makers), None)

    def may_hide(self) -> bool:
        """Whether another rank has made anything late."""
        self._read()
        return self._any_hidden

    def hides(self, at: str) -> bool:
        """Whether other ranks have made *at* late, and this one has not."""
        return self.may_hide() and self._own not in (self.makers(at) or {self._own})

    def is_shared(self, at: str) -> bool:
        """Whether this rank has made *at* late, and others have too."""
        self._read()
        return len(makers := self._makers.get(at, set())) > 1 and self._own in makers

    def give_up(self, at: str) -> None:
        """Forget that this rank has made *at*, which others have made too."""
        self._makers[at].discard(self._own)

    def late(self) -> list[str]:
        """Return what this rank has made late and is there, without what is in such folders."""
        self._read()
        own = {at: None for at, makers in self._makers.items() if self._own in makers and _lexists(at)}
        return [at for at in own if own.keys().isdisjoint(map(str, Path(at).parents))]

    def clear(self) -> None:
        """Remove what this rank alone has made late; for *own* = 0, what any rank has."""
        self._read()
        goes = [at for at, by in self._makers.items() if by and (not self._own or by == {self._own})]
        goes += [at for at in self._gone if not self._own]
        stays = self._makers.keys() - set(goes)
        held = {str(folder) for at in stays for folder in Path(at).parents}
        # What is in a folder was made after it, and goes before it.
        for at in reversed(goes):
            if at not in held:
                _remove(at)

    def _read(self) -> None:
        """Read what was added to the list."""
        try:
            n_bytes = _stat(self._list).st_size
        except FileNotFoundError:
            return
        # The list only grows, so it is read on from where it ended.
        if n_bytes == self._n_read:
            return
        with self._open(self._list, "rb") as file:
            file.seek(self._n_read)
            added = file.read()
        # Another process may be writing the last line: it is read next time.
        added = added[: added.rfind(b"\n") + 1]
        self._n_read += len(added)
        for maker, at, goes in map(json.loads, added.splitlines()):
            self._gone |= {at} if goes else set()
            self._makers[at] = {*self._makers.get(at, ()), maker} if maker != _EARLY else set()
            self._any_hidden |= maker not in {_EARLY, self._own}


def clear(folder: Path) -> None:
    """Remove what the ranks of the rehearsal in *folder* have made late; none of them is running."""
    Made(folder.resolve(), lambda: True, 0).clear()


@contextmanager
def cleared(folder: Path) -> Iterator[None]:
    """At the end of this context, remove what the ranks of the rehearsal in *folder* have made late."""
    try:
        yield
    finally:
        clear(folder)


def _remove(at: str) -> None:
    with suppress(OSError):
        if _isdir(at) and not _islink(at):
            shutil.rmtree(at)
        else:
            os.unlink(at)  # noqa: PTH108 - of a link, not what it leads to


def missing(path: Any) -> FileNotFoundError:
    """Return the error of a *path* that is not there."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def hide(is_hidden: Callable[[Any], bool]) -> None:
    """Make the functions of Python that look at paths, or list folders, leave out those that *is_hidden*."""

    def looked(original: Callable[..., bool], path: Any) -> bool:
        return original(path) and not is_hidden(path)

    for name in _TESTS:
        # ``posixpath`` has names of its own for functions of ``genericpath``.
        modules = [module for module in (posixpath, genericpath) if hasattr(module, name)]
        replaces(*modules, name=name)(looked)

    @replaces(Path)
    def stat(original: Callable[..., Any], path: Path, *args: Any, **kwargs: Any) -> Any:
        if is_hidden(path):
            raise missing(path)
        return original(path, *args, **kwargs)

    @replaces(os)
    def listdir(original: Callable[..., Any], path: Any = ".") -> list[Any]:
        if path is None or isinstance(path, int):
            return list(original(path))
        if is_hidden(path):
            raise missing(path)
        return [name for name in original(path) if not is_hidden(os.path.join(path, name))]  # noqa: PTH118

    @replaces(os)
    def scandir(original: Callable[..., Any], path: Any = ".") -> Any:
        if path is None or isinstance(path, int):
            return original(path)
        if is_hidden(path):
            raise missing(path)
        return _Entries(original(path), is_hidden)


class _Entries:
    """What ``os.scandir`` returns, without what is hidden."""

    def __init__(self, entries: Any, is_hidden: Callable[[Any], bool]) -> None:
        self._entries, self._is_hidden = entries, is_hidden

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(entry for entry in self._entries if not self._is_hidden(entry.path))

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder."""
        self._entries.close()
