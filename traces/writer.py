"""Writes the spans of one rank while they happen, so that what was written survives the process.

Spans go to an Arrow IPC *stream*, whose prefix can be read at any time. Each batch is handed to the operating
system before ``append`` returns: a process killed at any moment loses no batch that it has appended. When
the rank is done, ``close`` turns the stream into a compressed Arrow file, which replaces it in one step.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from foretrace.traces.errors import RunError, reason
from foretrace.traces.replacing import replacing, replacing_by_name
from foretrace.traces.sealed import BLANK, KEY, Pieces, look, mapped, named, segments, write_file
from foretrace.traces.timeline import TIMELINE, checked, timeline

SPANS: Final = "spans"  # folder of the run directory that holds one file per rank

COMPACT_ROWS: Final = 1 << 17
"""Rows per record batch of a finished file: large enough to compress well, small enough to stream."""

_LABELS: Final = tuple(field.name for field in TIMELINE if pa.types.is_dictionary(field.type))


class SpanWriter:
    """Appends spans of one rank to a run directory; each batch is safe once ``append`` has returned.

    Safe means safe from the death of the process. Against the death of the machine, pass ``fsync=True``.

    Args:
        path: the run directory; made if it is not there.
        rank: global rank of the spans.
        fsync: wait for the disk after each batch.

    Attributes:
        id: what is in the file, and in ``RunInfo.files``, so that no file of another run takes its place.

    Raises:
        RunError: the directory cannot be written, or holds spans of this rank already.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int, *, fsync: bool = False) -> None:
        self.rank = rank
        self.id = secrets.token_hex(8)
        self.n_spans = 0
        folder = Path(path) / SPANS
        self._stream_path = folder / f"rank-{rank:05d}.arrows"
        self._file_path = folder / f"rank-{rank:05d}.arrow"
        self._fsync = fsync
        self._labels = {name: _Labels() for name in _LABELS}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._sink = self._claimed()
        except OSError as error:
            raise RunError(f"cannot record into {path}: {error}") from error
        # Through memory, where each batch gets its checksum before it goes to the file.
        self._pieces = Pieces()
        self._writer: ipc.RecordBatchStreamWriter | None = ipc.new_stream(
            self._pieces, named(TIMELINE, self.id)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, columns: Mapping[str, object]) -> None:
        """Append one batch of columns; ``rank`` and those in ``traces.timeline.DEFAULTS`` are optional.

        Raises:
            TimelineError: the columns are not those of a timeline.
            RunError: the disk is full, or the writer is closed.
        """
        given = dict(columns)
        if "rank" not in given:
            given["rank"] = np.full(len(given["start_ns"]), self.rank, np.int32)  # type: ignore[arg-type]
        self._write(timeline(given))

    def append_table(self, table: pa.Table) -> None:
        """Append one batch given as a table; raises as ``append`` does."""
        self._write(checked(table))

    def close(self) -> None:
        """End the stream and replace it by a compressed file; a second call does nothing.

        Raises RunError: the file cannot be written; the stream is then still there and can be read.
        """
        if self._writer is None:
            return
        # Closed from now on, whatever fails below.
        writer, self._writer = self._writer, None
        try:
            try:
                writer.close()
                self._put()
            finally:
                os.close(self._sink)
            compact(self._stream_path, self._file_path)
        except (OSError, pa.ArrowException) as error:
            raise RunError(
                f"cannot finish {self._file_path}: {error}; its stream can still be read"
            ) from error

    def _claimed(self) -> int:
        """Make the file, of two processes that come at once only in one; raise RunError if there is one."""
        try:
            if not self._file_path.exists():
                return os.open(self._stream_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            pass
        taken = self._stream_path.with_suffix("")
        raise RunError(f"{taken} exists: this directory holds a run already; record into a new one")

    def _write(self, table: pa.Table) -> None:
        if self._writer is None:
            raise RunError(f"the spans of rank {self.rank} are closed: nothing can be appended")
        if not table.num_rows:
            return
        if wrong := set(table["rank"].unique().to_pylist()) - {self.rank}:
            raise RunError(f"spans of rank {wrong.pop()} given to the writer of rank {self.rank}")
        try:
            self._writer.write_batch(self._batch(table), custom_metadata={KEY: BLANK})
            self._put()
            if self._fsync:
                os.fsync(self._sink)
        except (OSError, pa.ArrowException) as error:
            raise RunError(f"cannot write {self._stream_path}: {reason(error)}") from error
        self.n_spans += table.num_rows

    def _put(self) -> None:
        """Write what has been made; raise OSError for what only a part has room for."""
        data = memoryview(self._pieces.taken())
        while data:
            data = data[os.write(self._sink, data) :]

    def _batch(self, table: pa.Table) -> pa.RecordBatch:
        """Return *table* as one batch whose dictionaries extend those of the batch before."""
        columns = [
            self._labels[field.name].extended(table[field.name])
            if field.name in self._labels
            else _whole(table[field.name])
            for field in TIMELINE
        ]
        return pa.record_batch(columns, schema=TIMELINE)


class _Labels:
    """The dictionary of one column, growing with each batch; a batch stores it only if it has grown.

    It is then stored as a whole: polars 2.1 does not read streams in which dictionaries come as deltas.
    """

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self._values = pa.array([], pa.string())

    def extended(self, column: pa.ChunkedArray) -> pa.DictionaryArray:
        """Return *column* with indices into the grown dictionary."""
        encoded = _whole(column.unify_dictionaries())
        labels = encoded.dictionary.to_pylist()
        before = len(self._index)
        numbers = np.array([self._index.setdefault(label, len(self._index)) for label in labels], np.int32)
        if len(self._index) > before:
            self._values = pa.array(list(self._index), pa.string())
        indices = numbers[encoded.indices.to_numpy(zero_copy_only=False)]
        return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), self._values)


def compact(stream: Path, target: Path) -> None:
    """Turn the finished stream file *stream* into the compressed file *target*, then delete *stream*.

    Runs through the stream twice, once for the dictionaries and once for the rows, so that memory does not
    grow with the length of the run. Raises RunError if the stream is damaged.
    """
    with mapped(stream) as source:
        data = memoryview(source.read_buffer())
        source.seek(0)
        if not all(look(data[begin:end]).is_whole for begin, end in segments(source)):
            raise RunError(f"cannot finish {target}: {stream} is damaged; the rest of it can still be read")
        source.seek(0)
        # Dictionaries only grow: those of the last batch have every label.
        final: dict[str, pa.Array] = {}
        for batch in ipc.open_stream(source):
            final = {name: batch.column(name).dictionary for name in _LABELS}
        source.seek(0)
        with replacing_by_name(target) as made:
            rows = ipc.open_stream(source)
            write_file(made, rows.schema, _grouped(rows, final))
            # It must have reached the disk before the stream, which has the same spans, is deleted.
            _sync(made)
    _sync(target.parent)
    stream.unlink()


def _grouped(reader: ipc.RecordBatchStreamReader, labels: Mapping[str, pa.Array]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of *reader* in batches of about ``COMPACT_ROWS``, all with the same dictionaries."""
    waiting: list[pa.RecordBatch] = []
    n_rows = 0
    for batch in reader:
        columns = [
            pa.DictionaryArray.from_arrays(batch.column(name).indices, labels[name])
            if name in labels
            else batch.column(name)
            for name in TIMELINE.names
        ]
        waiting.append(pa.record_batch(columns, schema=TIMELINE))
        n_rows += batch.num_rows
        if n_rows >= COMPACT_ROWS:
            yield _joined(waiting)
            waiting, n_rows = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return one batch with the rows of all *batches*."""
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """Return *column* in one piece."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def write_atomically(target: Path, text: str, *, is_of_run: bool = False) -> None:
    """Write *text* to *target* so that a reader sees the old contents or the new, never a part.

    Raises RunError: the file cannot be written, or is a part of a run that *is_of_run* does not say it is of.
    """
    if not target.name:
        raise RunError(f"cannot write '{target}': that is a folder")
    try:
        with replacing(target, is_of_run=is_of_run) as file:
            file.write(text.encode())
    except OSError as error:
        raise RunError(f"cannot write {target}: {reason(error)}") from error


@contextmanager
def writing(files: Sequence[tuple[str | Path, str]], folder: str | Path | None = None) -> Iterator[None]:
    """Write several files, each with its text, all of them or none.

    They take their places when what is done meanwhile has succeeded. That may be to make *folder*; what is to
    be in that is written when it is there.

    Raises RunError: one cannot be written.
    """
    made = None if folder is None else Path(os.path.realpath(folder))
    later = [one for one in files if made is not None and made in Path(os.path.realpath(one[0])).parents]
    target: str | Path | None = None
    try:
        with ExitStack() as waiting:
            for target, text in files:
                if (target, text) not in later:
                    file = waiting.enter_context(replacing(Path(target)))
                    file.write(text.encode())
                    file.flush()
            target = None
            yield
    except OSError as error:
        raise RunError(f"cannot write {target or error.filename}: {reason(error)}") from error
    for target, text in later:
        write_atomically(Path(target), text)


def _sync(path: Path) -> None:
    """Wait until *path*, a file or a folder, has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
