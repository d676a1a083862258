"""Signals are the training's: each reaches it once, and what a handler raises passes through our code."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.processes import TIMEOUT_S

from foretrace.tracer.guarded import Guarded, is_interrupt
from foretrace.traces.store import open_run


class Handlers:
    """Ways to write a handler, each of which raises TimeoutError."""

    def method(self, number: int, frame: Any) -> None:
        raise TimeoutError(number)

    def __call__(self, *given: Any) -> None:
        self._deeper()

    def _deeper(self) -> None:
        raise TimeoutError

    @staticmethod
    def with_more(what: str, number: int, frame: Any, *, also: int = 0) -> None:
        raise TimeoutError(what, number, also)


HANDLERS: dict[str, Callable[..., Any]] = {
    "function": lambda number, frame: Handlers().method(number, frame),
    "any arguments": lambda *_: Handlers()._deeper(),
    "method": Handlers().method,
    "object": Handlers(),
    "partial": functools.partial(Handlers.with_more, "late", also=1),
}


@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS)
@pytest.mark.parametrize("depth", [0, 3])
def test_a_handler_s_exception_is_passed_on_and_the_hook_stays(
    handler: Callable[..., Any], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    before = signal.signal(signal.SIGUSR1, handler)
    guard = Guarded()

    def hook(left: int) -> str:
        if left:
            return hook(left - 1)
        signal.raise_signal(signal.SIGUSR1)
        return "not reached"

    try:
        with pytest.raises(TimeoutError):
            guard.guarded("modules", hook)(depth)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (guard.disabled, guard.warnings) == (set(), [])
    assert guard.guarded("modules", lambda: 5)() == 5


def test_a_fault_of_a_hook_is_none_of_the_training() -> None:
    """Nor where a function is given a number and a frame that is not its caller's."""
    guard = Guarded()

    def failing(number: int, frame: Any) -> None:
        raise TimeoutError("ours")

    guard.guarded("modules", failing)(14, sys._getframe().f_back)
    guard.guarded("meshes", lambda: failing(14, None))()
    assert guard.disabled == {"modules", "meshes"}
    assert guard.warnings[0] == "recording of modules stopped: TimeoutError: ours"
    assert not is_interrupt(TimeoutError())


ALARMED = """
import signal, sys
import torch
import foretrace

def late(number, frame):
    raise TimeoutError

signal.signal(signal.SIGUSR1, late)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
with foretrace.record(sys.argv[1]) as recording:
    session = recording.session
    as_it_is = session.called

    def interrupted(*given):
        session.called = as_it_is
        signal.raise_signal(signal.SIGUSR1)

    session.called = interrupted
    try:
        model(torch.ones(1, 2))
        for _ in range(10):
            pass
    except TimeoutError:
        print("late")
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
print(session.warnings, sorted(session.disabled - {"collectives", "meshes", "modules", "pipeline"}))
"""


def test_an_alarm_within_a_hook_reaches_the_training_and_its_steps_are_recorded(
    tmp_path: Path, ranks: Any
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", ALARMED, str(tmp_path / "run")]
    (done,) = ranks.launch(command, fresh=tmp_path)
    assert (done.returncode, done.stdout) == (0, "late\n[] []\n"), done.stderr
    rows = open_run(tmp_path / "run").spans().to_pylist()
    assert sum(row["kind"] == "forward" for row in rows) >= 3


COUNTING = """
import os, signal, sys

numbers = {signal.SIGALRM, *map(int, sys.argv[1:])}
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # realtime signals are queued: one that comes twice is seen
os.write(1, b"ready\\n")
while (number := signal.sigwait(numbers)) != signal.SIGALRM:
    os.write(1, b"%d\\n" % number)
"""

SENT = tuple(f"SIG{name}" for name in "INT TERM HUP QUIT USR1 USR2 CONT WINCH RTMIN".split())
STOPS = {"the group": os.killpg, "the recorder": os.kill}


@pytest.fixture
def counting(tmp_path: Path, ranks: Any) -> Iterator[subprocess.Popen[str]]:
    """A recorder, first of its group as a shell starts it, whose command says what signals reach it."""
    numbers = [str(int(getattr(signal, name))) for name in SENT]
    command = [sys.executable, "-m", "foretrace", "record", "-o", "run", "--", sys.executable, "-c", COUNTING]
    with subprocess.Popen(
        [*command, *numbers],
        cwd=tmp_path,
        env=ranks.env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,
    ) as process:
        # All who hold its output: the command lives on where the recorder is killed.
        timer = threading.Timer(TIMEOUT_S, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            timer.cancel()
            with suppress(ProcessLookupError):  # all of the group has ended
                os.killpg(process.pid, signal.SIGKILL)


def test_each_signal_reaches_the_command_once(counting: subprocess.Popen[str]) -> None:
    """Whether it is sent to the recorder, as a scheduler does, or to all of the group, as a terminal does."""
    assert counting.stdout is not None
    for send in STOPS.values():
        for name in SENT:
            number = int(getattr(signal, name))
            send(counting.pid, number)
            assert counting.stdout.readline() == f"{number}\n", name
        for process in (counting.pid, *children_of(counting.pid)):  # two of a kind that wait are one
            until_nothing_waits(process)
    counting.send_signal(signal.SIGTERM)  # the end of what was sent before
    assert counting.stdout.readline() == f"{signal.SIGTERM:d}\n"
    os.kill(child_of(counting.pid), signal.SIGALRM)
    assert counting.stdout.read() == ""
    assert counting.wait() == 0


def test_a_signal_that_nobody_asks_the_witness_for_swallows_no_later_one(
    counting: subprocess.Popen[str],
) -> None:
    """As where two to the group reach the recorder as one."""
    command = child_of(counting.pid)
    (witness,) = {*children_of(counting.pid)} - {command}
    os.kill(witness, signal.SIGUSR1)
    until_nothing_waits(witness)
    os.kill(counting.pid, signal.SIGUSR1)
    assert counting.stdout is not None
    assert counting.stdout.readline() == f"{signal.SIGUSR1:d}\n"
    os.kill(command, signal.SIGALRM)
    assert counting.wait() == 0


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("send", STOPS.values(), ids=STOPS)
def test_ctrl_z_stops_the_recorder_with_the_command(
    counting: subprocess.Popen[str], send: Callable[[int, int], None], *, is_first: bool
) -> None:
    """So that the shell takes the job for stopped; and goes on with it. The command may stop first."""
    command = child_of(counting.pid)
    if is_first:
        os.kill(command, signal.SIGTSTP)
        until = time.monotonic() + TIMEOUT_S
        while state_of(command) != "T" and time.monotonic() < until:
            time.sleep(0.01)
    send(counting.pid, signal.SIGTSTP)
    assert os.WIFSTOPPED(os.waitpid(counting.pid, os.WUNTRACED)[1])
    assert state_of(command) == "T"
    send(counting.pid, signal.SIGCONT)
    assert counting.stdout is not None
    assert counting.stdout.readline() == f"{signal.SIGCONT:d}\n"
    os.kill(command, signal.SIGALRM)
    assert counting.wait() == 0


def until_nothing_waits(process: int) -> None:
    """Wait until no signal is pending for *process*."""
    until = time.monotonic() + TIMEOUT_S
    status = Path(f"/proc/{process}/status")
    while "ShdPnd:\t0000000000000000" not in status.read_text() and time.monotonic() < until:
        time.sleep(0.02)


def state_of(process: int) -> str:
    """Return the state of *process*, as Linux names it: T if it is stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0]


def child_of(recorder: int) -> int:
    """Return the process of the command; the other child of a recorder is its witness, a fork of it."""
    own = Path(f"/proc/{recorder}/cmdline").read_bytes()
    (command,) = [one for one in children_of(recorder) if Path(f"/proc/{one}/cmdline").read_bytes() != own]
    return command


def children_of(process: int) -> list[int]:
    """Return the children of *process*."""
    return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]


def test_a_recorder_has_one_thread_while_its_command_runs(counting: subprocess.Popen[str]) -> None:
    """Others could be given the signals that it waits for, and die of them."""
    assert "Threads:\t1\n" in Path(f"/proc/{counting.pid}/status").read_text()
