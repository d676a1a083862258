"""Writing and reading a run returns the same table."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc
from pyarrow import parquet as pq
from tests.traces.made_runs import info, some

from foretrace.traces.errors import RunError, TimelineError
from foretrace.traces.info import Clock, RunInfo
from foretrace.traces.layout import Layout
from foretrace.traces.sealed import write_file
from foretrace.traces.store import SpanWriter, open_run, write_info, write_run
from foretrace.traces.timeline import MEMORY, TIMELINE, timeline

LABELS = st.sampled_from(["", "a", "layer.1", "µ/β", "x" * 40])
ROWS = st.lists(
    st.tuples(st.integers(0, 3), LABELS, st.integers(0, 2**62), st.integers(0, 2**40), st.integers(-1, 9)),
    max_size=30,
)


def table(rows: list[tuple[int, str, int, int, int]]) -> pa.Table:
    rank, label, start, duration, step = zip(*rows, strict=True) if rows else [()] * 5
    return timeline(
        {
            "rank": pa.array(rank, pa.int32()),
            "category": ["compute"] * len(rows),
            "kind": pa.array(label, pa.string()),
            "start_ns": pa.array(start, pa.int64()),
            "duration_ns": pa.array(duration, pa.int64()),
            "step": pa.array(step, pa.int32()),
        }
    )


@given(rows=ROWS.filter(len))
@settings(max_examples=25)
def test_what_is_written_is_read(rows: list[tuple[int, str, int, int, int]]) -> None:
    spans = table(rows)
    with tempfile.TemporaryDirectory() as folder:
        run = open_run(write_run(Path(folder) / "run", info(4), spans))
        order = np.argsort(spans["rank"].to_numpy(), kind="stable")
        assert run.spans().to_pylist() == spans.take(order).to_pylist()
        assert run.spans().schema.equals(TIMELINE, check_metadata=True)


def test_files_of_the_version_before_are_read(tmp_path: Path) -> None:
    """They know of no times that are bounds: all were taken for exact."""
    path = write_run(tmp_path / "run", info(4), table([(0, "forward", 5, 7, 0)]))
    (file,) = (path / "spans").iterdir()
    with ipc.open_file(file) as reader:
        spans = reader.read_all()
    old = spans.drop_columns(["is_bound"])
    old = old.replace_schema_metadata({"foretrace.format": "1"})
    with ipc.new_file(str(file), old.schema) as writer:
        writer.write_table(old)
    assert open_run(path).spans().to_pylist() == spans.to_pylist()


@given(rows=st.lists(ROWS, min_size=1, max_size=5))
@settings(max_examples=25)
def test_a_recording_reads_the_same_before_and_after_it_is_closed(
    rows: list[list[tuple[int, str, int, int, int]]],
) -> None:
    batches = [table([(0, *row[1:]) for row in batch]) for batch in rows if batch]
    if not batches:
        return
    with tempfile.TemporaryDirectory() as folder:
        with SpanWriter(folder, 0) as writer:
            for batch in batches:
                writer.append_table(batch)
            during = open_run(folder).spans().to_pylist()
        after = open_run(folder).spans().to_pylist()
        assert sorted(path.name for path in Path(folder, "spans").iterdir()) == ["rank-00000.arrow"]
    assert during == after == pa.concat_tables(batches).to_pylist()


def test_info_and_memory_come_back(tmp_path: Path) -> None:
    layout = Layout(pp=2, tp=2)
    given = RunInfo(
        origin="simulated",
        world_size=4,
        name="small",
        layout=layout,
        model={"name": "tiny", "hidden": 64},
        groups=tuple(layout.process_groups()),
        representatives=(0, 0, 2, 2),
        clock={1: Clock(offset_ns=-5, uncertainty_ns=2, drift_ppb=1.5)},
        summary={"step_time_s": 1.5},
        warnings=("GEMM not measured",),
        dropped={"host": 3},
        versions={"foretrace": "0.1.0"},
        started="2026-01-01T00:00:00Z",
    )
    memory = pa.table({"rank": [0], "t_ns": [5], "category": ["parameters"], "bytes": [100]})
    spans = pa.concat_tables([timeline(some(2)), timeline(some(3, rank=2))])
    run = open_run(write_run(tmp_path / "run", given, spans, memory))
    assert run.info == given
    assert run.memory().schema.equals(MEMORY)
    assert run.memory().to_pylist() == memory.to_pylist()
    assert run.warnings == given.warnings
    assert (run.ranks, run.stored_ranks) == ((0, 1, 2, 3), (0, 2))


def _remember(path: Path, rank: int, sizes: list[int]) -> Path:
    """Write the memory samples of one rank as a recording process does."""
    columns = {
        "rank": [rank] * len(sizes),
        "t_ns": list(range(len(sizes))),
        "category": ["total"] * len(sizes),
        "bytes": sizes,
    }
    target = path / "ranks" / f"rank-{rank:05d}.memory.arrow"
    target.parent.mkdir(exist_ok=True)
    write_file(target, MEMORY, [pa.table(columns)])
    return target


def test_memory_that_nobody_joined_is_joined_by_the_reader(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", info(3), table([(r, "a", 0, 1, 0) for r in range(3)]))
    _remember(run, 0, [7, 8])
    cut = _remember(run, 1, [9])
    _remember(run, 2, [5])
    whole = open_run(run).memory()
    assert whole.schema.equals(MEMORY)
    assert [(row["rank"], row["bytes"]) for row in whole.to_pylist()] == [(0, 7), (0, 8), (1, 9), (2, 5)]
    contents = cut.read_bytes()
    for length in (0, 3, 100, len(contents) // 2, len(contents) - 1):
        cut.write_bytes(contents[:length])
        opened = open_run(run)
        assert opened.memory()["rank"].to_pylist() == [0, 0, 2]
        assert opened.warnings == ("memory of rank 1 is cut short or damaged: left out",)


def test_memory_of_the_run_goes_before_that_of_its_ranks(tmp_path: Path) -> None:
    empty_memory = MEMORY.empty_table()
    run = write_run(tmp_path / "run", info(), table([(0, "a", 0, 1, 0)]), empty_memory)
    _remember(run, 0, [7])
    assert open_run(run).memory().num_rows == 0


def test_cutting_a_stream_anywhere_keeps_every_complete_batch(tmp_path: Path) -> None:
    writer = SpanWriter(tmp_path, 0)
    path = tmp_path / "spans" / "rank-00000.arrows"
    ends = []
    for i in range(4):
        writer.append(some(3, first=3 * i))
        ends.append(path.stat().st_size)
    contents = path.read_bytes()
    for cut in [*range(0, len(contents), 37), *ends]:
        path.write_bytes(contents[:cut])
        complete = sum(end <= cut for end in ends)
        if not complete:
            with pytest.raises(RunError, match="holds no spans"):
                open_run(tmp_path)
            continue
        run = open_run(tmp_path)
        assert run.spans()["start_ns"].to_pylist() == list(range(3 * complete))
        said = f"rank 0: {complete} batches read, the last {cut - ends[complete - 1]} bytes"
        assert any(said in warning for warning in run.warnings) == (cut not in ends)


def test_an_unfinished_stream_of_another_rank_is_a_warning(tmp_path: Path) -> None:
    with SpanWriter(tmp_path, 1) as writer:
        writer.append(some(2, rank=1))
    (tmp_path / "spans" / "rank-00000.arrows").touch()
    write_info(tmp_path, info(4, finished=False))
    run = open_run(tmp_path)
    assert run.stored_ranks == (1,)
    assert any("no spans of rank 0, 2-3 of 4" in warning for warning in run.warnings)
    assert any("has not finished" in warning for warning in run.warnings)


def test_sidecars_become_one_description(tmp_path: Path) -> None:
    layout = Layout(dp=2)
    groups = layout.process_groups()
    for rank in range(2):
        with SpanWriter(tmp_path, rank) as writer:
            writer.append(some(2, rank=rank))
        part = info(
            2,
            layout=layout,
            groups=(groups[rank],),
            clock={rank: Clock(offset_ns=100 * rank, applied=False)},
            warnings=("no profiler", *(["slow disk"] if rank else [])),
            dropped={"host": 1 + rank},
        )
        write_info(tmp_path, part, rank)
    run = open_run(tmp_path)
    assert run.info.finished
    assert run.info.layout == layout
    assert run.info.groups == tuple(groups)
    assert run.info.warnings == ("rank 0-1: no profiler", "rank 1: slow disk")
    assert run.info.dropped == {"host": 3}
    assert run.spans()["start_ns"].to_pylist() == [0, 1, 100, 101]  # rank 1 moved on to the common clock


def test_a_drifting_clock_is_mapped(tmp_path: Path) -> None:
    columns = some(2) | {"start_ns": [10**9, 2 * 10**9], "duration_ns": [10**9, 0]}
    with SpanWriter(tmp_path, 0) as writer:
        writer.append(columns)
    clock = Clock(offset_ns=7, drift_ppb=1000.0, reference_ns=10**9, applied=False)
    write_info(tmp_path, info(clock={0: clock}))
    spans = open_run(tmp_path).spans()
    assert spans["start_ns"].to_pylist() == [10**9 + 7, 2 * 10**9 + 7 + 1000]
    assert spans["duration_ns"].to_pylist() == [10**9 + 1000, 0]


def test_one_file_a_url_and_parquet_read_alike(tmp_path: Path) -> None:
    spans = timeline(some(4))
    run_dir = write_run(tmp_path / "run", info(), spans)
    pq.write_table(spans, tmp_path / "all.parquet")
    expected = spans.to_pylist()
    for path in (run_dir, run_dir / "spans" / "rank-00000.arrow", tmp_path / "all.parquet"):
        assert open_run(path).spans().to_pylist() == expected
        assert open_run(f"file://{path}").spans().to_pylist() == expected


def test_one_file_of_several_ranks_is_split(tmp_path: Path) -> None:
    spans = timeline(some(2, rank=1)), timeline(some(2, rank=0)), timeline(some(1, rank=1, first=2))
    pq.write_table(pa.concat_tables(spans), tmp_path / "all.parquet")
    run = open_run(tmp_path / "all.parquet")
    assert run.ranks == (0, 1)
    assert run.spans([1])["start_ns"].to_pylist() == [0, 1, 2]


def test_the_readme_of_a_user_survives_writing_again(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", info(), timeline(some(1)))
    (run_dir / "notes.txt").write_text("mine")
    write_run(run_dir, info(), timeline(some(2)))
    assert (run_dir / "notes.txt").read_text() == "mine"
    assert open_run(run_dir).spans().num_rows == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_nothing_is_written_over_what_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(RunError, match="is not a run: nothing written"):
        write_run(tmp_path, info(), timeline(some(1)))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(RunError, match="is a file or a link"):
        write_run(tmp_path / "thesis.tex", info(), timeline(some(1)))


@pytest.mark.parametrize("origin", ["simulated", "ingested"])
def test_a_recording_is_replaced_by_no_other_kind_of_run(tmp_path: Path, origin: str) -> None:
    """A simulation can be had again, a training that has been recorded cannot."""
    other = replace(info(), origin=origin)
    recorded = write_run(tmp_path / "run", replace(info(), origin="recorded"), timeline(some(1)))
    before = {path: path.read_bytes() for path in recorded.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="holds a recording: nothing written"):
        write_run(recorded, other, timeline(some(2)))
    assert {path: path.read_bytes() for path in recorded.rglob("*") if path.is_file()} == before
    again = write_run(tmp_path / "again", other, timeline(some(1)))
    assert open_run(write_run(again, other, timeline(some(2)))).spans().num_rows == 2


def test_a_refused_run_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(TimelineError):
        write_run(tmp_path / "a", info(), pa.table({"x": [1]}))
    with pytest.raises(RunError, match="spans of rank 3 in a run of 1 ranks"):
        write_run(tmp_path / "b", info(), timeline(some(1, rank=3)))
    with pytest.raises(RunError, match="cannot be written as JSON"):
        write_run(tmp_path / "c", info(summary={"x": object()}), timeline(some(1)))
    with pytest.raises(TimelineError, match="not memory"):
        write_run(tmp_path / "d", info(), timeline(some(1)), pa.table({"x": [1]}))
    assert list(tmp_path.iterdir()) == []


def test_a_writer_refuses_what_would_be_lost_or_mixed(tmp_path: Path) -> None:
    writer = SpanWriter(tmp_path, 0)
    with pytest.raises(RunError, match="spans of rank 1 given to the writer of rank 0"):
        writer.append(some(1, rank=1))
    with pytest.raises(RunError, match="holds a run already"):
        SpanWriter(tmp_path, 0)
    writer.append(some(1))
    writer.close()
    writer.close()
    with pytest.raises(RunError, match="closed"):
        writer.append(some(1))
    with pytest.raises(RunError, match="holds a run already"):
        SpanWriter(tmp_path, 0)
    with pytest.raises(RunError, match="cannot record into"):
        SpanWriter(tmp_path / "spans" / "rank-00000.arrow", 0)


def test_fsync_writes_the_same(tmp_path: Path) -> None:
    with SpanWriter(tmp_path, 0, fsync=True) as writer:
        writer.append(some(2))
        writer.append({name: value for name, value in some(1, first=2).items() if name != "rank"})
    assert open_run(tmp_path).spans()["start_ns"].to_pylist() == [0, 1, 2]
