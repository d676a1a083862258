"""Records as columns: what is written of them is what was noted, row by row."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.tracer.device_works import DeviceTimes
from foretrace.tracer.groups import GroupInfo
from foretrace.tracer.records import Block, Communication, Segment, StepWindow
from foretrace.tracer.sink import MIN_GLUE_NS, Sink, communication_row, segment_row, step_row, table
from foretrace.tracer.stamps import Resolver
from foretrace.traces.timeline import DEFAULTS, TIMELINE
from foretrace.traces.writer import SpanWriter

SHIFT_NS = 1_000_000_007
BLOCKS = st.sampled_from(
    [Block("layers.0", 0), Block("layers.1", 1), Block("model", is_glue=True), Block("layers.1", 7)]
)
SMALL = st.integers(-1, 3)
FOUND = st.lists(
    st.builds(
        Segment,
        st.sampled_from(["forward", "backward", "optimizer"]),
        BLOCKS,
        st.integers(0, 200_000),
        st.integers(0, 200_000),
        SMALL,
        SMALL,
        SMALL,
        SMALL,
        st.sampled_from(["compute", "compute.1"]),
    ),
    max_size=12,
)


class Kept:
    """A writer that keeps what it is given."""

    rank = 3
    n_spans = 0

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def append_table(self, made: pa.Table) -> None:
        assert made.schema.equals(TIMELINE)
        self.rows += made.to_pylist()

    def close(self) -> None:
        """Nothing is left to write."""


def _sink(kept: Kept, has_step: Any = lambda step: True) -> Sink:
    """Return what writes into *kept*, and writes by itself at its end alone."""
    moments = Resolver()
    return Sink(
        cast("Any", kept),
        SHIFT_NS,
        moments,
        DeviceTimes(moments),
        beside=lambda: None,
        failed=lambda error: pytest.fail(str(error)),
        flush_s=3600,
        has_step=has_step,
    )


def _written(*batches: list[Any], has_step: Any = lambda step: True) -> list[dict[str, Any]]:
    """Return the rows of what a recording hands over, batch by batch."""
    kept = Kept()
    sink = _sink(kept, has_step)
    sink.start()
    for batch in batches:
        for one in batch:
            sink.put(one)
        sink._flush()
    sink.close()
    return kept.rows


@given(FOUND.filter(bool))
def test_every_segment_is_a_row_that_says_the_same(found: list[Any]) -> None:
    """Without overlap among them: each begins where the ones before have ended, if they end later."""
    expected, ends_ns = [], {"compute": 0, "compute.1": 0}
    for one in found:
        start_ns = max(one.start, ends_ns[one.stream])
        ends_ns[one.stream] = max(one.end, ends_ns[one.stream])
        if one.end - start_ns >= (MIN_GLUE_NS if one.block.is_glue else 1):
            expected.append((one, start_ns))
    rows = _written(found)
    assert len(rows) == len(expected)
    for row, (one, start_ns) in zip(rows, expected, strict=True):
        assert row == {
            **DEFAULTS,
            "rank": 3,
            "stream": one.stream,
            "category": "compute",
            "kind": one.kind,
            "name": one.block.name,
            "start_ns": start_ns + SHIFT_NS,
            "duration_ns": one.end - start_ns,
            "step": one.step,
            "microbatch": one.microbatch,
            "layer": one.block.layer,
            "stage": one.stage,
            "virtual_stage": one.virtual_stage,
        }


@given(FOUND, FOUND.filter(bool))
def test_rows_never_overlap_each_other_or_the_batch_before(before: list[Any], found: list[Any]) -> None:
    rows = _written(before, found)
    for stream in ("compute", "compute.1"):
        found_ns = [(row["start_ns"], row["duration_ns"]) for row in rows if row["stream"] == stream]
        for (started_ns, took_ns), (start_ns, _) in pairwise(found_ns):
            assert started_ns + took_ns <= start_ns


@given(FOUND.filter(bool), st.sets(SMALL))
def test_steps_that_are_not_recorded_leave_no_row_and_no_room(found: list[Any], steps: set[int]) -> None:
    kept = [one for one in found if one.step in steps]
    assert _written(found, has_step=steps.__contains__) == _written(kept)


def test_what_has_not_ended_when_the_recording_does_is_counted() -> None:
    group, kept = GroupInfo(id=5, axis="dp", ranks=(0, 1)), Kept()
    sink = _sink(kept)
    sink.start()
    sink.put(Communication("send", group, 4, 1, 64, "fp32", Block("activations"), (2, 0, 0, 9), 10))
    sink.close()
    assert sink.dropped == {"communications under way when the recording ended": 1}
    assert not kept.rows


def test_rows_of_all_kinds_are_one_table() -> None:
    """Only labels that a row has are in the dictionaries."""
    group = GroupInfo(id=5, axis="dp", ranks=(0, 1))
    sent = Communication("send", group, 4, 1, 64, "fp32", Block("activations"), (2, 0, 0, 9), 10, end=20)
    piece = Segment("backward", Block("layers.3", 3), 30, 40, 2, -1, -1, -1, "compute")
    rows = [
        communication_row(sent, "dp.send", 110, 10),
        step_row(StepWindow(2, 5, 50), 105, 45),
        segment_row(piece, 130, 10),
    ]
    found = table(rows, rank=1)
    assert found.schema.equals(TIMELINE)
    assert found["name"].combine_chunks().dictionary.to_pylist() == ["activations", "step", "layers.3"]
    shown = found.select(["category", "kind", "start_ns", "duration_ns", "axis", "sequence"])
    assert [tuple(row.values()) for row in shown.to_pylist()] == [
        ("p2p", "send", 110, 10, "dp", 4),
        ("step", "step", 105, 45, "", -1),
        ("compute", "backward", 130, 10, "", -1),
    ]


def test_a_batch_late_in_a_run_takes_no_more_than_an_early_one(tmp_path: Path) -> None:
    """Labels that differ from step to step would be stored again and again: 2.7 GB after 20,000 batches."""
    sizes = []
    with SpanWriter(tmp_path, 0) as writer:
        for step in range(300):
            writer.append_table(table([step_row(StepWindow(step, step, step + 1), step, 1)], rank=0))
            sizes.append((tmp_path / "spans" / "rank-00000.arrows").stat().st_size)
    assert len({after - before for before, after in pairwise(sizes)}) == 1
