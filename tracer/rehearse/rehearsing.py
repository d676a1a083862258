"""Runs a script as chosen ranks, one process each, and makes a rehearsal of what they did."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foretrace.tracer.rehearse.advice import findings
from foretrace.tracer.rehearse.data.experts import EVEN, Loads, parsed
from foretrace.tracer.rehearse.device import driver
from foretrace.tracer.rehearse.errors import RehearsalError, UnroutedError
from foretrace.tracer.rehearse.world import late
from foretrace.tracer.rehearse.world.acting import Loaded, Progress, Troupe
from foretrace.tracer.rehearse.world.batch import batch_of
from foretrace.tracer.rehearse.world.classes import (
    Classes,
    acted_chain,
    differences,
    groups_of,
    hear_senders,
    peers_of,
    shapes_that_differ,
    together,
)
from foretrace.tracer.rehearse.world.late import cleared
from foretrace.tracer.rehearse.world.launchers import (
    accelerate_flags,
    exported,
    launchers_of,
    name_of,
    script_of,
    told_by_fabric,
)
from foretrace.tracer.run_directory import next_free, no_empty_folders
from foretrace.traces.batch import Batch, stated
from foretrace.traces.errors import LayoutError, reason
from foretrace.traces.info import joined_models
from foretrace.traces.layout import Layout, ranks_in
from foretrace.traces.private import is_private, private_folder
from foretrace.traces.rehearsal import FOLDER, Rehearsal, read_rank, write_rehearsal
from foretrace.traces.replacing import scratch_folder
from foretrace.traces.store import holds_recording

# Folders in which ranks write their results while they are rehearsed, and the one that these go to.


def emptied(folder: Path) -> None:
    """Delete everything in *folder*, before a rehearsal starts again."""
    late.clear(folder)
    for one in folder.iterdir():
        shutil.rmtree(one) if one.is_dir() else one.unlink()


def checked_target(output: Path) -> Path:
    """Return the run directory *output* made absolute. Raises RehearsalError if no rehearsal may go there."""
    target = output.absolute()
    try:
        str(target).encode()  # as Arrow will
    except UnicodeEncodeError as error:
        raise RehearsalError(f"cannot write {output}: {reason(error)}") from error
    if holds_recording(target):
        raise RehearsalError(f"{output} holds a recording: give a new directory")
    known = {FOLDER, "run.json", "spans", "memory.arrow", "links.arrow", "ranks"}
    if target.exists() and (not target.is_dir() or {entry.name for entry in target.iterdir()} - known):
        raise RehearsalError(f"{output} has other files in it: give a directory that is new, empty or a run")
    return target


# Starts a rehearsal again with made-up choices of experts if the script reads what its routers choose.


def with_choices(act: Callable[[float | Loads], Rehearsal], load: float | Loads, folder: Path) -> Rehearsal:
    """Rehearse with a *load*, and with choices of experts that are made up evenly if the script reads them.

    Raises:
        RehearsalError: the script cannot be rehearsed, or reads choices although the load is one number.
    """
    try:
        return act(load)
    except UnroutedError as error:
        asker = str(error)
    if load != 1.0:
        raise RehearsalError(
            f"{asker} needs which experts are chosen, which --expert-load {load} does not say: give zipf:S "
            "or the share of each expert"
        )
    emptied(folder)
    found = act(EVEN)
    how = f"rehearsed as with --expert-load {EVEN.text}"
    return replace(found, notes=(*found.notes, f"{asker} needs which experts are chosen: {how}"))


def check_choices(load: float | Loads, outcomes: Iterable[Mapping[str, Any]]) -> None:
    """Raise RehearsalError if *load* is a shape, and no rank of *outcomes* has made a choice of experts."""
    if isinstance(load, Loads) and not any(one["n_choices"] for one in outcomes):
        n = len(load.shares)
        asked = f"among {n} experts" if n else "of experts (topk, max or argmax in a module named so)"
        raise RehearsalError(f"--expert-load {load.shown}: the script makes no choice {asked}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to rehearse."""

    command: tuple[str, ...]  # the script and its arguments; a launcher before it is left out
    world_size: int  # ranks of the world
    ranks: tuple[int, ...] = ()  # those to act out; empty: one of each class of ranks that behave alike
    warmup: int = 1  # steps before those that are kept
    steps: int = 1  # steps to keep
    local_world_size: int = 8  # ranks per node, as the script is told
    stub: str = ""  # file of Python that is run before the script, empty for none
    samples: int = 1  # members of other classes that are checked against the rank that stands for them
    every_microbatch: bool = False  # run all micro-batches of a pipeline, also those that do what others did
    # what the experts of a rehearsed rank are sent, over an even share, or the shape of their loads
    # (``experts.parsed``)
    expert_load: float | str = 1.0
    has_gpu: bool = True  # whether the script is told that there is a GPU
    # tokens of a step over all ranks, None where the rehearsal is to find out
    tokens_per_step: int | None = None


def rehearse(
    asked: Asked, output: Path, progress: Progress | None = None, *, on: Loaded | None = None
) -> Rehearsal:
    """Rehearse what is *asked* and write it to the run directory *output*, all of it or nothing.

    Args:
        asked: what to rehearse.
        output: the run directory.
        progress: told about each phase.
        on: the process that loads torch, for several rehearsals one after the other; by default one of its
            own.

    Raises:
        RehearsalError: the script cannot be rehearsed, *output* holds something else, torch is not installed.
    """
    tell = progress or (lambda words: None)
    target = _checked(asked, output)
    with no_empty_folders(target.parent), scratch_folder(_private_beside(target)) as (scratch, _):
        with cleared(scratch), Loaded() if on is None else nullcontext(on) as loaded:
            found = with_choices(
                lambda load: _Acted(asked, scratch, tell, load).all(loaded),
                parsed(asked.expert_load),
                scratch,
            )
        folder = scratch / FOLDER
        for rank in found.ranks:
            shutil.move(scratch / f"rank-{rank:05d}", folder / f"rank-{rank:05d}")
            shutil.move(scratch / f"rank-{rank:05d}.log", folder / f"rank-{rank:05d}" / "output.log")
        write_rehearsal(folder, found)
        with scratch_folder(target) as (beside, place):  # on its disk, where it takes its place at once
            shutil.move(folder, beside / FOLDER)
            place.mkdir(exist_ok=True)
            if (place / FOLDER).exists():
                shutil.rmtree(place / FOLDER)
            (beside / FOLDER).rename(place / FOLDER)
    return found


def _private_beside(target: Path) -> Path:
    """Return *target*, or where others could write beside it a path in this user's cache.

    What ranks send each other is kept there, and read as pickles: who can write those runs code.
    """
    if is_private(target.parent):
        return target
    return private_folder(driver.cache_folder().with_name("rehearsals"), driver.WHY) / target.name


def _checked(asked: Asked, output: Path) -> Path:
    """Return *output* made absolute. Raises RehearsalError before anything is run in vain."""
    if find_spec("torch") is None:
        raise RehearsalError("rehearsing needs torch: pip install torch")
    if not asked.command:
        raise RehearsalError("no script to rehearse: foretrace rehearse --world-size 512 -- train.py ARGS")
    if outside := [rank for rank in asked.ranks if not 0 <= rank < asked.world_size]:
        raise RehearsalError(f"rank {outside[0]} is outside a world of {asked.world_size}")
    parsed(asked.expert_load)
    script, is_module = script_of(asked.command)
    if not is_module and not Path(script[0]).is_file():
        is_program = shutil.which(script[0]) is not None
        python = (
            "; write the line of Python that it runs, where '$RANK' is a rank's own" if is_program else ""
        )
        raise RehearsalError(f"{script[0]}: no such script{python}")
    if asked.stub and not Path(asked.stub).is_file():
        raise RehearsalError(f"{asked.stub}: no such stub file")
    return checked_target(output)


class _Acted:
    """The ranks that have been acted out so far."""

    def __init__(self, asked: Asked, folder: Path, tell: Progress, load: float | Loads) -> None:
        self._asked, self._folder, self._tell, self._load = asked, folder, tell, load
        self.outcomes: dict[int, dict[str, Any]] = {}
        self._noted: list[str] = []  # by ranks that others stand for
        self._dealt: list[tuple[int, ...]] = []  # groups whose members tell each other different numbers
        self._batch = Batch()  # of a step of all ranks
        self._chain: tuple[int, ...] = ()  # stages of a pipeline that the script names nowhere

    def all(self, loaded: Loaded) -> Rehearsal:
        """Act out every rank that is asked for, or one of each class: the first, then the others.

        Where there is no pipeline the last rank of the world will be the sample: it is acted out beside the
        first. Where it turns out to be of no use, nothing of it is kept.
        """
        asked = self._asked
        ranks = sorted(asked.ranks) or [0]
        troupe = Troupe(self._spec(), self._folder, self._tell, loaded, adds=not asked.ranks)
        # It runs while the first one does: 70B on 512 ranks take 11 s, and took 20 one after the other.
        last = None if asked.ranks or not asked.samples else asked.world_size - 1
        early = troupe.act(ranks[:1], beside=last, later=ranks[1:])
        self.outcomes = {ranks[0]: early.pop(ranks[0])}
        if not asked.ranks:
            self._chain = acted_chain(troupe, self.outcomes, ranks[0], also=early)
        classes = self._classes(ranks[0])
        samples = [] if asked.ranks else list(classes.samples(asked.samples, groups_of(early)))
        wanted = [*ranks, *(() if asked.ranks else classes.members), *(at for at, _ in samples)]
        # Ranks that ran beside the first one stay only if they are wanted.
        for rank in early:
            if rank in wanted:
                self.outcomes[rank] = early[rank]
            else:
                troupe.forget(rank)
        self._act(troupe, wanted)
        if asked.ranks:
            self._chain = acted_chain(troupe, self.outcomes, ranks[0])

        def act(again: Sequence[int]) -> None:
            self.outcomes |= troupe.act(again)

        hear_senders(act, self.outcomes, adds=not asked.ranks)
        check_choices(self._load, self.outcomes.values())
        # Groups whose members differ make further classes, and with them further samples.
        if self._tell_each_other(act) or asked.ranks:
            classes = self._classes(ranks[0])
            groups = groups_of(self.outcomes)
            samples = [] if asked.ranks else list(classes.samples(asked.samples, groups))
            self._act(troupe, [at for at, _ in samples])
        groups = groups_of(self.outcomes, self._chain)
        self._batch, said = batch_of(self.outcomes, groups, self._layout(), asked.world_size)
        self._noted += said
        checked = self._check(samples)
        kept = [rank for rank, _ in samples if rank in self.outcomes]
        # A rank that differs is rehearsed with its pipeline: else its transfers have no other side.
        self._act(troupe, [peer for rank in kept for peer in peers_of(rank, groups)])
        # After the check: ranks that did the same as another are represented by it from now on.
        stands_for = classes.representatives(sorted(self.outcomes))
        return self._rehearsal(stands_for, checked)

    def _classes(self, first: int) -> Classes:
        """Return the classes of ranks that *first* has shown: where loads have a shape, also by experts."""
        groups, dealt = groups_of(self.outcomes, self._chain), [*self._dealt]
        if isinstance(self._load, Loads):
            dealt += [tuple(ranks) for one in self.outcomes.values() for ranks in one["dealt_among"]]
            dealt += [group.ranks for group in groups if group.axis == "ep"]
        return Classes(self._asked.world_size, groups, first, dealt)

    def _act(self, troupe: Troupe, ranks: Sequence[int]) -> None:
        """Act out those of *ranks* for which that has not been done."""
        if wanted := [rank for rank in dict.fromkeys(ranks) if rank not in self.outcomes]:
            self.outcomes |= troupe.act(wanted)

    def _tell_each_other(self, act: Callable[[Sequence[int]], None]) -> bool:
        """Act those out again who tell each other different numbers; return whether others were needed."""
        adds = isinstance(self._load, Loads) and not self._asked.ranks
        added, said = together(act, self.outcomes, self._folder, adds=adds)
        self._dealt += added
        self._noted += said
        return bool(added)

    def _spec(self) -> dict[str, Any]:
        """Return what the process of every rank is told."""
        asked = self._asked
        command, is_module = script_of(asked.command)
        n_local = min(asked.local_world_size, asked.world_size)
        return {
            "folder": str(self._folder),
            "world_size": asked.world_size,
            "local_world_size": n_local,
            "warmup": asked.warmup,
            "steps": asked.steps,
            "stub": asked.stub,
            "command": command,
            "module": is_module,
            "launchers": launchers_of(asked.command),
            "exported": exported(asked.command) | told_by_fabric(asked.command, asked.world_size, n_local),
            "accelerate": accelerate_flags(asked.command),
            "repeats": not asked.every_microbatch,
            "has_gpu": asked.has_gpu,
            "expert_load": self._load.text if isinstance(self._load, Loads) else self._load,
        }

    def _check(self, samples: Sequence[tuple[int, int]]) -> list[str]:
        """Say of ranks that others stand for whether they did the same; one that did stands for nobody."""
        said = []
        for rank, stands in samples:
            found = differences(read_rank(self._folder, stands), read_rank(self._folder, rank))
            if found:
                peers = ", ".join(map(str, peers_of(rank, groups_of(self.outcomes, self._chain))))
                itself = f"itself, with its pipeline (ranks {peers})" if peers else "itself"
                said.append(f"rank {rank} differs from rank {stands}, so it represents {itself}: {found}")
            else:
                self._noted += self.outcomes.pop(rank)["notes"]
                said.append(f"rank {rank} does the same as rank {stands}, which represents it")
        return said

    def _layout(self) -> Layout | None:
        """Return the parallel degrees that a rank has found, None if none has."""
        found = next((one["layout"] for one in self.outcomes.values() if one["layout"]), None)
        if found is None and len(self._chain) == self._asked.world_size:
            return Layout(pp=len(self._chain))
        return Layout(**found) if found else None

    def _rehearsal(self, stands_for: Sequence[int], checked: Sequence[str]) -> Rehearsal:
        """Put together what the ranks know."""
        outcomes = self.outcomes
        first = outcomes[min(outcomes)]
        script, _ = script_of(self._asked.command)
        notes = list(dict.fromkeys(note for one in outcomes.values() for note in one["notes"]))
        notes += [note for note in dict.fromkeys(self._noted) if note not in notes]
        groups, n_tokens = groups_of(outcomes, self._chain), self._asked.tokens_per_step
        batch = self._batch if n_tokens is None else stated(n_tokens)
        model = joined_models([one["model"] for one in outcomes.values()])
        pipelines = [{*group.ranks} for group in groups if group.axis == "pp"]
        if model and pipelines and not any(ranks <= outcomes.keys() for ranks in pipelines):
            model["n_params"] = None  # stages are missing
        # Reversed: where ranks say different things, the first one counts.
        job = {key: value for one in reversed(list(outcomes.values())) for key, value in one["job"].items()}
        return Rehearsal(
            world_size=self._asked.world_size,
            ranks=tuple(sorted(outcomes)),
            representatives=tuple(stands_for),
            name=name_of(self._asked.command),
            command=script,
            layout=self._layout(),
            groups=groups,
            model=model,
            job={
                **job,
                "findings": findings(
                    outcomes, {rank: read_rank(self._folder, rank) for rank in sorted(outcomes)}, groups
                ),
                **batch.job,
                "rows_given": {rank: outcomes[rank]["part"].get("given") for rank in sorted(outcomes)},
                "first_step": first["first_step"],
                "steps": first["steps"],
            },
            memory={str(rank): outcomes[rank]["memory"] for rank in sorted(outcomes)},
            stated=tuple(dict.fromkeys(told for one in outcomes.values() for told in one["stated"])),
            notes=(*notes, *shapes_that_differ(outcomes)),
            checked=tuple(checked),
            versions=first["versions"],
        )


def wanted_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Return the ranks in *text*, none for ``"auto"``.

    Raises:
        RehearsalError: it is neither.

    >>> wanted_ranks("0,4-6", 8), wanted_ranks("auto", 8)
    ((0, 4, 5, 6), ())
    """
    if text == "auto":
        return ()
    try:
        return ranks_in(text, below=world_size)
    except LayoutError as error:
        raise RehearsalError(f"--ranks: auto, or a list; {error}") from None


def free_directory(command: Sequence[str]) -> Path:
    """Return a directory below ``runs`` that is not there yet, named after the script of *command*."""
    return next_free(name_of(command) if command else "script")
