"""Rehearses a small command, records the same on processors, and compares all but times."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from foretrace.tracer.finish import finish, why_it_failed, why_nothing
from foretrace.tracer.launch import launch
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked, rehearse
from foretrace.tracer.rehearse.world.acting import Progress
from foretrace.tracer.rehearse.world.launchers import launchers_of, script_of
from foretrace.tracer.rehearse.world.started import STARTS_RANKS
from foretrace.tracer.rehearse.world.stuck import WAITING_S
from foretrace.tracer.run_directory import no_empty_folders
from foretrace.traces.communicated import Channels, Communicated, channels, compared, issued
from foretrace.traces.info import read_info
from foretrace.traces.rehearsal import Rehearsal, read_rank, rehearsal_folder
from foretrace.traces.run import Run
from foretrace.traces.store import open_run

MOST_STEPS: Final = 8
"""Steps that are rehearsed at most: those of a small command are alike."""

TIMES_AS_LONG: Final = 3.0
"""Times that a rehearsal took in which a recording may write nothing: what is slow before a first step, as
reading data, was slow there, too."""

PER_NODE: Final = ("--nproc-per-node", "--nproc_per_node")
"""Flags of torchrun that say how many processes it starts."""

INTERPRETERS: Final = {"python", "python3"}
"""What starts a script once, not once per rank."""


class Row(NamedTuple):
    """One figure of the recorded and of the rehearsed run, as people read it; ``-`` is unknown."""

    what: str
    recorded: str
    rehearsed: str
    agrees: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """How a rehearsal compares with a recording of the same command."""

    # the run directories
    recorded: Path
    rehearsed: Path
    rows: tuple[Row, ...]  # what was compared; one that is unknown in a run neither agrees nor differs
    communicated: Communicated  # the communication of all steps that were compared

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return all(row.agrees is not False for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "agrees": self.agrees,
            "compared": [row._asdict() for row in self.rows],
            "communication": self.communicated.to_dict(),
            "recorded": str(self.recorded),
            "rehearsed": str(self.rehearsed),
        }


def verify(asked: Asked, folder: Path, progress: Progress | None = None) -> Verified:
    """Rehearse the command of *asked* in all ranks, and record it on as many processes as its world has.

    Args:
        asked: what to rehearse; its ranks and steps are chosen here.
        folder: receives ``recorded`` and ``rehearsed``, two run directories.
        progress: told about each phase.

    Raises:
        RehearsalError: the command fails, or has another number of processes.
        RecordError: it cannot be started or recorded.
    """
    n, recorded = asked.world_size, folder / "recorded"
    # First the rehearsal, which leaves no checkpoints: a script that finds some goes on from there.
    began_s = time.monotonic()
    wanted = replace(asked, ranks=tuple(range(n)), warmup=0, steps=MOST_STEPS, local_world_size=n)
    found = rehearse(wanted, folder / "rehearsed", progress)
    command = with_processes(asked.command, n, starts_ranks=STARTS_RANKS in found.job)
    if progress is not None:
        progress(f"recording on {n} processes")
    watched = _Watched(recorded, max(WAITING_S, TIMES_AS_LONG * (time.monotonic() - began_s)))
    with no_empty_folders(recorded):
        status = launch(command, recorded, quiet=True, n_gpus_on_cpu=n, is_stuck=watched.is_stuck)
        if watched.why:
            raise RehearsalError(watched.why)
        summary = finish(recorded.absolute()) if recorded.is_dir() else None
        if status or summary is None:
            why = [*why_it_failed(recorded), f"exit status {status}"] if status else [why_nothing(recorded)]
            raise RehearsalError(f"the command cannot be verified, because it fails on processors: {why[0]}")
    run = open_run(recorded)
    if run.info.world_size != n:
        raise RehearsalError(
            f"--verify {n}: the command started {run.info.world_size} processes; give it as many, such as "
            f"torchrun --nproc-per-node {n}"
        )
    verified = _verified(run, found, folder)
    if verified.agrees and not verified.communicated.a:
        raise RehearsalError(
            f"--verify {n} has nothing to compare: neither the recording nor the rehearsal communicates "
            "within a step; give a command whose ranks train together"
        )
    return verified


class _Watched:
    """Whether the ranks that record into *path* have written nothing for *limit_s* seconds, and why."""

    def __init__(self, path: Path, limit_s: float) -> None:
        self._path, self._limit_s = path, limit_s
        self._n_bytes, self._grew_s = 0, time.monotonic()
        self.why = ""

    def is_stuck(self) -> bool:
        """Whether they are; says why if they are so for the first time, while their processes run."""
        n_bytes, now_s = self._n_written(), time.monotonic()
        if n_bytes != self._n_bytes:
            self._n_bytes, self._grew_s = n_bytes, now_s
        elif not self.why and now_s - self._grew_s > self._limit_s:
            waits = "; ".join(why_it_failed(self._path)) or "no rank waits for another"
            self.why = (
                "the command cannot be verified: on processors it has done nothing for "
                f"{self._limit_s:.0f} s, and was ended: {waits}"
            )
        return bool(self.why)

    def _n_written(self) -> int:
        """Return the bytes of spans: modules, collectives and steps that are over are written each second."""
        return sum(file.stat().st_size for file in self._path.glob("spans/*"))


def with_processes(command: Sequence[str], n: int, *, starts_ranks: bool = False) -> tuple[str, ...]:
    """Return *command* so that torchrun starts *n* processes of a script, unless it says how many itself.

    A script that *starts_ranks* itself is started once.

    Raises:
        RehearsalError: the command would start such a script once per rank.

    >>> with_processes(("torchrun", "train.py"), 2) == with_processes(("train.py",), 2)
    True
    """
    if starts_ranks and {*launchers_of(command)} - INTERPRETERS:
        raise RehearsalError(
            f"{shlex.join(command)}: the script starts a process per rank itself, so each rank would start "
            f"all; leave the launcher out: -- {shlex.join(script_of(command)[0])}"
        )
    if command and command[0].endswith(".py"):
        command = ((sys.executable if starts_ranks else "torchrun"), *command)
    is_silent = not any(word.partition("=")[0] in PER_NODE for word in command)
    if command and Path(command[0]).name == "torchrun" and is_silent:
        return (command[0], PER_NODE[0], str(n), *command[1:])
    return tuple(command)


def _verified(run: Run, found: Rehearsal, folder: Path) -> Verified:
    """Return how the rehearsal *found* compares with *run*, both below *folder*."""
    steps = _steps(run)
    n_found = min(int(found.job["steps"]), len(steps) + 1)
    rehearsed = folder / "rehearsed"
    tables = {rank: read_rank(rehearsal_folder(rehearsed), rank) for rank in found.ranks}
    # Before its first forward a rank is in no step, though a stage may ask for its first input by then.
    common = range(min(len(steps), n_found))[1:] or range(min(len(steps), n_found))
    sides: dict[int, tuple[Channels, Channels]] = {}
    for rank in found.ranks:
        spans = run.spans([rank])
        real: dict[Any, list[Any]] = {}
        said: dict[Any, list[Any]] = {}
        for step in common:
            of_step = spans.filter(pc.equal(spans["step"], pa.scalar(step, spans["step"].type)))
            for own, more in (
                (real, channels(run, of_step, by_axis=False)),
                (said, issued(tables[rank], found.groups, step)),
            ):
                for channel, calls in more.items():
                    own.setdefault(channel, []).extend(calls)
        sides[rank] = (real, said)
    communicated = compared(sides)
    given = {int(rank): n for rank, n in found.job["rows_given"].items()}
    rows_real = {rank: _rows_given(run, rank) for rank in found.ranks}
    n_said = f"{n_found}" if n_found != MOST_STEPS or len(steps) <= MOST_STEPS else f"first {n_found}"
    rows = (
        Row("steps", str(len(steps)), n_said, n_found == min(len(steps), MOST_STEPS)),
        _row("parameters", *((one or {}).get("n_params") for one in (run.info.model, found.model))),
        _row("rows per rank and step", _each(rows_real), _each(given)),
        Row("calls", *_totals(sides, len), not communicated.differences),
        Row("bytes", *_totals(sides, _bytes), _totals(sides, _bytes)[0] == _totals(sides, _bytes)[1]),
    )
    return Verified(recorded=folder / "recorded", rehearsed=rehearsed, rows=rows, communicated=communicated)


def _steps(run: Run) -> list[int]:
    """Return the steps of *run*, those of all ranks."""
    found = run.spans([run.stored_ranks[0]])
    numbers = found.filter(pc.equal(pc.cast(found["category"], pa.string()), "step"))["step"].to_pylist()
    return sorted({number for number in numbers if number >= 0})


def _rows_given(run: Run, rank: int) -> int | None:
    """Return the rows that the passes of a step are given on *rank*, None if not all inputs had one shape."""
    job: Mapping[str, Any] = run.info.job or {}
    file = Path(run.path) / "ranks" / f"rank-{rank:05d}.json"
    with suppress(OSError):
        job = read_info(file).job or {}
    shape, n_passes = job.get("input_shape"), job.get("forwards_per_step", 1)
    if "n_microbatches" in job:
        n_passes = job["n_microbatches"] * job.get("schedules_per_step", 1)
    return int(shape[0]) * int(n_passes) if shape and job.get("input_shapes", 1) == 1 else None


def _each(rows: Mapping[int, int | None]) -> str | None:
    """Return one number if all ranks have it, else all of them; None if some are unknown."""
    if any(n is None for n in rows.values()):
        return None
    return (
        f"{next(iter(rows.values())):,}" if len({*rows.values()}) == 1 else ", ".join(map(str, rows.values()))
    )


def _row(what: str, recorded: Any, rehearsed: Any) -> Row:
    def words(one: Any) -> str:
        return "-" if one is None else f"{one:,}" if isinstance(one, int) else str(one)

    is_known = recorded is not None and rehearsed is not None
    return Row(what, words(recorded), words(rehearsed), recorded == rehearsed if is_known else None)


def _totals(sides: Mapping[int, tuple[Channels, Channels]], measure: Any) -> tuple[str, str]:
    """Return the sum of a *measure* of calls over all channels of each side."""
    sums = [sum(measure(calls) for pair in sides.values() for calls in pair[at].values()) for at in (0, 1)]
    return f"{sums[0]:,}", f"{sums[1]:,}"


def _bytes(calls: Sequence[Any]) -> int:
    return sum(call.size_bytes for call in calls)
