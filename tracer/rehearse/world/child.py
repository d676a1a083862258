"""The process that runs ranks (``acting.Loaded`` starts it), with tasks on its standard input.

It loads torch, and forks a child for every line of its input, which describes the task of one rank. The child
prepares torch, runs the script, and writes what the rank would have issued, and its result to
``outcome-RANK.json``; its own output is that of the script. Progress, and the ends of children, are written
to file descriptor N.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import runpy
import select
import signal
import sys
import traceback
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

from foretrace.tracer import internals
from foretrace.tracer.record import Recording, activate
from foretrace.tracer.rehearse.errors import (
    AwaitedError,
    Finished,
    RehearsalError,
    UnlikeError,
    UnroutedError,
)
from foretrace.tracer.rehearse.words import ending
from foretrace.tracer.rehearse.world import launchers
from foretrace.tracer.rehearse.world.acting import FIRST, REFUSED, file_of
from foretrace.tracer.rehearse.world.launchers import tell_accelerate
from foretrace.tracer.rehearse.world.letters import Letters, leave, left
from foretrace.tracer.rehearse.world.started import begin, run_file
from foretrace.traces.errors import RunError

POLL_S: Final = 0.02
"""Seconds between two checks whether a child has ended."""


OF_EVERY_RANK: Final = (
    *("numpy.ma", "foretrace.traces.rehearsal"),  # the first by pyarrow
    *(f"torch.distributed.{name}" for name in ("checkpoint.state_dict", "fsdp", "launcher.api", "tensor")),
    *(f"foretrace.tracer.{name}" for name in ("backward", "modules", "process", "rehearse.session")),
    *(f"foretrace.tracer.rehearse.{name}" for name in ("device.stand_ins", "device.threads", "tape.watch")),
    *(f"foretrace.tracer.rehearse.world.{name}" for name in ("files", "pipeline", "reducer", "sharding")),
    *(f"foretrace.tracer.rehearse.world.{name}" for name in ("started", "stuck", "world")),
)
"""What each rank imports: once, before the first of them, since it takes longer than many a rank."""


M_MMAP_THRESHOLD: Final = -3  # of glibc's malloc.h

LARGE_BYTES: Final = 128 * 1024
"""Size from which memory of its own is asked of the system: glibc's own value where it begins."""


class RehearsedRecording(Recording):
    """The object that ``foretrace.record`` yields in a rehearsal; it records nothing.

    Args:
        folder: where the rehearsal writes.
    """

    def __init__(self, session: Any, folder: Path) -> None:
        super().__init__(folder, name="", flush_s=None)
        self._rehearsal = session

    def end_step(self) -> None:
        """End a step of the rehearsal: the script has called ``foretrace.step``."""
        self._rehearsal.steps.told()


def main(progress: int) -> NoReturn:
    """Run a rank for every line of the input, each in its own process, until the input ends."""
    # A group of its own: ``killpg`` ends this process and its ranks, and not who has started them.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, _stop)
    try:
        device = _load(progress)
    except (RehearsalError, RunError) as error:
        sys.stderr.write(f"{error}\n")
        _end(REFUSED)
    except SystemExit:  # what was being compiled has been removed; its compiler may still run
        os.killpg(0, signal.SIGKILL)
    # From here on there may be ranks, which have to end with it.
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    under_way: dict[int, int] = {}
    rest, is_open = b"", True
    while is_open:
        if select.select([0], [], [], POLL_S if under_way else None)[0]:
            said = os.read(0, 1 << 16)
            is_open = bool(said)
            if not is_open and under_way:  # the parent process is gone
                os.killpg(0, signal.SIGKILL)
            *lines, rest = (rest + said).split(b"\n")
            for line in lines:
                spec = {**json.loads(line), "progress": progress}
                _import(spec["imports"])
                number = os.fork()
                if number == 0:
                    try:
                        _act(spec, device)
                    finally:  # where not even what went wrong can be written, as on a full disk
                        os._exit(1)
                under_way[number] = spec["rank"]
        for number in list(under_way):
            ended, status = os.waitpid(number, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                os.write(progress, f"ended {under_way.pop(number)} {code}\n".encode())
    _end(0)  # unloading torch would take a second


def _stop(*_: object) -> NoReturn:
    raise SystemExit


def _load(progress: int) -> Any:
    """Load the parts of torch that every rank needs, with GPUs; return these."""

    def tell(words: str) -> None:
        os.write(progress, f"{FIRST}{words}\n".encode())

    own = dict(os.environ)  # torch adds to it where it is loaded
    os.environ["OMP_NUM_THREADS"] = "1"
    # Left alone, glibc raises that size with each large block that is freed. Known numbers of a few megabytes
    # then lie among small objects, which settle where one was freed: 80 layers took 340 MB that nobody used.
    with suppress(AttributeError):  # another C library has no such function
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
    from foretrace.tracer.rehearse.device.driver import MOST_DEVICES
    from foretrace.tracer.rehearse.device.installing import install

    device = install(MOST_DEVICES, tell=tell)
    import torch

    torch.set_num_threads(1)
    # The first to ask for torch's pool of threads in a process that was forked makes it anew. Where backward
    # starts a thread for each device, several ask at once, and one that finds none aborts.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
    _import(OF_EVERY_RANK)
    os.environ.clear()
    os.environ.update(own)
    return device


def _import(names: Iterable[str]) -> None:
    """Import for all ranks from now on those of *names* that are not there yet."""
    if missing := [name for name in names if name not in sys.modules]:
        for name in missing:
            import_module(name)
        gc.freeze()  # a collection in a rank need not look at torch


def _act(spec: Mapping[str, Any], device: Any) -> None:
    """Run the rank of *spec* and end the process."""
    # A rank that is ended must not end the others: the handler of its parent process would.
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
    file = file_of(Path(spec["folder"]), spec["rank"], "outcome")
    part = file.with_suffix(".part")  # the parent process reads all of it or nothing
    imported = [name for name in internals.OF_COMPILERS if name in sys.modules]
    part.write_text(json.dumps({**outcome, "imported": imported}), encoding="utf-8")
    part.replace(file)
    _end(0)


def _end(status: int) -> NoReturn:
    """End the process without clean-up: the process groups do not exist."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def rehearse(spec: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """Run the script of *spec* and write what its rank issues; return a description of the run.

    Raises:
        RehearsalError: the script cannot be rehearsed, or did not do a step.
    """
    os.chdir(spec["cwd"])
    # A rehearsal may be a task of SLURM itself: none of its ranks is that task.
    for name in launchers.inherited(os.environ):
        del os.environ[name]
    os.environ.update(launchers.environment(spec))
    import torch

    from foretrace.tracer.rehearse.device import threads
    from foretrace.tracer.rehearse.tape.watch import Watcher
    from foretrace.tracer.rehearse.world import files, started
    from foretrace.tracer.rehearse.world.stuck import Watchdog
    from foretrace.tracer.rehearse.world.world import World

    # Before PyTorch first uses a device: from then on it keeps the number.
    device.driver.count = spec["local_world_size"] if spec["has_gpu"] else 0
    if not spec["has_gpu"]:
        internals.become_cpu_build()
    torch.autograd.set_multithreading_enabled(False)  # what is known of a thread is known in its backward
    session, world = _session(spec, device), World(spec["rank"], spec["world_size"])
    world.install(session)
    _install(spec, session)
    started.install(session, spec)
    watcher = Watcher(session)
    guard = session.files = files.Files(Path(spec["folder"]), spec["rank"], lambda: session.position.step > 0)
    guard.install()
    modes = (device.mode, watcher.mode())
    activate(RehearsedRecording(session, Path(spec["folder"])))
    Watchdog(session, lambda words: _leave(spec, {"error": words, "missed": []})).watch()
    with guard.cleared(session.notes), threads.Threads(session, modes, watcher.one_at_a_time).seen():
        _run(spec, session, modes)
    session.notes += world.said()
    if session.position.step < 0 or not session.tape.n_events:
        raise RehearsalError(
            "nothing to rehearse: the script called no torch.nn.Module and no optimizer of torch.optim "
            "stepped, so it is unknown where its steps are; if it trains in another way, call "
            f"foretrace.step() at the end of each step; {_noted(session)}its output is in {spec['log']}"
        )
    return _written(spec, session, world)


def _noted(session: Any) -> str:
    """Return the notes of a rehearsal that ends with an error: they may explain it."""
    return "".join(f"{note}; " for note in session.notes)


def _session(spec: Mapping[str, Any], device: Any) -> Any:
    """Return a session for the rank of *spec* that reports its progress."""
    from foretrace.tracer.rehearse.data.stated import Stated
    from foretrace.tracer.rehearse.session import RehearsalSession

    letters = Letters(spec["rank"], left(Path(spec["folder"])), spec["coming"])

    def tell(words: str) -> None:
        os.write(spec["progress"], f"says {spec['rank']} {words}\n".encode())

    return RehearsalSession(
        spec["rank"],
        spec["world_size"],
        device,
        stated=Stated(spec["expert_load"], letters),
        warmup=spec["warmup"],
        steps=spec["steps"],
        tell=tell,
    )


def _install(spec: Mapping[str, Any], session: Any) -> None:
    """Replace devices and libraries of torch."""
    from foretrace.tracer.rehearse.device import stand_ins
    from foretrace.tracer.rehearse.world import reducer, sharding

    reducer.install(session)
    sharding.install(session)
    sharding.watch_inputs(session)
    stand_ins.install(session)
    session.expect_pipeline(repeats=spec["repeats"])
    if spec["accelerate"] is not None:
        tell_accelerate(spec["accelerate"], spec["world_size"])


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
    # A refusal comes before what came of it: the script may have caught it and gone on.
    error = session.failures.refusal(ended_by=error) or error
    missed = sorted(session.letters.missed)
    if isinstance(error, AwaitedError):
        error.n_left = len(session.letters.left)
    # Another rank may go on with what this one has sent so far.
    if isinstance(error, AwaitedError) or (error is not None and missed):
        leave(file_of(Path(spec["folder"]), spec["rank"], "letters"), session.letters.left)
    if isinstance(error, UnlikeError | AwaitedError | UnroutedError):
        raise error
    if error is not None:
        raise RehearsalError(ending(error, spec, list(session.stated.told)), missed=missed) from error


def _play(spec: Mapping[str, Any], session: Any, modes: tuple[Any, ...]) -> None:
    """Run the script to its end."""
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        # Only now: imports of ours must not find what the folder of the script has.
        begin(launchers.words_of(spec), is_module=spec["module"])
        if spec["stub"]:
            runpy.run_path(spec["stub"], run_name="__stub__")
        if spec["module"]:
            runpy.run_module(spec["command"][0], run_name="__main__", alter_sys=True)
        else:
            run_file(spec["command"][0])
        session.is_over = True
        session.steps.finish()


def _written(spec: Mapping[str, Any], session: Any, world: Any) -> dict[str, Any]:
    """Write what the rank issues; return its description as JSON."""
    from dataclasses import asdict

    from foretrace.tracer.process import versions
    from foretrace.tracer.rehearse.world.pipeline import described
    from foretrace.traces.rehearsal import write_rank

    folder, rank, first_step = Path(spec["folder"]), spec["rank"], session.kept.first()
    write_rank(folder, rank, session.tape.tables())
    shapes = session.shapes
    leave(file_of(folder, rank, "letters"), session.letters.left)
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
        # As many as were kept, which may be fewer than were asked for.
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
    }
