"""A training that is killed: what it had written can be read, and starts where it started."""

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from traces.errors import RunError
from traces.store import open_run


def test_sigkill_leaves_a_readable_prefix(tmp_path: Path, config: Path, ranks: Any) -> None:
    command = [sys.executable, str(ranks.root / "examples" / "train_ddp.py"), "--config", str(config)]
    path = tmp_path / "run"
    processes = ranks.start([*command, "--steps", "100000", "--seq-len", "16"], ranks.env(path))
    files = [path / "spans" / f"rank-0000{rank}.arrows" for rank in (0, 1)]
    try:
        until = time.monotonic() + 100
        while not all(file.exists() and file.stat().st_size > 100_000 for file in files):
            assert time.monotonic() < until, "nothing was written while the training ran"
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
    run = open_run(path)
    assert run.stored_ranks == (0, 1)
    assert not run.info.finished
    assert any("has not finished" in warning for warning in run.warnings)
    n_steps = []
    for rank in (0, 1):
        spans = run.spans([rank]).to_pylist()
        steps = [row["step"] for row in spans if row["category"] == "step"]
        assert steps == list(range(len(steps)))
        n_steps.append(len(steps))
        streams: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for row in spans:
            streams[row["stream"]].append((row["start_ns"], row["start_ns"] + row["duration_ns"]))
        assert all(a[1] <= b[0] for found in streams.values() for a, b in pairwise(sorted(found)))
    assert min(n_steps) > 3


N_KILLS = int(os.environ.get("FORETRACE_KILLS", "6"))
"""Kills at random moments; each takes about a second."""

FLUSH_S = 0.1

SLACK_S = 1.0
"""How much later than asked for a busy machine runs the thread that writes."""

FORKING = """
import os, random, signal, sys, time
import torch, torch.distributed as dist
import foretrace
from torch.distributed.fsdp import fully_shard  # imported once, before the forks

def train(path, rank):
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}.store", 2), rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(8, 8)] * 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with foretrace.record(path, flush_s=float(sys.argv[3])) as recording:
        if rank == 0:
            with open(f"{path}.epoch", "w") as file:
                file.write(str(recording.session.clock.epoch_ns))
        while True:
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()

torch.set_num_threads(1)
random.seed(0)
for number in range(int(sys.argv[2])):
    path, children = f"{sys.argv[1]}/{number}", []
    for rank in (0, 1):
        child = os.fork()
        if not child:
            train(path, rank)
        children.append(child)
    while not os.path.exists(f"{path}/spans/rank-00001.arrows"):
        time.sleep(0.01)
    time.sleep(random.uniform(0, 1))
    killed_ns = time.monotonic_ns()
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    print(number, killed_ns, flush=True)
"""


def test_whenever_it_is_killed_no_more_is_lost_than_the_last_moment(tmp_path: Path, ranks: Any) -> None:
    """The last span that can be read ended shortly before the kill; what precedes it is whole."""
    script = tmp_path / "train.py"
    script.write_text(FORKING)
    env = {**ranks.env(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path), str(N_KILLS), str(FLUSH_S)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr
    kills = [line.split() for line in result.stdout.splitlines()]
    assert len(kills) == N_KILLS
    lost_s = []
    for number, killed_ns in kills:
        try:
            run = open_run(tmp_path / number)
        except RunError:  # killed before the first batch
            continue
        for rank in run.stored_ranks:
            spans = run.spans([rank]).to_pylist()
            steps = [row["step"] for row in spans if row["category"] == "step"]
            assert steps == list(range(len(steps)))
            numbers = sorted(row["sequence"] for row in spans if row["category"] == "collective")
            assert numbers == list(range(len(numbers)))  # none is missing before the last
            ended_ns = max(row["start_ns"] + row["duration_ns"] for row in spans)
            if (epoch := tmp_path / f"{number}.epoch").exists():
                lost_s.append((int(killed_ns) - int(epoch.read_text()) - ended_ns) / 1e9)
    assert len(lost_s) > N_KILLS // 2
    assert median(lost_s) < FLUSH_S + SLACK_S
