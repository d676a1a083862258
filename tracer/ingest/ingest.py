"""Takes over trace files as a run directory."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from foretrace.door import shown
from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.chakra import shared
from foretrace.tracer.ingest.explained import explained, write_issued
from foretrace.tracer.ingest.joining import Joined, join
from foretrace.tracer.ingest.reading import read_all
from foretrace.tracer.ingest.recording import Recording
from foretrace.tracer.ingest.sources import GROUPS, PACKED, Progress, Source, found_sources, head, kind_of
from foretrace.traces.info import RunInfo
from foretrace.traces.rehearsal import FOLDER
from foretrace.traces.store import write_run

READERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "kineto": "foretrace.tracer.ingest.kineto",
        "exported": "foretrace.tracer.ingest.exported",
        "operations": "foretrace.tracer.ingest.optable",
        "timers": "foretrace.tracer.ingest.timers",
        "chakra": "foretrace.tracer.ingest.chakra",
        "flight recorder": "foretrace.tracer.ingest.flight",
        "param": "foretrace.tracer.ingest.param",
        "nsight": "foretrace.tracer.ingest.nsight",
        "rocprof": "foretrace.tracer.ingest.rocprof",
        "xplane": "foretrace.tracer.ingest.xplane",
    }
)
"""By kind of file, the module whose ``read`` reads it, given a source and the function that is told of
progress; imported when there is such a file. A file of several ranks gives a recording each."""

MOST_NAMED: Final = 16
"""Files that are left out and named; a folder may hold many more."""


def ingest(
    paths: Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    name: str = "",
    progress: Progress | None = None,
    communicates: str = "",
    explain: bool = False,
    describe_device: Callable[[str, int], Mapping[str, Any]] | None = None,
) -> RunInfo:
    """Read trace files of another tool and write them as one run.

    Args:
        paths: files, folders, archives; one file per rank, or one of several ranks.
        output: run directory to write.
        name: what to call the run; the last part of *output* if empty.
        progress: called while files are read.
        communicates: regular expression; kernels whose names fit it are communication, beside those known.
        explain: tell from operators and their shapes what was issued, too, and what job it was.
        describe_device: returns what a device can do, for ``RunInfo.cluster``, from its name and its memory
            in bytes, 0 if unknown.

    Returns:
        The description of the run: what was found, inferred from what, and lost.

    Raises:
        IngestError: nothing of it can be read, or the files are of different kinds.
        RunError: *output* cannot be written.
    """
    pattern = _pattern(communicates)
    with found_sources(paths, Path(output)) as sources:
        kind, recordings, lost = _read(sources, pattern, progress, explain=explain)
    if kind == "exported":
        if len(recordings) > 1:
            raise IngestError("each exported file is a run: take them over one at a time")
        return _taken_over(recordings[0], output, name, lost)
    joined = join(recordings, name or Path(output).absolute().name, kind)

    info = replace(joined.info, warnings=(*joined.info.warnings, *lost))
    if info.cluster and describe_device is not None:
        device = info.cluster["device"]
        can = describe_device(device["name"], device.get("memory_bytes", 0))
        info = replace(info, cluster={"device": {**device, **can}})
    if pattern is not None:
        evidence = info.job["evidence"] if info.job else {}
        evidence["communication kernels"] = f"those known, and those that fit {communicates!r}, as asked"
    return _written(output, explained(info, joined.issued) if explain else info, joined)


def _read(
    sources: Sequence[Source], pattern: re.Pattern[str] | None, progress: Progress | None, *, explain: bool
) -> tuple[str, list[Recording], list[str]]:
    """Return of what kind *sources* are, what is recorded in them, and in one line each what is left out."""
    kinds = {source: kind_of(source) for source in sources}
    beside = set(_graphs_beside_traces(kinds))
    # Left out as if they were no traces, and told of below.
    kinds |= dict.fromkeys(beside, "")
    members = dict.fromkeys(source for source, kind in kinds.items() if kind == GROUPS)
    kinds |= dict.fromkeys(members, "")
    found = sorted(set(kinds.values()) - {""})
    if not found:
        begins = head(sources[0])  # says what is wrong with it if it cannot be read
        if begins.startswith(PACKED):
            raise IngestError(f"{sources[0].name} is packed: unpack it first; .gz, .zip and .tar.gz are read")
        raise IngestError(f"{sources[0].name} is not a trace of a known kind; docs/ingest.md lists them")
    if len(found) > 1:
        raise IngestError(
            f"files of different kinds, {' and '.join(found)}: take them over one kind at a time"
        )
    options: dict[str, Any] = {}
    for asked, flag in ((pattern is not None, "--comm-kernels"), (explain, "--explain")):
        if asked and found[0] != "kineto":
            raise IngestError(f"{flag} is for traces of the kind kineto, these are of the kind {found[0]}")
    if found[0] == "kineto":
        options = {"communicates": pattern, "explain": explain}
    elif found[0] == "chakra":
        options = shared([source for source in sources if kinds[source]], list(members))
    outcomes = list(read_all(READERS[found[0]], options, [s for s in sources if kinds[s]], progress))
    recordings = [one for outcome in outcomes for one in outcome.recordings]
    failed = [outcome.failed for outcome in outcomes if outcome.failed]
    if not recordings:
        raise IngestError(failed[0])
    ignored = [
        f"{source.name} is {'a graph beside traces that have times' if source in beside else 'no trace'}: "
        "left out"
        for source in sources
        if not kinds[source] and source not in members
    ]
    if len(ignored) > MOST_NAMED:
        ignored[MOST_NAMED:] = [f"{len(ignored) - MOST_NAMED:,} more files are left out"]
    return found[0], recordings, [*failed, *ignored]


def _written(output: str | os.PathLike[str], info: RunInfo, joined: Joined) -> RunInfo:
    """Write a run, and what its ranks issued if they tell; what an earlier run of the place issued goes."""
    issued, folder = joined.issued, Path(output) / FOLDER
    write_run(output, info, joined.written(), joined.memory)
    if folder.is_dir():
        shutil.rmtree(folder)
    if issued:
        write_issued(folder, info, issued)
    return info


def _taken_over(
    recording: Recording, output: str | os.PathLike[str], name: str, warnings: list[str]
) -> RunInfo:
    """Write the run that an exported file holds as it was, but for *name*, if any, and further *warnings*."""
    run: RunInfo = recording.facts["run"]
    run = replace(run, name=name or run.name, warnings=(*run.warnings, *warnings))
    write_run(output, run, recording.spans, recording.facts.get("memory"))
    return run


def _pattern(communicates: str) -> re.Pattern[str] | None:
    if not communicates:
        return None
    try:
        with warnings.catch_warnings(action="error"):  # of a pattern that a newer Python reads otherwise
            pattern = re.compile(communicates)
    except (re.error, FutureWarning, OverflowError, RecursionError) as error:
        raise IngestError(f"{shown(communicates)} is not a regular expression: {error}") from error
    if pattern.search(""):
        raise IngestError(
            f"{communicates!r} fits even a name without letters, and so every kernel: write only what "
            "communicates, e.g. 'exchange|dispatch'"
        )
    return pattern


def _graphs_beside_traces(kinds: Mapping[Source, str]) -> list[Source]:
    """Return the graphs of a folder that has traces of Kineto, too: those say when things were."""
    if set(kinds.values()) - {""} != {"chakra", "kineto"}:
        return []
    return [source for source, kind in kinds.items() if kind == "chakra"]
