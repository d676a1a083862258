"""A process that has loaded torch, and splits itself for every script that is to run: ``preloaded.py N``.

It reads a line of JSON for each, as ``tests/forked.py`` writes them, and tells file descriptor N how each has
ended. A part of it has an environment, a folder and an output of its own. It runs its script as ``__main__``,
and ends as Python does, but for torch: to take that apart takes longer than most trainings.
"""

import atexit
import gc
import json
import os
import select
import signal
import sys
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch._dynamo  # which an optimizer loads when it is first made
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401 - scripts use all of these

import foretrace.tracer.hooks
import foretrace.tracer.record  # noqa: F401 - and of these, where they are recorded


def asked(tell: int) -> dict[str, Any] | None:
    """Split for each line of the input. Return in a part what it is to run; None when the input has ended."""
    parts: dict[int, tuple[int, int]] = {}  # number and process of each, by the descriptor of its process
    rest = b""
    while True:
        for one in select.select([0, *parts], [], [])[0]:
            if one:
                number, process = parts.pop(one)
                os.close(one)
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                os.write(tell, f"{number} {code}\n".encode())
                continue
            said = os.read(0, 1 << 16)
            *lines, rest = (rest + said).split(b"\n")
            for spec in map(json.loads, lines):
                if "argv" in spec and not (process := os.fork()):
                    for descriptor in (tell, *parts):
                        os.close(descriptor)
                    return dict(spec)
                if "argv" in spec:
                    parts[os.pidfd_open(process)] = spec["number"], process
            ended = {spec["number"] for spec in map(json.loads, lines) if "argv" not in spec}
            for number, process in parts.values():
                if number in ended or not said:
                    os.kill(process, signal.SIGKILL)
            if not said:
                return None


def prepare(spec: dict[str, Any]) -> ModuleType:
    """Have this process as one that was started with what *spec* says; return its main module."""
    for stream, (path, flags) in enumerate(
        (
            (os.devnull, os.O_RDONLY),
            (spec["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
            (spec["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        )
    ):
        opened = os.open(path, flags)
        os.dup2(opened, stream)
        os.close(opened)
    os.chdir(spec["cwd"])
    os.environ.clear()
    os.environ.update(spec["env"])
    for way in spec["warnings"]:
        sys.warnoptions.append(way)
        warnings.simplefilter(way)
    sys.argv = spec["argv"]
    main = ModuleType("__main__")
    sys.path[0] = ""
    if spec["source"] is None:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        main.__file__ = sys.argv[0]
    sys.modules["__main__"] = main
    if spec["site"] is not None:
        _attach(spec["site"])
    return main


def _attach(site: str) -> None:
    """Run what Python finds first in a process that is recorded; what it waits for has been loaded."""
    sys.path.insert(1, site)
    path = Path(site, "sitecustomize.py")
    with suppress(ModuleNotFoundError):  # there is no other
        exec(compile(path.read_text(), path, "exec"), {"__file__": str(path), "__name__": "sitecustomize"})
    expected: Any = sys.meta_path[0]
    for name in {*expected.expected} & {*sys.modules}:
        expected.expected.pop(name)(sys.modules[name])


def run(source: str, name: str, module: ModuleType) -> int:
    """Run *source* of the file *name* as *module*; return the exit status."""
    try:
        exec(compile(source, name, "exec"), module.__dict__)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def end(module: ModuleType, status: int) -> NoReturn:
    """End the process: its threads, what it has registered for the end, what *module* holds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    module.__dict__.clear()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    gc.freeze()  # what is loaded stays: to go through it at its end would take each part a second
    if (told := asked(int(sys.argv[1]))) is not None:
        module = prepare(told)
        name = "<string>" if told["source"] is not None else sys.argv[0]
        source = told["source"] if told["source"] is not None else Path(name).read_text(encoding="utf-8")
        end(module, run(source, name, module))
