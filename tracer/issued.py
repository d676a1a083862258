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
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Final

from tracer.clock import now_ns
from tracer.records import Communication

SLOTS: Final = 64
"""Communications that are kept."""

SLOT_BYTES: Final = 512
"""Bytes of a line: numbers of 20 digits fit, and two names in whatever script."""

MOST_NAME: Final = 32
"""Characters of a name that are kept, from its end: 4 bytes each at most."""

LOCAL: Final = frozenset(
    {
        "bcachefs",
        "btrfs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "overlay",
        "ramfs",
        "reiserfs",
        "tmpfs",
        "xfs",
        "zfs",
    }
)
"""File systems of one machine. On one of several machines another machine may delete what is mapped here, and
the next write would then end the process with SIGBUS."""

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
        self._numbers = count()
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
        number = next(self._numbers)
        step, stage, _, microbatch = one.position
        issued_ns = (one.start if isinstance(one.start, int) else now_ns()) + self._shift_ns
        line = (
            f'{{"n": {number}, "issued_ns": {issued_ns}, "kind": "{one.kind}", '
            f'"name": {_text(one.block.name)}, "axis": {_text(one.group.axis)}, '
            f'"group": {one.group.id}, "sequence": {one.sequence}, "peer": {one.peer}, '
            f'"size_bytes": {one.size_bytes}, "dtype": "{one.dtype}", "step": {step}, '
            f'"microbatch": {microbatch}, "layer": {one.block.layer}, "stage": {stage}}}'
        ).encode()
        at = number % SLOTS * SLOT_BYTES
        made[at : at + SLOT_BYTES] = line[: SLOT_BYTES - 1].ljust(SLOT_BYTES - 1) + b"\n"

    def close(self, *, is_told: bool) -> None:
        """Give the ring up; *is_told* says that spans tell all that is in it, so that the file can go."""
        made, self._map = self._map, None
        if made is not None:
            made.close()
            if is_told:
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


@cache
def _text(name: str) -> str:
    """Return *name* as JSON text; there are as many names as blocks and groups."""
    return json.dumps(name[-MOST_NAME:], ensure_ascii=False)
