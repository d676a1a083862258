"""``rehearse --verify``: a recording and a rehearsal of one command agree, or one line says what differs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.processes import Runner

from foretrace import cli
from foretrace.tracer.record import RUN_VARIABLE
from foretrace.tracer.rehearse.verify import with_processes

pytest.importorskip("torch")

ROWS, STEPS = 4, 4

SCRIPT = f"""
import os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

is_real = "{RUN_VARIABLE}" in os.environ
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
data = [torch.arange(8) + i for i in range({ROWS * STEPS * 2})]
loader = DataLoader(data, batch_size={ROWS}, sampler=DistributedSampler(data))
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Embedding(99, 8), torch.nn.Linear(8, 8)).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in loader:
    loss = model(batch.cuda()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    {{more}}
dist.destroy_process_group()
"""


def verified(folder: Path, more: str = "pass", *flags: str) -> Any:
    """Return how the command ended on a script with *more* in its loop."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(more=more))
    words = [
        sys.executable,
        "-m",
        "foretrace",
        "rehearse",
        "--verify",
        "2",
        *flags,
        "-o",
        str(folder / "run"),
    ]
    torchrun = ["torchrun", "--master-port", "{port}", str(script)]
    (done,) = Runner.launch([*words, "--", *torchrun], fresh=folder / "run")
    return done


def test_a_rehearsal_agrees_with_a_recording_of_the_same_command(tmp_path: Path) -> None:
    done = verified(tmp_path, "pass", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["agrees"]
    rows = {row["what"]: row for row in found["compared"]}
    assert all(row["agrees"] for row in rows.values())
    assert rows["steps"]["recorded"] == rows["steps"]["rehearsed"] == str(STEPS)
    assert rows["parameters"]["recorded"] == f"{99 * 8 + 8 * 8 + 8}"
    assert rows["rows per rank and step"]["recorded"] == str(ROWS)
    assert found["communication"]["a"] == found["communication"]["b"]
    assert found["communication"]["a"]["all_reduce"] == 2 * (STEPS - 1)


RESUMES = """
    own = f"{__file__}.{dist.get_rank()}"
    if globals().setdefault("resumes", os.path.exists(own)):
        break
    torch.save({}, own)
"""


def test_the_one_run_does_not_resume_from_the_checkpoints_of_the_other(tmp_path: Path) -> None:
    """A script that finds checkpoints does other steps than one that begins."""
    done = verified(tmp_path, RESUMES.strip(), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["compared"][0]["recorded"] == str(STEPS)


def test_what_differs_is_said_and_is_the_exit_status(tmp_path: Path) -> None:
    """A loss that only the real run averages: its calls, and the bytes of these."""
    done = verified(tmp_path, "is_real and dist.all_reduce(loss.detach())")
    assert done.returncode == 1, done.stderr
    said = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert "DIFFERS" in said["calls"]
    assert "DIFFERS" in said["bytes"]
    assert "DIFFERS" not in said["steps"] + said["parameters"] + said["rows per rank and step"]
    assert any("all_reduce of 4 B" in line for line in said)


def test_a_command_that_fails_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = verified(tmp_path, "assert not is_real, 'nothing works'")
    assert done.returncode == 2
    assert "it fails on processors" in done.stderr.splitlines()[-1]
    assert not done.stdout


def test_flags_that_mean_nothing_here_are_refused() -> None:
    for flags in (["--cluster", "dgx-h100"], ["--world-size", "2"], ["--steps", "3"]):
        result = CliRunner().invoke(cli.main, ["rehearse", "--verify", "2", *flags, "--", "train.py"])
        assert result.exit_code == 2
        assert f"{flags[0]}: --verify compares all ranks" in result.output


@pytest.mark.parametrize("words", [("python", "train.py"), ("torchrun", "--nproc_per_node=4", "train.py")])
def test_a_command_that_says_how_many_processes_it_has_stays_as_it_is(words: tuple[str, ...]) -> None:
    assert with_processes(words, 2) == words
