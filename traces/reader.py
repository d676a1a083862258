"""Opens runs: a directory, one file, a run that is still being written, or any of these behind a URL.

Missing parts are reported, not guessed: the tail of a stream whose writer was killed, ranks without a file.
Files of another kind, or damaged ones, are refused in one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from os import PathLike, fspath
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np
import pyarrow as pa
from pyarrow import fs, ipc

from foretrace.door import MOST_BYTES, counted, parse, shaped
from foretrace.traces.errors import RunError, TimelineError, reason
from foretrace.traces.info import RunInfo, merged, rank_list
from foretrace.traces.notebook import run_html
from foretrace.traces.pending import damaged_notes
from foretrace.traces.run import Part, Run
from foretrace.traces.sealed import ID, KEY, WAY_OUT, mapped, read_batches, read_file, segments
from foretrace.traces.timeline import FORMAT_VERSION, LINKS, MEMORY, LinkChange, checked
from foretrace.traces.writer import SPANS

INFO_KEY: Final = b"foretrace.run"
"""Schema metadata under which a single file carries the text of ``run.json``."""

MOST_NAMED: Final = 3  # files of a run that are missing and named

FOREIGN: Final = (
    "is of another run: put back the one of this run, or move it away and read the rest with --partial"
)

_BECOMES: Final = dict.fromkeys(
    (".json", ".gz", ".zip", ".pb", ".sqlite", ".et"),
    "a trace of another tool becomes one by foretrace ingest",
) | {".toml": "a job becomes one by foretrace simulate"}
"""How a file that is no run becomes one, by its ending."""

_RANK_FILE: Final = re.compile(r"rank-(\d+)\.(arrow|arrows|json)$")
_MEMORY_FILE: Final = re.compile(r"ranks/rank-(\d+)\.memory\.arrow")


def open_run(path: str | PathLike[str]) -> Run:
    """Open a run: a directory, one ``.arrow``, ``.arrows`` or ``.parquet`` file, or a URL of either.

    Args:
        path: local path, or a URL supported by ``pyarrow.fs``, e.g. ``s3://bucket/run``.

    Raises:
        RunError: there is nothing there, it is not a run, it is damaged, or it needs a newer foretrace.
    """
    name = fspath(path)
    try:
        if "://" in name:
            filesystem, root = fs.FileSystem.from_uri(name)
        else:
            filesystem, root = fs.LocalFileSystem(), str(Path(name).absolute())
        found = filesystem.get_file_info(root)
        if found.type == fs.FileType.NotFound:
            raise RunError(f"{name} does not exist")
        if found.type == fs.FileType.Unknown:
            raise RunError(f"{name} is a device, a pipe or a socket: give a run directory, or a file of one")
        reader = _Reader(filesystem, name)
        return reader.directory(root) if found.type == fs.FileType.Directory else reader.file(root)
    except (OSError, pa.ArrowException, UnicodeEncodeError) as error:
        raise RunError(f"cannot read {name}: {reason(error)}") from error


class _Reader:
    """Reads the files of one run through one file system."""

    def __init__(self, filesystem: fs.FileSystem, name: str) -> None:
        self._fs = filesystem
        self._name = name
        self._notes: list[str] = []
        self._is_sealed = True
        self._root, self._files, self._is_named = "", dict[str, str](), True

    def directory(self, root: str) -> Run:
        """Open a run directory, complete or still being written."""
        files = {
            info.path[len(root) :].strip("/"): info
            for folder in ("", f"/{SPANS}", "/ranks")
            for info in self._fs.get_file_info(
                fs.FileSelector(f"{root}{folder}", recursive=False, allow_not_found=True)
            )
            if info.is_file
        }
        base = self._info(files["run.json"].path) if "run.json" in files else None
        sidecars = {rank: self._info(at.path) for rank, _, at in _rank_files(files, "ranks")}
        self._root, self._files = root, self._files_of(base, sidecars)
        spans = self._span_files(files)
        if base is None and not sidecars and not spans:
            raise RunError(
                f"{self._name} is not a run: neither run.json nor spans/rank-*.arrow in it; traces of other "
                f"tools become one by foretrace ingest {self._name} -o DIRECTORY"
            )
        parts = [part for rank, at in spans.items() if (part := self._part(rank, at)) is not None]
        if not parts:
            raise RunError(f"{self._name} holds no spans: nothing was recorded, or every file is missing")
        if base is None and not sidecars:
            self._notes.append("no run.json: layout, groups and clocks are unknown")
            info = _guessed(max(part.rank or 0 for part in parts) + 1)
        else:
            info = merged(base, sidecars)
        if (last := max(part.rank or 0 for part in parts)) >= info.world_size:
            raise RunError(
                f"{self._name} has spans of rank {last}, but its world has {info.world_size} ranks"
            )
        is_left = (
            any(not one.finished for one in sidecars.values()) or not sidecars
        )  # missing ranks have a note
        if not info.finished and is_left:
            self._notes.append("the run has not finished, or was stopped: what it had written is shown")
        memory = self._memory(files["memory.arrow"].path) if "memory.arrow" in files else self._samples(files)
        links = self._links(files["links.arrow"].path) if "links.arrow" in files else None
        if isinstance(self._fs, fs.LocalFileSystem):
            self._notes += damaged_notes(root)
            self._notes += [f"{name} is no file: left out" for name in _no_files(Path(root))]
        if not self._is_sealed:
            self._notes.append("files without checksums: damage to them would go unnoticed")
        if not self._is_named:
            self._notes.append("files that do not say of which run they are: others would go unnoticed")
        # Of spans that are missing, the ranks are told. The others are not of a rank that may still come.
        of_spans = tuple(name for name in base.files if name.startswith(SPANS)) if base is not None else ()
        if base is not None and (lost := base.files.keys() - files.keys() - set(of_spans)):
            first = ", ".join(sorted(lost)[:MOST_NAMED])
            more = f" and {len(lost) - MOST_NAMED:,} more" if len(lost) > MOST_NAMED else ""
            self._notes.append(f"files of the run are missing, and what they say is not shown: {first}{more}")
        return Run(self._name, info, parts, memory, self._notes, links=links, shown=run_html)

    def file(self, path: str) -> Run:
        """Open one file, which may hold several ranks."""
        table = self._table(path)
        carried = (table.schema.metadata or {}).get(INFO_KEY)
        table = _timeline(table, self._name)
        if not table.num_rows:
            raise RunError(f"{self._name} holds no spans")
        if carried is not None:
            info = RunInfo.from_json(carried.decode(), self._name)
        else:
            self._notes.append("one file without run.json: layout, groups and clocks are unknown")
            # A rank that only a peer names is in the world, too.
            info = _guessed(int(max(np.max(table["rank"].to_numpy()), np.max(table["peer"].to_numpy()))) + 1)
        part = Part(None, lambda: table)
        return Run(self._name, info, [part], MEMORY.empty_table(), self._notes, shown=run_html)

    def _files_of(self, base: RunInfo | None, sidecars: Mapping[int, RunInfo]) -> dict[str, str]:
        """Return what files of the run hold under ``ID``. Raises RunError: a sidecar is of another run."""
        found = dict(base.files) if base is not None else {}
        for rank, info in sidecars.items():
            for name, of in info.files.items():
                if found.setdefault(name, of) != of:
                    raise RunError(f"{self._name}/ranks/rank-{rank:05d}.json {FOREIGN}")
        return found

    def _check_own(self, path: str, schema: pa.Schema) -> None:
        """Raise RunError if the file *path* is of another run; take note if it does not say."""
        # A stream is named as the file that it becomes.
        if not (wanted := self._files.get(path[len(self._root) :].strip("/").replace(".arrows", ".arrow"))):
            return
        said = (schema.metadata or {}).get(ID)
        self._is_named &= said is not None
        if said is not None and said != wanted.encode():
            raise RunError(f"{path} {FOREIGN}")

    def _span_files(self, files: dict[str, fs.FileInfo]) -> dict[int, fs.FileInfo]:
        """Return the file of each rank; the finished one where a stream is still beside it."""
        found: dict[int, fs.FileInfo] = {}
        for folder in ("", SPANS):
            for rank, kind, at in _rank_files(files, folder):
                if kind == "arrow" or rank not in found:
                    found[rank] = at
        return dict(sorted(found.items()))

    def _part(self, rank: int, at: fs.FileInfo) -> Part | None:
        """Open the spans of one rank at the door, so that a foreign file is refused before any work."""
        if at.path.endswith(".arrows"):
            table = self._stream(at.path, f"rank {rank}")
            if table is None:
                return None
            timeline = _timeline(table, at.path)
            return Part(rank, lambda: timeline)
        source = self._source(at.path)
        try:
            schema = ipc.open_file(source).schema
        except (OSError, pa.ArrowException) as error:
            raise RunError(f"{at.path} is not an Arrow file, or is damaged: {reason(error)}") from error
        _refuse_newer(schema, at.path)
        self._check_own(at.path, schema)
        self._is_sealed &= KEY in (schema.metadata or {})
        return Part(rank, lambda: _timeline(read_file(source, at.path)[0], at.path))

    def _table(self, path: str) -> pa.Table:
        """Return the contents of one file by its ending."""
        if path.endswith(".arrows"):
            table = self._stream(path, Path(path).name)
            if table is None:
                raise RunError(f"{self._name} holds no complete batch of spans")
            return table
        try:
            if path.endswith(".parquet"):
                return _parquet(self._fs.open_input_file(path))
            if path.endswith(".arrow"):
                return self._arrow(path)
        except (OSError, pa.ArrowException) as error:
            raise RunError(f"{self._name} is damaged or not a timeline: {reason(error)}") from error
        how = _BECOMES.get(PurePosixPath(path).suffix)
        own = "give its directory, or an .arrow, .arrows or .parquet file"
        said = f"{how} {self._name} -o DIRECTORY" if how else own
        raise RunError(f"{self._name} is not a run: {said}")

    def _arrow(self, path: str) -> pa.Table:
        """Return the rows of an Arrow file, and note whether it has a checksum."""
        table, is_sealed = read_file(self._source(path), path)
        self._check_own(path, table.schema)
        self._is_sealed &= is_sealed
        return table

    def _stream(self, path: str, who: str) -> pa.Table | None:
        """Return the readable prefix of a stream; None and a note if not even one batch is complete."""
        places: list[tuple[int, int]] = []
        with self._source(path) as source:
            if not (size := source.size()):
                self._notes.append(f"{who} has written nothing yet")
                return None
            # One by one, so that those before an error are kept.
            try:
                for place in segments(source):
                    places.append(place)
                end = source.tell()
            except (OSError, pa.ArrowException) as error:
                if not places and not _starts_like_a_stream(source):
                    raise RunError(f"{path} is not an Arrow stream: {reason(error)}") from error
                end = places[-1][1] if places else 0
            source.seek(0)
            data = pa.py_buffer(source.read(end))  # a copy, as a recorder removes the file once it is done
        if (left := size - end) > 0:
            self._notes.append(
                f"{who}: {len(places)} batches read, the last {left} bytes are an incomplete batch, "
                "or damaged, and were left out"
            )
        elif not places:
            self._notes.append(f"{who} has written no span")
        if not places:
            return None
        try:
            schema, batches, is_sealed = read_batches(data, places)
        except (OSError, pa.ArrowException) as error:
            raise RunError(f"{path} is damaged: {reason(error)}; {WAY_OUT}") from error
        _refuse_newer(schema, path)
        self._check_own(path, schema)
        self._is_sealed &= is_sealed
        if damaged := [number for number, batch in enumerate(batches, 1) if batch is None]:
            which = f"{'batch' if len(damaged) == 1 else 'batches'} {rank_list(damaged)} of {len(batches)}"
            self._notes.append(f"{who}: {which} damaged; {len(batches) - len(damaged)} used")
        whole = [batch for batch in batches if batch is not None]
        return pa.Table.from_batches(whole) if whole else None

    def _source(self, path: str) -> pa.NativeFile:
        """Open *path* for random access; local files are mapped into memory."""
        return mapped(path) if isinstance(self._fs, fs.LocalFileSystem) else self._fs.open_input_file(path)

    def _info(self, path: str) -> RunInfo:
        with self._fs.open_input_file(path) as file:
            # Its size first: a file can state any, and take no room.
            contents = file.read() if file.size() <= MOST_BYTES else None
        if contents is None:
            raise RunError(
                f"{path} is larger than {MOST_BYTES >> 20} MiB, the most that is read of such a file"
            )
        try:
            return RunInfo.from_json(contents.decode(), path)
        except UnicodeDecodeError as error:
            raise RunError(f"{path} is not text: {error}") from error

    def _memory(self, path: str) -> pa.Table:
        table = self._arrow(path)
        try:
            table.validate(full=True)
            return table.select(MEMORY.names).cast(MEMORY).combine_chunks()
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:
            raise RunError(f"{path} is not memory over time: {reason(error)}") from error

    def _links(self, path: str) -> pa.Table | None:
        """Return how full links were; None, and a note, if that cannot be read."""
        try:
            table = self._arrow(path)
            table.validate(full=True)
            said = table.schema.metadata or {}
            changes = parse(said.get(b"changes", b"[]").decode(), "JSON", path, RunError)
            shaped(tuple[LinkChange, ...], changes)
            return table.select(LINKS.names).cast(LINKS.with_metadata(said))
        except (KeyError, ValueError, pa.ArrowException):
            self._notes.append("how full links were (links.arrow) is damaged: left out")
            return None

    def _samples(self, files: dict[str, fs.FileInfo]) -> pa.Table:
        """Return the memory that each rank wrote by itself, joined; one that cannot be read is said."""
        found = []
        for name in sorted(files):
            if matched := _MEMORY_FILE.fullmatch(name):
                try:
                    found.append(self._memory(files[name].path).unify_dictionaries())
                except RunError:
                    self._notes.append(f"memory of rank {int(matched[1])} is cut short or damaged: left out")
        if not found:
            return MEMORY.empty_table()
        return pa.concat_tables(found).unify_dictionaries().combine_chunks()


def _no_files(root: Path) -> Iterator[str]:
    """Yield what has the name of a file of a run and is none: a folder, a device, a link to nowhere."""
    for folder in (root, root / SPANS, root / "ranks"):
        with suppress(OSError):
            for at in sorted(folder.iterdir()):
                if at.suffix in {".json", ".arrow", ".arrows"} and not at.is_file():
                    yield str(at.relative_to(root))


def _parquet(file: pa.NativeFile) -> pa.Table:
    """Return the table in a Parquet file; the library is loaded when there is one."""
    from pyarrow import parquet as pq  # noqa: PLC0415 - takes as long to load as a small run to read

    return pq.read_table(file, page_checksum_verification=True)


def _rank_files(files: dict[str, fs.FileInfo], folder: str) -> list[tuple[int, str, fs.FileInfo]]:
    """Return rank, ending and file of each ``rank-*`` file directly in *folder*."""
    wanted = {"arrow", "arrows"} if folder != "ranks" else {"json"}
    found = []
    for name, at in files.items():
        parent, _, base = name.rpartition("/")
        matched = _RANK_FILE.fullmatch(base)
        if parent == folder and matched and matched[2] in wanted:
            found.append((int(matched[1]), matched[2], at))
    return sorted(found, key=lambda item: item[:2])


def _timeline(table: pa.Table, name: str) -> pa.Table:
    """Return *table* checked and in one piece per column; raises RunError naming the file."""
    _refuse_newer(table.schema, name)
    try:
        table.validate(full=True)  # an index outside its dictionary would otherwise be read from anywhere
        return checked(table).unify_dictionaries().combine_chunks()
    except TimelineError as error:
        raise RunError(f"{name}: {error}") from error
    except (ValueError, pa.ArrowException) as error:
        raise RunError(f"{name} is damaged: {reason(error)}") from error


def _refuse_newer(schema: pa.Schema, name: str) -> None:
    """Raise RunError if *schema* says that it was written by a newer version of the format."""
    version = (schema.metadata or {}).get(b"foretrace.format", b"0")
    if not 0 <= counted(version.decode(errors="replace")) <= FORMAT_VERSION:
        raise RunError(
            f"{name} has format version {version.decode(errors='replace')}, this foretrace reads up to "
            f"{FORMAT_VERSION}; install a newer foretrace"
        )


def _starts_like_a_stream(source: pa.NativeFile) -> bool:
    """Whether *source* begins with the marker of an Arrow stream, and could be a stream cut short."""
    source.seek(0)
    start = source.read(4)
    return b"\xff\xff\xff\xff".startswith(start)


def _guessed(world_size: int) -> RunInfo:
    """Return the description of spans that came without one."""
    return RunInfo(origin="ingested", world_size=world_size)


# How the verbs open a run: one that is finished has to be whole, unless the user says otherwise.


def open_whole(path: str, *, partial: bool) -> Run:
    """Open the run at *path*; refuse a finished one that lacks ranks, unless *partial*.

    A recording that was killed or still goes on, and a trace of another tool, may lack ranks: it is read with
    a warning, for what was recorded is never lost. A run that was finished has lost files since. Raises
    RunError: the run cannot be read, or is not whole.
    """
    run = open_run(path)
    was_whole = run.info.origin == "simulated" or (run.info.origin == "recorded" and run.info.finished)
    lost = set(run.missing_ranks) & set(run.info.recorded_ranks)
    if lost and was_whole and not partial:
        raise RunError(
            f"{path} is finished but has no spans of rank {rank_list(lost)} of "
            f"{run.info.world_size}: files are missing; copy them, or read the other ranks with --partial"
        )
    return run
