"""After a death: who failed first, after which call, and where the others waited."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from foretrace.traces.analysis.diagnosis import Diagnosis, diagnose
from foretrace.traces.errors import RunError
from foretrace.traces.store import open_run

N_KILLS = 3
"""Kills at random moments of a job whose ranks reduce all the time."""

SCRIPT = """
import os, random, signal, sys, time
import torch, torch.distributed as dist
import foretrace
from foretrace.tracer.ended import watch

def steps(rank, noted, ends):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(10**6):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        note(noted, number)

def reduces(rank, noted, ends):
    for number in range(10**6):
        if number == 20:
            ends(rank)
        time.sleep(random.uniform(0, 0.002))
        note(noted, number)
        dist.all_reduce(torch.ones(4))

def stages(rank, noted, ends):
    for number in range(10**6):
        if number == 20:
            ends(rank)
        if rank:
            note(noted, number)
            dist.recv(torch.ones(4), rank - 1)
        if rank < dist.get_world_size() - 1:
            dist.send(torch.ones(4), rank + 1)

def note(noted, number):
    os.write(noted, b"%d\\n" % number)

def exits(rank):
    if rank == 2:
        os._exit(7)

def raises(rank):
    if rank == 1:
        raise ValueError("no such file")

def all_raise(rank):
    raise ValueError("no such file")

def crashes(rank):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSEGV)

def is_killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

def stands_still(rank):
    if rank == 3:
        time.sleep(1000)

def leaves(rank):
    if rank == 0:
        raise SystemExit  # the loader of one rank has run out

def nothing(rank):
    pass

def child(path, rank, n, loop, ends):
    random.seed(rank)
    noted = os.open(f"{path}.{rank}.noted", os.O_WRONLY | os.O_CREAT)
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}.store", n), rank=rank, world_size=n)
    with foretrace.record(path, flush_s=0.2):
        loop(rank, noted, ends)

def lasts(path, n):
    files = [f"{path}.{rank}.noted" for rank in range(n)]
    return [open(file).read().splitlines() if os.path.exists(file) else [] for file in files]

def job(path, n, loop, ends, victims=(), waits_s=0.0, after=30, ends_others=True):
    children = {}
    for rank in range(n):
        if not (number := os.fork()):
            try:
                child(path, rank, n, loop, ends)
            except SystemExit:
                os._exit(0)
            except BaseException as error:
                os._exit(1)
            os._exit(0)
        children[number] = rank
    if victims:
        while min(map(len, lasts(path, n))) < after:
            time.sleep(0.01)
        time.sleep(waits_s or random.uniform(0, 0.5))
        for number, rank in children.items():
            if rank in victims:
                kill(number, signal.SIGKILL)
    while children:  # as torchrun: the first that fails ends all others
        for number in list(children):
            found, status = os.waitpid(number, os.WNOHANG)
            if found:
                del children[number]
                if status and ends_others:
                    for other in children:
                        os.kill(other, signal.SIGTERM)
        time.sleep(0.02)

base, kill = sys.argv[1], os.kill  # by which somebody else kills, unseen by the launcher
watch(f"{base}/run")
torch.set_num_threads(1)
random.seed(1)
everybody = (0, 1, 2, 3)
for number in range(int(sys.argv[2])):
    job(f"{base}/run-killed{number}", 4, reduces, nothing, (2,))
    job(f"{base}/run-ddp{number}", 4, steps, nothing, (2,))
job(f"{base}/run-whole", 4, steps, nothing, everybody)
job(f"{base}/run-exits", 4, reduces, exits)
job(f"{base}/run-raises", 4, reduces, raises)
job(f"{base}/run-all", 4, reduces, all_raise, ends_others=False)
job(f"{base}/run-crashes", 4, reduces, crashes)
job(f"{base}/run-leaves", 4, reduces, leaves)
job(f"{base}/run-stage", 3, stages, is_killed)
job(f"{base}/run-hangs", 4, reduces, stands_still, everybody, 2.5, after=20)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, ranks: Any) -> Path:
    """The folder of all jobs that have died."""
    folder = tmp_path_factory.mktemp("died")
    script = tmp_path_factory.mktemp("script") / "die.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", str(script), str(folder), str(N_KILLS)]
    (result,) = ranks.launch(command, fresh=folder, timeout_s=300)
    assert result.returncode == 0, result.stderr
    return folder


def told(base: Path, name: str) -> Diagnosis:
    """Return what is said of a job, with spans or without."""
    path = base / f"run-{name}"
    try:
        return diagnose(path, open_run(path))
    except RunError:
        return diagnose(path, None)


def noted(base: Path, name: str, rank: int) -> int:
    """Return the last number that a rank has noted, before the call of that number."""
    return int((base / f"run-{name}.{rank}.noted").read_text().splitlines()[-1])


@pytest.mark.parametrize("number", range(N_KILLS))
def test_whenever_a_rank_is_killed_it_is_named_with_its_last_call(base: Path, number: int) -> None:
    name = f"killed{number}"
    found, last = told(base, name), noted(base, name, 2)
    assert found.failed == (2,), found
    said = re.match(r"rank 2 was killed \(signal 9\) after all_reduce (\d+) of world(.*)", found.text)
    assert said is not None, found.text
    assert int(said[1]) in {last, last - 1}  # it noted the number, and may not have come to the call
    for rank in (0, 1, 3):
        evidence = next(one for one in found.ranks if one.rank == rank)
        (count,) = evidence.counts.values()
        assert count - 1 in {noted(base, name, rank), noted(base, name, rank) - 1}
    if said[2]:
        assert said[2] == f"; ranks 0-1, 3 waited in all_reduce {int(said[1]) + 1}"


@pytest.mark.parametrize("number", range(N_KILLS))
def test_a_rank_that_is_killed_within_a_step_is_named(base: Path, number: int) -> None:
    name = f"ddp{number}"
    found = told(base, name)
    assert found.failed == (2,), found
    said = re.match(r"rank 2 was killed \(signal 9\) after \w+ \d+ of \w+, step (\d+)", found.text)
    assert said is not None, found.text
    assert noted(base, name, 2) - 1 <= int(said[1]) <= noted(base, name, 2)


def test_of_a_job_that_is_killed_as_a_whole_no_rank_is_named(base: Path) -> None:
    found = told(base, "whole")
    assert found.failed == ()
    assert found.text == "ranks 0-3 were killed (signal 9) together: no rank is known to have gone first"


@pytest.mark.parametrize(
    ("name", "rank", "end"),
    [
        ("exits", 2, "exited (status 7)"),
        ("raises", 1, "ended with ValueError: no such file"),
        ("crashes", 2, "crashed (signal 11, SIGSEGV)"),
        ("leaves", 0, "had ended its recording"),
    ],
)
def test_how_the_first_has_ended_is_said(base: Path, name: str, rank: int, end: str) -> None:
    found = told(base, name)
    others = {0: "1-3", 1: "0, 2-3", 2: "0-1, 3"}[rank]
    assert (
        found.text
        == f"rank {rank} {end} after all_reduce 19 of world; ranks {others} waited in all_reduce 20"
    )
    assert found.failed == (rank,)


def test_what_all_have_raised_is_said_of_all(base: Path) -> None:
    found = told(base, "all")
    assert found.text.startswith("ranks 0-3 ended with ValueError: no such file")
    assert found.failed == ()


def test_a_stage_that_dies_holds_up_both_sides_of_the_pipeline(base: Path) -> None:
    found = told(base, "stage")
    assert found.failed == (1,)
    assert found.text.startswith("rank 1 was killed (signal 9) after send 19 of world")
    assert "rank 2 waited in recv 20" in found.text


def test_who_stood_still_before_all_were_killed_is_named_as_standing(base: Path) -> None:
    found = told(base, "hangs")
    assert found.failed == ()
    (wait,) = found.waits
    assert (wait.kind, wait.sequence, wait.waiting, wait.missing) == ("all_reduce", 20, (0, 1, 2), (3,))
    assert "stands_still" in wait.places[3]
    assert wait.age_s >= 1
    assert found.lines == [("hang", wait.text)]
