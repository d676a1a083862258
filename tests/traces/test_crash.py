"""A process killed at any moment leaves every batch that it had appended."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foretrace.traces.store import open_run

TRIALS = 12
LAYERS = pa.array([f"layer.{i}" for i in range(50)])
"""What spans are of, in turns."""

CHILD = """
import os, random, signal, sys, time
from foretrace.traces.store import SpanWriter

def record(folder, acknowledged):
    with SpanWriter(folder, 0) as writer:
        for i in range(random.randint(1, 400)):
            n = 1 + i * 7 % 60
            first = writer.n_spans
            writer.append({
                "category": ["compute"] * n,
                "kind": ["forward"] * n,
                "name": [f"layer.{(first + k) % 50}/{i}" for k in range(n)],
                "start_ns": list(range(first, first + n)),
                "duration_ns": [1] * n,
            })
            os.write(acknowledged, b"%d\\n" % writer.n_spans)

random.seed(int(sys.argv[3]))
for trial in range(int(sys.argv[2])):
    folder = os.path.join(sys.argv[1], str(trial))
    reader, acknowledged = os.pipe()
    child = os.fork()
    if not child:
        record(folder, acknowledged)
        os._exit(0)
    os.close(acknowledged)
    if trial % 4:
        os.read(reader, 1)  # it has appended its first batch
        time.sleep(random.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
    said = b"0\\n"  # the byte above was the first digit of "1"
    while chunk := os.read(reader, 65536):
        said += chunk
    _, status = os.waitpid(child, 0)
    last = int(said.rpartition(b"\\n")[0].rpartition(b"\\n")[2] or b"0")
    print(trial, max(last, 1), os.WIFSIGNALED(status), flush=True)
"""


def test_killed_recorders_leave_what_they_had_appended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(TRIALS), "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    outcomes = [line.split() for line in done.stdout.splitlines()]
    assert len(outcomes) == TRIALS
    killed = 0
    for trial, appended, was_killed in outcomes:
        run = open_run(tmp_path / trial)
        spans = run.spans()
        assert spans.num_rows >= int(appended)
        order = np.arange(spans.num_rows)
        assert np.array_equal(spans["start_ns"].to_numpy(), order)
        layers = pc.list_element(pc.split_pattern(spans["name"].cast(pa.string()), "/"), 0)
        assert layers.combine_chunks().equals(LAYERS.take(pa.array(order % len(LAYERS))))
        killed += was_killed == "True"
    assert killed >= TRIALS // 3  # otherwise nothing was tested
