"""The last communications that a rank has issued, on disk before each is made.

A span is written when its communication is over, a second late at most. A process that dies at once, because
gloo aborts it over sizes that differ or because it is killed, would take its last call with it: the one that
explains the death. So the newest calls are kept in a ring of lines in a file that is mapped into memory: the
operating system keeps it whatever becomes of the process. Section 8 of docs/timeline-format.md.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

from foretrace.tracer.clock import now_ns
from foretrace.tracer.records import Communication

SLOTS: Final = 64
"""Communications that are kept."""

SLOT_BYTES: Final = 704
"""Bytes of a line: 256 of keys and braces, 124 of numbers, the rest for two names in whatever script."""

MOST_NAME: Final = 24
"""Characters of a name that are kept, from its end: 4 bytes each at most, 6 if JSON escapes them."""

LOCAL: Final = frozenset(
    {
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "overlay",
        "ramfs",
        "reiserfs",
        "tmpfs",
        "xfs",
    }
)
"""File systems of one machine. On one of several machines another machine may delete what is mapped here, and
the next write would then end the process with SIGBUS. So may a full disk under one that copies on write, as
btrfs, zfs and bcachefs: room that was made once is no room for a second write."""

MOST_TEMPLATES: Final = 4096
"""Lines that are kept prepared: one for each block, kind, group and type."""

_NUMBERS: Final = tuple(
    f'"{name}": %{width}d'
    for name, width in (
        ("n", 20), ("issued_ns", 20), ("sequence", 20), ("peer", 11), ("size_bytes", 20), ("step", 11),
        ("microbatch", 11), ("stage", 11),
    )
)  # fmt: skip
"""What differs from call to call, and the most characters of each: 64 or 32 bits and a sign."""

_MOUNTS: Final = Path("/proc/self/mountinfo")


class Issued:
    """The ring of one rank; ``note`` may be called on any thread.

    Where the file system is not local, or has no room, there is no ring and ``note`` does nothing.

    Args:
        path: the run directory.
        rank: own global rank.
        shift_ns: what to add to own time to get the time of the run.
    """

    def __init__(self, path: Path, rank: int, shift_ns: int) -> None:
        self.path = path / "ranks" / f"rank-{rank:05d}.issued.jsonl"
        self._shift_ns = shift_ns
        self._numbers: Iterator[int] = count()
        self._templates: dict[tuple[Any, ...], bytes] = {}
        self._map: mmap.mmap | None = None
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if file_system(self.path.parent) in LOCAL:
                self._map = _mapped(self.path)

    def note(self, one: Communication) -> None:
        """Write the line of *one*, which is about to be made."""
        made = self._map
        if made is None:
            return
        key = (one.kind, one.group.id, one.group.axis, one.dtype, one.block)
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= MOST_TEMPLATES:
                self._templates.clear()
            template = self._templates[key] = _template(one)
        number = next(self._numbers)
        step, stage, _, microbatch = one.position
        issued_ns = (one.start if isinstance(one.start, int) else now_ns()) + self._shift_ns
        at = number % SLOTS * SLOT_BYTES
        made[at : at + SLOT_BYTES] = template % (
            number, issued_ns, one.sequence, one.peer, one.size_bytes, step, microbatch, stage,
        )  # fmt: skip

    def close(self) -> None:
        """Give the ring up, and its file: the process ends in order, and its spans tell the same."""
        made, self._map = self._map, None
        if made is not None:
            made.close()
            self.path.unlink(missing_ok=True)


def file_system(folder: Path) -> str:
    """Return the type of the file system that holds *folder*, "" if nobody says."""
    at = os.path.realpath(folder)
    best, found = -1, ""
    for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        holds = at == point or at.startswith(point.rstrip("/") + "/")
        if holds and len(point) >= best:  # of two mounts at one place the later one is seen
            best, found = len(point), after.split()[0]
    return found


def _mapped(path: Path) -> mmap.mmap:
    """Make the file with room for all lines, so that no later write can fail, and map it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.posix_fallocate(handle, 0, SLOTS * SLOT_BYTES)
        return mmap.mmap(handle, SLOTS * SLOT_BYTES)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def _template(one: Communication) -> bytes:
    """Return the line of all communications like *one*, with places of equal width for their numbers.

    Formatting bytes into a template is one call of C: on the path of a collective, where caches are cold, a
    fifth of what putting the line together takes.
    """
    text = {"kind": one.kind, "name": one.block.name[-MOST_NAME:], "axis": one.group.axis[-MOST_NAME:]}
    words = json.dumps({**text, "dtype": one.dtype}, ensure_ascii=False).replace("%", "%%")
    numbers = f'"group": {one.group.id}, "layer": {one.block.layer}, ' + ", ".join(_NUMBERS)
    line = f"{words[:-1]}, {numbers}}}".encode()
    length = len(line % ((0,) * len(_NUMBERS)))
    return line + b" " * (SLOT_BYTES - 1 - length) + b"\n"
