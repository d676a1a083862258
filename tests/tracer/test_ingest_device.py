"""What a trace of a device says: steps on its clock, why it is idle, which pass, what communicates."""

import base64
import json
import struct
import zlib
from collections import Counter
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
from foretrace.tracer.ingest.ingest import ingest
from foretrace.tracer.ingest.kernels import kernel
from foretrace.traces.analysis.collectives import bandwidths
from foretrace.traces.analysis.device_time import held_memory
from foretrace.traces.analysis.findings import findings
from foretrace.traces.analysis.gaps import causes, gaps
from foretrace.traces.analysis.kernels import kernels
from foretrace.traces.analysis.metrics import assumptions, breakdown, summarize
from foretrace.traces.analysis.windows import windows
from foretrace.traces.columns import int64, is_one_of
from foretrace.traces.reader import open_run
from foretrace.traces.report.tables import tables
from foretrace.traces.run import Run

from .test_ingest_kineto import REAL, event, info, kineto_text, launched, needs_real, rows, taken

real_files = (
    sorted(path for folder in ("fresh", "hta", "tracelens") for path in REAL.glob(f"{folder}/*.json.gz"))
    if REAL.is_dir()
    else []
)
real_files = [path for path in real_files if not path.name.startswith("rocprof")]  # another format

PERIODS = {  # ../shared/real_traces/INDEX.md: kernels of each step, shortest and longest period in ms
    "tracelens/mi300x8_rank0_resnet_ddp_rccl": (746, 18.55, 18.99),
    "hta/v100x1_ns_resolution": (870, 95.39, 95.74),
    "hta/v100x2_rank1_test": (1555, 114.8, 123.2),
}


def kernels_by_step(run: Run) -> dict[int, int]:
    table = run.spans()
    chosen = is_one_of(table, "category", ("compute", "collective", "p2p"))
    return dict(Counter(int64(table, "step")[chosen].tolist()))


def idle_ns(run: Run) -> int:
    """Time of the averaged steps in which nothing runs on the device, by its definition."""
    table = run.spans()
    chosen = is_one_of(table, "category", ("compute", "copy", "collective", "p2p"))
    start = int64(table, "start_ns")[chosen]
    spans = sorted(zip(start.tolist(), (start + int64(table, "duration_ns")[chosen]).tolist(), strict=True))
    averaged = {step["step"] for step in summarize(run)["steps"] if step["averaged"]}
    total = 0
    for window in (window for window in windows(run) if window.step in averaged):
        until = window.start_ns
        for begin, end in spans:
            total += max(min(begin, window.end_ns) - until, 0)
            until = max(until, min(end, window.end_ns))
        total += max(window.end_ns - until, 0)
    return total


def assert_caused(run: Run) -> None:
    """Causes of idle time are known ones, are positive, and add up to it exactly."""
    found = gaps(run)
    assert {row["cause"] for row in found} <= set(causes())
    assert all(row["total_s"] > 0 for row in found)
    assert sum(round(row["total_s"] * 1e9) for row in found) == idle_ns(run)


@needs_real
@pytest.mark.parametrize("path", real_files, ids=lambda path: path.name.partition(".")[0])
def test_steps_hold_the_same_kernels_and_idle_time_has_causes(path: Path, tmp_path: Path) -> None:
    ingest([path], tmp_path / "run")
    run = open_run(tmp_path / "run")
    if not (run.info.job or {}).get("launches"):
        return  # no device
    if not path.name.startswith("trace_compare_test"):  # a kernel is gone from its second step
        busy = {step: n for step, n in kernels_by_step(run).items() if step >= 0}
        assert len(set(busy.values())) <= 1
    assert_caused(run)
    idle = sum(row["share"] for row in gaps(run))
    assert idle < 0.05 or any(one.what.startswith("idle:") for one in findings(run))


@needs_real
@pytest.mark.parametrize("name", PERIODS)
def test_asynchronous_steps_last_as_long_as_the_device_takes(name: str, tmp_path: Path) -> None:
    ingest([REAL / f"{name}.json.gz"], tmp_path / "run")
    run = open_run(tmp_path / "run")
    n_kernels, shortest_ms, longest_ms = PERIODS[name]
    averaged = [step for step in summarize(run)["steps"] if step["averaged"]]
    for step in averaged:
        assert kernels_by_step(run)[step["step"]] == n_kernels
        assert shortest_ms <= step["step_time_s"] * 1e3 <= longest_ms


def ahead(n_steps: int, kernel_us: float, *, marks: str = "ProfilerStep#{}") -> list[dict[str, Any]]:
    """A host that launches three kernels a step in 10 µs, of a device that takes *kernel_us* for each."""
    found, free = [], 0.0
    for step in range(n_steps):
        begin = step * 20.0
        found.append(event("user_annotation", marks.format(step), begin, 20 if "{}" in marks else 5))
        for i in range(3):
            call, start = begin + 6 + i * 4, max(begin + 8 + i * 4, free)
            number = step * 3 + i + 1
            found.append(event("cuda_runtime", "cudaLaunchKernel", call, 1, 1, correlation=number))
            found.append(
                event("kernel", f"k{i}", start, kernel_us, 7, device=0, stream=7, correlation=number)
            )
            free = start + kernel_us
    return found


@settings(max_examples=25, deadline=None)
@given(n_steps=st.integers(2, 6), kernel_us=st.integers(1, 60))
def test_a_step_begins_when_the_device_is_done_with_those_before(
    tmp_path_factory: pytest.TempPathFactory, n_steps: int, kernel_us: int
) -> None:
    run = taken(tmp_path_factory.mktemp("run"), ahead(n_steps, kernel_us))
    assert kernels_by_step(run) == dict.fromkeys(range(n_steps), 3)
    of_step = {window.step: window for window in windows(run)}
    for row in rows(run, category="compute"):
        window = of_step[row["step"]]
        assert window.start_ns <= row["start_ns"]
        assert row["start_ns"] + row["duration_ns"] <= window.end_ns
    if kernel_us > 20:  # the host is always ahead: a step takes its three kernels
        assert all(of_step[step].duration_ns == 3_000 * kernel_us for step in range(1, n_steps))
    assert_caused(run)


def test_optimizers_mark_steps_where_nothing_else_does(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "Optimizer.step#SGD.step", 100 * step + 90, 10) for step in range(3)
    ] + [one for i in range(9) for one in launched("k", 100.0 * (i // 3) + 20 + 10 * (i % 3), 5, 7, i + 1)]
    run = taken(tmp_path, events)
    assert kernels_by_step(run) == {0: 3, 1: 3, 2: 3}
    assert run.info.job is not None
    assert "Optimizer.step" in run.info.job["evidence"]["step"]


def test_a_window_is_not_called_a_step(tmp_path: Path) -> None:
    taken(tmp_path, launched("k", 100, 5, 7, 1) + launched("k", 300, 5, 7, 2))
    shown = CliRunner().invoke(main, ["analyze", str(tmp_path / "run")]).output
    assert "nothing marks steps" in shown
    assert "a step" not in shown.split("critical path")[0]


def test_causes_of_idle_time_are_told_apart(tmp_path: Path) -> None:
    """One step: the host loads data, copies pageable memory, is in an annotation, and reads a result."""
    copy = [event("cuda_runtime", "cudaMemcpyAsync", 400, 150, 1, correlation=8)]
    copy += [event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 540, 10, 7, stream=7, correlation=8)]
    graph = [event("cuda_runtime", "cudaGraphLaunch", 690, 5, 1, correlation=9)]
    graph += [event("kernel", "g", ts, 10, 7, stream=7, correlation=9) for ts in (700, 730)]
    events = [
        event("user_annotation", "ProfilerStep#3", 0, 1000),
        event("user_annotation", "enumerate(DataLoader)#_Iter.__next__", 0, 200),
        *launched("k", 300, 10, 7, 1),
        *copy,
        event("user_annotation", "forward of mine", 560, 120),
        *graph,
        event("cuda_runtime", "cudaStreamSynchronize", 745, 200, 1, correlation=10),
    ]
    run = taken(tmp_path, events)
    assert_caused(run)
    by_cause: Counter[str] = Counter()
    for row in gaps(run):
        by_cause[row["cause"]] += round(row["total_s"] * 1e6)
    assert by_cause == {
        "loading": 200,  # to the end of the annotation
        "before": 90,  # to the launch
        "launch": 10 + 10,
        "host": 90 + 140,  # to the copy; from the copy to the graph, most of it in an annotation
        "pageable": 140,
        "graph": 20,
        "blocked": 200,
        "after": 5 + 55,
    }
    (mine,) = [row for row in gaps(run) if row["doing"] == "forward of mine"]
    assert round(mine["total_s"] * 1e6) == 120


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void dpsk::ep::internode::combine<false, 8>(int4*)", "all_to_all"),
        ("void some::other::dispatch<8>(int4*)", "all_to_all"),
        ("mscclpp::allreduce7(int*)", "all_reduce"),
        ("EpDispatchInterNodeKernel(x)", "all_to_all"),
        ("void tensorrt_llm::kernels::twoShotAllReduceKernel<half>(x)", "all_reduce"),
        ("nvshmemi_transfer_rma_kernel", "unknown"),
    ],
)
def test_libraries_of_communication_are_known_by_their_kernels(name: str, kind: str) -> None:
    assert kernel("kernel", name)[:2] == ("collective", kind)


@pytest.mark.parametrize(
    "name",
    [
        "void flash_fwd_splitkv_combine_kernel<x>(y)",
        "triton_poi_fused_all_reduce_add_0",
        "void cub::DeviceReduceKernel<int>(x)",
        "void at::native::small_reduce<4>(x)",
    ],
)
def test_kernels_that_only_sound_like_it_compute(name: str) -> None:
    assert kernel("kernel", name).category == "compute"


@pytest.mark.parametrize("space", ["(anonymous namespace)", "<unnamed>", "ns::(anonymous namespace)", "x<2>"])
def test_what_a_silent_stream_suggests_fits_its_kernels_and_no_others(tmp_path: Path, space: str) -> None:
    """Whatever their namespace is called, and where their name is one letter that others have, too."""
    events = [
        *launched("ampere_sgemm_nk", 100, 50, 7, 1),
        *launched(f"void {space}::k<float>(int*)", 200, 90, 9, 2),
    ]
    (tmp_path / "a.json").write_text(kineto_text(events, info(0, 2)))
    (warning,) = ingest([tmp_path / "a.json"], tmp_path / "plain").warnings
    ingest([tmp_path / "a.json"], tmp_path / "run", communicates=warning.split("'")[-2])
    run = open_run(tmp_path / "run")
    told = [row["category"] for stream in ("stream 7", "stream 9") for row in rows(run, stream=stream)]
    assert told == ["compute", "collective"]


def test_a_pattern_that_fits_every_kernel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(kineto_text(launched("gemm", 100, 50, 7, 1), info(0, 2)))
    with pytest.raises(IngestError, match=r"'\|gemm' fits even a name without letters"):
        ingest([tmp_path / "a.json"], tmp_path / "run", communicates="|gemm")
    assert not (tmp_path / "run").exists()


def test_a_stream_of_unknown_purpose_is_named_and_can_be_told(tmp_path: Path) -> None:
    events = [
        *launched("ampere_sgemm", 100, 50, 7, 1),
        *launched("void x::exchange<2>(y)", 200, 90, 9, 2),
    ]
    (tmp_path / "a.json").write_text(kineto_text(events, info(0, 2)))
    found = ingest([tmp_path / "a.json"], tmp_path / "plain")
    (warning,) = found.warnings
    assert "stream 9" in warning
    assert r"--comm-kernels '\b(exchange)\b'" in warning
    asked = ["ingest", str(tmp_path / "a.json"), "-o", str(tmp_path / "run"), "--comm-kernels", "exchange"]
    assert CliRunner().invoke(main, asked).exit_code == 0
    (row,) = rows(open_run(tmp_path / "run"), stream="stream 9")
    assert row["category"] == "collective"
    for pattern in ("(", "[[1]]", "a{99999999999}", 5000 * "("):
        wrong = CliRunner().invoke(main, [*asked[:-1], pattern])
        assert "not a regular expression" in wrong.output


def test_what_a_file_does_not_tell_is_called_assumed_where_the_figure_is(tmp_path: Path) -> None:
    step = [event("user_annotation", "ProfilerStep#1", 0, 400)]
    nccl = [
        one
        for i, stream in enumerate((20, 21))
        for one in launched("ncclKernel_AllReduce_RING(x)", 100.0 + 100 * i, 50, stream, i + 1)
    ]
    run = taken(tmp_path, step + nccl, info(0, 4))
    groups = {row["group"] for row in rows(run, category="collective")}
    assert len(groups) == 2  # a stream is a communicator
    (said,) = [one.text for one in findings(run) if one.what == "exposed:world"]
    assert "assumed" in said
    assert "assumed" in next(one.note for one in tables(run, 5) if one.head[0] == "collective")


@pytest.mark.parametrize(
    ("long", "short"),
    [
        ("at::native::elementwise_kernel<4, at::native::{}<float>>", "elementwise_kernel<4, {}<float>>"),
        ("x::{}::(anonymous namespace)::y::Gemm<z::{}::Tile>", "y::Gemm<{}::Tile>"),
        ("x::{}::" + "y::" * 30 + "Gemm", "y::Gemm, kernel"),
    ],
)
def test_kernels_have_names_that_differ_without_their_namespaces(
    tmp_path: Path, long: str, short: str
) -> None:
    names = [long.replace("{}", one) for one in "ab"]
    events = [one for i, name in enumerate(names) for one in launched(name, 100.0 + 100 * i, 50, 7, i + 1)]
    shown = next(one.rows for one in tables(taken(tmp_path, events), 5) if one.head[0].startswith("kernel"))
    assert sorted(row[0] for row in shown) == [short.replace("{}", one) for one in "ab"]


@pytest.mark.parametrize(
    ("call", "sizes", "group", "n_bytes"),
    [
        ("_allgather_base_", [4000, 1000], (4, 5, 6, 7), 4000),
        ("_reduce_scatter_base_", [1000, 4000], (4, 5, 6, 7), 4000),
        ("_allgather_base_", [8000, 1000], tuple(range(8)), 8000),
        ("_allgather_base_", [3000, 1000], tuple(range(8)), 3000),  # of no group in a row: nothing tells it
    ],
)
def test_sizes_of_input_and_output_tell_the_group(
    tmp_path: Path, call: str, sizes: list[int], group: tuple[int, ...], n_bytes: int
) -> None:
    """Rank 5 of 8, of a torch that says no groups; what else is on the stream is of the same communicator."""
    kinds = {"Input type": ["signed char", "signed char", ""]}
    around = event(
        "cpu_op", f"c10d::{call}", 80, 20, 1, **{"Input Dims": [[n] for n in sizes] + [[]]}, **kinds
    )
    note = {"Input Dims": [[sizes[1]]], "Input type": ["signed char"]}
    inner = event("user_annotation", f"nccl:{call.rstrip('_')}", 85, 12, 1, **note)
    kernels = launched("ncclKernel_AllGather_RING(x)", 100, 50, 20, 1)
    others = launched("ncclKernel_AllReduce_RING(x)", 200, 50, 20, 2)
    run = taken(tmp_path, [around, inner, *kernels, *others], info(5, 8))
    members = {one.id: one.ranks for one in run.info.groups}
    first, second = rows(run, category="collective")
    assert (first["size_bytes"], first["dtype"]) == (n_bytes, "int8")
    assert members[first["group"]] == members[second["group"]] == group
    assert ("ranks in a row" in assumptions(run).get("group", "")) == (len(group) == 4)


def test_what_a_missing_rank_was_waited_for_is_no_transfer(tmp_path: Path) -> None:
    note = event(
        "user_annotation", "nccl:all_reduce", 85, 12, 1, **{"Input Dims": [[1000]], "Input type": ["float"]}
    )
    run = taken(tmp_path, [note, *launched("ncclKernel_AllReduce(x)", 100, 50, 20, 1)], info(0, 2))
    (row,) = next(one for one in tables(run, 5) if one.head[0] == "collective").rows
    assert row[3:6] == ("≤ 50.0 µs", "unknown", "≥ 80 MB/s")


@pytest.mark.parametrize("shapes", [[], "[[1000]]", None])
def test_an_annotation_without_a_shape_tells_no_size(tmp_path: Path, shapes: Any) -> None:
    said = {"Input Dims": shapes, "Input type": ["float"]}
    note = event("user_annotation", "nccl:all_reduce", 85, 12, 1, **said)
    run = taken(tmp_path, [note, *launched("ncclKernel_AllReduce(x)", 100, 50, 20, 1)], info(0, 2))
    assert [row["size_bytes"] for row in rows(run, kind="all_reduce")] == [0]


@pytest.mark.parametrize("n_steps", [1, 2])
def test_what_runs_in_a_lone_step_and_is_of_none_is_told(tmp_path: Path, n_steps: int) -> None:
    """A second step begins behind what was launched before it; the only one is the window of the host."""
    steps = [event("user_annotation", f"ProfilerStep#{i}", 1000.0 * i, 1000) for i in range(1, n_steps + 1)]
    call = event("cuda_runtime", "cudaLaunchKernel", 900, 4, correlation=1)
    early = event("kernel", "gemm", 950, 250, 7, device=0, stream=7, correlation=1)
    run = taken(tmp_path, [*steps, call, early, *launched("gemm", 1300, 700, 7, 2)], info(0, 1))
    told = [one for one in run.info.warnings if "before the step" in one]
    assert len(told) == (n_steps == 1)
    assert all("until 200.0 µs after its begin" in one and "800.0 µs" in one for one in told)


def test_kernels_without_launches_have_their_tables_and_unknown_ranks_are_waited_for(tmp_path: Path) -> None:
    """A tool that records kernels alone: nothing tells of other ranks, and yet there is communication."""
    names = ("ampere_sgemm", "ncclDevKernel_Generic(x)")
    kernels_ = [
        event("kernel", name, 100.0 + 100 * i, 50, 7, device=0, stream=7) for i, name in enumerate(names)
    ]
    run = taken(tmp_path, kernels_)
    shown = {one.head[0].partition(",")[0]: one.rows for one in tables(run, 5)}
    assert [row[0] for row in shown["kernel"]] == ["ampere_sgemm"]
    assert [row[0:1] + row[3:5] for row in shown["collective"]] == [("communication", "≤ 50.0 µs", "unknown")]
    (said,) = [one.text for one in findings(run) if one.what.startswith("exposed")]
    assert said.startswith(
        "communication among unknown ranks while nobody computes, be it transfer or waiting"
    )


def test_what_is_captured_is_not_launched(tmp_path: Path) -> None:
    """Between two kernels the host captures a graph for 300 µs of 350, and is only slow for the others."""
    calls = [("cudaStreamBeginCapture", 220), ("cudaLaunchKernel", 300), ("cudaStreamEndCapture", 510)]
    captured = [event("cuda_runtime", name, ts, 10, correlation=i + 5) for i, (name, ts) in enumerate(calls)]
    run = taken(tmp_path, [*launched("gemm", 100, 100, 7, 1), *captured, *launched("gemm", 560, 50, 7, 2)])
    by_cause = Counter[str]()
    for row in gaps(run):
        by_cause[row["cause"]] += round(row["total_s"] * 1e6)
    assert by_cause == {"capture": 300, "host": 50, "launch": 10}


def test_what_files_warn_of_alike_is_told_once(tmp_path: Path) -> None:
    for rank in range(3):
        step = event("user_annotation", "ProfilerStep#1", 1000, 1000)
        early = event("kernel", "gemm", 950, 250.0 + 700 * rank, 7, device=0, stream=7)
        text = kineto_text([step, early, *launched("gemm", 2700, 10, 8, 2)], info(rank, 3))
        (tmp_path / f"rank{rank}.json").write_text(text)
    paths = [tmp_path / f"rank{rank}.json" for rank in range(3)]
    (told,) = (one for one in ingest(paths, tmp_path / "run").warnings if "before the step" in one)
    assert told.startswith(f"{paths[0]} (and 2 alike): 1 kernels")


def test_a_step_in_which_no_device_runs_is_not_without_a_finding(tmp_path: Path) -> None:
    run = taken(
        tmp_path,
        [event("cpu_op", "aten::add", 100, 900), event("user_annotation", "ProfilerStep#1", 0, 1000)],
    )
    (one,) = findings(run)
    assert (one.what, one.share) == ("untold", 1.0)


def test_a_bandwidth_that_no_link_has_is_refused(tmp_path: Path) -> None:
    note = event(
        "user_annotation",
        "nccl:all_reduce",
        85,
        12,
        1,
        **{"Input Dims": [[1 << 30]], "Input type": ["float"]},
    )
    (tmp_path / "a.json").write_text(
        kineto_text(
            [note, *launched("ncclKernel_AllReduce(x)", 100, 50, 20, 1)],
            info(0, 8) | {"deviceProperties": [{"name": "NVIDIA H100 80GB HBM3"}]},
        )
    )
    done = CliRunner().invoke(main, ["ingest", str(tmp_path / "a.json"), "-o", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    (row,) = bandwidths(open_run(tmp_path / "run"))
    assert row["median_busbw_bytes_per_s"] is None
    assert row["refused_bytes_per_s"] > 1e14


def annotated_passes(*, by_hand: bool) -> list[dict[str, Any]]:
    """Forward and both parts of a backward on one thread, under annotations or only named by kernels."""
    marks = ["attn(F)", "attn(B)", "attn(W)"]
    names = ["gemm_a", "attention_bwd" if by_hand else "gemm_b", "gemm_c"]
    found = [event("user_annotation", "ProfilerStep#1", 0, 1000)]
    for i, (mark, name) in enumerate(zip(marks, names, strict=True)):
        found += [] if by_hand else [event("user_annotation", mark, 100 * i + 50, 90)]
        found += launched(name, 100.0 * i + 100, 20, 7, i + 1)
    return found


def test_annotations_tell_passes(tmp_path: Path) -> None:
    run = taken(tmp_path, annotated_passes(by_hand=False))
    assert {row["name"]: row["kind"] for row in rows(run, category="compute")} == {
        "gemm_a": "forward",
        "gemm_b": "backward_input",
        "gemm_c": "backward_weight",
    }


def test_a_backward_by_hand_is_not_forward(tmp_path: Path) -> None:
    run = taken(tmp_path, annotated_passes(by_hand=True))
    kinds = {row["name"]: row["kind"] for row in rows(run, category="compute")}
    assert kinds == {"gemm_a": "kernel", "attention_bwd": "backward", "gemm_c": "kernel"}


def test_products_reach_what_their_shapes_say(tmp_path: Path) -> None:
    """2 * 64 * 32 * 16 FLOPs in 10 µs, of the longer of the two kernels that the operator launches."""
    product = event(
        "cpu_op",
        "aten::mm",
        80,
        40,
        1,
        **{"Input Dims": [[64, 32], [32, 16]], "Input type": ["c10::Half"] * 2},
    )
    run = taken(tmp_path, [product, *launched("gemm", 100, 10, 7, 1), *launched("split_k", 112, 2, 7, 2)])
    found = {row["name"]: (row["flops_per_s"], row["dtype"]) for row in kernels(run)}
    assert found == {"gemm": (pytest.approx(65_536 / 10e-6), "fp16"), "split_k": (None, "")}


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def _shared() -> bytes:
    """Return a table of 100 columns that are one and the same megabyte of the file."""
    n, size = 100, 1_000_000
    table = pa.table({f"c{i}": np.zeros(size // 8, np.int64) for i in range(n)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    at = len(data) - n * size - 8  # behind the bytes of the columns stands a mark
    head = data[:at].replace(struct.pack("<q", n * size), struct.pack("<q", size))
    for i in range(1, n):
        head = head.replace(struct.pack("<qq", i * size, size), struct.pack("<qq", 0, size))
    return head + bytes(size) + data[-8:]


def test_an_exported_run_comes_back_as_it_was(tmp_path: Path) -> None:
    run = taken(tmp_path, ahead(4, 30), info(1, 2))
    for name, kind in (("a.json", "chrome"), ("b.json.gz", "kineto")):
        file = str(tmp_path / name)
        for asked in (
            ["export", str(tmp_path / "run"), "-o", file, "--format", kind, "--partial"],
            ["ingest", file, "-o", str(tmp_path / kind)],
        ):
            done = CliRunner().invoke(main, asked)
            assert done.exit_code == 0, done.output
        back = open_run(tmp_path / kind)
        assert back.spans().equals(run.spans())
        assert (back.info.groups, back.info.world_size) == (run.info.groups, run.info.world_size)
        assert breakdown(back) == breakdown(run)
    (tmp_path / "notes.txt").write_text("hello")
    named = ingest([tmp_path / "a.json", tmp_path / "notes.txt"], tmp_path / "named", name="mine")
    assert (named.name, open_run(tmp_path / "named").info.name) == ("mine", "mine")
    assert any("notes.txt is no trace" in said for said in named.warnings)
    whole = (tmp_path / "a.json").read_text()
    document = json.loads(whole)
    assert document["distributedInfo"]["rank"] == 1
    for spans, said in (
        ("\N{LATIN SMALL LETTER E WITH ACUTE}", "only ASCII"),
        (base64.b64encode(b"plain").decode(), "does not hold the run"),
        (_packed(bytes(100_000_000)), "unpacks to more"),
        (_packed(_shared()), "unpacks to more"),
    ):
        document["foretrace"]["spans"] = spans
        (tmp_path / "bad.json").write_text(json.dumps(document))
        with pytest.raises(IngestError, match=said):
            ingest([tmp_path / "bad.json"], tmp_path / "no")
    (tmp_path / "cut.json").write_text(whole[: len(whole) - 20])
    assert (
        CliRunner().invoke(main, ["ingest", str(tmp_path / "cut.json"), "-o", str(tmp_path / "no")]).exit_code
    )
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(("told_us", "cause"), [(120.0, "event"), (140.0, "queued"), (20.0, "queued")])
def test_a_stream_that_waits_for_an_event_is_told(tmp_path: Path, told_us: float, cause: str) -> None:
    """Only what a stream was told before a launch, and after the one before, holds back what is launched."""
    said = {"stream": 20, "wait_on_stream": 7, "wait_on_cuda_event_id": 3, "correlation": 9}
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 1000),
        *launched("first", 50, 5, 20, 1),  # launched at 40
        *launched("a", 60, 40, 7, 2),
        event("cuda_sync", "Stream Wait Event", told_us, 2, **said),
        event("cuda_runtime", "cudaLaunchKernel", 130, 4, correlation=3),
        event("kernel", "b", 900, 90, 20, device=0, stream=20, correlation=3),
    ]
    found = {(row["cause"], row["doing"]): row["total_s"] for row in gaps(taken(tmp_path, events))}
    named = "stream 20 waits for an event of stream 7" if cause == "event" else None
    (held,) = [key for key in found if key[0] in {"event", "queued"}]
    assert held[0] == cause
    assert named is None or held[1] == named
    assert found[held] == pytest.approx(
        (900 - (134 + 20)) / 1e6, abs=1e-9
    )  # after the launch and its latency


def test_what_a_device_held_is_a_table(tmp_path: Path) -> None:
    """The most of each, allocated and reserved, of the device that holds most; the host's is left out."""
    instant = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 0, "tid": 1}

    def held(ts: float, kind: int, device: int, allocated: int, reserved: int) -> dict[str, Any]:
        said = {
            "Device Type": kind,
            "Device Id": device,
            "Total Allocated": allocated,
            "Total Reserved": reserved,
        }
        return instant | {"ts": ts, "args": said}

    instants = [held(20, 1, 0, 100, 400), held(60, 1, 0, 300, 400), held(70, 1, 0, 50, 500)]
    instants += [held(65, 1, 1, 200, 200), held(66, 0, -1, 9000, 9000)]
    document = {
        "deviceProperties": [{"name": "x", "totalGlobalMem": 1000}],
        "traceEvents": [*launched("a", 50, 40, 7, 2), *instants],
    }
    (tmp_path / "trace.json").write_text(json.dumps(document))
    ingest([tmp_path / "trace.json"], tmp_path / "run")
    row = {
        "rank": 0,
        "peak_bytes": 300,
        "reserved_bytes": 500,
        "limit_bytes": 1000,
        "at_s": pytest.approx(10e-6),
    }
    assert held_memory(open_run(tmp_path / "run")) == [row]
    shown = CliRunner().invoke(main, ["analyze", str(tmp_path / "run")])
    assert "memory" in shown.output
    assert "30.0 %" in shown.output  # of the device
