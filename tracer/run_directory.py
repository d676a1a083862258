"""The directory that a recording goes to: what may be in it before, and what processes leave in it."""

from __future__ import annotations

import errno
import fcntl
import glob
import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from foretrace.tracer.errors import RecordError
from foretrace.tracer.process import own_name
from foretrace.traces.errors import reason

REFUSED: Final = ".not-recording"
"""File of the run directory in which a process says why it is not recorded; the recorder takes it away."""

RESTART: Final = "-restart"
"""What, with a number behind it, is added to the name of a run directory when torchrun starts ranks again."""

AGAIN: Final = "-again"
"""What, likewise, is added when a process has left its process group and joins another."""

ALONE: Final = "-alone"
"""What is added to the name of a run directory for what a process did before it joined its process group."""

CLAIM: Final = ".recorder"  # file of the run directory that its recorders lock

CLAIM_TRIES: Final = 100
CLAIM_POLL_S: Final = 0.01
"""How often, and how far apart, a lock is tried that one of many recorders holds for a moment."""

PROBE_BYTES: Final = 1 << 16
"""What is written to see whether the directory can be: as much as the first spans of a rank."""

_BESIDE: Final = re.compile(rf"({RESTART}\d+)?({AGAIN}\d+|{ALONE}|-task\d*|-process\d+)*")
"""All that is added to the name of a run directory, by what makes more than one run of a command."""


def check_new(path: Path) -> None:
    """Raise RecordError if *path* is something else than a directory of this very recording, or nothing."""
    if path.exists() and not path.is_dir():
        raise RecordError(f"{path} is a file; give a directory that is new or empty")
    if path.is_dir() and any(
        entry.name not in {"spans", "ranks", "run.json"} and not entry.name.startswith(".")
        for entry in path.iterdir()
    ):
        raise RecordError(f"{path} has files in it; give a directory that is new or empty")


def holds_run(path: Path) -> bool:
    """Whether something was recorded into the run directory *path*."""
    return any(not entry.name.startswith(".") for entry in path.iterdir())


@contextmanager
def claimed(path: Path, claimant: str) -> Iterator[None]:
    """Make the run directory *path* if need be, and let nobody but *claimant* record into it meanwhile.

    Recorders of the ranks of one job are one claimant, and share it. Raises RecordError: another one does
    already, or nothing can be written there.
    """
    file = path / CLAIM
    with ExitStack() as stack:
        try:
            str(path).encode()  # as Arrow will
            path.mkdir(parents=True, exist_ok=True)
            if link := next((entry for entry in path.iterdir() if entry.is_symlink()), None):
                raise RecordError(f"{link} is a link, which a recorder would write through; nothing started")
            claim = _claim(file, claimant.encode())
            stack.callback(os.close, claim)
            # Called before the close above, which lets the lock go.
            stack.callback(_give_up, claim, file)
            # Behind the name, which others may read meanwhile.
            _write(claim, bytes(PROBE_BYTES), len(claimant))
            os.ftruncate(claim, len(claimant))
        except (OSError, UnicodeEncodeError) as error:
            raise RecordError(f"cannot record into {path}: {reason(error)}; nothing started") from error
        yield


def _claim(file: Path, claimant: bytes) -> int:
    """Return *file*, open and locked for *claimant*; raise RecordError if another one has it, or OSError."""
    for _ in range(CLAIM_TRIES):
        claim = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            holder = _holder(claim, claimant)
            is_there = os.fstat(claim).st_nlink > 0  # and was not taken away before we had locked it
        except OSError:
            _give_up(claim, file)  # as on a full disk, where nobody's name fits in
            os.close(claim)
            raise
        if holder == claimant and is_there:
            return claim
        os.close(claim)
        if holder not in {b"", claimant}:
            said = f"{file.parent} is being recorded into by {holder.decode(errors='replace')}"
            raise RecordError(f"{said}: nothing started; give another directory")
        time.sleep(CLAIM_POLL_S)
    raise RecordError(f"{file.parent} is being recorded into: nothing started; give another directory")


def _holder(claim: int, claimant: bytes) -> bytes:
    """Lock *claim* for *claimant*, and return who has it; nobody can tell while another one locks it.

    A lock is the claim, which goes with the process that holds it, however that ends. Whoever gets it
    exclusively is the first, and writes who it is; all share it then, if they are the same.
    """
    with suppress(BlockingIOError):
        if not _lock(claim, fcntl.LOCK_EX):
            return claimant
        os.ftruncate(claim, 0)
        _write(claim, claimant, 0)
    with suppress(BlockingIOError):
        _lock(claim, fcntl.LOCK_SH)
        return os.pread(claim, PROBE_BYTES, 0).rstrip(b"\0")  # less what is written as a probe
    return b""


def _write(claim: int, data: bytes, at: int) -> None:
    """Write all of *data*, or raise OSError: what only a part has room for ends short first."""
    while data:
        done = os.pwrite(claim, data, at)
        data, at = data[done:], at + done


def _lock(claim: int, how: int) -> bool:
    """Lock the file *claim* or raise BlockingIOError; return whether its file system has locks."""
    try:
        fcntl.flock(claim, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        return False
    return True


def _give_up(claim: int, file: Path) -> None:
    """Take the file of a claim away, unless others share it."""
    with suppress(OSError):
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.unlink()


def next_free(stem: str) -> Path:
    """Return the first of ``runs/STEM-1``, ``runs/STEM-2``, ... that is not there yet."""
    numbered = (Path("runs") / f"{stem}-{number}" for number in itertools.count(1))
    return next(path for path in numbered if not path.exists())


@contextmanager
def no_empty_folders(path: Path) -> Iterator[None]:
    """Take away the folder *path*, and those above it, if they were made meanwhile and end up empty."""
    path = path.absolute()
    missing = [one for one in (path, *path.parents) if not one.exists()]
    try:
        yield
    finally:
        # The innermost comes first.
        for one in missing:
            with suppress(OSError):  # something is in it, or it was never made
                one.rmdir()


def with_words(path: Path, words: str) -> Path:
    """Return the run directory beside *path* whose name has *words* behind it."""
    return path.with_name(path.name + words)


def beside(path: Path) -> list[Path]:
    """Return the run directories beside *path* that the same command has filled, restarts in their order."""

    # By their numbers: restart 10 comes after restart 2.
    def order(one: Path) -> tuple[tuple[int, str], ...]:
        words = re.findall(r"(\D+)(\d*)", one.name.removeprefix(path.name))
        return tuple((int(number or 0), word) for word, number in words)

    found = (one for one in path.parent.glob(f"{glob.escape(path.name)}-*") if one.is_dir())
    return sorted((one for one in found if _BESIDE.fullmatch(one.name.removeprefix(path.name))), key=order)


def attempt(path: Path, one: Path) -> int:
    """Return how often torchrun had started ranks again when *one*, *path* or beside it, was filled."""
    found = re.match(rf"{RESTART}(\d+)", one.name.removeprefix(path.name))
    return int(found[1]) if found else 0


# A process that is in no process group. Nobody knows of several such processes whether they are ranks that
# will meet or trainings that never do. So each records into a directory of its own beside the one that was
# asked for, and at its end gets that one if nobody has.


def folder_alone(target: Path, *, is_shared: bool) -> Path:
    """Return the directory of what this process records while it is in no process group.

    If *is_shared*, several trainings may record into *target*, the one asked for, one after the other.
    """
    name = own_name()
    if not name and is_shared and any(target.glob("spans/rank-00000.*")):
        name = _process()
    return with_words(target, f"-{name}" if name else "")


def set_aside(path: Path, target: Path, n_spans: int) -> None:
    """Keep what was recorded into *path* before this process joined its process group, if it is anything.

    Raises OSError: it cannot be moved away.
    """
    if path == target:
        path = with_words(target, ALONE)
        if path.exists():
            path = with_words(target, f"-{_process()}")
        target.rename(path)
    if not n_spans:
        shutil.rmtree(path)


def settle(path: Path, target: Path) -> Path:
    """Move what was recorded into *path* to *target* unless another process has; return where it is.

    It was in no process group to its end.
    """
    if path == target:
        return target
    try:
        target.mkdir(exist_ok=True)  # there already where its recorder has claimed it
        (path / "spans").rename(target / "spans")  # which one process can: the first
        for rest in path.iterdir():
            rest.rename(target / rest.name)
        path.rmdir()
    except OSError:  # another process was there before
        sys.stderr.write(f"foretrace: recorded into {path}: {target.name} is of another process\n")
        return path
    return target


def _process() -> str:
    return f"process{os.getpid()}"
