"""A process that has loaded torch, and splits itself for each that asks: ``preloaded.py LISTENER FOLDER``.

Who asks is ``tests/standing_in.py``. A part has its arguments, environment, folder and open files. It ends as
Python does, but for torch: to take that apart takes longer than most trainings.
"""

import atexit
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from foretrace.tracer import on_cpu
from foretrace.tracer.importing import Expectation
from foretrace.tracer.internals import C_OF_TORCH
from foretrace.tracer.process import n_pretended_gpus

USED = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.launcher.api"),
    *("torch.distributed.pipelining", "torch.distributed.tensor.parallel"),
    *("foretrace.tracer.hooks", "foretrace.tracer.record"),
)
"""What scripts use, and recordings of them; the first an optimizer loads when it is first made."""

for name in (C_OF_TORCH, "torch") if n_pretended_gpus() else ():
    Expectation(name, on_cpu.install)
for name in USED:
    importlib.import_module(name)

FIRST_FREE = 512
"""No process is given a file of this number or a higher one."""


Parts = dict[int, tuple[int, socket.socket]]
"""The process of each part and who has asked for it, by the descriptors of both."""


def asked(listener: socket.socket) -> dict[str, Any] | None:
    """Split for each that asks. Return in a part what it is to do; None when the input has ended."""
    parts: Parts = {}
    while True:
        for one in select.select([0, listener.fileno(), *parts], [], [])[0]:
            if one == 0:
                for process, _ in parts.values():
                    os.kill(process, signal.SIGKILL)
                return None
            if one != listener.fileno():
                _attend(one, parts)
            elif (spec := _split(listener, parts)) is not None:
                return spec


def _split(listener: socket.socket, parts: Parts) -> dict[str, Any] | None:
    """Split for the next that asks, and add it to *parts*. Return in the part what it is to do."""
    asking, _ = listener.accept()
    _, files, _, _ = socket.recv_fds(asking, 1, FIRST_FREE)
    with asking.makefile() as line:
        spec: dict[str, Any] = json.loads(line.readline() or "{}")
    process = os.fork() if spec else 0
    if spec and not process:
        for descriptor in (listener.fileno(), asking.fileno(), *parts):
            os.close(descriptor)
        _open(files, spec["files"])
        return spec
    for descriptor in files:
        os.close(descriptor)
    if process:
        parts[os.pidfd_open(process)] = parts[asking.fileno()] = process, asking
    else:  # who has asked was killed
        asking.close()
    return None


def _attend(one: int, parts: Parts) -> None:
    """Pass on what has come from descriptor *one*: an end, a signal, or that who has asked was killed."""
    process, asking = parts.get(one, (0, None))
    if asking is None:  # it has ended in this round
        return
    if one == asking.fileno():
        said = asking.recv(1)
        os.kill(process, said[0] if said else signal.SIGKILL)
        if not said:
            del parts[one]
        return
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with suppress(BrokenPipeError):
        asking.sendall(b"%d\n" % status)
    for descriptor in (one, asking.fileno()):
        parts.pop(descriptor, None)
    os.close(one)
    asking.close()


def _open(files: Sequence[int], wanted: Sequence[int]) -> None:
    """Have the open *files* have the numbers that are *wanted*."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, FIRST_FREE) for number in files]
    for number in files:
        os.close(number)
    for number, its in zip(high, wanted, strict=True):
        os.dup2(number, its)
        os.close(number)


def prepare(spec: dict[str, Any], python: str) -> ModuleType:
    """Have this process as one that was started as *python* with what *spec* says; return its main module."""
    os.chdir(spec["cwd"])
    os.environ.clear()
    os.environ.update(spec["env"])
    for way in spec["warnings"]:
        sys.warnoptions.append(way)
        warnings.simplefilter(way)
    if "-u" in spec["flags"]:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.executable, sys.argv, sys.orig_argv = python, spec["argv"], [python, *spec["words"]]
    multiprocessing.set_executable(python)
    sys.modules["__main__"] = main = ModuleType("__main__")
    if spec["how"] == "file":
        main.__file__ = spec["what"] = os.path.join(spec["cwd"], spec["what"])  # noqa: PTH118 - as Python does
    first = {"-c": "", "-m": spec["cwd"]}.get(spec["how"], str(Path(spec["what"]).resolve().parent))
    is_safe = "-P" in spec["flags"] or spec["env"].get("PYTHONSAFEPATH")
    added = [one for one in spec["env"].get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:] = [*([] if is_safe else [first]), *added, *INSTALLED]
    _customize()
    return main


def _customize() -> None:
    """Import what Python imports unasked; a recording finds what it waits for loaded already."""
    before = {*map(id, sys.meta_path)}
    sys.modules.pop("sitecustomize", None)  # of the system, which this process was started with
    with suppress(ModuleNotFoundError):  # there is none
        importlib.import_module("sitecustomize")
    for finder in [one for one in sys.meta_path if id(one) not in before]:
        expected: dict[str, Any] = getattr(finder, "expected", {})
        expected.pop("torch", None)  # of which processors stand for GPUs, already
        for name in sorted({*expected} & {*sys.modules}):
            expected.pop(name)(sys.modules[name])


def run(spec: dict[str, Any], module: ModuleType) -> int:
    """Run as *module* what *spec* says; return the exit status."""
    try:
        if spec["how"] == "-m":
            runpy._run_module_as_main(spec["what"])  # type: ignore[attr-defined]
        elif spec["how"] == "-c":
            exec(compile(spec["what"], "<string>", "exec"), module.__dict__)
        else:
            exec(compile(Path(spec["what"]).read_bytes(), spec["what"], "exec"), module.__dict__)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        sys.stderr.write(f"{error.code}\n")
        return 1
    except BaseException as error:
        shown = error.__traceback__
        sys.excepthook(type(error), error, shown.tb_next if shown is not None else None)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(module: ModuleType, status: int) -> NoReturn:
    """End the process: its threads, what it has registered for the end, what *module* holds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    module.__dict__.clear()
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


INSTALLED = [one for one in sys.path[1:] if one not in os.environ["PYTHONPATH"].split(os.pathsep)]
"""The path of a process without a folder of its own and without PYTHONPATH."""

if __name__ == "__main__":
    gc.freeze()  # what is loaded stays: to go through it at its end would take each part a second
    python = f"{sys.argv[2]}/python"
    if (told := asked(socket.socket(fileno=int(sys.argv[1])))) is not None:
        module = prepare(told, python)
        end(module, run(told, module))
