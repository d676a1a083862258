"""What is left to do when all ranks have ended: one memory file, and the headline figures of the run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from foretrace.tracer.errors import RecordError
from foretrace.tracer.ingest.ingest import ingest
from foretrace.tracer.kernels import KERNELS, KINETO
from foretrace.tracer.memory import write_samples
from foretrace.tracer.run_directory import REFUSED
from foretrace.traces.analysis.diagnosis import diagnose
from foretrace.traces.analysis.metrics import summarize
from foretrace.traces.errors import TraceError
from foretrace.traces.info import rank_list, read_info
from foretrace.traces.replacing import scratch_folder
from foretrace.traces.run import Run
from foretrace.traces.sealed import read_file
from foretrace.traces.store import open_run, write_info
from foretrace.traces.timeline import MEMORY

NOTHING: Final = "no process of the command called init_process_group or stepped an optimizer"
"""Why a command was not recorded that has left nothing at all."""

STOPPED: Final = "recording stopped: "  # how a warning begins that tells why no more was written


def finish(path: Path) -> dict[str, Any] | None:
    """Join what the ranks have left in the run directory *path* and return its summary.

    Returns:
        The summary of ``traces.analysis.metrics.summarize``, ``audit`` (what torch's own flight recorder
        confirms), ``warnings`` of the ranks, ``ranks_here``, how many ranks a machine has, and
        ``ranks_known``, how many have begun to record here; None if no rank has recorded a span.
    """
    stored, of = path / "run.json", ""
    with suppress(TraceError):  # none yet, or of an older version
        of = read_info(stored).files.get("run.json", "")
    _join_memory(path, of)
    try:
        run = open_run(path)
        summary = summarize(run)
    except TraceError:
        return None
    if (kernels := _kernels(path)) is not None:
        summary = {**summary, "kernels": kernels}
    try:
        if stored.is_file():
            info = read_info(stored)
            names = ("layout", "cluster", "model", "job", "groups", "finished")
            known = {name: getattr(run.info, name) for name in names}
            # The memory of the ranks is in one file now.
            files = {name: one for name, one in run.files.items() if not name.endswith(".memory.arrow")}
            files |= {"memory.arrow": of} if (path / "memory.arrow").is_file() else {}
            summarized = json.loads(json.dumps(summary))
            write_info(path, replace(info, **known, files=files, summary=summarized))
    except TraceError:  # a full disk: the sidecars of the ranks say what run.json would
        pass
    here = (run.info.cluster or {}).get("gpus_per_node", run.info.world_size)
    known = {"ranks_here": here, "ranks_known": len(run.info.processes)}
    return {**summary, **run.info.audited(), "warnings": list(run.info.warnings), **known}


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
        for warning in read_info(file).warnings
        if warning.startswith(STOPPED)
    )
    # The sidecars are read here, one after the other, by `next`.
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


def _join_memory(path: Path, of: str) -> None:
    """Join the memory samples of the ranks into the file of the run; a broken file stays where it is.

    Launchers of other nodes, whose ranks ended before, may have joined theirs in it.
    """
    files, tables, target = [], [], path / "memory.arrow"
    for file in sorted(path.glob("ranks/rank-*.memory.arrow")):
        with suppress(pa.ArrowException, ValueError):
            tables.append(_samples(file))
            files.append(file)
    if tables:
        try:
            tables[:0] = [_samples(target)] if target.is_file() else []
        except (pa.ArrowException, ValueError):  # damaged: readers say so, and the samples stay beside it
            return
        # Each file has a dictionary of its own, and an Arrow file holds only one for a column.
        joined = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
        try:
            write_samples(target, joined, of)
        except OSError:  # a full disk: readers join the files of the ranks
            return
    # Only now that all samples are in the file of the run.
    for file in files:
        file.unlink()


def _samples(file: Path) -> pa.Table:
    return read_file(file)[0].unify_dictionaries().cast(MEMORY)


def merge(paths: Sequence[Path], output: Path) -> dict[str, Any] | None:
    """Join the run directories *paths* into *output*; they stay as they are.

    Returns:
        The summary of the run, as ``finish`` returns it.

    Raises:
        RecordError: the directories are not parts of one run, or *output* holds something already.
        TraceError: one of them is no run.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RecordError(f"{output} holds something already; give a directory that is new or empty")
    if len(paths) < 2:
        raise RecordError("nothing to merge: give two run directories or more")
    runs = [(path, open_run(path)) for path in paths]
    _check(runs)
    try:
        with scratch_folder(output) as (scratch, place):
            made = scratch / "run"
            for path in paths:
                for source, target in _files(path):
                    (made / target).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source, made / target)
            stored = made / "run.json"
            if len({run.info.name for _, run in runs}) > 1 and stored.is_file():  # those of the directories
                info = read_info(stored)
                write_info(made, replace(info, name=output.name))
            summary = finish(made)
            if place.is_dir():
                place.rmdir()
            made.replace(place)
    except OSError as error:
        raise RecordError(f"cannot write {output}: {error.strerror or error}") from error
    return summary


def _check(runs: Sequence[tuple[Path, Run]]) -> None:
    """Raise RecordError unless the runs are parts of one: the same world, the same groups, other ranks."""
    first, run = runs[0]
    owner: dict[int, Path] = {}
    groups = {group.id: group for group in run.info.groups}
    for path, part in runs:
        if part.info.origin != "recorded":
            raise RecordError(f"{path} was {part.info.origin}: only parts of one recording are merged")
        if part.info.world_size != run.info.world_size:
            raise RecordError(
                f"{first} is of a world of {run.info.world_size} ranks and {path} of {part.info.world_size}: "
                "give parts of one run"
            )
        both = [rank for rank in part.stored_ranks if rank in owner]
        if both:
            raise RecordError(
                f"rank {rank_list(both)} is in {owner[both[0]]} and in {path}: give each rank once"
            )
        owner.update(dict.fromkeys(part.stored_ranks, path))
        for group in part.info.groups:
            if groups.setdefault(group.id, group).ranks != group.ranks:
                raise RecordError(f"{path} has other process groups than {first}: give parts of one run")


def _files(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a run directory that a merged one needs, and where they go."""
    for folder in ("spans", "ranks", KINETO):
        for file in sorted((path / folder).glob("rank-*")):
            yield file, f"{folder}/{file.name}"
    if (path / "run.json").is_file():
        yield path / "run.json", "run.json"
    if (path / "memory.arrow").is_file():  # joined for this machine; ``finish`` joins it with the others
        ranks = sorted(open_run(path).stored_ranks)
        yield path / "memory.arrow", f"ranks/rank-{ranks[0]:05d}.memory.arrow"
