"""Processes of Python that need not load torch: one that has splits itself for each of them.

``python()`` is a program that takes the place of ``sys.executable`` in a command. What a process finds as its
own ``sys.executable`` is that program, too: of ``foretrace record -- torchrun train.py`` all are split off.
"""

import atexit
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from foretrace.tracer.process import ON_CPU

HERE = Path(__file__).parent

N_GPUS = "2"
"""GPUs for which processors stand in a process that is split off another one for that."""


SHARED = "PYTHON_OF_TESTS"
"""Names what ``python`` has returned in the process whose environment this one has."""


@cache
def python() -> str:
    """Return a program that does what Python does, in a process in which torch has been loaded.

    Python itself on a machine with GPUs: who has looked for them cannot be split. Only Linux tells when a
    part ends.
    """
    if SHARED in os.environ:
        return os.environ[SHARED]
    if Path("/dev/nvidiactl").exists() or not hasattr(os, "pidfd_open"):
        return sys.executable
    kept = tempfile.TemporaryDirectory()
    address = str(Path(kept.name, "socket"))
    for name, words in (("python", ""), ("torchrun", "-m torch.distributed.run")):
        stand_in = f"{shlex.join([sys.executable, '-IS', str(HERE / 'standing_in.py'), address])} {words}"
        program = Path(kept.name, name)
        program.write_text(f'#!/bin/sh\nexec {stand_in} "$@"\n')
        program.chmod(0o755)
    _start(kept, address)
    return str(Path(kept.name, "python"))


@cache
def python_on_cpu() -> str:
    """Have that program also take processors for two GPUs where it is told to, and return it."""
    program = python()
    if program != sys.executable and SHARED not in os.environ:
        kept = tempfile.TemporaryDirectory()
        _start(kept, str(Path(program).with_name(f"socket{N_GPUS}")), **{ON_CPU: N_GPUS})
    return program


def share() -> None:
    """Have all processes that this one starts split the two that it has started."""
    os.environ[SHARED] = python_on_cpu()


def _start(kept: tempfile.TemporaryDirectory[str], address: str, **more: str) -> None:
    """Start the process that listens at *address*, and have it end with this one, and *kept* with it."""
    env = {**os.environ, "PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": "1", **more}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(128)  # who comes while torch is loaded waits
        process = subprocess.Popen(
            [sys.executable, str(HERE / "preloaded.py"), str(listener.fileno()), str(Path(address).parent)],
            stdin=subprocess.PIPE,
            pass_fds=(listener.fileno(),),
            env=env,
        )

    def end() -> None:
        if process.stdin is not None:
            process.stdin.close()
        process.wait()
        kept.cleanup()

    atexit.register(end)
