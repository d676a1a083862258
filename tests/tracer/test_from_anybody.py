"""What NCCL does not have: receives from whichever rank sends first, and barriers that are monitored."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.processes import TIMEOUT_S

from foretrace.traces.analysis.diagnosis import diagnose
from foretrace.traces.run import Run
from foretrace.traces.store import open_run

SCRIPT = """
import sys, time
import torch, torch.distributed as dist

TAG = 99  # a monitored barrier of gloo sends messages of its own with the first tags
dist.init_process_group("gloo")
rank, pair = dist.get_rank(), dist.new_group([2, 1])
if rank:
    for i in range(rank):
        dist.send(torch.full((4,), rank * 10.0 + i), 0, tag=TAG)
else:
    found = [torch.zeros(4) for _ in range(3)]
    first = dist.recv(found[0], tag=TAG)
    later = [dist.irecv(one, tag=TAG) for one in found[1:]]
    for work in later:
        work.wait()
    said = zip([first, *(work._source_rank() for work in later)], found)
    print(sorted((source, one[0].item()) for source, one in said))
dist.monitored_barrier()
if rank == 2:
    dist.send(torch.ones(2), 1, pair, TAG)
if rank == 1:
    print(dist.recv(torch.zeros(2), group=pair, tag=TAG))
dist.monitored_barrier(wait_all_ranks=True)
if sys.argv[1:]:
    dist.recv(torch.zeros(8), tag=TAG) if rank == 0 else time.sleep(1000)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, ranks: Any) -> tuple[str, Run]:
    """What the ranks print, and the run."""
    folder = tmp_path_factory.mktemp("run")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    result = ranks.run([sys.executable, "-W", "ignore", str(script)], ranks.env(folder / "run"), 3)
    assert result.status == (0, 0, 0), result.errors
    return result.output, open_run(folder / "run")


def test_a_receive_from_anybody_has_the_sender_that_it_got(run: tuple[str, Run]) -> None:
    said, found = run
    assert "[(1, 10.0), (2, 20.0), (2, 21.0)]\n2\n" in said
    assert found.warnings == ()
    rows = [row for row in found.spans().to_pylist() if row["category"] == "p2p" and row["size_bytes"] == 16]
    assert sorted((row["rank"], row["kind"], row["peer"], row["sequence"]) for row in rows) == [
        (0, "recv", 1, 0),
        (0, "recv", 2, 0),
        (0, "recv", 2, 1),
        (1, "send", 0, 0),
        (2, "send", 0, 0),
        (2, "send", 0, 1),
    ]


def test_the_sender_is_a_global_rank_also_in_a_group_in_another_order(run: tuple[str, Run]) -> None:
    rows = [row for row in run[1].spans().to_pylist() if row["category"] == "p2p" and row["size_bytes"] == 8]
    assert {(row["rank"], row["kind"], row["peer"], row["sequence"]) for row in rows} == {
        (1, "recv", 2, 0),
        (2, "send", 1, 0),
    }


def test_a_monitored_barrier_is_a_barrier(run: tuple[str, Run]) -> None:
    rows = [row for row in run[1].spans().to_pylist() if row["kind"] == "barrier"]
    assert sorted((row["rank"], row["axis"], row["sequence"]) for row in rows) == [
        (rank, "world", number) for rank in range(3) for number in range(2)
    ]


def test_one_that_nobody_answers_is_told_while_it_hangs(tmp_path: Path, ranks: Any) -> None:
    script, path = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    processes = ranks.start([sys.executable, "-W", "ignore", str(script), "hang"], ranks.env(path), 3)
    file = path / "ranks" / "rank-00000.pending.json"
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while not (file.exists() and (told := json.loads(file.read_text()))["pending"]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=TIMEOUT_S)
    (waiting,) = told["pending"]
    assert (waiting["kind"], waiting["peer"], waiting["sequence"], waiting["size_bytes"]) == (
        "recv",
        -1,
        -1,
        32,
    )
    (wait,) = diagnose(path, open_run(path)).waits
    assert wait.text.startswith("rank 0 waits in recv of world, 32 B for ")
    assert wait.text.endswith("; no rank has sent to it")
