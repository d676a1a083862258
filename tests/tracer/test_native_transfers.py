"""Transfers that C++ follows: ends where nobody waits, waits that come later, what is left of hooks."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from foretrace.tracer.native import build
from foretrace.traces.store import open_run

SCRIPT = """
import datetime, inspect, json, time
import torch, torch.distributed as dist
from torch.distributed.pipelining.stage import _PipelineStageBase as Stage

METHODS = ("forward_one_chunk", "backward_one_chunk", "get_fwd_send_ops")

def seen():
    methods = [getattr(Stage, name) for name in METHODS]
    return methods, [inspect.signature(method) for method in methods], dist.Work.wait, \\
        torch.autograd._engine_run_backward

def works_on(seconds):
    # Blocks that begin, as in a training: moments at which transfers are looked at.
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        model(torch.ones(1, 2))

before = seen()
dist.init_process_group("gloo")
during = seen()
rank, peer = dist.get_rank(), 1 - dist.get_rank()
store, model, said = dist.distributed_c10d._get_default_store(), torch.nn.Linear(2, 2), {}
dist.barrier()

late = dist.isend(torch.full((3,), 1.0), 1) if rank == 0 else dist.irecv(torch.zeros(3), 0)
works_on(1.0)
said["late wait"] = late.wait(), late.is_completed()

if rank == 0:
    dropped = dist.isend(torch.full((3,), 2.0), 1)
    del dropped
    works_on(0.1)
    found = torch.zeros(3)
    never = dist.irecv(found, 1)
    works_on(0.1)
    try:
        never.wait(datetime.timedelta(seconds=0.1))
    except RuntimeError as error:
        said["timeout"] = str(error)
    store.set("send it", "")
    said["after it"] = never.wait(), found.tolist()
else:
    found = torch.zeros(3)
    dist.recv(found, 0)
    said["dropped"] = found.tolist()
    store.wait(["send it"])
    dist.send(torch.full((3,), 3.0), 0)

# Both at once, and each answered by the other.
both = [torch.full((3,), float(rank)), torch.zeros(3)]
operations = [dist.P2POp(op, tensor, peer) for op, tensor in zip((dist.isend, dist.irecv), both)]
for work in dist.batch_isend_irecv(operations):
    work.wait()
said["batch"] = both[1].tolist()
dist.barrier()
said["signatures kept"] = during[1] == before[1] and during[0] != before[0]
dist.destroy_process_group()
after = seen()
said["removed"] = after[0] == before[0] and after[2:] == before[2:]
print(json.dumps({rank: said}))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, ranks: Any, compiled: Path) -> tuple[Path, list[Any]]:
    """Where the run is, and what each rank says of itself."""
    folder = tmp_path_factory.mktemp("transfers")
    script = folder / "transfers.py"
    script.write_text(SCRIPT)
    env = {**ranks.env(folder / "run"), build.SWITCH: "1"}
    result = ranks.run([sys.executable, "-W", "ignore", str(script)], env)
    assert result.status == (0, 0), result.errors
    found: dict[str, Any] = {}
    for line in result.output.splitlines():
        found |= json.loads(line)
    return folder / "run", [found["0"], found["1"]]


def test_who_comes_late_finds_what_a_thread_of_ours_has_waited_for(said: tuple[Path, list[Any]]) -> None:
    assert [rank["late wait"] for rank in said[1]] == [[True, True]] * 2


def test_a_wait_that_times_out_may_be_tried_again(said: tuple[Path, list[Any]]) -> None:
    first, second = said[1]
    assert first["timeout"] == "timed out after 100 ms waiting for a point-to-point transfer"
    assert first["after it"] == [True, [3.0] * 3]
    assert second["dropped"] == [2.0] * 3
    assert [first["batch"], second["batch"]] == [[1.0] * 3, [0.0] * 3]


def test_each_transfer_ends_when_it_is_complete(said: tuple[Path, list[Any]]) -> None:
    """One that nobody waited for during a second of work did not take that second."""
    run = open_run(said[0])
    assert run.warnings == ()
    rows = [row for row in run.spans().to_pylist() if row["category"] == "p2p"]
    found = {(row["rank"], row["kind"], row["peer"], row["sequence"], row["size_bytes"]) for row in rows}
    sent = {(0, n) for n in range(3)} | {(1, n) for n in range(2)}
    assert found == {
        one for rank, n in sent for one in ((rank, "send", 1 - rank, n, 12), (1 - rank, "recv", rank, n, 12))
    }
    first = [
        row
        for row in rows
        if row["sequence"] == 0 and {row["rank"]: row["kind"]} in ({0: "send"}, {1: "recv"})
    ]
    assert max(row["duration_ns"] for row in first) < 900_000_000


def test_functions_of_torch_keep_their_signatures_and_come_back(said: tuple[Path, list[Any]]) -> None:
    assert all(rank["signatures kept"] and rank["removed"] for rank in said[1])
