"""A block that is entered before the process joins its group, whatever the group is then made by."""

import sys
from pathlib import Path
from typing import Any

import pytest

from foretrace.tracer.record import NO_GROUP
from foretrace.traces.store import open_run

JOINED = """
import sys, time
import torch, torch.distributed as dist
from torch.distributed import init_process_group
from torch.distributed.device_mesh import init_device_mesh
import foretrace

def by_mesh():
    init_device_mesh("cpu", (2,))

def joined():
    {"mesh": by_mesh, "name": lambda: init_process_group("gloo"),
     "module": lambda: dist.init_process_group("gloo")}.get(sys.argv[2], by_mesh)()

def left():
    time.sleep(0.3 * (dist.get_rank() == 0))
    dist.destroy_process_group()

for number in range(2):
    if sys.argv[2] == "before":
        joined()
    with foretrace.record(f"{sys.argv[1]}/{number}"):
        if sys.argv[2] != "before":
            joined()
        dist.all_reduce(torch.ones(2))
        if sys.argv[2] != "before":
            left()
    if sys.argv[2] == "before":
        left()
"""


@pytest.mark.parametrize("way", ["mesh", "name", "module", "before"])
def test_a_group_begins_a_recording_whatever_it_is_made_by(tmp_path: Path, ranks: Any, way: str) -> None:
    """torch and scripts bind ``init_process_group`` by its name, before the block is entered.

    Rank 0 leaves late: without a recording the other would meet it at the store of the first group, and both
    would wait for half an hour.
    """
    done = ranks.run([sys.executable, "-W", "ignore", "-c", JOINED, str(tmp_path), way], {}, fresh=tmp_path)
    assert done.status == (0, 0), done.errors
    assert "nothing recorded" not in done.errors
    for number in "01":
        rows = open_run(tmp_path / number).spans().to_pylist()
        assert {row["rank"] for row in rows if row["kind"] == "all_reduce"} == {0, 1}


ALONE = """
import sys
import foretrace

with foretrace.record(sys.argv[1]):
    pass
"""


def test_a_block_in_which_no_group_is_made_says_so_once(tmp_path: Path, ranks: Any) -> None:
    command = [sys.executable, "-W", "ignore", "-c", ALONE, str(tmp_path / "run")]
    done = ranks.run(command, {}, fresh=tmp_path)
    assert done.status == (0, 0), done.errors
    (said,) = [line for line in done.errors.splitlines() if "recorded" in line]
    assert said == f"foretrace: nothing recorded: {NO_GROUP}"
    assert not (tmp_path / "run").exists()
