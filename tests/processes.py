"""The one door by which tests start processes that train: what gloo or torch itself breaks is started again.

What fails for another reason is not started again, and nothing is started more often than ``MOST_RUNS``.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from random import SystemRandom

from tests.forked import python

from foretrace.tracer.launch import environment
from foretrace.tracer.record import RUN_VARIABLE

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

STANDS_STILL_S = 20
"""Time after which a process counts as standing still when another one of its world has ended well; the
second time twice as long, as the machine may be busy, and so on.

Torch 2.13 may do so at the end of a training with DDP, recorded or not: the reducer is freed with Python's
lock held and waits for gloo's thread, which asks for that lock to drop a reference of its last work."""

POLL_S = 0.2
"""Time between two looks at whether others have ended, while one process is waited for."""

GRACE_S = 10
"""Time that a launcher has to end its ranks when it is asked to."""

FIRST_PORT = 10_000
"""Ports below have names, and services."""

GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Between which ports Linux chooses for who asks for any."""

FIRST_GIVEN = 32_768
"""The first of those where the system does not say."""

NEWER = (2, 8)
"""The first torch that the recorder was made for: what an older one cannot do on gloo is left out there."""

Process = subprocess.Popen[str]
Done = subprocess.CompletedProcess[str]


class StandsStillError(Exception):
    """A process goes on although another one of its world has ended well."""


def ended(
    start: Callable[[], Sequence[Process]], fresh: Path | None, timeout_s: float = TIMEOUT_S
) -> list[Done]:
    """Wait until the processes of *start* have ended; start them again where gloo or torch failed by itself.

    Args:
        start: starts them.
        fresh: the folder that they fill, which is emptied before they are started again.
        timeout_s: time that each of them has, in seconds.
    """
    for run in range(MOST_RUNS):
        processes = start()
        try:
            said = _said(processes, timeout_s, STANDS_STILL_S * (run + 1))
        except StandsStillError as error:
            if run == MOST_RUNS - 1:
                raise TimeoutError(str(error)) from error
            empty(fresh)
            continue
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


def _said(processes: Sequence[Process], timeout_s: float, still_s: float) -> list[tuple[str, str]]:
    """Return the output and the errors of each, when all have ended; what gloo broke ends the others, too.

    One that has not found a port may leave the others waiting for it, or talking to who has that port.

    Raises:
        TimeoutError: some still run after *timeout_s*; it says what was written until then.
        StandsStillError: some still run *still_s* after another one has ended well.
    """
    until, said = time.monotonic() + timeout_s, dict[int, tuple[str, str]]()
    ended_well_s: float | None = None
    while under_way := [number for number in range(len(processes)) if number not in said]:
        for number in under_way:
            with suppress(subprocess.TimeoutExpired):
                said[number] = processes[number].communicate(timeout=POLL_S)
        now = time.monotonic()
        is_late = now > until
        if ended_well_s is None and any(processes[number].returncode == 0 for number in said):
            ended_well_s = now
        if len(said) < len(processes) and ended_well_s is not None and now > ended_well_s + still_s:
            late = [number for number in range(len(processes)) if number not in said]
            words = {number: _put_down(processes[number]) for number in late}
            raise StandsStillError(f"{late} of {processes[0].args!r} stand still: {words}")
        if is_late or any(processes[n].returncode and FLAKES.search(said[n][1]) for n in said):
            late = [number for number in range(len(processes)) if number not in said]
            said |= {number: _put_down(processes[number]) for number in late}
            if is_late and late:
                raise TimeoutError(f"{late} of {processes[0].args!r} run after {timeout_s} s: {said}")
    return [said[number] for number in range(len(processes))]


def _put_down(process: Process) -> tuple[str, str]:
    """End *process*, a launcher with what it has started; return its output and its errors."""
    process.terminate()
    for _ in range(2):
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=GRACE_S)
        process.kill()
    return "", "killed, and another has its output still open"


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
        """Start *command* as *n* ranks, which are split off a process that has loaded torch."""
        return [split_off(command, one) for one in worlds(env, n)]

    @staticmethod
    def run(
        command: Sequence[str],
        env: Mapping[str, str],
        n: int = 2,
        *,
        fresh: Path | None = None,
        loads_torch: bool = False,
    ) -> Ranks:
        """Run *command* as *n* ranks to their end.

        Args:
            command: what each rank runs.
            env: its environment, from `env`.
            n: number of ranks.
            fresh: as for `ended`, by default the run directory that *env* names.
            loads_torch: they load torch and foretrace, and take them apart, as processes do, and are not
                split off one that has. One that is recorded from its start finds torch loaded otherwise.
        """
        if fresh is None and RUN_VARIABLE in env:
            fresh = Path(env[RUN_VARIABLE])
        start = started if loads_torch else split_off
        done = ended(lambda: [start(command, one) for one in worlds(env, n)], fresh)
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
        loads_torch: bool = False,
        **env: str,
    ) -> list[Done]:
        """Run *commands*, which start the ranks themselves, all at once to their end.

        Args:
            commands: e.g. ``foretrace record`` with torchrun; ``{port}`` in them is a free one.
            fresh: as for `ended`.
            cwd: where they run.
            timeout_s: as for `ended`.
            loads_torch: as for `run`.
            env: what is added to the environment.
        """
        start_one = started if loads_torch else split_off
        world = {**Runner.env(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env}

        def start() -> list[Process]:
            port = free_port()
            return [
                start_one([word.replace("{port}", port) for word in words], world, cwd) for words in commands
            ]

        return ended(start, fresh, timeout_s)

    @staticmethod
    def env(path: Path | None = None) -> dict[str, str]:
        """Return an environment in which this checkout is importable, and which records into *path*."""
        base = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        return base if path is None else environment(path, path.name, base)


def worlds(env: Mapping[str, str], n: int) -> list[dict[str, str]]:
    """Return *env* as each of *n* ranks has it."""
    world = {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(n)}
    world |= {"LOCAL_WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n)]


def split_off(command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> Process:
    """Start *command* without its loading torch, nor what it starts in turn, if that can be."""
    words = [python() if word == sys.executable else word for word in command]
    path = os.pathsep.join([str(Path(python()).parent), env.get("PATH", os.defpath)])  # where torchrun is
    return started(words, {**env, "PATH": path}, cwd)


def started(command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> Process:
    """Start *command*; what it says is kept."""
    return subprocess.Popen(
        command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def free_port() -> str:
    """Return a port of this machine that nobody uses, or did not a moment ago.

    It is none that the system gives to who asks for any, as gloo does for each of its connections.
    """
    first_given = FIRST_GIVEN
    with suppress(OSError):  # Linux says it
        first_given = int(GIVEN.read_text(encoding="utf-8").split()[0])
    last = max(first_given, 2 * FIRST_PORT)
    while True:
        port = SystemRandom().randrange(FIRST_PORT, last)  # not of a sequence that another has, too
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return str(port)
