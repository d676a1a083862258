"""What is left to do when all ranks have ended: one memory file, and the headline figures of the run."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import ipc

from foretrace.tracer.errors import RecordError
from foretrace.tracer.ingest.ingest import ingest
from foretrace.tracer.kernels import KERNELS, KINETO
from foretrace.tracer.run_directory import REFUSED
from foretrace.traces.analysis.diagnosis import diagnose
from foretrace.traces.analysis.metrics import summarize
from foretrace.traces.errors import TraceError
from foretrace.traces.info import RunInfo
from foretrace.traces.store import open_run, write_info
from foretrace.traces.timeline import MEMORY

NOTHING: Final = "no process of the command called init_process_group or stepped an optimizer"
"""Why a command was not recorded that has left nothing at all."""

STOPPED: Final = "recording stopped: "
"""How a warning begins that tells why no more was written."""


def finish(path: Path) -> dict[str, Any] | None:
    """Join what the ranks have left in the run directory *path* and return its summary.

    Returns:
        The summary of ``traces.analysis.metrics.summarize``, ``audit`` (what torch's own flight recorder
        confirms), ``warnings`` of the ranks, and ``ranks_here``, how many ranks a machine has; None if no
        rank has recorded a span.
    """
    _join_memory(path)
    try:
        run = open_run(path)
        summary = summarize(run)
    except TraceError:
        return None
    if (kernels := _kernels(path)) is not None:
        summary = {**summary, "kernels": kernels}
    stored = path / "run.json"
    try:
        if stored.is_file():
            info = RunInfo.from_json(stored.read_text(encoding="utf-8"), str(stored))
            names = ("layout", "cluster", "model", "job", "groups", "finished")
            known = {name: getattr(run.info, name) for name in names}
            write_info(path, replace(info, **known, summary=json.loads(json.dumps(summary))))
    except TraceError:  # a full disk: the sidecars of the ranks say what run.json would
        pass
    here = (run.info.cluster or {}).get("gpus_per_node", run.info.world_size)
    return {**summary, **run.info.audited(), "warnings": list(run.info.warnings), "ranks_here": here}


def why_it_failed(path: Path) -> list[str]:
    """Return what is known of why the training in *path* hung or died."""
    try:
        run = open_run(path)
    except TraceError:
        run = None
    return [f"{label} {text}" for label, text in diagnose(path, run).lines]


def why_nothing(path: Path) -> str:
    """Return why a command has left no spans in *path*; take away what its processes have left to say so."""
    refused = path / REFUSED
    if refused.is_file():
        why = refused.read_text(encoding="utf-8")
        refused.unlink()
        with suppress(OSError):
            path.rmdir()
        return why
    sidecars = sorted(path.glob("ranks/rank-*.json"))
    stopped = (
        warning
        for file in sidecars
        if "." not in file.stem  # as rank-00000.pending
        for warning in RunInfo.from_json(file.read_text(encoding="utf-8"), str(file)).warnings
        if warning.startswith(STOPPED)
    )
    with suppress(TraceError, OSError):
        return next(stopped, "it ended too early" if sidecars else NOTHING)
    return "it ended too early"


def _kernels(path: Path) -> str | None:
    """Make a run of the Kineto traces of the ranks, if any; return where it is, or why it is not."""
    if not (path / KINETO).is_dir():
        return None
    try:
        ingest([path / KINETO], path / KERNELS, name=f"{path.name}, kernels")
    except (RecordError, TraceError, OSError) as error:
        return f"not made: {error}"
    return str(path / KERNELS)


def _join_memory(path: Path) -> None:
    """Join the memory samples of the ranks into the file of the run; a broken file stays where it is."""
    files, tables = [], []
    for file in sorted(path.glob("ranks/rank-*.memory.arrow")):
        try:
            with pa.memory_map(str(file)) as source:
                tables.append(ipc.open_file(source).read_all().unify_dictionaries().cast(MEMORY))
        except (pa.ArrowException, OSError, ValueError):
            continue
        files.append(file)
    if tables:
        joined = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
        target = path / "memory.arrow"
        temporary = target.with_suffix(".arrow.tmp")
        try:
            with ipc.new_file(str(temporary), MEMORY) as writer:
                writer.write_table(joined)
            temporary.replace(target)
        except OSError:  # a full disk: readers join the files of the ranks
            temporary.unlink(missing_ok=True)
            return
    for file in files:
        file.unlink()
