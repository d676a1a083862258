"""Puts together what several machines have recorded of one training, each into a directory of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretrace.tracer.errors import RecordError
from foretrace.tracer.finish import finish
from foretrace.tracer.kernels import KINETO
from foretrace.traces.info import RunInfo, rank_list
from foretrace.traces.run import Run
from foretrace.traces.store import open_run, write_info


def merge(paths: Sequence[Path], output: Path) -> dict[str, Any] | None:
    """Join the run directories *paths* into *output*; they stay as they are.

    Args:
        paths: run directories of disjoint ranks of one training.
        output: run directory, new or empty.

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
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
            made = Path(scratch) / "run"
            for path in paths:
                for source, target in _files(path):
                    (made / target).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source, made / target)
            stored = made / "run.json"
            if len({run.info.name for _, run in runs}) > 1 and stored.is_file():  # those of the directories
                info = RunInfo.from_json(stored.read_text(encoding="utf-8"), str(stored))
                write_info(made, replace(info, name=output.name))
            summary = finish(made)
            if output.is_dir():
                output.rmdir()
            made.replace(output)
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
