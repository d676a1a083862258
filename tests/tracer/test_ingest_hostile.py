"""Broken traces end in one clear line or in counted losses: never a traceback, a hang, or a wrong sum."""

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import zipfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from foretrace.tracer.errors import RecordError
from foretrace.tracer.ingest.chrome import read_kineto_layout
from foretrace.tracer.ingest.ingest import ingest
from foretrace.tracer.ingest.sources import Source, found_sources, opened, read_whole
from foretrace.traces.analysis.everything import analysis
from foretrace.traces.analysis.metrics import breakdown
from foretrace.traces.errors import TraceError
from foretrace.traces.export.protobuf import message, number, varint
from foretrace.traces.store import open_run

N_INPUTS = 60
"""Inputs per kind of file; ``make fuzz`` tries more."""

VALUES: tuple[Any, ...] = (
    None, -1, 0, 1e308, -1e308, 1e30, 2**70, -(2**63), "", "7", "<b>&\"'", "\ud800", [], [[]], {}, True,
    "[0, 1, ...]", "ProfilerStep#99999999999", "nccl:all_reduce", float("nan"), [[1, -5],
    [2**80]], "e" * 5000,
)  # fmt: skip


def events() -> list[dict[str, Any]]:
    """A step of one rank: a compute kernel, a copy, an all-reduce with metadata, launches, annotations."""
    said = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 8, "Out msg nelems": 8}
    said |= {"Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Seq": 3}
    found = []
    for i, (cat, name) in enumerate(
        [("kernel", "k"), ("gpu_memcpy", "Memcpy HtoD"), ("kernel", "ncclDevKernel_X")]
    ):
        args = {"device": 0, "stream": 7 + i, "correlation": i + 1} | (said if "nccl" in name else {})
        found.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 0,
                "tid": 7,
                "ts": 100.5 + 20 * i,
                "dur": 10,
                "args": args,
            }
        )
        found.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 2,
                      "ts": 95.5 + 20 * i, "dur": 2, "args": {"correlation": i + 1}})  # fmt: skip
    for name in ("ProfilerStep#4", "Optimizer.step#SGD", "nccl:all_reduce"):
        args = {"Input Dims": [[4, 2]], "Input type": ["float"]}
        found.append(
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": name,
                "pid": 1,
                "tid": 2,
                "ts": 90,
                "dur": 99,
                "args": args,
            }
        )
    product = {"Input Dims": [[4, 8], [8, 2]], "Input type": ["float", "float"]}
    waits = {"stream": 7, "wait_on_stream": 8}
    held = {"Device Type": 1, "Device Id": 0, "Total Allocated": 64, "Total Reserved": 128}
    found += [
        {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 2, "ts": ts, "dur": dur, "args": args}
        for cat, name, ts, dur, args in (
            ("cpu_op", "aten::mm", 94, 6, product),
            ("cuda_sync", "Stream Wait Event", 112, 1, waits),
            ("python_function", "a.py(1): f", 80, 400, {}),
            ("user_annotation", "attn(B)", 130, 40, {}),
        )
    ]
    memory = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": 2}
    return [*found, memory | {"ts": 99.5, "args": held}]


def timers() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for rank in range(2):
        found.append(
            {"ph": "i", "name": "iteration begin", "ts": 0, "pid": rank, "tid": 0, "args": {"iteration": 1}}
        )
        for i, name in enumerate(("forward", "backward")):
            said = {"iteration": 1, "microbatch": 0, "model_chunk": 0, "pp_rank": rank}
            for ph, ts in (("B", 10 + 20 * i), ("E", 25 + 20 * i)):
                found.append({"ph": ph, "name": name, "ts": ts, "pid": rank, "tid": 0, "args": said})
        found.append(
            {"ph": "i", "name": "iteration end", "ts": 90, "pid": rank, "tid": 0, "args": {"iteration": 1}}
        )
    return found


def graph() -> list[dict[str, Any]]:
    said = {"Name": "gemm", "NodeType": 4, "runtime": 5, "is_cpu_op": False}
    return [said | {"Id": i, "data_deps": [i - 1] if i else []} for i in range(4)]


def dump() -> list[dict[str, Any]]:
    said = {"profiling_name": "nccl:all_reduce", "process_group": ["0", "default_pg"], "duration_ms": 0.5}
    said |= {"input_sizes": [[4]], "input_dtypes": ["Float"]}
    return [said | {"collective_seq_id": i, "time_created_ns": 10**6 * (i + 1)} for i in range(3)]


def param() -> list[dict[str, Any]]:
    said = {"in_msg_size": 8, "out_msg_size": 8, "dtype": "Float", "world_size": 2, "pg_id": 0}
    said |= {"global_ranks": [0, 1], "latency_us": 4.0}
    found = [said | {"comms": "all_reduce", "startTime_ns": 1000 * i, "req": i} for i in range(3)]
    return [*found, {"comms": "wait", "req": 1, "startTime_ns": 9000}, {"compute": "gemm", "latency_us": 2.0}]


def called() -> list[dict[str, Any]]:
    groups = json.dumps([{"pg_name": "0", "ranks": [], "group_size": 2}])
    tensors = {"values": [groups], "shapes": [[4, 2], [2, 4]], "types": ["Tensor(float)", "Tensor(float)"]}
    names = ("## process_group:init ##", "aten::mm", "nccl:all_reduce", "aten::add")
    attributes = [{"name": "tid", "type": "uint64", "value": 1}]
    return [
        {"id": i + 2, "name": name, "ctrl_deps": 1, "inputs": dict(tensors), "attrs": attributes}
        for i, name in enumerate(names)
    ]


def kineto_text(found: list[dict[str, Any]], header: str) -> str:
    """Return *found* in the layout that Kineto writes."""
    parts = []
    for e in found:
        keys = ("ph", "cat", *(("s",) if "s" in e else ()), "name", "pid", "tid")
        first = ", ".join(f'"{key}": {json.dumps(e.get(key))}' for key in keys)
        times = f'"ts": {json.dumps(e.get("ts"))}, "dur": {json.dumps(e.get("dur"))}'
        parts.append(f'  {{\n    {first},\n    {times},\n    "args": {json.dumps(e.get("args"))}\n  }}')
    return f'{{\n  {header}"traceEvents": [\n' + ",\n".join(parts) + '\n  ],\n  "traceName": "x"\n}\n'


def table(luck: random.Random) -> bytes:
    """Return a table of operations with cells out of place."""
    rows = [
        {"dp_rank": 0, "stage": s, "rank": s, "step": 1, "optype": kind, "start_ts": 0.1 * i + s, "duration":
        0.1,
         "seq_id": 0, "mc": 0, "mb_id": 0, "gmc": s}
        for s in range(2) for i, kind in enumerate(("forward-compute", "forward-send", "backward-compute"))
    ]  # fmt: skip
    for _ in range(luck.randrange(4)):
        row = luck.choice(rows)
        row[luck.choice(list(row))] = luck.choice((None, -1, 10**6, 2**40, 0, 1))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    if luck.random() < 0.3:
        del columns[luck.choice(list(columns))]
    columns["optype"] = [str(value) for value in columns.get("optype", [0] * 6)]
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def workload(luck: random.Random) -> bytes:
    """Return the graph of a rank in protobuf, whose attributes may be absurd."""
    parts = [message(1, "0.0.4")]
    for at in range(6):
        said = {"comm_type": 0, "comm_size": 64, "comm_src": 1, "comm_dst": 1, "comm_tag": at, "num_ops": 9}
        if luck.random() < 0.3:
            said[luck.choice(list(said))] = luck.choice((1 << 40, (1 << 64) - 1, 10**6, 7))
        listed = [message(10, message(1, name) + number(9, value)) for name, value in said.items()]
        before = number(5, max(at - 1, 0) if luck.random() < 0.9 else luck.randrange(9)) if at else b""
        took = number(7, luck.choice((0, 5, 1 << 60)))
        parts.append(number(1, at) + number(3, luck.choice(range(2, 8))) + before + took + b"".join(listed))
    return b"".join(varint(len(part)) + part for part in parts)


def document(kind: str, luck: random.Random) -> bytes:
    """Return a file of *kind* with some values replaced, events repeated, dropped and shuffled."""
    if kind in {"operations", "workload"}:
        return table(luck) if kind == "operations" else workload(luck)
    made = {"timers": timers, "graph": graph, "dump": dump, "param": param, "called": called}
    found = made.get(kind, events)()
    for _ in range(luck.randrange(4)):
        event = luck.choice(found)
        args = event.get("args", event.get("inputs"))
        target = args if luck.random() < 0.5 and isinstance(args, dict) and args else event
        target[luck.choice(list(target))] = luck.choice(VALUES)
    for _ in range(luck.randrange(3)):
        found.insert(luck.randrange(len(found) + 1), luck.choice(found))
    if luck.random() < 0.3:
        luck.shuffle(found)
    header: dict[str, Any] = {"distributedInfo": {"rank": 0, "world_size": 2, "backend": "nccl"}}
    if luck.random() < 0.4:
        header = {
            luck.choice(["distributedInfo", "baseTimeNanoseconds", "deviceProperties"]): luck.choice(VALUES)
        }
    if kind in {"timers", "param"}:
        return json.dumps(found).encode()
    if kind in {"graph", "dump"}:
        return json.dumps({**header, {"graph": "workload_graph", "dump": "entries"}[kind]: found}).encode()
    if kind == "called":
        return json.dumps({**header, "schema": "1.1.1-chakra.0.0.4", "nodes": found}).encode()
    if kind == "any layout":
        return json.dumps({**header, "traceEvents": found}).encode()
    return kineto_text(found, json.dumps(header)[1:-1] + ", ").encode()


def broken(data: bytes, luck: random.Random) -> bytes:
    """Return *data* cut off, with bytes flipped, or nested deep; or as it is."""
    choice = luck.random()
    if choice < 0.2:
        return data[: luck.randrange(len(data) + 1)]
    if choice < 0.4:
        flipped = bytearray(data)
        for _ in range(luck.randrange(1, 8)):
            flipped[luck.randrange(len(flipped))] = luck.randrange(256)
        return bytes(flipped)
    if choice < 0.43:
        return data.replace(b"[", b"[" * 3000, 1)
    return data


def try_one(data: bytes, path: Path, outcome: Counter[str]) -> None:
    """Take over *data* and analyse it; anything but one of our errors escapes."""
    source = path / "trace"
    source.write_bytes(data)
    try:
        info = ingest([source], path / "run")
        run = open_run(path / "run")
        for row in breakdown(run):
            assert sum(row.ns.values()) == row.window_ns
            assert min(row.ns.values()) >= 0
        json.dumps(analysis(run, 2.0))
        outcome["said" if info.dropped or info.warnings else "read"] += 1
    except (RecordError, TraceError) as error:
        outcome["refused"] += 1
        outcome["refused in several lines"] += "\n" in str(error)


KINDS = ("kineto", "any layout", "timers", "operations", "graph", "dump", "param", "called", "workload")


@pytest.mark.parametrize("kind", KINDS)
def test_broken_files_are_refused_or_counted(kind: str, tmp_path: Path) -> None:
    luck = random.Random(kind)
    outcome: Counter[str] = Counter()
    for _ in range(N_INPUTS):
        try_one(broken(document(kind, luck), luck), tmp_path, outcome)
    assert outcome["refused"] > N_INPUTS // 50
    assert outcome["refused in several lines"] == 0
    assert outcome["read"] + outcome["said"] > N_INPUTS // 5


@pytest.mark.parametrize("suffix", [".tar.bz2", ".tar.xz", ".json.xz", ".et.bz2"])
def test_what_is_packed_otherwise_is_said_to_be_unpacked_first(tmp_path: Path, suffix: str) -> None:
    pack = bz2.compress if suffix.endswith("bz2") else lzma.compress
    file = tmp_path / f"rank0{suffix}"
    file.write_bytes(pack(json.dumps({"traceEvents": events()}).encode()))
    with pytest.raises(RecordError, match="is packed: unpack it first"):
        ingest([file], tmp_path / "run")


@pytest.mark.parametrize("suffix", [".json.gz", ".tar.gz"])
def test_packed_files_may_be_padded_but_not_without_end(tmp_path: Path, suffix: str) -> None:
    """Python reads what pads a gzip file byte by byte: gigabytes of nothing would take hours."""
    data = json.dumps({"traceEvents": events()}).encode()
    if suffix == ".tar.gz":
        with tarfile.open(fileobj=(archive := io.BytesIO()), mode="w") as tar:
            member = tarfile.TarInfo("rank0.json")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        data = archive.getvalue()
    file = tmp_path / f"rank0{suffix}"
    file.write_bytes(gzip.compress(data) + bytes(10_000))
    ingest([file], tmp_path / "run")
    assert open_run(tmp_path / "run").spans().num_rows
    with file.open("ab") as stream:
        stream.truncate(1 << 24)
    source = Source(file, str(file), file.stat().st_size)
    with pytest.raises(RecordError, match="65,536 zeros follow what is packed"), opened(source) as stream:
        stream.read()


def _count(read: Counter[str], name: str, n_bytes: int) -> None:
    read[name] += n_bytes


@pytest.mark.parametrize("suffix", [".zip", ".tar", ".tgz"])
def test_a_member_costs_its_own_bytes_however_many_others_an_archive_has(tmp_path: Path, suffix: str) -> None:
    """Not the directory of the archive, nor the members before it; nothing unpacked is left behind."""
    luck = random.Random(0)  # bytes that cannot be packed, so that a packed archive is as long
    members = {f"{i}{'n' * 10_000}.json": luck.randbytes(100_000) for i in range(30)}
    file = tmp_path / f"a{suffix}"
    if suffix == ".zip":
        with zipfile.ZipFile(file, "w") as packed:
            for name, data in members.items():
                packed.writestr(name, data)
    else:
        with tarfile.open(file, "w:gz" if suffix == ".tgz" else "w") as tar:
            for name, data in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    with found_sources([file], tmp_path / "run") as sources:
        assert [one.name for one in sources] == [f"{file}:{name}" for name in members]
        for source, data in zip(sources, members.values(), strict=True):
            read = Counter[str]()
            assert read_whole(source, partial(_count, read)) == data
            # A buffer is filled at the first member of the archive, too.
            assert read.total() < len(data) + 3 * (1 << 16)
    assert list(tmp_path.iterdir()) == [file]


def test_an_archive_holds_no_more_files_than_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        for i in range(6):
            packed.writestr(f"{i}.json", b"{}")
    monkeypatch.setattr("foretrace.tracer.ingest.sources.MOST_FILES", 5)
    with pytest.raises(RecordError, match=r"a\.zip holds more than 5 files"):
        ingest([tmp_path / "a.zip"], tmp_path / "run")


def test_the_first_files_that_are_left_out_are_named_and_the_others_counted(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "rank0.json").write_text(json.dumps({"traceEvents": events()}))
    for i in range(20):
        (tmp_path / "traces" / f"note{i}.json").write_text("{}")
    left_out = [one for one in ingest([tmp_path / "traces"], tmp_path / "run").warnings if "left out" in one]
    assert len(left_out) == 17
    assert left_out[-1] == "4 more files are left out"


def test_traces_that_share_no_group_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with each, a few thousand of them would take minutes."""
    compared: list[None] = []
    monkeypatch.setattr("foretrace.tracer.ingest.joining._difference", lambda a, b: compared.append(None))
    (tmp_path / "traces").mkdir()
    kernel = next(event for event in events() if event["cat"] == "kernel")
    for rank in range(6):
        (tmp_path / "traces" / f"rank{rank}.json").write_text(json.dumps({"traceEvents": [kernel]}))
    assert ingest([tmp_path / "traces"], tmp_path / "run").world_size == 6
    assert compared == []


class Endless(io.RawIOBase):
    """A file of *start*, and zeros behind it without an end."""

    def __init__(self, start: bytes) -> None:
        self._start, self.n_read = io.BytesIO(start), 0

    def readable(self) -> bool:
        return True

    def readinto(self, place: Any) -> int:
        n = self._start.readinto(place)
        if not n:
            place[:] = bytes(len(place))
            n = len(place)
        self.n_read += n
        return n


def test_what_follows_the_events_of_a_trace_without_an_end_is_not_read_to_it() -> None:
    """As a file with a hole of a terabyte: what is before it is read, and said to be cut off."""
    event = (
        b'  {\n    "ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7,\n    "ts": 1, "dur": 1\n  }'
    )
    file = Endless(b'{\n  "traceEvents": [\n' + event + b",\n" + event + b'\n  ],\n  "x": 1\n}\n')
    trace = read_kineto_layout(io.BufferedReader(file))
    assert trace.n_events == 2
    assert trace.cut.endswith("in which no event ends")
    assert file.n_read < 1 << 28
