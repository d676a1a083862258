"""The process that runs ranks (``acting.Loaded`` starts it), with tasks on its standard input.

It loads torch, and forks a child for every line of its input, which describes the task of one rank. The child
prepares torch, runs the script, and writes what the rank would have issued, and its result to
``outcome-RANK.json``; its own output is that of the script. Progress, and the ends of children, are written
to file descriptor N.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import runpy
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NoReturn

from foretrace.tracer.rehearse.errors import (
    AwaitedError,
    Finished,
    RehearsalError,
    UnlikeError,
    UnroutedError,
)
from foretrace.tracer.rehearse.peers.letters import Letters, leave, left
from foretrace.tracer.rehearse.ranks import launchers
from foretrace.tracer.rehearse.ranks.accelerated import tell_accelerate
from foretrace.tracer.rehearse.ranks.acting import REFUSED, letters_of, outcome_of, stages_of
from foretrace.tracer.rehearse.script import main_file
from foretrace.tracer.rehearse.words import ending

POLL_S: Final = 0.02
"""Seconds between two checks whether a child has ended."""


def main(progress: int) -> NoReturn:
    """Run a rank for every line of the input, each in its own process, until the input ends.

    Args:
        progress: file descriptor to which is written what ranks do.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    try:
        device = _load()
    except RehearsalError as error:
        sys.stderr.write(f"{error}\n")
        _end(REFUSED)
    under_way: dict[int, int] = {}
    rest, is_open = b"", True
    while is_open or under_way:
        if is_open and select.select([0], [], [], POLL_S if under_way else None)[0]:
            said = os.read(0, 1 << 16)
            is_open = bool(said)
            if not is_open and under_way:  # the parent process is gone
                os.killpg(0, signal.SIGKILL)
            *lines, rest = (rest + said).split(b"\n")
            for line in lines:
                spec = {**json.loads(line), "progress": progress}
                number = os.fork()
                if number == 0:
                    _act(spec, device)
                under_way[number] = spec["rank"]
        for number in list(under_way):
            ended, status = os.waitpid(number, os.WNOHANG if is_open else 0)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                os.write(progress, f"ended {under_way.pop(number)} {code}\n".encode())
    _end(0)  # unloading torch would take a second


def _load() -> Any:
    """Load the parts of torch that every rank needs, with GPUs; return these."""
    own = dict(os.environ)  # torch adds to it where it is loaded
    os.environ["OMP_NUM_THREADS"] = "1"
    from foretrace.tracer.rehearse.device.driver import MOST_DEVICES
    from foretrace.tracer.rehearse.device.installing import install

    device = install(MOST_DEVICES)
    import torch

    torch.set_num_threads(1)
    import torch.distributed.fsdp
    import torch.distributed.tensor

    os.environ.clear()
    os.environ.update(own)
    return device


def _act(spec: Mapping[str, Any], device: Any) -> None:
    """Run the rank of *spec* and end the process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable()  # on a fatal signal, print where the process was
    outcome: dict[str, Any]
    try:
        outcome = rehearse(spec, device)
    except AwaitedError as error:
        outcome = {"awaits": error.rank, "n_left": error.n_left}
    except UnlikeError as error:
        outcome = {"unlike": str(error)}
    except UnroutedError as error:
        outcome = {"unrouted": str(error)}
    except RehearsalError as error:
        traceback.print_exc()
        outcome = {"error": str(error), "missed": error.missed}
    except BaseException:
        traceback.print_exc()
        _end(1)
    _leave(spec, outcome)


def _leave(spec: Mapping[str, Any], outcome: Mapping[str, Any]) -> NoReturn:
    """Write the *outcome* and end the process."""
    outcome_of(Path(spec["folder"]), spec["rank"]).write_text(json.dumps(outcome), encoding="utf-8")
    _end(0)


def _end(status: int) -> NoReturn:
    """End the process without clean-up: the process groups do not exist."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def rehearse(spec: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """Run the script of *spec* and write what its rank issues; return a description of the run.

    Raises:
        RehearsalError: the script cannot be rehearsed, or did not do a step.
    """
    began = time.process_time()
    for name in launchers.inherited(os.environ):
        del os.environ[name]
    os.environ.update(launchers.environment(spec))
    import torch

    from foretrace.tracer import internals
    from foretrace.tracer.record import activate
    from foretrace.tracer.rehearse.events.watch import Watcher
    from foretrace.tracer.rehearse.peers.world import World
    from foretrace.tracer.rehearse.script import files, started, threads
    from foretrace.tracer.rehearse.script.own_steps import RehearsedRecording
    from foretrace.tracer.rehearse.script.stuck import Watchdog

    device.driver.count = spec["local_world_size"] if spec["has_gpu"] else 0
    if not spec["has_gpu"]:
        internals.become_cpu_build()
    torch.autograd.set_multithreading_enabled(False)  # what is known of a thread is known in its backward
    session, world = _session(spec, device), World(spec["rank"], spec["world_size"])
    world.install(session)
    kept = _installed(spec, session)
    started.install(session, spec)
    watcher = Watcher(session)
    guard = session.files = files.Files(Path(spec["folder"]), spec["rank"], lambda: session.position.step > 0)
    guard.install()
    modes = (device.mode, watcher.mode())
    activate(RehearsedRecording(session, Path(spec["folder"])))
    Watchdog(session, lambda words: _leave(spec, {"error": words, "missed": []})).watch()
    with guard.cleared(session.notes), threads.Threads(session, modes, watcher.one_at_a_time).seen():
        _run(spec, session, modes)
    del kept
    session.notes += [*session.steps.said(), *world.said()]
    if session.position.step < 0 or not session.tape.n_events:
        raise RehearsalError(
            "nothing to rehearse: the script called no torch.nn.Module and no optimizer of torch.optim "
            "stepped, so it is unknown where its steps are; if it trains in another way, call "
            f"foretrace.step() at the end of each step; {_noted(session)}its output is in {spec['log']}"
        )
    return _written(spec, session, world) | {"process_s": time.process_time() - began}


def _noted(session: Any) -> str:
    """Return the notes of a rehearsal that ends with an error: they may explain it."""
    return "".join(f"{note}; " for note in session.notes)


def _session(spec: Mapping[str, Any], device: Any) -> Any:
    """Return a session for the rank of *spec* that reports its progress."""
    from foretrace.tracer.rehearse.session import RehearsalSession
    from foretrace.tracer.rehearse.values.stated import Stated

    letters = Letters(spec["rank"], left(Path(spec["folder"]), "letters"), spec["coming"])

    def tell(words: str) -> None:
        os.write(spec["progress"], f"says {spec['rank']} {words}\n".encode())

    return RehearsalSession(
        spec["rank"],
        spec["world_size"],
        device,
        stated=Stated(spec["expert_load"], letters, asks_choices=spec["asks_choices"]),
        warmup=spec["warmup"],
        steps=spec["steps"],
        tell=tell,
    )


def _installed(spec: Mapping[str, Any], session: Any) -> Any:
    """Replace devices and libraries of torch; return objects that must be kept alive."""
    from foretrace.tracer.rehearse.peers import cut_inputs, sharding, under_ddp
    from foretrace.tracer.rehearse.script import shims

    under_ddp.install(session)
    sharding.install(session)
    cut_inputs.install(session)
    kept = shims.install(session)
    session.expect_pipeline(left(Path(spec["folder"]), "stages"), repeats=spec["repeats"])
    if spec["accelerate"] is not None:
        tell_accelerate(spec["accelerate"], spec["world_size"])
    return kept


def _run(spec: Mapping[str, Any], session: Any, modes: tuple[Any, ...]) -> None:
    """Run the script under *modes* until it ends, or has done the requested steps.

    Raises:
        UnlikeError: all micro-batches must be run.
        UnroutedError: choices of experts must be made up.
        AwaitedError: another rank must be rehearsed first.
        RehearsalError: the script cannot be rehearsed; also if the script has caught that error.
    """
    error: BaseException | None = None
    try:
        _play(spec, session, modes)
    except Finished:
        pass
    except SystemExit as left:
        error = left if left.code not in {None, 0} else None
    except BaseException as found:  # as those of distributed checkpoints are
        error = found
    error = session.failures.refusal() or error
    missed = sorted(session.letters.missed)
    if isinstance(error, AwaitedError):
        error.n_left = len(session.letters.left)
    if isinstance(error, AwaitedError) or (error is not None and missed):
        leave(letters_of(Path(spec["folder"]), spec["rank"]), session.letters.left)
    if isinstance(error, UnlikeError | AwaitedError | UnroutedError):
        raise error
    if error is not None:
        raise RehearsalError(ending(error, spec, list(session.stated.told)), missed=missed) from error


def _play(spec: Mapping[str, Any], session: Any, modes: tuple[Any, ...]) -> None:
    """Run the script to its end."""
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        main_file.begin(launchers.words_of(spec), is_module=spec["module"])
        if spec["stub"]:
            runpy.run_path(spec["stub"], run_name="__stub__")
        if spec["module"]:
            runpy.run_module(spec["command"][0], run_name="__main__", alter_sys=True)
        else:
            main_file.run_file(spec["command"][0])
        session.is_over = True
        session.steps.finish()


def _written(spec: Mapping[str, Any], session: Any, world: Any) -> dict[str, Any]:
    """Write what the rank issues; return its description as JSON."""
    from dataclasses import asdict

    from foretrace.tracer.process import versions
    from foretrace.tracer.rehearse.peers.pipeline import described
    from foretrace.traces.rehearsal import write_rank

    folder, rank, first_step = Path(spec["folder"]), spec["rank"], session.kept.first()
    write_rank(folder, rank, session.tape.tables())
    shapes = session.shapes
    leave(stages_of(folder, rank), shapes.found if shapes is not None else {})
    leave(letters_of(folder, rank), session.letters.left)
    layout = session.trainings.layout(rank)
    routing = session.stated.routing
    return {
        "groups": [asdict(group) for group in world.groups(session)],
        "layout": None if layout is None else layout.degrees,
        "model": session.whole_model(),
        "job": {**session.job, "forwards_per_step": session.trainings.n_passes()},
        "part": session.trainings.part(first_step),
        "gathered": session.trainings.gathered(),
        "uneven": session.trainings.loaded.uneven(),
        "first_step": first_step,
        "steps": max(min(spec["steps"], session.position.step - first_step), 1),
        "memory": session.memory.described(has_gpu=session.job.get("device") != "cpu"),
        "stated": [f"{told} ({n} times)" if n > 1 else told for told, n in session.stated.told.items()],
        "n_choices": 0 if routing is None else routing.n_choices,
        "dealt_among": [] if routing is None else routing.groups,
        "notes": [*session.notes, *session.trainings.said(first_step)],
        "sent": described(shapes.found if shapes else {}),
        "missed": sorted(session.letters.missed),
        "taken": described(shapes.taken if shapes else {}),
        **session.trainings.loaded.told(session.job),
        "versions": versions(),
        "n_events": session.tape.n_events,
        "memory_used_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
