"""Kineto files become runs: every layout reads alike, nothing overlaps, what is inferred was put in."""

import gzip
import json
import os
import zipfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.cli import main
from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.events import LONGEST_US
from foretrace.tracer.ingest.ingest import ingest
from foretrace.tracer.ingest.joining import LONGEST_NS, _first_ns
from foretrace.tracer.ingest.kernels import collective_kind, is_communication, kernel
from foretrace.tracer.ingest.recording import Rows, innermost
from foretrace.traces.analysis.communications import arrivals
from foretrace.traces.analysis.metrics import breakdown
from foretrace.traces.columns import int64, is_one_of, lanes
from foretrace.traces.info import Clock
from foretrace.traces.run import Run
from foretrace.traces.store import open_run

REAL = Path(os.environ.get("FORETRACE_REAL_TRACES", Path(__file__).parents[3] / "shared" / "real_traces"))
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason=f"no real traces at {REAL} (FORETRACE_REAL_TRACES)")
real_kineto = sorted([*REAL.glob("hta/*.gz"), *REAL.glob("tracelens/*.json.gz")]) if REAL.is_dir() else []

Event = dict[str, Any]


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}


def launched(name: str, ts: float, dur: float, stream: int, number: int, **args: Any) -> list[Event]:
    """A kernel, and the runtime call that launched it 10 µs before."""
    call = event("cuda_runtime", "cudaLaunchKernel", ts - 10, 4, args.pop("tid", 1), correlation=number)
    return [call, event("kernel", name, ts, dur, stream, device=0, stream=stream, correlation=number, **args)]


def kineto_text(events: Sequence[Event], header: dict[str, Any]) -> str:
    """Return a file in the layout that Kineto writes."""

    def one(e: Event) -> str:
        head = ", ".join(f'"{key}": {json.dumps(e[key])}' for key in ("ph", "cat", "name", "pid", "tid"))
        args = ", ".join(f'"{key}": {json.dumps(value)}' for key, value in e["args"].items())
        times = f'"ts": {json.dumps(e["ts"])}, "dur": {json.dumps(e["dur"])}'
        return f'  {{\n    {head},\n    {times},\n    "args": {{\n      {args}\n    }}\n  }}'

    start = json.dumps(header)[1:-1] + ("," if header else "")
    body = ",\n".join(one(e) for e in events)
    return f'\n{{\n  {start}\n  "traceEvents": [\n{body}\n  ],\n  "traceName": "x"\n}}\n'


def info(rank: int, world_size: int) -> dict[str, Any]:
    return {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size}}


def metadata(**more: Any) -> dict[str, Any]:
    said = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float"}
    said |= {"Group size": 2, "Process Group Name": "3", "Process Group Description": "mesh_dp"}
    return said | {"Process Group Ranks": "[0, 1]"} | more


def rank_events(arrive_us: Sequence[float], end_us: Sequence[float], shift_us: float = 0.0) -> list[Event]:
    """One all-reduce per pair of times, with all metadata on the kernel."""
    found = [event("user_annotation", "ProfilerStep#7", shift_us, 1000, 1)]
    for i, (a, b) in enumerate(zip(arrive_us, end_us, strict=True)):
        found += launched("ncclDevKernel_AllReduce(x)", a + shift_us, b - a, 20, i + 1, **metadata())
    return found


def taken(path: Path, events: Sequence[Event], header: dict[str, Any] | None = None) -> Run:
    source = path / "trace.json"
    source.write_text(kineto_text(events, header or {}), encoding="utf-8")
    ingest([source], path / "run")
    return open_run(path / "run")


def rows(run: Run, **wanted: str) -> list[dict[str, Any]]:
    return [row for row in run.spans().to_pylist() if all(row[key] == value for key, value in wanted.items())]


def test_a_kernel_with_metadata_says_kind_size_group_and_axis(tmp_path: Path) -> None:
    run = taken(tmp_path, rank_events([100], [150]), info(1, 2))
    (row,) = rows(run, category="collective")
    assert (row["rank"], row["kind"], row["size_bytes"], row["dtype"]) == (1, "all_reduce", 4000, "fp32")
    assert (row["axis"], row["stream"], row["step"], row["sequence"]) == ("dp", "stream 20", 7, 0)
    assert [group.ranks for group in run.info.groups if group.id == row["group"]] == [(0, 1)]


def test_metadata_of_the_call_reaches_the_kernel_that_it_launched(tmp_path: Path) -> None:
    """torch 2.3: only record_param_comms says what a collective is."""
    call = event(
        "cpu_op", "record_param_comms", 85, 12, 5, **metadata(**{"Collective name": "_allgather_base"})
    )
    other = event("cpu_op", "record_param_comms", 85, 12, 6, **metadata(**{"In msg nelems": 5}))
    run = taken(tmp_path, [other, call, *launched("ncclKernel_Generic", 100, 20, 9, 1, tid=5)], info(0, 2))
    (row,) = rows(run, category="collective")
    assert (row["kind"], row["size_bytes"], row["axis"]) == ("all_gather", 4000, "dp")


def test_an_annotation_gives_the_size_where_nothing_else_does(tmp_path: Path) -> None:
    note = event(
        "user_annotation",
        "nccl:_all_gather_base",
        85,
        12,
        5,
        **{"Input Dims": [[8, 16]], "Input type": ["c10::Half"]},
    )
    run = taken(
        tmp_path,
        [note, *launched("ncclKernel_AllGather_RING_LL_Sum_int8_t", 100, 20, 9, 1, tid=5)],
        info(0, 4),
    )
    (row,) = rows(run, category="collective")
    assert (row["kind"], row["size_bytes"], row["dtype"]) == ("all_gather", 8 * 16 * 2 * 4, "fp16")
    assert row["axis"] == "world"


def test_a_rank_that_arrives_late_lets_the_other_wait(tmp_path: Path) -> None:
    """Rank 1 arrives 40 µs late and its clock is 3 ms ahead: the wait is 40 µs, not 3 ms."""
    arrive = np.arange(5) * 300.0 + 100
    for rank, (late, shift) in enumerate([(0, 0), (40, 3000)]):
        text = kineto_text(
            rank_events((arrive + late).tolist(), (arrive + 90).tolist(), shift), info(rank, 2)
        )
        (tmp_path / f"r{rank}.json").write_text(text, encoding="utf-8")
    found = ingest([tmp_path / "r0.json", tmp_path / "r1.json"], tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert found.clock[1].offset_ns == -3_000_000
    waited = []
    for rank in (0, 1):
        spans = run.spans([rank])
        communication = is_one_of(spans, "category", ("collective",))
        waited.append((arrivals(run).last_ns[rank] - int64(spans, "start_ns"))[communication].tolist())
    assert waited == [[40_000] * 5, [0] * 5]


def test_collectives_that_do_not_fit_are_not_joined(tmp_path: Path) -> None:
    far = [10.0, 400.0, 800.0]
    (tmp_path / "r0.json").write_text(kineto_text(rank_events(far, [20, 410, 810]), info(0, 2)))
    (tmp_path / "r1.json").write_text(kineto_text(rank_events([10, 100, 200], [20, 110, 210]), info(1, 2)))
    found = ingest([tmp_path], tmp_path.parent / f"{tmp_path.name}-run")
    assert any("cannot be joined" in warning for warning in found.warnings)


times = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(0, 300), st.integers(1, 3)), min_size=1, max_size=40
)


@settings(max_examples=25, deadline=None)
@given(times=times, whole=st.booleans())
def test_every_layout_reads_alike_and_no_stream_overlaps(
    times: list[tuple[int, int, int]], whole: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("layouts")
    scale = 1 if whole else 0.37
    events = [
        e
        for i, (ts, dur, s) in enumerate(times)
        for e in launched("k", ts * scale + 50, dur * scale, s, i + 1)
    ]
    header = info(0, 1)
    text = kineto_text(events, header)
    document = json.loads(text)
    (path / "a.json").write_text(text)
    (path / "b.json").write_text(json.dumps(document))
    (path / "c.json").write_text(json.dumps({"traceEvents": document["traceEvents"], **header}, indent=1))
    (path / "d.json.gz").write_bytes(gzip.compress(text.encode()))
    with zipfile.ZipFile(path / "e.zip", "w") as archive:
        archive.writestr("inside.json", text)
    tables = []
    for name in ("a.json", "b.json", "c.json", "d.json.gz", "e.zip"):
        ingest([path / name], path / "run")
        tables.append(open_run(path / "run").spans().to_pylist())
    assert all(table == tables[0] for table in tables)
    device = [row for row in tables[0] if row["category"] == "compute"]
    assert len(device) == len(times)
    for stream in {row["stream"] for row in tables[0]}:
        own = sorted((r["start_ns"], r["duration_ns"]) for r in tables[0] if r["stream"] == stream)
        assert all(a + d <= b for (a, d), (b, _) in pairwise(own))


def test_rounding_of_one_microsecond_makes_no_second_stream() -> None:
    lane, start = lanes(np.array([0, 9_500, 20_000]), np.array([10_000, 12_000, 21_000]), 1_000, 4)
    assert (lane.tolist(), start.tolist()) == ([0, 0, 0], [0, 10_000, 20_000])
    assert lanes(np.array([0, 5_000]), np.array([10_000, 12_000]), 1_000, 4)[0].tolist() == [0, 1]


@given(spans=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=20))
def test_the_innermost_owns_every_moment_once(spans: list[tuple[int, int]]) -> None:
    """One that outlasts the span it began in is cut to it."""
    ordered = sorted(((a, a + d) for a, d in spans), key=lambda s: (s[0], -s[1]))
    pieces = innermost(np.array([a for a, _ in ordered]), np.array([b for _, b in ordered]))
    cut: list[tuple[int, int]] = []
    for start, end in ordered:
        cut.append((start, min([end, *(b for a, b in cut if a <= start < b)])))
    owners = {moment: number for number, (a, b) in enumerate(cut) for moment in range(a, b)}
    assert [(moment, i) for i, a, b in pieces for moment in range(a, b)] == sorted(owners.items())


@pytest.mark.parametrize(("end_ns", "streams"), [(10, ["it", "it"]), (11, ["it", "it 2"])])
def test_what_overlaps_by_a_nanosecond_is_beside(end_ns: int, streams: list[str]) -> None:
    found = Rows()
    for start, end in ((10, 20), (0, end_ns)):
        found.add({"category": "host", "kind": "x", "start_ns": start, "duration_ns": end - start})
    assert found.beside("it")["stream"].to_pylist() == streams


@pytest.mark.parametrize("late_ns", [LONGEST_NS, LONGEST_NS + 1])
def test_clocks_that_lie_further_apart_than_can_be_told_are_refused(late_ns: int) -> None:
    tables = dict.fromkeys((0, 1), pa.table({"start_ns": np.zeros(1, np.int64)}))
    clock = {0: Clock(), 1: Clock(offset_ns=late_ns)}
    if late_ns > LONGEST_NS:
        with pytest.raises(IngestError, match="years apart"):
            _first_ns(tables, clock)
    else:
        assert _first_ns(tables, clock) == 0


def test_a_pause_is_told_apart_by_who_was_late(tmp_path: Path) -> None:
    """The second launch comes 50 µs after the device is idle; the third came while it was still busy."""
    first = launched("a", 100, 10, 7, 1)
    late = launched("b", 170, 10, 7, 2)
    queued = [event("cuda_runtime", "cudaLaunchKernel", 165, 2, 1, correlation=3)]
    queued += [event("kernel", "c", 200, 10, 7, device=0, stream=7, correlation=3)]
    sync = [event("cuda_runtime", "cudaStreamSynchronize", 111, 45, 1, correlation=9)]
    run = taken(tmp_path, first + late + queued + sync, info(0, 1))
    pauses = [(r["kind"], r["name"], r["duration_ns"]) for r in rows(run, stream="idle")]
    late_host = [("host", 1_000), ("blocked", 45_000), ("host", 4_000)]
    on_device = [("launch", 10_000), ("launch", 7_000), ("queued", 13_000)]
    assert [(kind, ns) for kind, _, ns in pauses] == [*late_host, *on_device]
    assert pauses[1][1] == "cudaStreamSynchronize"


def test_a_file_cut_off_says_so_and_keeps_what_was_complete(tmp_path: Path) -> None:
    text = kineto_text(rank_events([100, 200, 300], [110, 210, 310]), info(0, 2))
    (tmp_path / "a.json").write_text(text[: text.rindex("ncclDevKernel") + 5])
    found = ingest([tmp_path / "a.json"], tmp_path / "run")
    assert any("ends in the middle" in warning for warning in found.warnings)
    assert len(rows(open_run(tmp_path / "run"), category="collective")) == 2


def test_files_of_two_jobs_make_no_run(tmp_path: Path) -> None:
    for name, size in (("a", 2), ("b", 8)):
        (tmp_path / f"{name}.json").write_text(kineto_text(rank_events([100], [150]), info(1, size)))
    with pytest.raises(IngestError, match=r"a\.json is of 2 ranks, .*b\.json of 8: take them over one"):
        ingest([tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_files_of_one_rank_are_not_counted_twice(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(kineto_text(rank_events([100], [110]), info(0, 2)))
    found = ingest([tmp_path], tmp_path.parent / f"{tmp_path.name}-run")
    assert found.dropped == {"file of a rank that another file is of": 1}


@pytest.mark.parametrize(
    ("ts", "dur", "why"),
    [
        (5, -3, "with a negative duration"),
        (LONGEST_US, 3, "without a usable time"),
        (5, LONGEST_US, "without a usable time"),
    ],
)
def test_times_that_cannot_be_are_counted_and_left_out(
    ts: float, dur: float, why: str, tmp_path: Path
) -> None:
    bad = event("kernel", "k", ts, dur, 7, device=0, stream=7, correlation=1)
    run = taken(tmp_path, [bad, *launched("k", 100, 10, 7, 2)], info(0, 1))
    assert run.info.dropped == {f"device event {why}": 1}
    assert len(rows(run, category="compute")) == 1


@pytest.mark.parametrize(("said", "held"), [(4096, 4096), (-8, 0), (2.0**62, 0), (1e300, 0)])
def test_a_copy_moves_what_it_says_unless_no_memory_holds_as_much(
    said: float, held: int, tmp_path: Path
) -> None:
    where = {"device": 0, "stream": 7, "correlation": 1, "bytes": said}
    copy = event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 5, 2, 7, **where)
    run = taken(tmp_path, [copy, *launched("k", 100, 10, 7, 2, bytes=4096)], info(0, 1))
    assert [row["bytes_moved"] for row in rows(run, stream="stream 7")] == [held, 0]


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2", '{"traceEvents": []}', "hello", '{"traceEvents": [{"ph": "X"}]}']
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(IngestError) as caught:
        ingest([tmp_path / "x.json"], tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "reduce_scatter"),
        ("ncclDevKernel_AllGather_RING_LL(x)", "all_gather"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)", "send_recv"),
        ("ncclDevKernel_Generic(x)", "unknown"),
        ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)", "all_to_all"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(x)", "all_reduce"),
    ],
)
def test_communication_is_told_by_the_names_of_kernels(name: str, kind: str) -> None:
    assert is_communication(name)
    assert kernel("kernel", name)[:2] == ("collective", kind)


def test_compute_is_not_communication() -> None:
    assert kernel("kernel", "void at::native::reduce_kernel<512, 1>(x)").category == "compute"
    assert collective_kind("wait") == "unknown"


def test_the_verb_says_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(kineto_text(rank_events([100], [110]), info(0, 2)))
    done = CliRunner().invoke(
        main, ["ingest", str(tmp_path / "a.json"), "-o", str(tmp_path / "run"), "--json"]
    )
    said = json.loads(done.output)
    assert (said["kind"], said["ranks"], said["world_size"]) == ("kineto", [0], 2)
    shown = CliRunner().invoke(main, ["ingest", str(tmp_path / "a.json"), "-o", str(tmp_path / "run")])
    assert "rank: distributedInfo in the file" in shown.output


@needs_real
@pytest.mark.parametrize("path", real_kineto, ids=lambda path: path.name.partition(".")[0])
def test_every_real_trace_is_read_and_adds_up(path: Path, tmp_path: Path) -> None:
    ingest([path], tmp_path / "run")
    run = open_run(tmp_path / "run")
    for row in breakdown(run):
        assert sum(row.ns.values()) == row.window_ns
    spans = run.spans(run.stored_ranks[:1])
    start, duration = int64(spans, "start_ns"), int64(spans, "duration_ns")
    for stream in spans["stream"].unique().to_pylist():
        own = is_one_of(spans, "stream", (stream,))
        order = np.argsort(start[own], kind="stable")
        assert (np.diff(start[own][order]) >= duration[own][order][:-1]).all()


@needs_real
def test_dlrm_on_8_gpus_waits_much_more_than_it_moves(tmp_path: Path) -> None:
    """Each of 8 collectives takes at least as long as on its last arriver: 0.217 ms, of 6.07 ms per rank.

    6.07 ms is the plain sum of the durations of NCCL kernels in the 8 files, over 8.
    """
    ingest([REAL / "param_dlrm_v100x8" / "kineto"], tmp_path / "run")
    run = open_run(tmp_path / "run")
    durations: dict[int, list[int]] = {}
    for row in rows(run, category="collective"):
        durations.setdefault(row["sequence"], []).append(row["duration_ns"])
    assert len(durations) == 8
    assert all(len(own) == 8 for own in durations.values())
    assert sum(min(own) for own in durations.values()) == pytest.approx(217_000, rel=0.005)
    assert sum(sum(own) for own in durations.values()) / 8 == pytest.approx(6_067_750)
    assert max(clock.uncertainty_ns for clock in run.info.clock.values()) <= 7_000


def test_a_zip_archive_that_is_encrypted_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "a.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("rank0.json", "{}")
    packed = bytearray(file.read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        packed[packed.index(signature) + flags] |= 1
    file.write_bytes(packed)
    with pytest.raises(IngestError, match=r"a\.zip:rank0\.json is encrypted: unpack it first"):
        ingest([file], tmp_path / "run")
