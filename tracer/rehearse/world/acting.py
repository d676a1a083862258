"""Processes that run ranks: one process loads torch and forks a child for each rank.

Loading torch takes longer than running most ranks. It is done once, and as many ranks run at a time as there
are processors.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from foretrace.tracer.rehearse.errors import RehearsalError, UnroutedError
from foretrace.traces.rehearsal import RankTables, read_rank

Progress = Callable[[str], None]
"""Told what is being done, in a few words."""


STARTING: Final = Path(__file__).with_name("starting.py")
"""What the process that loads torch runs."""


class Loaded:
    """The process that loads torch, for one rehearsal or for several one after the other.

    It starts when it is first needed, with the environment of that moment.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._imports: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(at_once=error is not None)

    def start(self) -> None:
        """Start the process unless it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        self.end(at_once=True)
        read, write = os.pipe()
        root = str(Path(__file__).parents[4])
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with the process
        self._process = subprocess.Popen(
            [sys.executable, str(STARTING), root, str(write)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=(write,),
        )
        # Ours is closed, so that reading comes to an end when the process has died.
        os.close(write)
        self._lines = os.fdopen(read, encoding="utf-8")

    def end(self, *, at_once: bool) -> None:
        """End the process when its ranks are done, or *at_once* together with them."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
        if at_once:
            process.terminate()  # which ends the ranks, too
        process.wait()
        self._lines.close()
        self._log.close()

    def ask(self, spec: Mapping[str, Any]) -> None:
        """Ask the process to run the rank of *spec*."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it has ended: ``said`` says so
                self._process.stdin.write(json.dumps({**spec, "imports": self._imports}).encode() + b"\n")
                self._process.stdin.flush()

    def expect(self, imports: Collection[str]) -> None:
        """Have the process import, before the next rank, *imports* that a rank has needed."""
        self._imports += [name for name in imports if name not in self._imports]

    def said(self) -> str:
        """Return the next line from the process or a rank. Raises RehearsalError if it has ended."""
        for line in self._lines:
            if not line.startswith(FIRST):
                return line.rstrip("\n")
            sys.stderr.write(line.removeprefix(FIRST))
        # The pipe has come to its end: the process is gone.
        self._log.seek(0)
        status = self._process.wait() if self._process is not None else 0
        last = _last_line(self._log.read().decode(errors="replace"))
        if status == REFUSED:
            raise RehearsalError(last)
        raise RehearsalError(f"the process of all ranks died with status {status}: {last}")


MOST_SENDERS: Final = 16
"""Ranks that are rehearsed only because others need what they send."""

FIRST: Final = "first "  # begins a line about what the process does before any rank
REFUSED: Final = 2  # exit status of the process of all ranks where its last line says what is missing


LEAST_FREE_BYTES: Final = 1 << 16
"""Free on a disk below which a rank that died, and wrote nothing, died of that."""


class Troupe:
    """The ranks of a rehearsal.

    Args:
        spec: what every rank needs to know.
        folder: where ranks write their results.
        tell: called with progress, in a few words.
        loaded: the process that runs them.
        adds: whether ranks that were not asked for are run if another fails without what they send.
    """

    def __init__(
        self, spec: Mapping[str, Any], folder: Path, tell: Progress, loaded: Loaded, *, adds: bool
    ) -> None:
        self._n_to_add = MOST_SENDERS if adds else 0
        self._acted: set[int] = set()
        self._spec, self._folder, self._tell, self._loaded = dict(spec), folder, tell, loaded
        self._n_at_once = max(os.cpu_count() or 1, 1)
        self._awaits: dict[int, int] = {}
        self._n_left: dict[int, int] = {}
        self._seen: dict[int, dict[int, int]] = {}
        loaded.start()

    def act(
        self, ranks: Sequence[int], beside: int | None = None, later: Sequence[int] = ()
    ) -> dict[int, dict[str, Any]]:
        """Run *ranks*; return the result of each.

        Raises:
            RehearsalError: one of *ranks* cannot be rehearsed.
        """
        has_room, under_way = len(ranks) < self._n_at_once, set[int]()
        try:
            return self._act(ranks, None if beside in ranks or not has_room else beside, later, under_way)
        except UnroutedError:
            # All begin anew, on the process that has loaded torch; those under way soon ask the same.
            while under_way:
                under_way.discard(self._ended()[0])
            raise
        except BaseException:
            if under_way:
                self._loaded.end(at_once=True)
            raise

    def _act(
        self, ranks: Sequence[int], beside: int | None, later: Sequence[int], under_way: set[int]
    ) -> dict[int, dict[str, Any]]:
        waiting = [*ranks, *([] if beside is None else [beside])]
        found: dict[int, dict[str, Any]] = {}
        repeats = dict.fromkeys(waiting, bool(self._spec["repeats"]))
        while waiting or under_way:
            while len(under_way) < self._n_at_once and (ready := self._ready(waiting, under_way)):
                rank = ready[0]
                waiting.remove(rank)
                # Those for whom this rank may wait.
                coming = {*waiting, *under_way, *later} - {*found, rank}
                # All wait for each other: this rank is told that nobody comes, and takes what there is.
                is_stuck = not under_way and not self._may_go_on(rank, waiting)
                under_way.add(rank)
                self._start(rank, repeats=repeats[rank], coming=[] if is_stuck else sorted(coming))
            rank, status = self._ended()
            under_way.discard(rank)
            if rank == beside and not self._has_gone_well(rank):
                self.forget(rank)
                continue
            outcome = self._outcome(rank, status)
            if "awaits" in outcome:
                awaited = self._awaits[rank] = outcome["awaits"]
                self._n_left[rank] = outcome["n_left"]
                if awaited not in {*waiting, *under_way, *found}:
                    waiting.append(awaited)
                    repeats[awaited] = bool(self._spec["repeats"])
                waiting.append(rank)
            elif "unlike" in outcome:
                repeats[rank] = False
                waiting.insert(0, rank)
            else:
                found[rank] = outcome
                self._acted.add(rank)
        return found

    def _ready(self, waiting: Sequence[int], under_way: Collection[int]) -> list[int]:
        """Return those of *waiting* that may go on; if none may, and nobody is under way, the first."""
        ready = [rank for rank in waiting if self._may_go_on(rank, (*waiting, *under_way))]
        return ready or ([] if under_way else list(waiting[:1]))

    def _may_go_on(self, rank: int, still: Collection[int]) -> bool:
        """Whether who *rank* needs is not *still* to be acted out, or has left more since *rank* began."""
        awaited = self._awaits.get(rank)
        if awaited is None or awaited not in still:
            return True
        return self._n_left.get(awaited, 0) > self._seen[rank].get(awaited, 0)

    def _start(self, rank: int, *, repeats: bool, coming: Sequence[int]) -> None:
        # A copy: ``_may_go_on`` asks whether others have left more since this rank began.
        self._seen[rank] = dict(self._n_left)
        file_of(self._folder, rank, "outcome").unlink(
            missing_ok=True
        )  # of an earlier run: this one may die before it writes
        asked = {"rank": rank, "log": str(self._log_of(rank)), "repeats": repeats, "coming": coming}
        spec = {**self._spec, **asked, "cwd": str(Path.cwd())}  # which is not always where the process began
        self._loaded.ask(spec)

    def _ended(self) -> tuple[int, int]:
        """Return the next rank that has come to its end, and how; tell what others do meanwhile."""
        while True:
            kind, rank, words = self._loaded.said().split(" ", 2)
            if kind == "ended":
                return int(rank), int(words)
            self._tell(f"rank {rank}: {words}")

    @property
    def world_size(self) -> int:
        """Ranks of the world."""
        return int(self._spec["world_size"])

    def tables(self, rank: int) -> RankTables:
        """Return what *rank* did, which has been acted out."""
        return read_rank(self._folder, rank)

    def forget(self, rank: int) -> None:
        """Delete the files of *rank*, including what it sent to other ranks."""
        for kind in ("outcome", "letters"):
            file_of(self._folder, rank, kind).unlink(missing_ok=True)

    def _has_gone_well(self, rank: int) -> bool:
        file = file_of(self._folder, rank, "outcome")
        return file.is_file() and not {"error", "unlike", "awaits", "unrouted"} & {
            *json.loads(file.read_text(encoding="utf-8"))
        }

    def _outcome(self, rank: int, status: int) -> dict[str, Any]:
        log, file = self._log_of(rank), file_of(self._folder, rank, "outcome")
        if not file.is_file():
            if shutil.disk_usage(self._folder).free < LEAST_FREE_BYTES:
                raise RehearsalError(f"cannot write {self._folder.parent}: {os.strerror(errno.ENOSPC)}")
            words = f": {last}" if (last := _last_words(log)) else ""
            raise RehearsalError(
                f"rank {rank} died of {_cause(status)}{words}; its output is in {_kept_log(log)}"
            )
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        self._loaded.expect(found.pop("imported", ()))
        if "unrouted" in found:
            raise UnroutedError(found["unrouted"])
        # It failed for want of what another rank sends: that one is run, and this one again.
        if "error" in found and self._n_to_add and (missed := {*found["missed"]} - self._acted):
            self._n_to_add -= 1
            return {"awaits": min(missed), "n_left": 0}
        if "error" in found:
            kept = _kept_log(log)
            raise RehearsalError(f"rank {rank}: {found['error'].replace(str(log), kept)}")
        return found

    def _log_of(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.log"


def file_of(folder: Path, rank: int, kind: str) -> Path:
    """Return the file in which *rank* writes its ``outcome``, or ``letters`` for others."""
    return folder / f"{kind}-{rank:05d}.{'json' if kind == 'outcome' else 'pickle'}"


def _cause(status: int) -> str:
    """Return in words what a process died of.

    >>> _cause(-11), _cause(1)
    ('signal 11 (SIGSEGV)', 'status 1')
    """
    return f"status {status}" if status >= 0 else f"signal {-status} ({signal.Signals(-status).name})"


def _last_words(log: Path) -> str:
    """Return where a process was that died of a signal, by ``faulthandler``, else its last line."""
    words = log.read_text(encoding="utf-8", errors="replace")
    for line in words[max(words.find("Current thread "), 0) :].splitlines():
        if line.startswith('  File "'):
            return "in " + line.strip()
    return _last_line(words)


def _last_line(words: str) -> str:
    return " ".join(words.strip().splitlines()[-1:])


def _kept_log(log: Path) -> str:
    """Keep the output of a rank that failed, and return where."""
    handle, kept = tempfile.mkstemp(prefix=f"foretrace-{log.stem}-", suffix=log.suffix)
    os.close(handle)
    shutil.copyfile(log, kept)
    return kept
