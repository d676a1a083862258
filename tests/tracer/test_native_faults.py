"""Compiled hooks among threads, forks and faults: the training goes on, and nothing of them is left."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from foretrace.tracer.native import build
from foretrace.traces.store import open_run

Said = tuple[Path, dict[str, bool]]
"""Where the recordings are, and what came out as it should."""

SCRIPT = """
import json, os, sys, threading
import torch, torch.distributed as dist
import foretrace
from torch.distributed.pipelining.stage import _PipelineStageBase as Stage

FOLDER = sys.argv[1]
OPERATORS = ("allreduce_", "_reduce_scatter_base_", "barrier", "send")

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])

def train(model, n):
    for _ in range(n):
        loss = model(torch.ones(4, 8)).square().sum()
        loss.backward()
    return loss.item()

def in_threads():
    losses, models = [], [net() for _ in range(4)]
    def one(model):
        losses.append(train(model, 30))
    threads = [threading.Thread(target=one, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return losses

def in_forks():
    # As the workers of a data loader: they end without Python's own shutdown.
    losses, statuses = [train(net(), 3)], []
    for _ in range(3):
        child = os.fork()
        if not child:
            try:
                train(net(), 3)
            finally:
                os._exit(7)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return [*losses, train(net(), 3), statuses == [7] * 3]

def without_stage():
    class Other: ...  # that calls the method of torch
    said = []
    for _ in range(2):
        try:
            Stage.forward_one_chunk(Other(), 0, (torch.ones(1),))
        except AttributeError as error:
            said.append(str(error))
    return [said, train(net(), 3)]

def at_fault():
    summed = torch.ones(2)
    dist.all_reduce(summed)
    return [train(net(), 5), summed.tolist()]

def broken(*args):
    raise RuntimeError("a fault of ours")

def seen():
    return [torch._C._dispatch_dump(f"c10d::{name}") for name in OPERATORS], \\
        len(torch.nn.modules.module._global_forward_hooks), dist.Work.wait

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
before, found = seen(), {}
WAYS = {"threads": in_threads, "forks": in_forks, "no stage": without_stage,
        "fault": at_fault, "fault inside": at_fault}
for way, run in WAYS.items():
    plain = run()
    with foretrace.record(f"{FOLDER}/{way}") as recording:
        native = recording.session.native
        if way == "fault":
            native.met_group = broken
        elif way == "fault inside":
            native.begin = broken
        found[way] = run() == plain
found["removed"] = seen() == before
print(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def said(
    tmp_path_factory: pytest.TempPathFactory, ranks: Any, compiled: Path
) -> tuple[Path, dict[str, bool]]:
    """What one process says of itself, after all of it."""
    folder = tmp_path_factory.mktemp("faults")
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder)]
    (done,) = ranks.launch(command, fresh=folder, **{build.SWITCH: "1"})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("foretrace") == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.mark.parametrize("way", ["threads", "forks", "no stage", "fault", "fault inside"])
def test_the_training_gets_the_same_numbers(said: Said, way: str) -> None:
    assert said[1][way]


def test_nothing_is_left_when_a_recording_has_ended(said: Said) -> None:
    assert said[1]["removed"]


def test_what_threads_and_the_parent_of_forks_compute_is_recorded(
    said: Said,
) -> None:
    for way in ("threads", "forks"):
        run = open_run(said[0] / way)
        assert run.warnings == ()
        assert {row["kind"] for row in run.spans().to_pylist()} >= {"forward", "backward"}


@pytest.mark.parametrize(("way", "lost"), [("fault", "collective"), ("fault inside", "compute")])
def test_a_fault_switches_off_its_own_hooks_only(said: Said, way: str, lost: str) -> None:
    run = open_run(said[0] / way)
    (warning,) = run.warnings
    assert "a fault of ours" in warning
    kept = {row["category"] for row in run.spans().to_pylist()} & {"collective", "compute"}
    assert kept == {"collective", "compute"} - {lost}
