"""``rehearse --verify``: a recording and a rehearsal of one command agree, or one line says what differs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.processes import Runner
from tests.rehearsals import rehearse

from foretrace import cli
from foretrace.tracer.record import RUN_VARIABLE
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.rehearsing import Asked
from foretrace.tracer.rehearse.verify import MOST_STEPS, with_processes

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("on_cpu")

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


SPAWNS = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def main(rank, n, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(main, args=(2, sys.argv[1]), nprocs=2)
"""


REHEARSED = """
from foretrace.cli import main
from foretrace.tracer.rehearse import verify
from foretrace.traces.rehearsal import read_rehearsal
verify.rehearse = lambda asked, output, tell: read_rehearsal(output)
"""
"""Takes what this process has rehearsed, on the one that has loaded torch."""

IMPATIENT = """
verify.WAITING_S, verify.TIMES_AS_LONG = 8.0, 0.0
is_stuck = verify._Watched.is_stuck
verify._Watched.is_stuck = lambda self: self._n_written() > 0 and is_stuck(self)
"""
"""Gives up 8 s after the last that was written, once anything was: ranks may begin as late as they like."""


def verified(
    folder: Path,
    more: str = "pass",
    *flags: str,
    whole: str = "",
    how: str = REHEARSED,
    loads_torch: bool = False,
) -> Any:
    """Return how the command ended on a script with *more* in its loop, or on the *whole* of another.

    It rehearses itself if *how*, which is run before it, is empty.
    """
    script = folder / "train.py"
    script.write_text(whole or SCRIPT.format(more=more))
    command = (str(script), "{port}") if whole else ("torchrun", "--master-port", "{port}", str(script))
    if how:
        asked = Asked(
            command=command, world_size=2, ranks=(0, 1), warmup=0, steps=MOST_STEPS, local_world_size=2
        )
        rehearse(asked, folder / "run" / "rehearsed")
    words = [sys.executable, *(("-c", f"{how}main()") if how else ("-m", "foretrace"))]
    words += ["rehearse", "--verify", "2", *flags, "-o", str(folder / "run"), "--", *command]
    (done,) = Runner.launch(words, fresh=folder / "run" / "recorded", loads_torch=loads_torch)
    return done


RESUMES = """
    own = f"{__file__}.{dist.get_rank()}"
    if globals().setdefault("resumes", os.path.exists(own)):
        break
    torch.save({}, own)
"""


def test_a_rehearsal_agrees_with_a_recording_of_the_same_command(tmp_path: Path) -> None:
    """Nor does the one run resume from the checkpoints of the other: it would do other steps."""
    done = verified(tmp_path, RESUMES.strip(), "--json", how="", loads_torch=True)
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


def test_ranks_that_wait_for_each_other_are_ended_and_said(tmp_path: Path) -> None:
    """Rank 0 receives what rank 1, which is at its next gradients, never sends."""
    more = "is_real and dist.get_rank() == 0 and dist.recv(torch.ones(3), 1)"
    # Processes that torchrun has not split off itself, but another one for it, would go on.
    done = verified(tmp_path, more, how=REHEARSED + IMPATIENT, loads_torch=True)
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert "has done nothing for 8 s" in line
    assert "rank 1 waits in broadcast" in line
    assert "rank 0 waits in recv" in line
    assert not done.stdout


def test_a_script_that_starts_its_own_ranks_is_started_once(tmp_path: Path) -> None:
    """Behind torchrun each rank would start all of them, and wait for the others without an end."""
    done = verified(tmp_path, "", "--json", whole=SPAWNS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["agrees"]
    assert found["communication"]["a"]["all_reduce"] == 4
    with pytest.raises(
        RehearsalError, match=r"starts a process per rank itself.*leave the launcher out: -- a"
    ):
        with_processes(("torchrun", "a.py"), 2, starts_ranks=True)


def test_ranks_that_never_communicate_agree_in_nothing(tmp_path: Path) -> None:
    lonely = SCRIPT.replace("DistributedDataParallel(", "torch.nn.Sequential(").format(more="pass")
    done = verified(tmp_path, "", whole=lonely + "# {port}")
    assert done.returncode == 2
    assert "has nothing to compare" in done.stderr.splitlines()[-1]
    assert not done.stdout


def test_flags_that_mean_nothing_here_are_refused() -> None:
    for flags in (["--cluster", "dgx-h100"], ["--world-size", "2"], ["--steps", "3"]):
        result = CliRunner().invoke(cli.main, ["rehearse", "--verify", "2", *flags, "--", "train.py"])
        assert result.exit_code == 2
        assert f"{flags[0]}: --verify compares all ranks" in result.output


@pytest.mark.parametrize("words", [("python", "train.py"), ("torchrun", "--nproc_per_node=4", "train.py")])
def test_a_command_that_says_how_many_processes_it_has_stays_as_it_is(words: tuple[str, ...]) -> None:
    assert with_processes(words, 2) == words
