"""The one door by which tests start processes that train: what gloo or torch itself breaks is started again.

What fails for another reason is not started again, and nothing is started more often than ``MOST_RUNS``.
"""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tracer.attach import RUN_VARIABLE
from tracer.launch import environment

ROOT = Path(__file__).parents[1]

FLAKES = re.compile(
    "connectFullMesh|EADDRINUSE|Address already in use|terminate called without an active exc"
)
"""Failures of gloo on a busy machine. The last is torch's own, recorded or not: of 100 trainings with tensor
parallelism on torch 2.13 that were not recorded, one process aborted so while Python shut down. Up to 3.13
Python ends a thread that asks for its lock by then with ``pthread_exit``, which unwinds frames of C++ that
allow no exception. A thread of Python that is inside of ``Work.wait`` then does so; gloo's own threads, which
run on behind ``destroy_process_group``, ask for the lock where they drop the last reference to a tensor."""

SAID_BY_GLOO = re.compile(r"^\[Gloo\] .*\n", re.MULTILINE)
"""What torch 2.8 prints when ranks have found each other, to standard output."""

MOST_RUNS = 3
"""How often processes are started until they do not fail so."""

TIMEOUT_S = 300
"""Time after which processes count as hanging: they take seconds, or minutes on a machine that others use."""

NEWER = (2, 8)
"""The first torch that the recorder was made for: what an older one cannot do on gloo is left out there."""

Process = subprocess.Popen[str]
Done = subprocess.CompletedProcess[str]


def ended(
    start: Callable[[], Sequence[Process]], fresh: Path | None, timeout_s: float = TIMEOUT_S
) -> list[Done]:
    """Wait until the processes of *start* have ended; start them again where gloo or torch failed by itself.

    Args:
        start: starts them.
        fresh: the folder that they fill, which is emptied before they are started again.
        timeout_s: time that each of them has, in seconds.
    """
    for _ in range(MOST_RUNS):
        processes = start()
        try:
            said = [process.communicate(timeout=timeout_s) for process in processes]
        finally:
            for process in processes:
                process.kill()
        done = [
            Done(p.args, p.returncode, SAID_BY_GLOO.sub("", output), errors)
            for p, (output, errors) in zip(processes, said, strict=True)
        ]
        if not any(one.returncode for one in done) or not any(FLAKES.search(one.stderr) for one in done):
            break
        empty(fresh)
    return done


def empty(folder: Path | None) -> None:
    """Take away what is in *folder*, if it is there."""
    for path in folder.iterdir() if folder is not None and folder.is_dir() else ():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@dataclass(frozen=True)
class Ranks:
    """How the processes of a training ended."""

    status: tuple[int, ...]
    output: str
    errors: str

    @property
    def losses(self) -> list[str]:
        """Every loss that was printed, with the nine digits that identify a float32."""
        return re.findall(r"loss +(-?[0-9.e+-]+)", self.output)


class Runner:
    """Runs processes of one world."""

    root = ROOT
    newer = NEWER

    @staticmethod
    def torch() -> tuple[int, ...]:
        """Return the version of torch."""
        return tuple(int(part) for part in version("torch").split(".")[:2])

    @staticmethod
    def start(command: Sequence[str], env: Mapping[str, str], n: int = 2) -> list[Process]:
        """Start *command* as *n* ranks."""
        world = {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(n)}
        world |= {"LOCAL_WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return [started(command, {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(n)]

    @staticmethod
    def run(
        command: Sequence[str], env: Mapping[str, str], n: int = 2, *, fresh: Path | None = None
    ) -> Ranks:
        """Run *command* as *n* ranks to their end.

        Args:
            command: what each rank runs.
            env: its environment, from `env`.
            n: number of ranks.
            fresh: as for `ended`, by default the run directory that *env* names.
        """
        if fresh is None and RUN_VARIABLE in env:
            fresh = Path(env[RUN_VARIABLE])
        done = ended(lambda: Runner.start(command, env, n), fresh)
        return Ranks(
            tuple(one.returncode for one in done),
            "".join(one.stdout for one in done),
            "".join(one.stderr for one in done),
        )

    @staticmethod
    def launch(
        *commands: Sequence[str],
        fresh: Path | None = None,
        cwd: Path | None = None,
        timeout_s: float = TIMEOUT_S,
        **env: str,
    ) -> list[Done]:
        """Run *commands*, which start the ranks themselves, all at once to their end.

        Args:
            commands: e.g. ``foretrace record`` with torchrun; ``{port}`` in them is a free one.
            fresh: as for `ended`.
            cwd: where they run.
            timeout_s: as for `ended`.
            env: what is added to the environment.
        """
        world = {**Runner.env(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env}

        def start() -> list[Process]:
            port = free_port()
            return [
                started([word.replace("{port}", port) for word in words], world, cwd) for words in commands
            ]

        return ended(start, fresh, timeout_s)

    @staticmethod
    def env(path: Path | None = None) -> dict[str, str]:
        """Return an environment in which this checkout is importable, and which records into *path*."""
        base = {**os.environ, "PYTHONPATH": str(ROOT)}
        return base if path is None else environment(path, path.name, base)


def started(command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> Process:
    """Start *command*; what it says is kept."""
    return subprocess.Popen(
        command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def free_port() -> str:
    """Return a port of this machine that nobody uses, or did not a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
