"""One run of known totals as every generation of PyTorch writes it, on NVIDIA and AMD: the same comes out."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from foretrace.tracer.ingest.ingest import ingest
from foretrace.traces.analysis.device_time import device_times
from foretrace.traces.analysis.metrics import breakdown
from foretrace.traces.info import RunInfo
from foretrace.traces.run import Run
from foretrace.traces.store import open_run

Event = dict[str, Any]
N_RANKS = 4
SHAPE = {"Input Dims": [[250_000]], "Input type": ["float"]}
SAID = {
    "Collective name": "allreduce", "In msg nelems": 250_000, "Out msg nelems": 250_000, "dtype": "Float",
    "Group size": 4, "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, 3]",
}  # fmt: skip
OLD = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"
NEW = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
RCCL = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"


def event(cat: str, name: str, ts: float, dur: float, tid: int, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}


def rank_events(
    rank: int,
    *,
    first_us: float = 1_700_000_000_000_000,
    nccl: str = NEW,
    told_by: str = "kernel",
    launch: str = "cudaLaunchKernel",
    steps: bool = True,
    early: bool = False,
) -> list[Event]:
    """Two steps of 1 ms: compute for 400 µs, an all-reduce from 400 + 20 x rank to 600, a copy of 50 µs."""
    found = []
    for step in range(2):
        begin = first_us + 1000 * step
        if steps:
            found.append(event("user_annotation", f"ProfilerStep#{step}", begin, 1000, 1))
        said = {**SAID, "Seq": step} if told_by == "seq" else SAID if told_by == "kernel" else {}
        device = [
            ("kernel", "void gemm<float>(float*)", 100, 200, 7, {}),
            ("kernel", "void relu<float>(float*)", 300, 200, 7, {}),
            ("kernel", nccl, 400 + 20 * rank, 200 - 20 * rank, 20, said),
            ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 700, 50, 7, {}),
        ]
        for i, (cat, name, at, dur, stream, args) in enumerate(device):
            number = 1 + step if launch == "cudaGraphLaunch" else 1 + 4 * step + i
            known = args | {"stream": stream, "device": 0, "correlation": number}
            category = cat.removeprefix("gpu_").capitalize() if early else cat
            found.append(event(category, name, begin + at, dur, stream, **known))
            if launch and (i == 0 or launch != "cudaGraphLaunch"):
                called = begin + at - 60 - i
                runtime = "Runtime" if early else "cuda_runtime"
                found.append(event(runtime, launch, called, 5, 1, correlation=number))
                if i == 2 and told_by == "note":
                    found.append(event("user_annotation", "nccl:all_reduce", called - 10, 40, 1, **SHAPE))
                if i == 2 and told_by == "call":
                    found.append(event("cpu_op", "record_param_comms", called - 10, 40, 1, **SAID))
    return found


def header(rank: int) -> dict[str, Any]:
    return {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": N_RANKS}}


def written(folder: Path, pattern: str, told: bool, **options: Any) -> Path:
    """Write a file per rank, as ``json.dump`` would; gzipped if its name says so."""
    for rank in range(N_RANKS):
        base = {"baseTimeNanoseconds": 10**18} if options.get("first_us") else {}
        document: Any = {**header(rank), **base, "traceEvents": rank_events(rank, **options)}
        text = json.dumps(document if told else document["traceEvents"]).encode()
        path = folder / pattern.format(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text) if pattern.endswith(".gz") else text)
    return folder


def taken(folder: Path, out: Path) -> tuple[RunInfo, Run]:
    found = ingest([folder], out)
    return found, open_run(out)


@pytest.mark.parametrize(
    ("options", "size_bytes"),
    [
        pytest.param({"early": True, "told_by": "", "nccl": OLD}, 0, id="torch 1.9, capitals"),
        pytest.param({"told_by": "note", "nccl": OLD}, 1_000_000, id="torch 1.13"),
        pytest.param({"told_by": "note"}, 1_000_000, id="torch 2.0"),
        pytest.param({"told_by": "call", "first_us": 7e6 + 0.25}, 1_000_000, id="torch 2.3"),
        pytest.param({"first_us": 5000.25}, 1_000_000, id="torch 2.4"),
        pytest.param({"told_by": "seq", "first_us": 5000.5}, 1_000_000, id="sequence numbers"),
        pytest.param({"nccl": RCCL, "launch": "hipLaunchKernel"}, 1_000_000, id="AMD"),
        pytest.param(
            {"nccl": RCCL, "told_by": "note", "launch": "hipLaunchKernel"}, 1_000_000, id="AMD, old"
        ),
        pytest.param({"launch": "cudaGraphLaunch", "told_by": ""}, 0, id="CUDA graph"),
        pytest.param({"launch": ""}, 1_000_000, id="only the device"),
        pytest.param({"steps": False}, 1_000_000, id="no steps"),
    ],
)
def test_totals_are_those_that_were_put_in(options: Event, size_bytes: int, tmp_path: Path) -> None:
    """The transfer is the 140 µs of the last to arrive, 100 of them exposed; the rest of the others waits."""
    folder = written(tmp_path / "in", "node{0}/worker{0}.pt.trace.json.gz", True, **options)
    info, run = taken(folder, tmp_path / "run")
    assert (info.world_size, info.dropped, info.warnings) == (N_RANKS, {}, ())
    for row in device_times(run):
        late_us = 20 * row.rank
        assert row.compute_ns == 800_000
        assert row.communication_ns == 2 * (200 - late_us) * 1000
        assert row.overlap_ns == 2 * (100 - late_us) * 1000
    for part in breakdown(run):
        per_window = 1 if options.get("steps", True) else 2
        assert part.ns["compute"] == per_window * 450_000
        assert part.ns["exposed:world"] == per_window * 100_000
    spans = run.spans()
    kinds = set(zip(*(spans[name].to_pylist() for name in ("kind", "size_bytes", "axis")), strict=True))
    assert ("all_reduce", size_bytes, "world") in kinds


@pytest.mark.parametrize(
    ("pattern", "source"),
    [
        ("trace_rank{}.json", "name of the file"),
        ("rank_{}1/gpu0/trace.json", "name of the folder"),
        ("run-1{}.json", "order of the files"),
    ],
)
def test_ranks_that_no_file_tells(pattern: str, source: str, tmp_path: Path) -> None:
    info, run = taken(written(tmp_path / "in", pattern, False), tmp_path / "run")
    assert info.job is not None
    assert info.job["evidence"]["rank"] == source
    late = {row.rank: 400 - row.communication_ns // 1000 for row in device_times(run)}
    expected = [1, 11, 21, 31] if "folder" in source else range(N_RANKS)
    assert late == {rank: 40 * place for place, rank in enumerate(expected)}


def test_files_without_ranks_are_in_the_order_of_the_numbers_in_their_names(tmp_path: Path) -> None:
    for number in (9, 10, 11):
        path = tmp_path / "in" / f"trace_{number}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(rank_events(number - 9)), encoding="utf-8")
    _, run = taken(tmp_path / "in", tmp_path / "run")
    assert [row.communication_ns for row in device_times(run)] == [400_000, 360_000, 320_000]


def test_ranks_that_no_job_has_are_not_believed(tmp_path: Path) -> None:
    """A member of 8 digits, a stride that leads beyond any job: the group is not known."""
    for more in (
        {"Process Group Ranks": "[0, 71303168]"},
        {"Process Group Ranks": "", "Global rank start": 0, "Global rank stride": 10**9},
    ):
        events = rank_events(0)
        for one in events:
            if "Process Group Ranks" in one["args"]:
                one["args"] |= more
        path = tmp_path / "one.json"
        path.write_text(json.dumps({**header(0), "traceEvents": events}), encoding="utf-8")
        assert taken(path, tmp_path / "run")[0].world_size == N_RANKS
