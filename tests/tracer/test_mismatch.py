"""Ranks that do not agree: gloo aborts a rank, hangs, or goes through with wrong numbers; each is named."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.processes import TIMEOUT_S

from foretrace.traces.analysis.mismatch import mismatches
from foretrace.traces.errors import RunError
from foretrace.traces.run import Run
from foretrace.traces.store import open_run

SCRIPT = """
import sys
import torch, torch.distributed as dist

def exchange(sent, received, group):
    dist.all_to_all_single(torch.ones(sum(received)), torch.ones(sum(sent)), received, sent, group)

def main(way):
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(4))
    if way == "sizes":
        dist.all_reduce(torch.ones(1000 if rank else 2000))
    elif way == "order":
        for name in ("reduce", "gather") if rank else ("gather", "reduce"):
            if name == "reduce":
                dist.all_reduce(torch.ones(10))
            else:
                dist.all_gather_into_tensor(torch.ones(10 * n), torch.ones(10))
    else:
        dist.broadcast(torch.ones(200 if rank else 100), 0)
        exchange(*([[1, 1], [3, 1]] if rank else [[2, 3], [2, 1]]), dist.new_group())
        group = dist.new_group()
        dist.recv(torch.ones(200), 0, group) if rank else dist.send(torch.ones(100), 1, group)

dist.init_process_group("gloo")
main(sys.argv[1])
dist.destroy_process_group()
"""


def opened(path: Path) -> Run | None:
    """Return the run, None while it has no span."""
    try:
        return open_run(path)
    except RunError:
        return None


def test_what_gloo_aborts_is_named_though_the_process_is_gone(tmp_path: Path, ranks: Any) -> None:
    """The larger message aborts the rank that receives it, microseconds after it has called."""
    script, path = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "foretrace", "record", "-o", str(path), "--json", "--"]
    command += [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (result,) = ranks.launch([*command, str(script), "sizes"], fresh=path)
    said = json.loads(result.stdout)
    assert result.returncode == said["exit_status"] == 1
    (found,) = mismatches(path, opened(path))
    assert (found.axis, found.sequence, found.sender) == ("world", 1, -1)
    assert found.calls == (("all_reduce of 8 kB fp32", (0,)), ("all_reduce of 4 kB fp32", (1,)))
    assert said["failure"][0] == f"mismatch {found.text}"
    assert "the likely cause of a crash" in found.text


def test_what_goes_through_with_wrong_numbers_is_named(tmp_path: Path, ranks: Any) -> None:
    """A broadcast and a transfer of two sizes; those of an all-to-all are each rank's own affair."""
    script, path = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    result = ranks.run([sys.executable, str(script), "silent"], ranks.env(path))
    assert result.status == (0, 0), result.errors
    found = {(one.sequence, one.sender, one.receiver): one.calls for one in mismatches(path, opened(path))}
    assert found == {
        (1, -1, -1): (("broadcast of 400 B fp32", (0,)), ("broadcast of 800 B fp32", (1,))),
        (0, 0, 1): (("send of 400 B fp32", (0,)), ("recv of 800 B fp32", (1,))),
    }
    assert not list((path / "ranks").glob("*.issued.jsonl"))  # spans tell all of it


def test_another_order_is_named_while_it_hangs(tmp_path: Path, ranks: Any) -> None:
    script, path = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    processes = ranks.start([sys.executable, str(script), "order"], ranks.env(path))
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not (differing := mismatches(path, opened(path))):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=TIMEOUT_S)
    (found,) = differing
    assert found.sequence == 1
    assert {who: what.split()[0] for what, who in found.calls} == {(0,): "all_gather", (1,): "all_reduce"}
