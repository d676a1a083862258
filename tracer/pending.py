"""What a rank has under way, on disk while it is: a hang never comes to a span, which is written when over.

``ranks/rank-00000.pending.json`` says how many collectives and transfers the rank has issued in each group,
which of them have not ended, and where its main thread is: section 7 of docs/timeline-format.md.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

from foretrace.door import sealed_text
from foretrace.tracer.clock import now_ns
from foretrace.tracer.groups import Groups
from foretrace.tracer.records import Communication
from foretrace.tracer.sink import COLUMNS, communication_row
from foretrace.tracer.stamps import GATE, Resolver
from foretrace.traces.timeline import FORMAT_VERSION
from foretrace.traces.writer import write_atomically

STALL_NS: Final = 1_000_000_000
"""Age of a communication, or of the last that was issued, from which on the file is written."""

EVERY_NS: Final = 10_000_000_000
"""Time after which it is written without a reason, as the process may be killed at any moment."""

MOST_LISTED: Final = 64  # communications under way that are listed; the oldest of them explain the others
MOST_FRAMES: Final = 16  # calls of the main thread that are listed

UNKNOWN: Final = ("stream", "duration_ns", "is_bound")  # columns that only what has ended has


class Pending:
    """Writes what one rank has under way; called on the writing thread after each batch."""

    def __init__(
        self,
        path: Path,
        rank: int,
        groups: Groups,
        shift_ns: int,
        moments: Resolver,
        *,
        under_way: Callable[[], Iterable[Communication]],
        step: Callable[[], int],
    ) -> None:
        self.path = path / "ranks" / f"rank-{rank:05d}.pending.json"
        self._rank, self._groups, self._shift_ns = rank, groups, shift_ns
        self._under_way, self._step = under_way, step
        self._moments = moments
        self._seen: object = None
        self._seen_ns = self._written_ns = now_ns()
        self._written: object = None

    def update(self) -> None:
        """Write the file if that tells something new about a rank that may hang.

        Raises RunError: the file cannot be written.
        """
        with GATE.asking() as may_ask:
            if may_ask:
                self._update()

    def _update(self) -> None:
        now, counts = now_ns(), self._counts()
        found = self._unended(self._under_way())
        if counts != self._seen:
            self._seen, self._seen_ns = counts, now
        is_quiet = now - self._seen_ns > STALL_NS
        is_stalled = bool(found) and now - self._issued_ns(found[0], now) > STALL_NS
        is_due = now - self._written_ns > EVERY_NS
        if not (is_quiet or is_stalled or is_due):
            return
        state = (counts, [id(one) for one in found[:MOST_LISTED]], len(found))
        if state != self._written or is_due:  # nothing goes on: say until when this rank was alive
            self._write(found, counts)
            self._written, self._written_ns = state, now

    def close(self, left: Iterable[Communication]) -> None:
        """Write what will never end, or delete the file if there is nothing.

        Raises RunError: the file cannot be written.
        """
        with GATE.asking() as may_ask:
            found = self._unended(left) if may_ask else list(left)
        if found:
            self._write(found, self._counts())
        else:
            self.path.unlink(missing_ok=True)

    def _counts(self) -> tuple[dict[str, int], list[list[int]]]:
        collectives, transfers = {}, []
        for group in self._groups.known():
            collectives[str(group.id)] = group.n_collectives
            transfers += [[group.id, *pair, n] for pair, n in group.n_transfers.items()]
        return collectives, transfers

    def _issued_ns(self, communication: Communication, now: int) -> int:
        """Return when *communication* was issued; *now* if a device has not come to it."""
        start = communication.start
        return self._moments.ns(start) if self._moments.knows(start) else now

    def _write(self, found: list[Communication], counts: tuple[dict[str, int], list[list[int]]]) -> None:
        collectives, transfers = counts
        document = {
            "format_version": FORMAT_VERSION,
            "rank": self._rank,
            "t_ns": now_ns() + self._shift_ns,
            "written": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": self._step(),
            "collectives": collectives,
            "transfers": transfers,
            "pending": [self._described(one) for one in found[:MOST_LISTED]],
            "n_pending": len(found),
            "stack": main_stack(),
        }
        write_atomically(self.path, sealed_text(json.dumps(document)), is_of_run=True)

    def _described(self, one: Communication) -> dict[str, Any]:
        start = self._moments.ns(one.start) + self._shift_ns if self._moments.knows(one.start) else -1
        row = dict(zip(COLUMNS, communication_row(one, "", start, 0), strict=True))
        return {name: value for name, value in row.items() if name not in UNKNOWN}

    def _unended(self, communications: Iterable[Communication]) -> list[Communication]:
        return [one for one in communications if not self._moments.knows(one.end)]


def main_stack() -> list[str]:
    """Return where the main thread is, as ``file:line function``, innermost first, without frames of ours."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - public by its docs
    own = str(Path(__file__).parent)
    found: list[str] = []
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(own):
            found.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return list(islice(found, MOST_FRAMES))


# The last communications that a rank has issued, on disk before each is made. A span is written when its
# communication is over, a second late at most: a process that dies at once, because gloo aborts it over
# sizes that differ or because it is killed, would take its last call with it, the one that explains the
# death. So the newest calls are kept in a ring of lines in a file that is mapped into memory: the operating
# system keeps it whatever becomes of the process. Section 8 of docs/timeline-format.md.

SLOTS: Final = 64  # communications that are kept

SLOT_BYTES: Final = 704
"""Bytes of a line: 256 of keys and braces, 124 of numbers, the rest for two names in whatever script."""

MOST_NAME: Final = 24
"""Characters of a name that are kept, from its end: 4 bytes each at most, 6 if JSON escapes them."""

LOCAL: Final = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0xF2F52010,  # f2fs
        0x794C7630,  # overlay
        0x858458F6,  # ramfs
        0x52654973,  # reiserfs
        0x01021994,  # tmpfs
        0x58465342,  # xfs
    }
)
"""File systems of one machine, by their numbers in linux/magic.h. On one of several machines another machine
may delete what is mapped here, and the next write would then end the process with SIGBUS. So may a full disk
under one that copies on write, as btrfs, zfs and bcachefs: room that was made once is no room for a second
write."""

MOST_TEMPLATES: Final = 4096  # lines that are kept prepared: one for each block, kind, group and type

_NUMBERS: Final = tuple(
    f'"{name}": %{width}d'
    for name, width in (
        ("n", 20), ("issued_ns", 20), ("sequence", 20), ("peer", 11), ("size_bytes", 20), ("step", 11),
        ("microbatch", 11), ("stage", 11),
    )
)  # fmt: skip
"""What differs from call to call, and the most characters of each: 64 or 32 bits and a sign."""

_STATFS_BYTES: Final = 256  # room for the system's struct, which begins with the number of the file system


class Issued:
    """The ring of one rank; ``note`` may be called on any thread.

    Where the file system is not local, or has no room, there is no ring and ``note`` does nothing.
    """

    def __init__(self, path: Path, rank: int, shift_ns: int) -> None:
        self.path = path / "ranks" / f"rank-{rank:05d}.issued.jsonl"
        self._shift_ns = shift_ns
        self._numbers: Iterator[int] = count()
        self._templates: dict[tuple[Any, ...], bytes] = {}
        self._map: mmap.mmap | None = None
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if is_local(self.path.parent):
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
        # When a device comes to it is not known yet: then it is the time of the call.
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


def is_local(folder: Path) -> bool:
    """Return whether *folder* is on one of ``LOCAL``, as the system says: a chroot has no list of mounts."""
    said = ctypes.create_string_buffer(_STATFS_BYTES)
    is_known = ctypes.CDLL(None).statfs(os.fsencode(folder), said) == 0
    return is_known and ctypes.c_ulong.from_buffer(said).value & 0xFFFFFFFF in LOCAL


def _mapped(path: Path) -> mmap.mmap:
    """Make the file with room for all lines, so that no later write can fail, and map it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
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
    # Numbers have places of a fixed width, so that any of them give this length.
    length = len(line % ((0,) * len(_NUMBERS)))
    return line + b" " * (SLOT_BYTES - 1 - length) + b"\n"
