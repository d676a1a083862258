"""A training that is killed: what it had written can be read, and starts where it started."""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.processes import TIMEOUT_S

from foretrace.tracer.pending import SLOTS
from foretrace.traces.errors import RunError
from foretrace.traces.pending import P2P, read_issued
from foretrace.traces.store import SpanWriter, open_run


def test_sigkill_leaves_a_readable_prefix(tmp_path: Path, config: Path, ranks: Any) -> None:
    command = [sys.executable, str(ranks.root / "examples" / "train_ddp.py"), "--config", str(config)]
    path = tmp_path / "run"
    processes = ranks.start([*command, "--steps", "100000", "--seq-len", "16"], ranks.env(path))
    seen = [0, 0]
    try:
        until = time.monotonic() + TIMEOUT_S
        while min(seen) <= 3:
            seen = [n_steps(path, rank) for rank in (0, 1)]
            assert time.monotonic() < until, "nothing was written while the training ran"
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=TIMEOUT_S)
    run = open_run(path)
    assert run.stored_ranks == (0, 1)
    assert not run.info.finished
    assert any("has not finished" in warning for warning in run.warnings)
    for rank in (0, 1):
        spans = run.spans([rank]).to_pylist()
        steps = [row["step"] for row in spans if row["category"] == "step"]
        assert steps == list(range(len(steps)))
        assert len(steps) >= seen[rank]
        streams: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for row in spans:
            streams[row["stream"]].append((row["start_ns"], row["start_ns"] + row["duration_ns"]))
        assert all(a[1] <= b[0] for found in streams.values() for a, b in pairwise(sorted(found)))
    (path / "spans" / "rank-00001.arrows").unlink()
    SpanWriter(path, 1).append_table(run.spans([1]))
    with pytest.raises(RunError, match=r"rank-00001\.arrows is of another run"):
        open_run(path)


def n_steps(path: Path, rank: int) -> int:
    """Return how many steps of *rank* can be read by now."""
    if not (path / "spans" / f"rank-0000{rank}.arrows").exists():
        return 0
    with suppress(RunError):  # not one batch is whole yet
        return int(open_run(path).spans([rank])["category"].to_pylist().count("step"))
    return 0


N_KILLS = int(os.environ.get("FORETRACE_KILLS", "3"))
"""Kills at random moments; each takes about a second."""

FLUSH_S = 0.1

FORKING = """
import os, random, signal, sys, time
import torch, torch.distributed as dist
import foretrace
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard  # imported once, before the forks
from foretrace.tracer import sink

write_batch = sink.Sink._flush

def noted(self, **given):
    # Write a batch, and then note which step was the last that waited for it, and when that had ended.
    steps = [one for one in list(self._records) if isinstance(one, sink.StepWindow)]
    write_batch(self, **given)
    if steps:
        os.write(noting, b"%d %d\\n" % (steps[-1].step, steps[-1].end))

def ddp(rank):
    layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8)] * 3)
    model = torch.nn.parallel.DistributedDataParallel(layers)
    return model, lambda: model(torch.ones(4, 8)).sum().backward()

def pipeline(rank):
    model = torch.nn.Linear(8, 8)
    stage = pipelining.PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    x = torch.ones(4, 8)
    return model, lambda: schedule.step(target=x) if rank else schedule.step(x)

def train(path, rank):
    global noting
    noting = os.open(f"{path}.{rank}.batches", os.O_WRONLY | os.O_CREAT)
    sink.Sink._flush = noted
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}.store", 2), rank=rank, world_size=2)
    model, work = {"ddp": ddp, "pipeline": pipeline}[sys.argv[4]](rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with foretrace.record(path, flush_s=float(sys.argv[3])) as recording:
        if rank == 0:
            with open(f"{path}.epoch", "w") as file:
                file.write(str(recording.session.clock.epoch_ns))
        while True:
            work()
            optimizer.step()
            optimizer.zero_grad()

torch.set_num_threads(1)
random.seed(0)
for number in range(int(sys.argv[2])):
    path, children = f"{sys.argv[1]}/{number}", []
    for rank in (0, 1):
        child = os.fork()
        if not child:
            train(path, rank)
        children.append(child)
    files = [f"{path}.{rank}.batches" for rank in (0, 1)]
    while not all(os.path.exists(file) and os.path.getsize(file) for file in files):
        time.sleep(0.01)
    time.sleep(random.uniform(0, 1))
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    print(number, time.monotonic_ns(), flush=True)
"""


def numbers(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the numbers of communications, ascending: of collectives, of sends and of receives."""
    found: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        found[row["kind"] if row["kind"] in P2P else "collective"].append(int(row["sequence"]))
    return {track: sorted(sequences) for track, sequences in found.items()}


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_whenever_it_is_killed_no_more_is_lost_than_since_the_last_batch(
    tmp_path: Path, ranks: Any, strategy: str
) -> None:
    """After each kill all steps that waited for the last batch can be read, and all before them is whole."""
    script, made = tmp_path / "train.py", tmp_path / "killed"
    made.mkdir()
    script.write_text(FORKING)
    command = [sys.executable, "-W", "ignore", str(script), str(made), str(N_KILLS), str(FLUSH_S), strategy]
    (result,) = ranks.launch(command, fresh=made, timeout_s=600)
    assert result.returncode == 0, result.stderr
    kills = [line.split() for line in result.stdout.splitlines()]
    assert len(kills) == N_KILLS
    tracks = {"ddp": {"collective"}, "pipeline": set(P2P)}[strategy]
    lost_s = []
    for number, killed_ns in kills:
        for rank in (0, 1):
            noted = made / f"{number}.{rank}.batches"
            batches = [tuple(map(int, line.split())) for line in noted.read_text().splitlines()]
            run = open_run(made / number)
            spans = run.spans([rank]).to_pylist()
            steps = [row["step"] for row in spans if row["category"] == "step"]
            assert steps == list(range(len(steps)))
            assert steps[-1] >= batches[-1][0]  # all that waited for the last batch
            written = numbers(row for row in spans if row["category"] in {"collective", "p2p"})
            for sequences in written.values():
                assert sequences == list(range(len(sequences)))  # none is missing before the last
            calls = read_issued(made / number)[rank]
            last = int(calls[-1]["n"])
            assert [int(row["n"]) for row in calls] == list(range(max(last - SLOTS + 1, 0), last + 1))
            issued = numbers(calls)
            assert issued.keys() >= tracks
            for track in tracks:  # what came since is known, if only by its call
                assert issued[track][-1] >= written[track][-1]
            epoch_ns = int((made / f"{number}.epoch").read_text())
            ended_ns = epoch_ns + max(row["start_ns"] + row["duration_ns"] for row in spans)
            assert batches[-1][1] <= ended_ns <= int(killed_ns)
            lost_s.append((int(killed_ns) - ended_ns) / 1e9)
    assert len(lost_s) == 2 * N_KILLS
    sys.stdout.write(
        f"lost {median(lost_s):.3f} s in the median of {len(lost_s)}, {max(lost_s):.3f} s at most\n"
    )
