"""The run store: the only place where timelines are read and written.

``write_run`` stores a complete run, such as a simulation. ``SpanWriter`` and ``write_info`` store one that
is still in progress. ``open_run`` reads both. The files are described in docs/timeline-format.md.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final, Self

import numpy as np
import pyarrow as pa

from foretrace.door import read_text
from foretrace.traces.errors import RunError, TimelineError, reason
from foretrace.traces.info import RunInfo
from foretrace.traces.reader import INFO_KEY, open_run
from foretrace.traces.replacing import FOLDERS_OF_A_RUN, NEW, PARTS_OF_A_RUN, scratch_folder, take_place
from foretrace.traces.run import Run
from foretrace.traces.sealed import named, write_file
from foretrace.traces.timeline import MEMORY, checked
from foretrace.traces.writer import COMPACT_ROWS, SPANS, SpanWriter, write_atomically

__all__ = ["INFO_KEY", "Run", "SpanWriter", "open_run", "write_info", "write_run"]

RUN_ENTRIES: Final = PARTS_OF_A_RUN | FOLDERS_OF_A_RUN
"""What a run directory is made of; anything else in it belongs to the user."""

BEFORE_A_RUN: Final = frozenset({"rehearsal"})
"""What may be in a directory before there is a run: that of which it is going to be made."""

WRITERS: Final = 2  # files that are written at once


def write_run(
    path: str | os.PathLike[str],
    info: RunInfo,
    spans: pa.Table | Iterable[pa.Table],
    memory: pa.Table | None = None,
    *,
    links: pa.Table | None = None,
) -> Path:
    """Write a complete run to the directory *path*, all of it or nothing; return the directory.

    An existing run is replaced, other files in the directory are kept. Only a recording replaces a
    recording, because it cannot be reproduced.

    Args:
        path: the run directory.
        info: its description.
        spans: timeline of the stored ranks; or several, one after another, each with complete ranks.
        memory: memory over time in the columns of ``traces.timeline.MEMORY``.
        links: how full links were, for ``links.arrow``; None if that is not known.

    Raises:
        RunError: *path* is something else than a run, or a recording, or cannot be written.
        TimelineError: *spans* is not a timeline, *memory* not memory over time.
    """
    target = Path(path).absolute()
    _check_replaceable(target, info)
    tables = [spans] if isinstance(spans, pa.Table) else spans
    if memory is not None:
        memory = _checked_memory(memory)
    try:
        with scratch_folder(target) as (scratch, place):
            fresh = scratch / NEW
            (fresh / SPANS).mkdir(parents=True)
            # Of the description, so that equal runs are written as equal files.
            of = hashlib.blake2b(info.to_json().encode(), digest_size=8).hexdigest()
            with _Files(of) as files:
                for table in tables:
                    _write_spans(files, fresh / SPANS, _checked_ranks(table, info.world_size))
                for name, beside in (("memory.arrow", memory), ("links.arrow", links)):
                    if beside is not None:
                        files.write(fresh / name, beside)
            written = sorted(str(path.relative_to(fresh)) for path in fresh.rglob("*.arrow"))
            whole = replace(info, files=dict.fromkeys(["run.json", *written], of))
            (fresh / "run.json").write_text(whole.to_json(), encoding="utf-8")
            take_place(scratch, place, RUN_ENTRIES)
    except (OSError, pa.ArrowException, UnicodeEncodeError) as error:
        raise RunError(f"cannot write {path}: {reason(error)}") from error
    return target


def write_info(path: str | os.PathLike[str], info: RunInfo, rank: int | None = None) -> None:
    """Write the description of a run that is being recorded, or the sidecar of one *rank*.

    The file is replaced atomically: a reader sees the old text or the new one.

    Args:
        path: the run directory; created if it does not exist.
        info: the description so far.
        rank: whose sidecar to write; None writes ``run.json``.

    Raises:
        RunError: the file cannot be written.
    """
    name = Path("run.json") if rank is None else Path("ranks") / f"rank-{rank:05d}.json"
    write_atomically(Path(path) / name, info.to_json(), is_of_run=True)


def _check_replaceable(target: Path, info: RunInfo) -> None:
    """Raise RunError unless *target* is new, empty or a run that the run of *info* may replace."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise RunError(f"{target} is a file or a link; give a directory that is new, empty or a run")
    if not target.is_dir():
        return
    if (target / "run.json").is_file():
        if info.origin != "recorded" and holds_recording(target):
            raise RunError(f"{target} holds a recording: nothing written; give a new directory")
        return
    if {entry.name for entry in target.iterdir()} - BEFORE_A_RUN:
        raise RunError(f"{target} has files in it and is not a run: nothing written; give a new directory")


def holds_recording(path: Path) -> bool:
    """Return whether a recorded run is at *path*, which nothing but a recording may replace."""
    try:
        described = read_text(path / "run.json", RunError)
        return RunInfo.from_json(described, str(path)).origin == "recorded"
    except RunError:
        return False


def _checked_ranks(spans: pa.Table, world_size: int) -> pa.Table:
    """Return *spans* as a timeline, or raise TimelineError; RunError if empty or with foreign ranks."""
    spans = checked(spans)
    if not spans.num_rows:
        raise RunError("a run without a span: nothing written")
    stored = set(spans["rank"].unique().to_pylist())
    if outside := [rank for rank in stored if not 0 <= rank < world_size]:
        raise RunError(f"spans of rank {max(outside)} in a run of {world_size} ranks")
    return spans


def _checked_memory(memory: pa.Table) -> pa.Table:
    """Return *memory* in the columns of MEMORY, or raise TimelineError."""
    try:
        return memory.select(MEMORY.names).cast(MEMORY)
    except (KeyError, ValueError, pa.ArrowException) as error:
        raise TimelineError(f"not memory over time: {error}") from error


def _write_spans(files: _Files, folder: Path, spans: pa.Table) -> None:
    """Write one file per rank."""
    rank = spans["rank"].to_numpy()
    if (np.diff(rank) < 0).any():
        spans = spans.take(np.argsort(rank, kind="stable"))
        rank = spans["rank"].to_numpy()
    spans = spans.unify_dictionaries().combine_chunks()
    starts = np.flatnonzero(np.diff(rank, prepend=-1))
    for start, end in pairwise([*starts.tolist(), len(rank)]):
        files.write(folder / f"rank-{rank[start]:05d}.arrow", spans.slice(start, end - start))


class _Files:
    """Writes tables while the next ones are being made: compressing them takes no part of the interpreter."""

    def __init__(self, of: str) -> None:
        self._of = of
        self._pool = ThreadPoolExecutor(WRITERS)
        self._waiting: deque[Future[None]] = deque()

    def write(self, path: Path, table: pa.Table) -> None:
        """Have *table* written to *path* soon. Raises OSError, ArrowException for one before it."""
        schema = named(table.schema, self._of)
        self._waiting.append(self._pool.submit(write_file, path, schema, [table], COMPACT_ROWS))
        while len(self._waiting) > 2 * WRITERS:  # so that few tables are held
            self._waiting.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for written in self._waiting:
                written.result()
