"""A training that is killed: what it had written can be read, and starts where it started."""

import os
import signal
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

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
