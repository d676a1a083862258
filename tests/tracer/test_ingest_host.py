"""Traces of a training on processors: what a host did is compute, but for waits and steps without an end."""

import json
from pathlib import Path
from typing import Any

import pytest

from foretrace.tracer.ingest.ingest import ingest
from foretrace.tracer.kernels import N_STEPS
from foretrace.traces.run import Run
from foretrace.traces.store import open_run

Event = dict[str, Any]

EVENTS = (
    ("user_annotation", "ProfilerStep#2", 0, 1000, 1),
    ("cpu_op", "aten::mm", 0, 300, 1),
    ("cpu_op", "_c10d_functional::wait_tensor", 300, 200, 1),
    ("user_annotation", "FSDP::pre_forward (layers.1)", 500, 400, 1),
    ("cpu_op", "aten::copy_", 800, 100, 1),
    ("user_annotation", "gloo:all_reduce", 400, 300, 2),
    ("user_annotation", "ProfilerStep#3", 1000, 100, 1),
    ("cpu_op", "aten::mm", 1000, 100, 1),
)
"""Category, name, start and length in µs, and thread of what one rank did."""


def taken(folder: Path, **header: Any) -> Run:
    """Make a run of the trace of one rank of two over gloo."""
    events = [
        {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": {}}
        for cat, name, ts, dur, tid in EVENTS
    ]
    info = {"distributedInfo": {"backend": "gloo", "rank": 0, "world_size": 1}, **header}
    (folder / "trace.json").write_text(json.dumps({**info, "traceEvents": events}), encoding="utf-8")
    ingest([folder / "trace.json"], folder / "run")
    return open_run(folder / "run")


def test_waiting_is_not_compute(tmp_path: Path) -> None:
    """Neither in an operator that waits, nor in an annotation around what no operator does."""
    spans = taken(tmp_path).spans([0]).to_pylist()
    found = {(row["name"], row["category"]): row["duration_ns"] // 1000 for row in spans if row["step"] == 2}
    assert found == {
        ("step 2", "step"): 1000,
        ("aten::mm", "compute"): 300,
        ("_c10d_functional::wait_tensor", "wait"): 200,
        ("FSDP::pre_forward (layers.1)", "host"): 300,
        ("aten::copy_", "compute"): 100,
        ("all_reduce", "collective"): 300,
    }


@pytest.mark.parametrize(("header", "steps"), [({N_STEPS: 3}, [2]), ({}, [2, 3])])
def test_a_step_that_had_not_ended_has_no_window(
    tmp_path: Path, header: dict[str, Any], steps: list[int]
) -> None:
    run = taken(tmp_path, **header)
    assert sorted(row["step"] for row in run.spans([0]).to_pylist() if row["category"] == "step") == steps
