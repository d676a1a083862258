"""Which ranks and steps are recorded, and steps that the training tells."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import integers

from foretrace.tracer.errors import RecordError
from foretrace.tracer.window import Window
from foretrace.traces.reader import open_whole
from foretrace.traces.store import open_run

SCRIPT = """
import sys
import torch, torch.distributed as dist
import foretrace

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(n):
    for _ in range(n):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()

with foretrace.record(f"{sys.argv[1]}/steps", steps="2:4,6"):
    train(8)
with foretrace.record(f"{sys.argv[1]}/ranks", ranks=[1]):
    train(2)
with foretrace.record(f"{sys.argv[1]}/cycles", wait=1, warmup=1, active=1):
    train(7)
with foretrace.record(f"{sys.argv[1]}/told"):
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
        foretrace.step()
with foretrace.record(f"{sys.argv[1]}/accumulated"):
    for _ in range(3):
        train(2)  # two optimizer steps are one to whoever says so
        foretrace.step()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, ranks: Any) -> Path:
    """Every way to choose, recorded by the same two processes one after the other."""
    folder = tmp_path_factory.mktemp("windows")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    made = folder / "runs"
    result = ranks.run([sys.executable, str(script), str(made)], ranks.env(), fresh=made)
    assert result.status == (0, 0), result.errors
    assert "foretrace" not in result.errors
    return made


def steps_of(path: Path, rank: int = 1) -> dict[str, list[int]]:
    """Return the steps of the windows, and of the all-reduces, of one rank."""
    spans = sorted(open_run(path).spans([rank]).to_pylist(), key=lambda row: row["start_ns"])
    return {
        category: [row["step"] for row in spans if row["category"] == category]
        for category in ("step", "collective")
    }


def test_chosen_steps_are_recorded_and_no_others(runs: Path) -> None:
    found = steps_of(runs / "steps")
    assert found["step"] == [2, 3, 6]
    assert set(found["collective"]) == {2, 3, 6}
    reduced = [
        row["sequence"]
        for row in open_run(runs / "steps").spans([0]).to_pylist()
        if row["kind"] == "all_reduce"
    ]
    assert len(reduced) == 3
    assert max(reduced) > 3  # what is left out is counted: ranks are joined by the numbers
    assert open_run(runs / "steps").info.finished
    assert steps_of(runs / "cycles")["step"] == [2, 5]


def test_chosen_ranks_are_recorded_and_the_run_is_whole(runs: Path) -> None:
    run = open_whole(str(runs / "ranks"), partial=False)
    assert run.stored_ranks == (1,)
    assert run.info.recorded_ranks == (1,)
    assert run.info.world_size == 2
    assert run.info.finished


def test_steps_can_be_told(runs: Path) -> None:
    # Nobody knew that a step had begun when the first collective was issued.
    assert steps_of(runs / "told") == {"step": [0, 1, 2], "collective": [-1, 1, 2]}
    # Until the first call nobody knew that two optimizer steps are one.
    assert steps_of(runs / "accumulated")["step"] == [0, 1, 2, 3]
    spans = open_run(runs / "accumulated").spans([0]).to_pylist()
    optimizers = [row["step"] for row in spans if row["kind"] == "optimizer"]
    assert optimizers == [0, 1, 2, 2, 3, 3]


@pytest.mark.filterwarnings("ignore:Profiler won.t be using warmup")
@given(wait=integers(0, 3), warmup=integers(0, 3), active=integers(1, 3), repeat=integers(0, 3))
def test_cycles_are_those_of_the_profiler(wait: int, warmup: int, active: int, repeat: int) -> None:
    profiler = pytest.importorskip("torch.profiler")
    actions = profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
    recording = {profiler.ProfilerAction.RECORD, profiler.ProfilerAction.RECORD_AND_SAVE}
    window = Window.scheduled(ranks=None, wait=wait, warmup=warmup, active=active, repeat=repeat)
    chosen = [window.has_step(step) for step in range(30)]
    assert chosen == [actions(step) in recording for step in range(30)]
    for step in range(30):
        assert not (window.is_past(step) and any(chosen[step:]))


@pytest.mark.parametrize("text", ["x", "3-1", "-1", "1,,2"])
def test_ranks_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(RecordError, match=r"0,8-11|goes down"):
        Window.parsed(ranks=text)


@pytest.mark.parametrize(
    "text", ["x", "3:3", "5:1", ":x", "1:2,,", "\N{SUPERSCRIPT TWO}", "9" * 5000, "1:" + "9" * 5000]
)
def test_steps_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(RecordError, match="10:20"):
        Window.parsed(steps=text)


def test_the_verb_refuses_what_cannot_be_recorded_before_it_starts_anything(
    tmp_path: Path, ranks: Any
) -> None:
    (tmp_path / "file").write_text("")
    for flags, reason in (
        (["-o", str(tmp_path / "file" / "run")], "cannot record into"),
        (["-o", str(tmp_path / "run"), "--steps", "9:3"], "steps '9:3'"),
        (["-o", str(tmp_path / "run"), "--ranks", "a"], "ranks 'a'"),
    ):
        command = [sys.executable, "-m", "foretrace", "record", *flags, "--", "touch", str(tmp_path / "ran")]
        result = subprocess.run(command, env=ranks.env(), capture_output=True, text=True, check=False)
        assert result.returncode == 2
        assert result.stderr.count("\n") == 1
        assert reason in result.stderr
        assert not (tmp_path / "ran").exists()


def test_the_verb_records_chosen_steps(tmp_path: Path, ranks: Any, config: Path) -> None:
    path = tmp_path / "run"
    script = str(ranks.root / "examples" / "train_ddp.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script]
    command = [sys.executable, "-m", "foretrace", "record", "-o", str(path), "--steps", "1", "--ranks", "0"]
    command += ["--json", "--", *torchrun, "--config", str(config), "--steps", "4", "--seq-len", "16"]
    (result,) = ranks.launch(command, fresh=path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["recorded"]
    assert steps_of(path, 0)["step"] == [1]
    assert open_run(path).stored_ranks == (0,)
