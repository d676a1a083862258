"""Starts a command whose ``torch.distributed`` processes are recorded, without editing its script."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from foretrace.tracer import on_cpu
from foretrace.tracer.attach import (
    DEPTH_VARIABLE,
    NAME_VARIABLE,
    RANKS_VARIABLE,
    RUN_VARIABLE,
    STEPS_VARIABLE,
)
from foretrace.tracer.ended import watch
from foretrace.tracer.errors import LaunchError
from foretrace.tracer.launched import is_one_of_many, job
from foretrace.tracer.record import DEPTHS
from foretrace.tracer.run_directory import check_new, claimed, holds_run, no_empty_folders
from foretrace.tracer.supervised import run
from foretrace.tracer.window import Window

SITE: Final = Path(__file__).absolute().parent / "site"
"""Folder whose ``sitecustomize`` Python runs first in every process of the command."""


def launch(
    command: Sequence[str],
    path: Path,
    *,
    name: str = "",
    quiet: bool = False,
    ranks: str = "",
    steps: str = "",
    depth: str = "light",
    n_gpus_on_cpu: int = 0,
) -> int:
    """Run *command* and record it into the run directory *path*; return how it ended.

    Args:
        command: program and arguments, e.g. ``["torchrun", "--nproc-per-node", "4", "train.py"]``.
        path: the run directory; new or empty.
        name: what a person calls the run; empty: the last part of *path*.
        quiet: send what the command prints to standard error, to keep standard output free.
        ranks: ranks to record, as ``Window.parsed`` takes them.
        steps: steps to record, likewise.
        depth: ``"light"`` or ``"kernels"``.
        n_gpus_on_cpu: take the processors for this many GPUs, 0: use what there is.

    Returns:
        Its exit status, or -n if signal n ended it.

    Raises:
        LaunchError: the command cannot be started.
        RecordError: *path* holds something already, is being recorded into, or cannot be written; the ranks
            or steps say nothing.
    """
    Window.parsed(ranks=ranks, steps=steps)
    if not command:
        raise LaunchError("nothing to record: give a command after --, e.g. -- torchrun train.py")
    path = path.absolute()
    check_new(path)
    words, program = [*command], _program(command[0])
    if shutil.which(command[0]) is None:  # it looks for itself by its name
        words[0] = program
    env = environment(path, name or path.name)
    asked = {RANKS_VARIABLE: ranks, STEPS_VARIABLE: steps, on_cpu.VARIABLE: str(n_gpus_on_cpu or "")}
    asked[DEPTH_VARIABLE] = "" if depth == DEPTHS[0] else depth
    env = {word: value for word, value in {**env, **asked}.items() if value or word not in asked}
    with no_empty_folders(path), claimed(path, job()):
        if holds_run(path) and not is_one_of_many():
            raise LaunchError(f"{path} holds a run already: nothing started; give a new directory")
        watch(str(path))  # the command may be a rank itself, as behind srun
        try:
            return run(words, env, program=program, output=sys.stderr if quiet else None)
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]!r}: {error.strerror or error}") from error


def environment(path: Path, name: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment in which Python processes record themselves into *path*.

    Args:
        path: the run directory, absolute.
        name: what a person calls the run.
        base: environment to extend, None: that of this process.
    """
    found = dict(os.environ if base is None else base)
    before = found.get("PYTHONPATH")
    found["PYTHONPATH"] = f"{SITE}{os.pathsep}{before}" if before else str(SITE)
    found[RUN_VARIABLE] = str(path)
    found[NAME_VARIABLE] = name
    return found


def _program(name: str) -> str:
    """Return the program *name*: on the path, or beside the Python that runs this. Raises LaunchError."""
    beside = Path(sys.executable).parent
    found = shutil.which(name) or shutil.which(name, path=str(beside))
    if found is None:
        raise LaunchError(f"cannot start {name!r}: no such program on the path or in {beside}")
    return found
