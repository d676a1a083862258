"""Ways to die, with and without a recording: the same status and output, and the recording is readable.

What is recorded has loaded torch itself where its own end is what is seen; else it is split off one that has.
"""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest
from tests.forked import python
from tests.processes import TIMEOUT_S, Done, Runner

from foretrace.traces.errors import RunError
from foretrace.traces.store import open_run

RECORD = (sys.executable, "-m", "foretrace", "record", "-o", "run", "--")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

N_STEPS = 3

TRAINING = """
import ctypes, os, signal, sys, time
import torch, torch.distributed as dist
import foretrace

how, rank, world = sys.argv[1], int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
if world > 1:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
for step in range(3):
    model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(model.weight.grad)
    foretrace.step()  # an optimizer would load torch's compiler, which takes as long as torch
print(f"trained {rank}\\n", end="", flush=True)  # in one write, as ranks print at once

def wait():
    while True:
        time.sleep(0.1)

def wait_twice():
    try:
        print("waits", flush=True)
        wait()
    except KeyboardInterrupt:
        print("cleaning up", flush=True)
        wait()

def die_hard(number):
    if (path := os.environ.get("FORETRACE_RUN")) is not None:  # what is written each second is there
        while True:
            try:
                run = foretrace.open_run(path)
                if all("step" in run.spans([one])["category"].to_pylist() for one in range(world)):
                    break
            except foretrace.traces.errors.RunError:
                pass
            time.sleep(0.05)
    if number == signal.SIGSEGV:
        ctypes.string_at(0)
    os.kill(os.getpid(), number)

def end(number, frame):
    os.write(1, f"asked to end by {number}\\n".encode())  # a print may be under way
    sys.exit(7)

if how == "exits":
    sys.exit(3)
elif how == "exits at once":
    os._exit(4)
elif how == "waits twice":
    wait_twice()
elif how == "handles":
    signal.signal(signal.SIGTERM, end)
    print("handles", flush=True)
    wait()
elif how == "one rank once":
    if rank == 1 and not is_restarted:
        die_hard(signal.SIGKILL)
    if not is_restarted:
        wait()
else:
    die_hard(getattr(signal, how))
"""


class Ended(NamedTuple):
    """How a command has ended, recorded or not."""

    status: int
    output: list[str]


@pytest.fixture
def training(tmp_path: Path) -> list[str]:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TRAINING)
    return [sys.executable, "-W", "ignore", "train.py"]


def compared(folder: Path, command: Sequence[str], mark: str, *, loads_torch: bool) -> tuple[Done, Done]:
    """Return how *command* has ended unrecorded, and recorded; its processes bear the *mark*.

    Ranks that torchrun starts again find in the store that they share with it how to reach gloo in those
    before them, which are gone (torch 2.13, recorded or not): so they do not share one.
    """
    found = []
    for before in ((), RECORD):
        words = [*before, *command]
        found += Runner.launch(
            words,
            cwd=folder,
            fresh=folder / "run",
            loads_torch=loads_torch and before == RECORD,
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            MARK=mark,
        )
    alone, done = found
    return alone, done


def marked() -> dict[str, str]:
    """Return an environment by which its processes can be found."""
    return {**Runner.env(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MARK": uuid4().hex}


def nothing_is_left(env: Mapping[str, str]) -> bool:
    """Return whether no process with the mark of *env* runs, as soon as that is so."""
    mark = f"MARK={env['MARK']}".encode()

    def runs(environ: Path) -> bool:
        with suppress(OSError):  # of somebody else, or gone
            return mark in environ.read_bytes()
        return False

    until = time.monotonic() + 30
    while left := any(map(runs, Path("/proc").glob("[0-9]*/environ"))):
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return not left


def ended(done: Done) -> Ended:
    return Ended(done.returncode, sorted(done.stdout.splitlines()))


def steps(path: Path, rank: int = 0) -> int:
    """Return how many steps of *rank* can be read in *path*."""
    return [row["category"] for row in open_run(path).spans([rank]).to_pylist()].count("step")


@pytest.mark.parametrize("how", ["exits", "exits at once", "SIGKILL", "SIGSEGV"])
def test_a_process_dies_as_it_does_unrecorded(tmp_path: Path, training: Sequence[str], how: str) -> None:
    env = marked()
    alone, done = compared(tmp_path, [*training, how], env["MARK"], loads_torch=how in {"exits", "SIGSEGV"})
    assert ended(done) == ended(alone), done.stderr
    assert nothing_is_left(env)
    if how == "exits at once":  # before anything was written
        with suppress(RunError):
            open_run(tmp_path / "run")
    else:
        assert steps(tmp_path / "run") >= (N_STEPS if how == "exits" else 1)
        assert f"run: 1 rank, {len(open_run(tmp_path / 'run').spans([0]))} spans" in done.stderr


ERRORS = """
import sys, torch, torch.distributed as dist

def no(*_):
    raise RuntimeError("the gradient is not a number")

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
loss = model(torch.ones(2, 4, requires_grad=True)).sum()
loss.register_hook(no)
try:
    loss.backward()
finally:
    torch.save(no.__code__, "nowhere")
"""


def test_an_uncaught_error_shows_the_calls_that_it_shows_unrecorded(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(ERRORS)
    command = [sys.executable, "-W", "ignore", "train.py"]
    alone, done = Runner.launch(
        command, [*RECORD, *command], cwd=tmp_path, fresh=tmp_path / "run", loads_torch=True
    )
    assert "in backward" in alone.stderr
    assert "in save" in alone.stderr
    assert done.stderr.startswith(alone.stderr)
    assert done.returncode == alone.returncode == 1


def test_an_import_of_torch_that_is_interrupted_shows_no_call_of_ours(tmp_path: Path) -> None:
    folder = tmp_path / "torch" / "distributed"
    folder.mkdir(parents=True)
    for part in (tmp_path / "torch", folder):
        (part / "__init__.py").touch()
    (folder / "distributed_c10d.py").write_text("raise KeyboardInterrupt\n")
    (tmp_path / "train.py").write_text("import torch.distributed.distributed_c10d\n")
    command = [sys.executable, "train.py"]
    alone, done = Runner.launch(
        command, [*RECORD, *command], cwd=tmp_path, fresh=tmp_path / "run", loads_torch=True
    )
    assert "KeyboardInterrupt" in alone.stderr
    assert done.stderr.startswith(alone.stderr)
    assert done.returncode == alone.returncode == -signal.SIGINT


def test_an_interrupt_while_the_recorder_is_loaded_shows_no_call_of_ours(tmp_path: Path) -> None:
    """A module of the standard library that is loaded for us alone stands for the moment of Ctrl-C."""
    (tmp_path / "socket.py").write_text("raise KeyboardInterrupt\n")
    (tmp_path / "train.py").write_text("import subprocess\n")
    command = [sys.executable, "train.py"]
    recorder = (sys.executable, "-P", *RECORD[1:])  # which does not load that module itself
    recorded = [*recorder, *command]
    (done,) = Runner.launch(recorded, cwd=tmp_path, fresh=tmp_path / "run", loads_torch=True)
    assert "KeyboardInterrupt" in done.stderr
    assert "sitecustomize" not in done.stderr
    assert f"{os.sep}tracer{os.sep}" not in done.stderr
    assert done.returncode == -signal.SIGINT


@pytest.mark.usefixtures("training")
def test_one_rank_is_killed_as_by_a_lack_of_memory(tmp_path: Path) -> None:
    """And torchrun ends the other one, and starts both again."""
    command = [*TORCHRUN, "--max-restarts", "1", "train.py", "one rank once"]
    env = marked()
    alone, done = compared(tmp_path, command, env["MARK"], loads_torch=False)
    assert ended(done) == ended(alone), done.stderr
    assert done.returncode == 0
    assert nothing_is_left(env)
    for name in ("run", "run-restart1"):
        assert min(steps(tmp_path / name, rank) for rank in (0, 1)) >= 1


def on_terminal(
    command: Sequence[str], env: Mapping[str, str], cwd: Path, keys: Mapping[str, bytes]
) -> Ended:
    """Run *command* in the foreground of a terminal of its own, and press *keys*, each behind its line."""
    terminal, its_end = pty.openpty()

    def own() -> None:
        fcntl.ioctl(its_end, termios.TIOCSCTTY, 0)

    with (cwd / "said").open("w") as said:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=its_end,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
            preexec_fn=own,  # noqa: PLW1509 - threads of torch hold nothing that it needs
        )
    os.close(its_end)
    lines = []
    with process, watched(process):
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            os.write(terminal, keys.get(lines[-1], b""))
    os.close(terminal)
    return Ended(process.returncode, lines)


@contextmanager
def watched(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill *process* if it takes too long, so that whoever reads its output goes on."""
    timer = threading.Timer(TIMEOUT_S, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


CTRL_C = b"\x03"


def test_ctrl_c_reaches_the_training_once(tmp_path: Path, training: Sequence[str]) -> None:
    """It ends by that signal, and so does the recorder, once it has said what there is."""
    env, keys = marked(), {"waits": CTRL_C, "cleaning up": CTRL_C}
    command = [*training, "waits twice"]
    alone = on_terminal([python(), *command[1:]], env, tmp_path, keys)
    assert on_terminal([*RECORD, *command], env, tmp_path, keys) == alone
    assert (alone.status, alone.output) == (-signal.SIGINT, ["trained 0", *keys])
    assert nothing_is_left(env)
    assert steps(tmp_path / "run") == N_STEPS
    assert "run: 1 rank, " in (tmp_path / "said").read_text()


def kill_recorder(process: subprocess.Popen[str]) -> None:
    process.kill()


def terminate(process: subprocess.Popen[str]) -> None:
    process.terminate()


@pytest.mark.parametrize("send", [kill_recorder, terminate])
def test_what_is_sent_to_the_recorder_is_for_the_training(
    tmp_path: Path, training: Sequence[str], send: Callable[[subprocess.Popen[str]], None]
) -> None:
    """A scheduler knows the recorder only; where that is killed, the training is asked to end."""
    env = marked()
    found = []
    for command in ((python(), *training[1:]), (*RECORD, *training)):
        process = subprocess.Popen(
            [*command, "handles"],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        with process, watched(process):
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
            send(process)
            lines += process.stdout
        found.append((process.returncode, lines))
        assert nothing_is_left(env)
    if send is kill_recorder:
        assert [status for status, _ in found] == [-signal.SIGKILL] * 2
        assert found[1][1][2:] == [f"asked to end by {signal.SIGTERM:d}\n"]
    else:
        assert found[0] == found[1]
        assert found[0][0] == 7
    assert steps(tmp_path / "run") == N_STEPS
