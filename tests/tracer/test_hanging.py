"""A training that hangs: its ranks tell, while it does, what they wait for and how far each has come."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.processes import TIMEOUT_S

from foretrace.traces.store import open_run

SCRIPT = """
import sys, time
import torch, torch.distributed as dist

def missing():
    time.sleep(1000)

dist.init_process_group("gloo")
for _ in range(5):
    dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1:
    if sys.argv[1] == "mismatch":
        dist.barrier()  # where rank 0 reduces
    missing()
dist.all_reduce(torch.ones(1000))
dist.barrier()
dist.recv(torch.ones(3), 1)
"""


def told(path: Path, until: Any) -> dict[int, dict[str, Any]]:
    """Return what both ranks say when *until* is true of it."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        files = [path / "ranks" / f"rank-0000{rank}.pending.json" for rank in (0, 1)]
        found = {rank: json.loads(file.read_text()) for rank, file in enumerate(files) if file.exists()}
        if len(found) == 2 and all(map(until, found.values())):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


@pytest.mark.parametrize("way", ["late", "mismatch"])
def test_what_hangs_is_told_while_it_hangs_and_after_a_kill(tmp_path: Path, ranks: Any, way: str) -> None:
    script, path = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    processes = ranks.start([sys.executable, str(script), way], ranks.env(path))
    try:
        found = told(path, lambda one: one["collectives"] and (way == "late" or one["pending"]))
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=TIMEOUT_S)
    waiting, other = found[0]["pending"][0], found[1]
    assert waiting["start_ns"] > 0
    assert (waiting["category"], waiting["kind"], waiting["sequence"]) == ("collective", "all_reduce", 5)
    assert (waiting["name"], waiting["size_bytes"]) == ("all_reduce", 4000)
    assert any("train.py:" in frame for frame in found[0]["stack"])
    group = str(waiting["group"])
    assert found[0]["collectives"] == {group: 6}
    if way == "late":
        assert other["collectives"] == {group: 5}
        assert other["pending"] == []
        assert "missing" in other["stack"][0]
    else:
        assert other["collectives"] == {group: 6}
        assert [(one["kind"], one["sequence"]) for one in other["pending"]] == [("barrier", 5)]
    run = open_run(path)
    assert not run.info.finished
    assert sum(row["category"] == "collective" for row in run.spans([0]).to_pylist()) == 5


def test_a_recording_that_comes_to_its_end_leaves_nothing_pending(tmp_path: Path, ranks: Any) -> None:
    script, path = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT.replace("1000)", "3)").replace("dist.recv", "0 and dist.recv"))
    result = ranks.run([sys.executable, str(script), "late"], ranks.env(path))
    assert len(result.status) == 2
    assert [file.name for file in (path / "ranks").glob("*.pending.json")] == []
