"""Transfers of gloo end when the training has waited for them: nobody else may wait in its place."""

import sys
from pathlib import Path
from typing import Any

from foretrace.traces.store import open_run

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
import foretrace
from foretrace.tracer import completion

completion.COINCIDE_NS = 100_000_000  # for a machine that holds a process up
dist.init_process_group("gloo")
rank, other = dist.get_rank(), 1 - dist.get_rank()
with foretrace.record(sys.argv[1]):
    for _ in range(3):
        dist.barrier()
        if rank == 0:
            time.sleep(0.3)
            dist.isend(torch.ones(4), other).wait()
        else:
            dist.irecv(torch.zeros(4), other).wait()  # it blocks: the end is that of the wait
    for _ in range(3):
        dist.barrier()
        work = dist.isend(torch.ones(4), other) if rank == 0 else dist.irecv(torch.zeros(4), other)
        time.sleep(0.2)
        work.wait()  # it finds it complete
    got, works = torch.zeros(200), []
    for one in range(200):  # which the sender never waits for
        if rank == 0:
            works.append(dist.isend(torch.full((1,), float(one)), other))
        else:
            dist.irecv(got[one : one + 1], other).wait()
    dist.barrier()
    del works
    print(got.sum().item())
"""


def test_a_transfer_ends_with_the_wait_and_is_a_bound_where_that_found_it_complete(
    tmp_path: Path, ranks: Any
) -> None:
    script, path = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    result = ranks.run([sys.executable, str(script), str(path)], ranks.env(), fresh=path)
    assert result.status == (0, 0), result.errors
    assert sorted(result.output.split()) == ["0.0", "19900.0"]
    run = open_run(path)
    for rank, kind in ((0, "send"), (1, "recv")):
        rows = [row for row in run.spans([rank]).to_pylist() if row["kind"] == kind]
        assert sorted(row["sequence"] for row in rows) == list(range(206)), "none is lost"
        own = {row["sequence"]: row for row in rows}
        if rank == 1:
            assert not any(own[n]["is_bound"] for n in range(3))
            assert all(own[n]["duration_ns"] > 100_000_000 for n in range(3))
        else:
            assert all(own[n]["is_bound"] for n in range(6, 206)), "nobody saw a dropped one end"
        assert all(own[n]["is_bound"] and own[n]["duration_ns"] > 190_000_000 for n in range(3, 6))
