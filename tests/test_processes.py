"""What torch breaks by itself is started again, anew; processes that need not load torch are as others."""

import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests import processes
from tests.forked import python
from tests.processes import MOST_RUNS, TIMEOUT_S, Runner, ended, split_off, started

from foretrace.traces.store import open_run

FAILING = """
mkdir made/run || exit 99
echo >> runs
if [ $(wc -l < runs) -le {n_failures} ]; then
    echo {says} >&2
    exit 134
fi
"""
"""Fails as often as it is told to, and differently where something is left of the time before."""


@pytest.mark.parametrize(
    ("says", "n_failures", "n_runs"),
    [
        ("terminate called without an active exception", 1, 2),
        ("terminate called without an active exception", 9, MOST_RUNS),
        ("terminate called after throwing an instance of foretrace::Fault", 9, 1),
        ("AssertionError", 9, 1),
        ("terminate called without an active exception", 0, 1),
    ],
)
def test_only_what_torch_breaks_is_started_again(
    tmp_path: Path, says: str, n_failures: int, n_runs: int
) -> None:
    made = tmp_path / "made"
    made.mkdir()
    command = ["sh", "-c", FAILING.format(n_failures=n_failures, says=says)]
    (done,) = Runner.launch(command, cwd=tmp_path, fresh=made)
    assert (tmp_path / "runs").read_text().count("\n") == n_runs
    assert done.returncode == (0 if n_runs > n_failures else 134)


def test_who_waits_for_one_that_torch_broke_is_not_waited_for(tmp_path: Path) -> None:
    """It may wait as long as torch does, for half an hour."""
    script = "[ $RANK = 0 ] && echo EADDRINUSE >&2 && exit 1; echo waits; exec sleep 1000"
    done = Runner.run(["sh", "-c", script], Runner.env(), fresh=tmp_path)
    assert done.status[0] == 1
    assert done.status[1] < 0


@pytest.mark.parametrize("n_still", [1, MOST_RUNS])
def test_who_stands_still_behind_one_that_has_ended_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_still: int
) -> None:
    """As torch does now and then at the end of a training; what does so every time is said to hang."""
    monkeypatch.setattr(processes, "STANDS_STILL_S", 0.5)
    made = tmp_path / "made"
    made.mkdir()
    script = (
        f"[ $RANK = 0 ] || exit 0; mkdir made/run || exit 99; echo >> runs; [ $(wc -l < runs) -gt {n_still} ]"
    )

    def start() -> list[Any]:
        env = Runner.env()
        command = ["sh", "-c", f"cd {tmp_path}; {{ {script}; }} || exec sleep 1000"]
        return [started(command, env | {"RANK": str(rank)}) for rank in range(2)]

    if n_still == MOST_RUNS:
        with pytest.raises(TimeoutError, match="stand still"):
            ended(start, made)
    else:
        assert [one.returncode for one in ended(start, made)] == [0, 0]
    assert (tmp_path / "runs").read_text().count("\n") == min(n_still + 1, MOST_RUNS)


@pytest.mark.parametrize("start", [started, split_off])
def test_what_hangs_says_what_it_has_written(start: Any) -> None:
    pytest.importorskip("torch")
    python, env = [sys.executable, "-c"], Runner.env()
    ended(lambda: [start([*python, ""], env)], None)  # torch is loaded now, or need not be
    hangs = [*python, "import time; print('so far', flush=True); time.sleep(1000)"]
    with pytest.raises(TimeoutError, match="so far"):
        ended(lambda: [start(hangs, env)], None, timeout_s=2)


SAYS = """
import os, subprocess, sys, warnings, __main__
print(sys.argv, __name__, vars(__main__).get("__file__"), sys.path[:2], sys.warnoptions, sys.orig_argv[1:])
print(os.getcwd(), sorted(set(os.environ) - {"LC_CTYPE"}), os.environ["RANK"])
sys.stdout.flush()
subprocess.run([sys.executable, "-c", "import sys; print(sys.argv)", "in turn"], check=True)
warnings.warn("one that is ignored")
print("ends", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("what", [["./says.py"], ["-c", SAYS], ["-m", "says"], ["-P", "-m", "says"]])
def test_a_process_that_is_split_off_is_as_one_that_is_started(
    tmp_path: Path, what: list[str], code: int
) -> None:
    """And so is what it starts itself."""
    pytest.importorskip("torch")
    (tmp_path / "says.py").write_text(SAYS)
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.warnoptions.append('mine')\n")
    command = [sys.executable, "-W", "ignore", *what, str(code), "a b"]
    env = {**Runner.env(), "RANK": "7", "PYTHONPATH": str(tmp_path)}
    env["PATH"] = f"{Path(python()).parent}:{env['PATH']}"
    real, split = (
        ended(lambda start=start: [start(command, env, tmp_path)], None)[0]  # type: ignore[misc]
        for start in (started, split_off)
    )
    assert (split.returncode, split.stdout, split.stderr) == (real.returncode, real.stdout, real.stderr)
    assert real.returncode == code


WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 7), (signal.SIGINT, -2), (signal.SIGKILL, -9)])
def test_what_ends_a_process_ends_the_one_that_was_split_off_for_it(sent: int, status: int) -> None:
    pytest.importorskip("torch")
    with split_off([sys.executable, "-W", "ignore", "-c", WAITS], Runner.env()) as process:
        assert process.stdout is not None
        part = int(process.stdout.readline())
        process.send_signal(sent)
        assert process.wait() == status
    until = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{part}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(f"/proc/{part}").exists()


TRAINS = """
import torch, torch.distributed as dist
import foretrace
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    for one in model.parameters():
        dist.all_reduce(one.grad)
    foretrace.step()  # an optimizer would load torch's compiler, which takes as long as torch
dist.destroy_process_group()
"""


def test_a_recording_that_finds_torch_loaded_is_as_one_that_does_not(tmp_path: Path) -> None:
    """So recorded processes can be split off, too."""
    pytest.importorskip("torch")
    found = []
    for loads_torch in (True, False):
        path = tmp_path / f"run{loads_torch}"
        done = Runner.run([sys.executable, "-c", TRAINS], Runner.env(path), loads_torch=loads_torch)
        assert (done.status, done.errors) == ((0, 0), "")
        rows = open_run(path).spans().to_pylist()
        kept = [row for row in rows if row["category"] != "compute"]  # which is cut where time has passed
        found.append(Counter((row["rank"], row["category"], row["kind"], row["step"]) for row in kept))
    assert found[0] == found[1]
    assert found[0][0, "collective", "all_reduce", 2] == 4
