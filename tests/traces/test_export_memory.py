"""What PyTorch's memory viewer is given holds, after every moment, what the run holds."""

import io
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.traces.hand_made import in_memory
from tests.traces.made_runs import info, some

from foretrace.traces.analysis.memory import curves
from foretrace.traces.errors import RunError
from foretrace.traces.export import export
from foretrace.traces.export.snapshot import write_snapshot
from foretrace.traces.run import Run
from foretrace.traces.timeline import MEMORY, timeline

ROWS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["weights", "activations"]), st.integers(0, 9)), min_size=1
)


def _run(rows: list[tuple[int, str, int]]) -> Run:
    columns = dict(zip(("t_ns", "category", "bytes"), map(list, zip(*rows, strict=True)), strict=True))
    table = pa.table({"rank": [0] * len(rows)} | columns).cast(MEMORY)
    return in_memory(info(), timeline(some(1)), table)


def _snapshot(run: Run) -> dict[str, Any]:
    file = io.BytesIO()
    write_snapshot(run, (0,), file)
    found: dict[str, Any] = pickle.loads(file.getvalue())
    return found


@settings(max_examples=30)
@given(ROWS)
def test_after_every_moment_each_category_holds_what_the_run_says(rows: list[tuple[int, str, int]]) -> None:
    """What is let go was held, of just that size; no two allocations share an address at any time."""
    run = _run([(t * 1000, name, size) for t, name, size in rows])
    snapshot = _snapshot(run)
    (events,) = snapshot["device_traces"]
    (curve,) = curves(run, [0])
    live: dict[int, tuple[int, str]] = {}
    at = 0
    for t_ns, held in zip(curve.t_ns.tolist(), np.array(list(curve.categories.values())).T, strict=True):
        while at < len(events) and events[at]["time_us"] * 1000 <= t_ns:
            event, of = events[at], (events[at]["size"], events[at]["frames"][0]["name"])
            if event["action"] == "alloc":
                ends = (event["addr"], event["addr"] + event["size"])
                assert all(ends[1] <= a or a + size <= ends[0] for a, (size, _) in live.items())
                live[event["addr"]] = of
            elif event["action"] == "free_completed":
                assert live.pop(event["addr"]) == of
            at += 1
        for name, size in zip(curve.categories, held.tolist(), strict=True):
            assert sum(n for n, of in live.values() if of == name) == size
    assert at == len(events)
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == curve.total_bytes[-1]


def test_where_categories_are_not_the_whole_the_total_is_shown() -> None:
    """Of a recorded GPU the allocator's reserve is no part of what is allocated."""
    (events,) = _snapshot(_run([(0, "total", 5), (0, "reserved", 8), (0, "peak", 7)]))["device_traces"]
    assert [(e["frames"][0]["name"], e["size"]) for e in events if e["action"] == "alloc"] == [("total", 5)]


def test_the_viewer_of_torch_reads_it(pipeline_run: Run, tmp_path: Any) -> None:
    """PyTorch's own reader adds up the segments, and raises where a block has no segment."""
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    file = export(pipeline_run, tmp_path / "a.pickle")
    snapshot = pickle.loads(file.read_bytes())
    assert f"segments: {len(snapshot['segments'])}" in viewer.segsum(snapshot)
    assert viewer.trace(snapshot).count("Device ") == len(pipeline_run.stored_ranks)
    assert "snapshot.pickle" in viewer.trace_plot(snapshot)


def test_a_rank_is_the_device_of_its_number() -> None:
    """Of two in four ranks, too: the viewer shows the places in the list, where it is not empty."""
    rows = {"rank": [1, 3], "t_ns": [0, 0], "category": ["weights"] * 2, "bytes": [5, 7]}
    run = in_memory(info(world_size=4), timeline(some(4)), pa.table(rows).cast(MEMORY))
    file = io.BytesIO()
    write_snapshot(run, (1, 3), file)
    snapshot = pickle.loads(file.getvalue())
    assert [sum(event["size"] for event in events) for events in snapshot["device_traces"]] == [0, 10, 0, 14]
    assert {segment["device"]: segment["total_size"] for segment in snapshot["segments"]} == {1: 5, 3: 7}


def test_a_run_without_memory_is_refused_and_nothing_written(tmp_path: Any) -> None:
    run = in_memory(info(), timeline(some(1)))
    with pytest.raises(RunError, match="no memory over time of rank 0"):
        export(run, tmp_path / "a.pickle")
    assert not list(tmp_path.iterdir())
