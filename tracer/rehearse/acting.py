"""Processes that act out ranks: one loads torch, and splits itself into one per rank.

Loading torch takes longer than most ranks do. It is done once, before anything is known of a rank, and as
many ranks as there are processors are acted out at a time.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tracer.rehearse.errors import RehearsalError

Progress = Callable[[str], None]
"""Told what is being done, in a few words."""


class Troupe:
    """The process that loads torch, and those of the ranks.

    Args:
        spec: what every rank is told.
        folder: where they write what they know.
        tell: told about progress.
    """

    def __init__(self, spec: Mapping[str, Any], folder: Path, tell: Progress) -> None:
        self._spec, self._folder, self._tell = dict(spec), folder, tell
        self._n_at_once = max(os.cpu_count() or 1, 1)
        self._log = folder / "troupe.log"

    def __enter__(self) -> Self:
        read, write = os.pipe()
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tracer.rehearse.child", str(write)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        os.close(write)
        self._lines = os.fdopen(read, encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        if error is not None:
            self._process.terminate()  # which ends the ranks, too
        self._process.wait()
        self._lines.close()

    def act(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Act out *ranks*; return what each of them knows.

        Raises:
            RehearsalError: one of them cannot be acted out.
        """
        waiting, under_way = list(ranks), set[int]()
        found: dict[int, dict[str, Any]] = {}
        repeats = dict.fromkeys(ranks, bool(self._spec["repeats"]))
        while waiting or under_way:
            while waiting and len(under_way) < self._n_at_once:
                rank = waiting.pop(0)
                under_way.add(rank)
                self._start(rank, repeats=repeats[rank])
            rank, status = self._ended()
            under_way.discard(rank)
            outcome = self._outcome(rank, status)
            if "unlike" in outcome:
                repeats[rank] = False
                waiting.insert(0, rank)
            else:
                found[rank] = outcome
        return found

    def _start(self, rank: int, *, repeats: bool) -> None:
        spec = {**self._spec, "rank": rank, "log": str(self._log_of(rank)), "repeats": repeats}
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(spec).encode() + b"\n")
            self._process.stdin.flush()

    def _ended(self) -> tuple[int, int]:
        """Return the next rank that has come to its end, and how; tell what others do meanwhile."""
        for line in self._lines:
            kind, rank, words = line.rstrip("\n").split(" ", 2)
            if kind == "ended":
                return int(rank), int(words)
            self._tell(f"rank {rank}: {words}")
        last = _last_line(self._log)
        raise RehearsalError(f"the process of all ranks died with status {self._process.wait()}: {last}")

    def _outcome(self, rank: int, status: int) -> dict[str, Any]:
        log, file = self._log_of(rank), self._folder / f"outcome-{rank:05d}.json"
        if not file.is_file():
            raise RehearsalError(
                f"rank {rank} died of {_cause(status)}: {_last_words(log)}; all of it is in {_kept_log(log)}"
            )
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if "error" in found:
            kept = _kept_log(log)
            raise RehearsalError(f"rank {rank}: {found['error'].replace(str(log), kept)}")
        return found

    def _log_of(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.log"


def _cause(status: int) -> str:
    """Return in words what a process died of.

    >>> _cause(-11), _cause(1)
    ('signal 11 (SIGSEGV)', 'status 1')
    """
    return f"status {status}" if status >= 0 else f"signal {-status} ({signal.Signals(-status).name})"


def _last_words(log: Path) -> str:
    """Return where a process was that died of a signal, by ``faulthandler``, else its last line."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith('  File "'):
            return "in " + line.strip()
    return _last_line(log)


def _last_line(log: Path) -> str:
    return " ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:])


def _kept_log(log: Path) -> str:
    """Keep the output of a rank that failed, and return where."""
    kept = Path(tempfile.gettempdir()) / f"foretrace-{os.getpid()}-{log.name}"
    shutil.copy(log, kept)
    return str(kept)
