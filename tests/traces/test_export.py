"""What other tools read is what was in the run: every file is parsed back, by a reader of its own."""

import csv
import gzip
import io
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.traces.exported import Perfetto, chrome, fields
from tests.traces.hand_made import in_memory

from foretrace.traces.analysis.communications import arrivals
from foretrace.traces.errors import RunError
from foretrace.traces.export import ENDINGS, FORMATS, export
from foretrace.traces.export.protobuf import number, numbers, tag, varint, width
from foretrace.traces.info import RunInfo
from foretrace.traces.layout import Layout
from foretrace.traces.run import Run
from foretrace.traces.store import open_run
from foretrace.traces.timeline import MEMORY, timeline

Row = dict[str, Any]


def opened(rows: Sequence[Row], memory: pa.Table | None = None, **values: Any) -> Run:
    given: dict[str, Any] = {"origin": "simulated", "world_size": 4, "name": "run"} | values
    text = {"axis": "", "name": "", "stream": "compute"}
    names = {name for row in rows for name in row}
    columns: dict[str, object] = {name: [row.get(name, text.get(name, -1)) for row in rows] for name in names}
    return in_memory(RunInfo(**given), timeline(columns), memory)


def compute(rank: int, start: int, duration: int, *, kind: str = "forward", **more: Any) -> Row:
    return {
        "rank": rank,
        "category": "compute",
        "kind": kind,
        "start_ns": start,
        "duration_ns": duration,
    } | more


def transfer(rank: int, kind: str, start: int, duration: int, peer: int, **more: Any) -> Row:
    return (
        compute(rank, start, duration, kind=kind)
        | {
            "category": "p2p",
            "stream": f"pp.{kind}",
            "axis": "pp",
            "group": 3,
            "sequence": 0,
            "peer": peer,
            "size_bytes": 5 << 32,
        }
        | more
    )


PIPELINE = [
    compute(0, 0, 10, name="attention", layer=7, flops=10**15, microbatch=0),
    transfer(0, "send", 10, 5, 1, name="activations"),
    transfer(1, "recv", 0, 15, 0, name="activations"),
    compute(1, 15, 10, name='odd "name" \\ µ', layer=8),
]


def written(run: Run, name: str, **how: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        data = export(run, Path(folder) / name, **how).read_bytes()
        assert [path.name for path in Path(folder).iterdir()] == [name]
    return gzip.decompress(data) if name.endswith(".gz") else data


def expected(run: Run) -> Counter[tuple[int, str, int, int]]:
    """Return rank, name, start and end of every slice: the waiting of a span is a slice of its own."""
    found: Counter[tuple[int, str, int, int]] = Counter()
    for rank in run.stored_ranks:
        for row, moving in zip(
            run.spans([rank]).to_pylist(), arrivals(run).last_ns[rank].tolist(), strict=True
        ):
            name = f"{row['kind']} {row['name']}".strip()
            end = row["start_ns"] + row["duration_ns"]
            found[rank, name, moving, end] += 1
            if moving > row["start_ns"]:
                found[rank, f"wait: {name}", row["start_ns"], moving] += 1
    return found


ROWS = st.lists(
    st.one_of(
        st.builds(
            lambda rank, start, duration, name, layer: compute(rank, start, duration, name=name, layer=layer),
            st.integers(0, 3),
            st.integers(0, 2**45),
            st.integers(0, 2**41),
            st.sampled_from(["a", "b", ""]),
            st.integers(-1, 300),
        ),
        st.builds(
            lambda rank, kind, start, duration, peer, n: transfer(
                rank, kind, start, duration, peer, sequence=n
            ),
            st.integers(0, 3),
            st.sampled_from(["send", "recv"]),
            st.integers(0, 50),
            st.integers(0, 50),
            st.integers(0, 3),
            st.integers(-1, 2),
        ),
    ),
    min_size=1,
    max_size=12,
)


@given(rows=ROWS)
@settings(max_examples=30, deadline=None)
def test_every_span_is_in_the_file(rows: list[Row]) -> None:
    run = opened(rows)
    for slices in (Perfetto(written(run, "t.pftrace")).all(), chrome(written(run, "t.json"))):
        found: Counter[tuple[int, str, int, int]] = Counter()
        for (rank, _, name, start, end), count in slices.items():
            found[rank, name, start, end] += count
        assert found == expected(run)
        by_track: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
        for rank, track, _, start, end in slices.elements():
            by_track[rank, track].append((start, end))
        for bounds in by_track.values():
            ordered = sorted(bounds)
            assert all(a[1] <= b[0] for a, b in pairwise(ordered))


def test_a_pipeline_in_perfetto() -> None:
    layout = Layout(pp=2, tp=2)
    memory = pa.table({"rank": [0, 0], "t_ns": [0, 9], "category": ["total", "total"], "bytes": [1, 1 << 40]})
    trace = Perfetto(written(opened(PIPELINE, memory, layout=layout), "t.pftrace.gz"))
    named = {track[2][0].decode() for track in trace.tracks.values() if track[2]}
    assert named >= {"rank 0 (pp 0, tp 0)", "rank 1 (pp 0, tp 1)", "pp.send", "pp.recv"}
    assert trace.arrows == [("send activations", "recv activations")]
    assert trace.counters == {"memory total": [(0, 1), (9, 1 << 40)]}
    said = {name: arguments for _, name, _, _, arguments in trace.slices}
    assert said["forward attention"] == {"layer": 7, "flops": 10**15, "microbatch": 0}
    assert said["send activations"] == {"peer": 1, "group": 3, "sequence": 0, "size_bytes": 5 << 32}
    assert set(said) >= {"wait: recv activations", 'forward odd "name" \\ µ'}


def test_a_pipeline_in_chrome() -> None:
    memory = pa.table({"rank": [1], "t_ns": [7], "category": ["reserved"], "bytes": [42]})
    events = json.loads(written(opened(PIPELINE, memory), "t.json.gz"))["traceEvents"]
    start, end = ([e for e in events if e["ph"] == ph] for ph in "sf")
    assert [(e["pid"], e["ts"]) for e in start + end] == [(0, 0.01), (1, 0.01)]
    assert start[0]["id"] == end[0]["id"]
    (slice_of_rank_1,) = (e for e in events if e["ph"] == "X" and "odd" in e["name"])
    assert slice_of_rank_1["name"] == 'forward odd "name" \\ µ'
    assert slice_of_rank_1["args"] == {"layer": 8, "stream": 0}
    assert slice_of_rank_1["cat"] == "kernel"
    names = {e["name"]: e for e in events if e["ph"] == "X"}
    assert names["send activations"]["cat"] == "kernel"
    assert "stream" not in names["wait: recv activations"]["args"]
    assert [(e["pid"], e["ts"], e["args"]) for e in events if e["ph"] == "C"] == [(1, 0.007, {"bytes": 42})]


def test_names_of_the_profiler_tell_its_tools_what_communicates() -> None:
    """Holistic Trace Analysis takes what matches ^nccl.*Kernel on a stream for communication."""
    step = compute(0, 0, 30) | {"category": "step", "kind": "step", "stream": "step", "step": 4}
    rows = [*PIPELINE, step]
    events = json.loads(written(opened(rows), "t.pt.trace.json"))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    nccl = {e["name"] for e in slices if re.search("^nccl.*Kernel", e["name"])}
    assert nccl == {"ncclKernel send activations", "ncclKernel recv activations"}
    plain = json.loads(written(opened(rows), "t.json"))["traceEvents"]
    assert "step 4" in {e["name"] for e in plain if e["ph"] == "X"}
    assert {e["name"] for e in slices if "stream" not in e["args"]} == {
        "ProfilerStep#4",
        "wait: recv activations",
    }


def test_the_official_parser_agrees() -> None:
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="needs perfetto")
    trace = protos.Trace.FromString(written(opened(PIPELINE), "t.pftrace"))
    begins = [p for p in trace.packet if p.track_event.type == protos.TrackEvent.TYPE_SLICE_BEGIN]
    assert len(begins) == 5
    assert {p.track_event.flow_ids[0] for p in begins if p.track_event.flow_ids} == {
        p.track_event.terminating_flow_ids[0] for p in begins if p.track_event.terminating_flow_ids
    }


@pytest.mark.parametrize("stream", ["pp.send", "pp.send.activations.next"])
def test_every_send_is_written_before_every_receive(stream: str) -> None:
    """A reader drops an arrow whose end it meets first, and both ends share their moment."""
    both = [transfer(0, "send", 10, 5, 1), transfer(1, "recv", 0, 15, 0)]
    back = [transfer(1, "send", 30, 5, 0), transfer(0, "recv", 20, 15, 1)]
    rows = [row | {"stream": stream.replace("send", str(row["kind"]))} for row in both + back]
    assert len(Perfetto(written(opened(rows), "t.pftrace")).arrows) == 2


def test_clocks_before_zero_are_moved() -> None:
    run = opened([compute(0, -5, 5), compute(0, 0, 5)])
    assert {(start, end) for *_, start, end in Perfetto(written(run, "t.pftrace")).all()} == {(0, 5), (5, 10)}
    assert {(start, end) for *_, start, end in chrome(written(run, "t.json"))} == {(0, 5), (5, 10)}


def test_folded_ranks_are_expanded_when_asked() -> None:
    layout = Layout(pp=2, dp=2)
    rows = [transfer(0, "send", 0, 5, 2), transfer(2, "recv", 0, 5, 0)]
    run = opened(rows, layout=layout, groups=tuple(layout.process_groups()), representatives=(0, 0, 2, 2))
    assert len(Perfetto(written(run, "t.pftrace")).arrows) == 1
    everyone = Perfetto(written(run, "t.pftrace", ranks=range(4)))
    assert {rank for rank, *_ in everyone.all()} == {0, 1, 2, 3}
    assert len(everyone.arrows) == 2
    assert len(Perfetto(written(run, "t.pftrace", ranks=[0])).arrows) == 0


def test_tables_come_back() -> None:
    run = opened(PIPELINE, layout=Layout(pp=2, tp=2))
    rows = list(csv.DictReader(io.StringIO(written(run, "t.csv.gz").decode())))
    as_text = {True: "true", False: "false"}
    spans = run.spans().to_pylist()
    assert [
        {k: as_text[v] if isinstance(v, bool) else str(v) for k, v in row.items()} for row in spans
    ] == rows
    with tempfile.TemporaryDirectory() as folder:
        path = export(run, Path(folder) / "t.parquet")
        again = open_run(path)
        assert again.spans().equals(run.spans())
        assert again.info == run.info


@pytest.mark.parametrize("name", ["=1+1", "+a", "-a", "@a", "a=1"])
def test_no_label_is_a_formula_to_a_spreadsheet(name: str) -> None:
    run = opened([compute(0, 0, 5, name=name)])
    (row,) = csv.DictReader(io.StringIO(written(run, "t.csv").decode()))
    assert row["name"] == (name if name[0] == "a" else f"'{name}")


@pytest.mark.parametrize("kind", FORMATS)
def test_the_ending_says_the_format(kind: str) -> None:
    held = {"rank": [0, 1], "t_ns": [0, 5], "category": ["total", "total"], "bytes": [7, 9]}
    run = opened(PIPELINE, pa.table(held).cast(MEMORY))
    for ending in ENDINGS[kind]:
        ranks = [0] if ending == ".et" else None
        by_ending = written(run, f"t{ending}", ranks=ranks)
        if not ending.endswith(".gz"):
            other = "t.zip" if ending.endswith(".zip") else "t.bin"
            assert by_ending == written(run, other, kind=kind, ranks=ranks)


@pytest.mark.parametrize(("name", "kind"), [("a.pt.trace.json", "chrome"), ("a.csv", "perfetto")])
def test_a_name_that_says_another_format_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    """Tools of the profiler would take all of a plain Chrome file for computing."""
    with pytest.raises(RunError, match=f"this {kind} file would be taken for: end it in "):
        export(opened(PIPELINE), tmp_path / name, kind)
    assert list(tmp_path.iterdir()) == []
    as_chrome = written(opened(PIPELINE), "a.json", kind="kineto")
    assert as_chrome == written(opened(PIPELINE), "a.pt.trace.json")


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    run = opened(PIPELINE)
    with pytest.raises(RunError, match="does not say its format: end it in one of"):
        export(run, tmp_path / "t.xls")
    with pytest.raises(RunError, match="unknown format 'xls': one of perfetto"):
        export(run, tmp_path / "t", "xls")
    with pytest.raises(RunError, match=r"no rank 2-3 in .*; it has ranks 0-1"):
        export(run, tmp_path / "t.csv", ranks=range(4))
    with pytest.raises(RunError, match=r"cannot write /dev/null/t.csv: Not a directory$"):
        export(run, "/dev/null/t.csv")
    assert list(tmp_path.iterdir()) == []


@given(value=st.integers(0, 2**63 - 1), extra=st.integers(0, 1))
def test_padded_numbers_read_as_the_same_number(value: int, extra: int) -> None:
    n_bytes = min(width(value) + extra, 9)
    padded = numbers(5, pa.array([value]).to_numpy(), n_bytes * extra).tobytes()
    assert len(padded) == len(tag(5, 0)) + n_bytes
    assert dict(fields(padded)) == dict(fields(number(5, value))) == {5: value}
    assert len(varint(value)) == width(value)
