"""Takes over trace files as a run directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Final

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.joining import join
from foretrace.tracer.ingest.recording import Recording
from foretrace.tracer.ingest.sources import Progress, Source, find_sources, kind_of
from foretrace.traces.info import RunInfo
from foretrace.traces.store import write_run

Reader = Callable[[Source, Progress | None], Recording]

READERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "kineto": "foretrace.tracer.ingest.kineto",
        "operations": "foretrace.tracer.ingest.optable",
        "timers": "foretrace.tracer.ingest.timers",
        "chakra": "foretrace.tracer.ingest.chakra",
        "flight recorder": "foretrace.tracer.ingest.flight",
        "param": "foretrace.tracer.ingest.param",
    }
)
"""By kind of file, the module whose ``read`` reads it; imported when there is such a file."""


def ingest(
    paths: Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    name: str = "",
    progress: Progress | None = None,
) -> RunInfo:
    """Read trace files of another tool and write them as one run.

    Args:
        paths: files, folders, archives; one file per rank, or one of several ranks.
        output: run directory to write.
        name: what to call the run; the last part of *output* if empty.
        progress: called while files are read.

    Returns:
        The description of the run: what was found, inferred from what, and lost.

    Raises:
        IngestError: nothing of it can be read, or the files are of different kinds.
        RunError: *output* cannot be written.
    """
    sources = find_sources(paths)
    kinds = {source: kind_of(source) for source in sources}
    beside = _graphs_beside_traces(kinds)
    kinds |= dict.fromkeys(beside, "")
    found = sorted(set(kinds.values()) - {""})
    if not found:
        raise IngestError(f"{sources[0].name} is not a trace of a known kind; docs/ingest.md lists them")
    if len(found) > 1:
        raise IngestError(
            f"files of different kinds, {' and '.join(found)}: take them over one kind at a time"
        )
    reader: Reader = import_module(READERS[found[0]]).read
    recordings, failed = _read(reader, [s for s in sources if kinds[s]], progress)
    if not recordings:
        raise IngestError(failed[0])
    joined = join(recordings, name or Path(output).absolute().name, found[0])
    ignored = [
        f"{source.name} is {'a graph beside traces that have times' if source in beside else 'no trace'}: "
        "left out"
        for source in sources
        if not kinds[source]
    ]
    info = replace(joined.info, warnings=(*joined.info.warnings, *failed, *ignored))
    write_run(output, info, joined.written())
    return info


def _graphs_beside_traces(kinds: Mapping[Source, str]) -> list[Source]:
    """Return the graphs of a folder that has traces of Kineto, too: those say when things were."""
    if set(kinds.values()) - {""} != {"chakra", "kineto"}:
        return []
    return [source for source, kind in kinds.items() if kind == "chakra"]


def _read(
    reader: Reader, sources: list[Source], progress: Progress | None
) -> tuple[list[Recording], list[str]]:
    """Return what could be read of *sources*, and why the others could not."""
    recordings: list[Recording] = []
    failed: list[str] = []
    for source in sources:
        try:
            recordings.append(reader(source, progress))
        except IngestError as error:
            said = str(error)
            failed.append(said if source.name in said else f"{source.name}: {said}")
    return recordings, failed
