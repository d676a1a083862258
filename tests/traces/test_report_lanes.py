"""The lanes of a row cover its step exactly and agree with the analysis, whatever the timeline."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretrace.traces.analysis.activity import activity
from foretrace.traces.analysis.metrics import breakdown
from foretrace.traces.info import RunInfo
from foretrace.traces.report.cells import COMPUTE_LANE, RankStep, painted, rank_step, share_of_bins
from foretrace.traces.report.kinds import Kinds, Labels
from foretrace.traces.report.lanes import STREAM, compute_lane
from foretrace.traces.run import Run
from foretrace.traces.store import open_run, write_run
from foretrace.traces.timeline import timeline

LENGTH_NS = 60
SLOW = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)


@st.composite
def rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Spans of one rank: two streams of compute, two of communication; none overlaps on its stream."""
    found: list[dict[str, Any]] = [
        {"category": "step", "kind": "step", "stream": "step", "start_ns": 5, "duration_ns": LENGTH_NS - 10}
    ]
    kinds = st.sampled_from(["forward", "backward", "strange"])
    for stream, category in (
        ("compute", "compute"),
        ("side", "compute"),
        ("tp", "collective"),
        ("dp", "collective"),
    ):
        edges = sorted(draw(st.lists(st.integers(0, LENGTH_NS), max_size=10, unique=True)))
        for start, end in zip(edges[::2], edges[1::2], strict=False):
            kind = "all_reduce" if category == "collective" else draw(kinds)
            axis = stream if category == "collective" else ""
            found.append(
                {
                    "category": category, "kind": kind, "stream": stream, "start_ns": start,
                    "duration_ns": end - start, "axis": axis,
                    "microbatch": -1 if axis else draw(st.integers(0, 2)),
                }
            )  # fmt: skip
    return found


def opened(folder: Path, spans: list[dict[str, Any]]) -> Run:
    names = {name for span in spans for name in span}
    blank = {"axis": "", "microbatch": -1}
    columns: dict[str, object] = {n: [span.get(n, blank.get(n)) for span in spans] for n in names}
    columns["rank"] = [0] * len(spans)
    columns["step"] = [0] * len(spans)
    run = open_run(write_run(folder / "run", RunInfo(origin="recorded", world_size=1), timeline(columns)))
    run.spans()
    return run


def taken_apart(run: Run) -> tuple[RankStep, Kinds]:
    kinds = Kinds((run,))
    labels = Labels(kinds)
    return rank_step(run, 0, 0, labels, labels.of_rank(run, 0)), kinds


@SLOW
@given(rows())
def test_compute_lane_covers_the_step_and_adds_up_to_the_breakdown(
    tmp_path: Path, spans: list[dict[str, Any]]
) -> None:
    run = opened(tmp_path, spans)
    done, kinds = taken_apart(run)
    lane = done.compute
    assert lane.start_ns[0] == 5
    assert lane.end_ns[-1] == LENGTH_NS - 5
    assert (lane.start_ns[1:] == lane.end_ns[:-1]).all()
    assert (lane.end_ns > lane.start_ns).all()
    total = dict.fromkeys(breakdown(run)[0].ns, 0)
    for kind, ns in done.parts_ns():
        entry = kinds.entries[kind]
        total["compute" if entry["group"] == "compute" else entry["id"]] += ns
    assert total == breakdown(run)[0].ns


@SLOW
@given(rows())
def test_what_a_cell_says_ran_did_run(tmp_path: Path, spans: list[dict[str, Any]]) -> None:
    run = opened(tmp_path, spans)
    table = run.spans([0])
    start = table["start_ns"].to_numpy()
    end = start + table["duration_ns"].to_numpy()
    lane = compute_lane(table, activity(run, 0, 0))
    for a, b, row, state in zip(lane.start_ns, lane.end_ns, lane.row, lane.state, strict=True):
        assert (row >= 0) == (state == 0)
        if row >= 0:
            assert start[row] <= a
            assert b <= end[row]


@SLOW
@given(rows())
def test_hidden_communication_is_that_of_the_breakdown(tmp_path: Path, spans: list[dict[str, Any]]) -> None:
    run = opened(tmp_path, spans)
    done, _ = taken_apart(run)
    hidden = dict.fromkeys(breakdown(run)[0].hidden_ns, 0)
    for (axis, direction, _), cells in done.lanes.items():
        if direction == STREAM:
            assert not cells.hidden_ns.any()
            continue
        if axis:
            hidden[axis] += int(cells.hidden_ns.sum())
            assert (cells.waited_ns + cells.hidden_ns <= cells.end_ns - cells.start_ns).all()
            assert (cells.start_ns[1:] >= cells.end_ns[:-1]).all()
    assert hidden == breakdown(run)[0].hidden_ns


@SLOW
@given(rows(), st.integers(0, 30))
def test_passes_only_swallow_short_gaps_between_like_work(
    tmp_path: Path, spans: list[dict[str, Any]], longest_ns: int
) -> None:
    done, _ = taken_apart(opened(tmp_path, spans))
    kind = done.kind_of_passes(longest_ns)
    works = done.compute.row >= 0
    assert (kind[works] == done.kind[works]).all()
    for i in np.flatnonzero(kind != done.kind):
        before = np.flatnonzero(works[:i])[-1]
        after = i + np.flatnonzero(works[i:])[0]
        assert done.kind[before] == done.kind[after] == kind[i]
        assert done.microbatch[before] == done.microbatch[after]
        assert done.compute.start_ns[after] - done.compute.end_ns[before] <= longest_ns


@SLOW
@given(rows(), st.integers(1, 40))
def test_bins_hold_the_time_of_each_kind_and_are_painted_as_much(
    tmp_path: Path, spans: list[dict[str, Any]], n_bins: int
) -> None:
    done, _ = taken_apart(opened(tmp_path, spans))
    n_kinds = 1 + int(done.kind.max())
    shares = share_of_bins(done, np.linspace(0, LENGTH_NS, n_bins + 1), n_kinds)
    assert shares.sum(axis=1) == pytest.approx(np.ones(n_bins), abs=1e-5)
    time = shares.sum(axis=0) * LENGTH_NS / n_bins
    of = dict(done.parts_ns())
    assert time == pytest.approx([*(of.get(kind, 0) for kind in range(n_kinds)), 10], abs=1e-3)
    kind = painted(shares[:, np.newaxis])[0]
    assert (shares[np.arange(n_bins), kind] > 0).all()
    assert np.abs(np.bincount(kind, minlength=n_kinds + 1) - shares.sum(axis=0)).max() <= 2


def test_what_covers_a_third_of_every_bin_is_painted_in_a_third_of_them() -> None:
    shares = np.broadcast_to([2 / 3, 1 / 3], (300, 1, 2))
    for part in (shares, shares[:30], shares[:3]):
        assert (painted(part) == 1).sum() == len(part) // 3


def test_overlapping_spans_of_a_stream_get_lanes_of_their_own(tmp_path: Path) -> None:
    gather = {"category": "collective", "kind": "all_gather", "stream": "dp", "duration_ns": 20, "axis": "dp"}
    spans: list[dict[str, Any]] = [
        {"category": "step", "kind": "step", "stream": "step", "start_ns": 0, "duration_ns": 50},
        *({**gather, "start_ns": start} for start in (0, 10, 20)),
    ]
    done, _ = taken_apart(opened(tmp_path, spans))
    levels = [key for key in done.lanes if key != COMPUTE_LANE]
    assert [key[2] for key in levels] == [0, 1]
    assert [len(done.lanes[key].row) for key in levels] == [2, 1]


def test_fsdp_rows_show_gathers_and_scatters_by_layer(fsdp_run: Run) -> None:
    done, _ = taken_apart(fsdp_run)
    (lane,) = [cells for key, cells in done.lanes.items() if key[0] == "dp"]
    table = fsdp_run.spans([0])
    said = table["kind"].to_pylist()
    assert {said[row] for row in lane.row} == {"all_gather", "reduce_scatter"}
    assert {table["layer"][int(row)].as_py() for row in lane.row} == set(range(6))


@pytest.mark.parametrize("rank", [0, 4, 8, 12])
def test_pipeline_passes_are_one_cell_per_microbatch(pipeline_run: Run, rank: int) -> None:
    kinds = Kinds((pipeline_run,))
    labels = Labels(kinds)
    done = rank_step(pipeline_run, rank, 0, labels, labels.of_rank(pipeline_run, rank))
    kind = done.kind_of_passes(100_000)
    forward = kinds.compute("forward")
    starts = np.flatnonzero((kind == forward) & (np.diff(kind, prepend=-1) != 0))
    passes = {int(done.microbatch[i]) for i in np.flatnonzero(done.kind == forward)}
    assert passes == set(range(8))
    assert len(starts) <= 8
