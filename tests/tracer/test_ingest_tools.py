"""Traces of Nsight Systems, rocprofv3 and XLA are read alike: what they hold, or one line on why not.

No export of Nsight Systems was at hand: its tables are made here from NVIDIA's description of them ("SQLite
Schema Reference"). The other two are held against sums over real files, too.
"""

import gzip
import json
import os
import sqlite3
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.cli import main
from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.ingest import READERS, ingest
from foretrace.tracer.ingest.sources import found_sources, kind_of
from foretrace.traces.analysis.gaps import gaps
from foretrace.traces.columns import int64, is_one_of
from foretrace.traces.run import Run
from foretrace.traces.store import open_run

from .test_ingest_kineto import REAL, needs_real

MS = 1_000_000
START = (
    1_700_000_000 * 1_000_000_000
)  # of a session, as tools count: times near 0 and near this are both used

KERNEL_COLUMNS = "start, end, globalPid, deviceId, streamId, correlationId, demangledName"
SCHEMA = f"""
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({KERNEL_COLUMNS}, shortName, gridX);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start, end, globalPid, deviceId, streamId, correlationId, bytes,
    copyKind, srcKind, dstKind);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId);
CREATE TABLE NVTX_EVENTS (start, end, eventType, text, textId, globalTid);
CREATE TABLE TARGET_INFO_GPU (id, name);
INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H100 80GB HBM3'), (1, 'NVIDIA H100 80GB HBM3');
INSERT INTO StringIds VALUES (1, 'sm90_gemm'), (2, 'cudaLaunchKernel_v7000'), (3, 'step 4'),
    (4, 'ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)'), (5, 'cudaMemcpyAsync_v3020');
"""


def exported(path: Path, n_processes: int = 2, base: int = START) -> Path:
    """Two steps of each process: a copy of pageable memory, a product and an all-reduce of 2 ms each."""
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(SCHEMA)
        for process in range(n_processes):
            pid = (100 + process) << 24
            for step in range(2):
                at, number = base + step * 10 * MS, 10 * step
                database.execute(
                    "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, ?, ?)",
                    (at, at + 10 * MS, None if step == 0 else "step 5", 3 if step == 0 else None, pid | 7),
                )
                for nth, name in ((1, 5), (2, 2), (3, 2)):
                    call = (at + nth * MS // 2, at + nth * MS // 2 + 1000, pid | 7, number + nth, name)
                    database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", call)
                copy = (at + 1 * MS, at + 2 * MS, pid, process, 7, number + 1, 1 << 20, 1, 0, 2)
                database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES ({'?,' * 9}?)", copy)
                for nth, name, stream in ((2, 1, 7), (3, 4, 20)):
                    row = (
                        at + 2 * nth * MS,
                        at + (2 * nth + 2) * MS,
                        pid,
                        process,
                        stream,
                        number + nth,
                        name,
                        0,
                        1,
                    )
                    database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({'?,' * 8}?)", row)
    database.close()
    return path


def taken(path: Path, folder: Path) -> Run:
    ingest([path], folder / "run")
    return open_run(folder / "run")


def busy_us(run: Run, rank: int) -> float:
    """Return how long anything runs on the device of *rank*, the union of its spans."""
    table = run.spans([rank])
    on_device = is_one_of(table, "category", ("compute", "copy", "collective", "p2p"))
    start = int64(table, "start_ns")[on_device]
    order = np.argsort(start, kind="stable")
    end = np.maximum.accumulate((start + int64(table, "duration_ns")[on_device])[order])
    start = start[order]
    return float(np.maximum(end - np.maximum(start, np.append(start[:1], end[:-1])), 0).sum()) / 1000


@pytest.mark.parametrize("base", [0, START])
def test_an_export_of_nsight_is_read(tmp_path: Path, base: int) -> None:
    run = taken(exported(tmp_path / "a.sqlite", base=base), tmp_path)
    assert (run.info.world_size, run.stored_ranks) == (2, (0, 1))
    assert (run.info.cluster or {})["device"]["name"] == "NVIDIA H100 80GB HBM3"
    for rank in (0, 1):
        table = run.spans([rank])
        assert "as 'step 4'" in (run.info.job or {})["evidence"]["step"]  # no annotation of torch's profiler
        assert busy_us(run, rank) == 2 * (1000 + 2000 + 2000)
        steps = int64(table, "step")[is_one_of(table, "category", ("compute", "collective", "copy"))]
        assert sorted(steps.tolist()) == [4, 4, 4, 5, 5, 5]
        assert is_one_of(table, "kind", ("all_reduce",)).sum() == 2
        copied = table.filter(is_one_of(table, "kind", ("host_to_device",)))
        assert copied["bytes_moved"].to_pylist() == [1 << 20, 1 << 20]
        assert set(copied["name"].to_pylist()) == {"Memcpy HtoD (Pageable -> Device)"}


def test_a_single_process_is_a_single_rank(tmp_path: Path) -> None:
    run = taken(exported(tmp_path / "a.sqlite", n_processes=1), tmp_path)
    assert run.info.world_size == 1
    assert gaps(run)  # the host's calls are there, so that pauses have causes


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL", "no table CUPTI_ACTIVITY_KIND_KERNEL"),
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN streamId", "no column streamId"),
        ("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL; DELETE FROM CUPTI_ACTIVITY_KIND_MEMCPY", "no kernel"),
        ("DROP TABLE StringIds; CREATE VIEW StringIds AS SELECT 1 AS id, 'x' AS value", "no table StringIds"),
    ],
)
def test_an_export_that_lacks_something_is_refused(tmp_path: Path, damage: str, said: str) -> None:
    path = exported(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(damage)
    with pytest.raises(IngestError, match=said):
        ingest([path], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_database_that_is_packed_is_refused(tmp_path: Path) -> None:
    packed = tmp_path / "a.sqlite.gz"
    packed.write_bytes(gzip.compress(exported(tmp_path / "a.sqlite").read_bytes()))
    with pytest.raises(IngestError, match="unpack it first"):
        ingest([packed], tmp_path / "run")


def test_a_database_is_never_held_whole(tmp_path: Path) -> None:
    path = exported(tmp_path / "a.sqlite")
    size = path.stat().st_size + (256 << 20)
    os.truncate(path, size)
    tracemalloc.start()
    try:
        taken(path, tmp_path)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < size / 2


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while True:
        out.append((value & 0x7F) | (0x80 if value > 0x7F else 0))
        value >>= 7
        if not value:
            return bytes(out)


def message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """Return a message of protobuf."""
    out = b""
    for number, value in fields:
        data = value.encode() if isinstance(value, str) else value
        is_number = isinstance(data, int)
        out += varint(number << 3 | (0 if is_number else 2))
        out += varint(data) if isinstance(data, int) else varint(len(data)) + data
    return out


def plane(name: str, lines: Mapping[str, Sequence[tuple[str, int, int, int]]]) -> bytes:
    """Return a plane: by line, events as name, start and duration in ps, and correlation number."""
    names = sorted({one[0] for events in lines.values() for one in events})
    tables = [(4, message((1, i + 1), (2, message((1, i + 1), (2, one))))) for i, one in enumerate(names)]
    tables.append((5, message((1, 3), (2, message((1, 3), (2, "correlation_id"))))))
    parts = []
    for number, (line, events) in enumerate(lines.items()):
        inside = [
            (4, message((1, names.index(one) + 1), (2, start), (3, took), (4, message((1, 3), (3, launch)))))
            for one, start, took, launch in events
        ]
        parts.append((3, message((1, number + 1), (2, line), (3, 1000), *inside)))
    return message((2, name), *parts, *tables)


def space(*planes: bytes) -> bytes:
    return message(*((1, one) for one in planes))


US = 1_000_000  # in ps


@pytest.mark.parametrize("field", [1, 2, 3])
def test_a_number_of_an_xplane_that_is_written_otherwise_is_refused(tmp_path: Path, field: int) -> None:
    """Of an event its name, offset and duration are integers; here one is eight bytes of a fraction."""
    event = message(*((one, US) for one in (1, 2, 3) if one != field)) + varint(field << 3 | 1) + bytes(8)
    body = message((2, "/device:GPU:0"), (3, message((2, "Stream #1"), (4, event))))
    path = _file(tmp_path / "x.xplane.pb", space(body))
    with pytest.raises(IngestError, match="is no XPlane"):
        ingest([path], tmp_path / "run")


@pytest.mark.parametrize(
    ("start_ns", "offset_ps"), [((1 << 63) - 1, (1 << 63) - 1), (1 << 62, 0), (-1 << 63, 0)]
)
def test_a_time_that_no_clock_shows_is_lost(tmp_path: Path, start_ns: int, offset_ps: int) -> None:
    bad = message((2, "Stream #1"), (3, start_ns), (4, message((2, offset_ps), (3, US))))
    good = message((2, "Stream #2"), (3, 1000), (4, message((2, 0), (3, US))))
    path = _file(tmp_path / "x.xplane.pb", space(message((2, "/device:GPU:0"), (3, bad))))
    with pytest.raises(IngestError, match="1 without a usable time"):
        ingest([path], tmp_path / "run")
    path.write_bytes(space(message((2, "/device:GPU:0"), (3, bad), (3, good))))
    run = taken(path, tmp_path)
    assert busy_us(run, 0) == 1
    assert sum(run.info.dropped.values()) == 1


def test_help_names_every_kind_that_is_read() -> None:
    said = " ".join(CliRunner().invoke(main, ["ingest", "--help"]).output.split())
    assert [kind for kind in READERS if kind not in said] == []


def test_an_xplane_of_gpus_is_read(tmp_path: Path) -> None:
    gpus = [
        plane(f"/device:GPU:{i}", {"Stream #7(Kernel)": [("fusion", 50 * US, 20 * US, 10 + i)],
              "XLA Ops": [("fusion.1", 50 * US, 20 * US, 0)], "XLA Modules": [("jit", 0, 500 * US, 0)]})
        for i in range(2)
    ]  # fmt: skip
    host = plane("/host:CPU", {"thread": [("cuLaunchKernel", 10 * US, 4 * US, 10), ("python", 0, 9 * US, 0)]})
    (tmp_path / "x.xplane.pb").write_bytes(space(*gpus, host))
    run = taken(tmp_path / "x.xplane.pb", tmp_path)
    assert run.stored_ranks == (0, 1)
    for rank in (0, 1):
        assert busy_us(run, rank) == 20
        table = run.spans([rank])
        names = table.filter(is_one_of(table, "category", ("compute",)))["name"].to_pylist()
        assert names == ["fusion"]  # modules and operations say again what kernels do


def test_an_xplane_of_tpus_has_steps(tmp_path: Path) -> None:
    lines = {
        "Steps": [("3", 0, 100 * US, 0), ("4", 100 * US, 100 * US, 0)],
        "XLA Ops": [("fusion", 10 * US, 50 * US, 0), ("all-reduce", 110 * US, 50 * US, 0)],
    }
    (tmp_path / "x.xplane.pb").write_bytes(space(plane("/device:TPU:0", lines)))
    table = taken(tmp_path / "x.xplane.pb", tmp_path).spans([0])
    assert int64(table, "step")[is_one_of(table, "category", ("compute",))].tolist() == [3]
    assert int64(table, "step")[is_one_of(table, "category", ("collective",))].tolist() == [4]


def rocprof(n_processes: int = 1) -> list[dict[str, Any]]:
    """Two processes of rocprofv3, each with a kernel that a call launched, and a copy from the host."""
    gpu = {"id": {"handle": 9}, "type": 2, "product_name": "AMD Instinct MI300X"}
    strings = [
        {"kind": "NONE", "operations": []},
        {"kind": "C", "operations": ["NONE", "MEMORY_COPY_HOST_TO_DEVICE"]},
    ]
    one = {
        "agents": [{"id": {"handle": 1}, "type": 1}, gpu],
        "kernel_symbols": [{"kernel_id": 5, "formatted_kernel_name": "ncclDevKernel_AllReduce_x(int)"}],
        "strings": {"buffer_records": strings},
        "buffer_records": {
            "kernel_dispatch": [
                {"start_timestamp": 5000, "end_timestamp": 9000, "correlation_id": {"internal": 3},
                 "dispatch_info": {"agent_id": {"handle": 9}, "queue_id": {"handle": 2}, "kernel_id": 5}},
            ],
            "memory_copy": [
                {"start_timestamp": 1000, "end_timestamp": 3000, "kind": 1, "operation": 1, "bytes": 4096,
                 "dst_agent_id": {"handle": 9}, "correlation_id": {"internal": 2}},
            ],
            "hip_api": [{"start_timestamp": 500, "end_timestamp": 700, "thread_id": 4, "kind": 1,
                         "operation": 0, "correlation_id": {"internal": 3}}],
        },
    }  # fmt: skip
    return [one] * n_processes


@pytest.mark.parametrize("n_processes", [1, 2])
def test_a_file_of_rocprofv3_is_read(tmp_path: Path, n_processes: int) -> None:
    path = tmp_path / "1_results.json"
    path.write_text(json.dumps({"rocprofiler-sdk-tool": rocprof(n_processes)}))
    run = taken(path, tmp_path)
    assert run.info.world_size == n_processes
    assert (run.info.cluster or {})["device"]["name"] == "AMD Instinct MI300X"
    for rank in range(n_processes):
        table = run.spans([rank])
        assert busy_us(run, rank) == 6
        assert is_one_of(table, "kind", ("all_reduce",)).sum() == 1
        copies = table.filter(is_one_of(table, "kind", ("host_to_device",)))
        assert copies["bytes_moved"].to_pylist() == [4096]


WRITERS: dict[str, Callable[[Path], Path]] = {
    "nsight": lambda folder: exported(folder / "a.sqlite"),
    "xplane": lambda folder: _file(
        folder / "a.xplane.pb", space(plane("/device:GPU:0", {"Stream #1": [("k", 0, US, 0)]}))
    ),
    "rocprof": lambda folder: _file(
        folder / "a.json", json.dumps({"rocprofiler-sdk-tool": rocprof()}).encode()
    ),
}


def _file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", WRITERS)
def test_the_kind_is_told_by_what_is_in_a_file(tmp_path: Path, kind: str) -> None:
    with found_sources([WRITERS[kind](tmp_path)], tmp_path / "run") as (source,):
        assert kind_of(source) == kind


@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_damage_is_one_line_or_a_run(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    """Cut off or flipped anywhere, a file is refused in one line, or read; no other error comes out."""
    folder = tmp_path_factory.mktemp("damaged")
    path = WRITERS[kind](folder)
    whole = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        whole = whole[:place]
    else:
        whole[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    said = ""
    try:
        ingest([path], folder / "run")
    except IngestError as error:
        said = str(error)
    assert "\n" not in said
    assert (folder / "run").exists() == (not said)


@needs_real
def test_a_real_xplane_equals_its_sum(tmp_path: Path) -> None:
    run = taken(REAL / "fresh" / "mi300_jax_conv.xplane.pb", tmp_path)
    expected = [3996.0, 3345.8, 3524.3, 3403.4, 3493.4, 3464.9, 3403.0, 3502.2]  # µs, of INDEX.md beside it
    assert [busy_us(run, rank) for rank in range(8)] == pytest.approx(expected, abs=0.1)
    assert (
        sum(is_one_of(run.spans([rank]), "category", ("compute",)).sum() for rank in range(8)) == 60 + 7 * 25
    )


@needs_real
def test_a_real_file_of_rocprofv3_equals_its_sum(tmp_path: Path) -> None:
    run = taken(REAL / "fresh" / "rocprofv3_908_results.json.gz", tmp_path)
    table = run.spans([0])
    on_device = is_one_of(table, "category", ("compute", "collective"))
    assert int(on_device.sum()) == 43_915
    assert int(is_one_of(table, "category", ("collective",)).sum()) == 1_310
    assert busy_us(run, 0) / 1000 == pytest.approx(4233.1, abs=0.1)
    assert (run.info.cluster or {})["device"]["name"] == "AMD Instinct MI350X"


@pytest.mark.usefixtures("planted")
def test_many_files_are_read_at_once_and_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own or one after another, files give the same run and the same words."""
    files = [exported(tmp_path / f"rank{i}.sqlite", n_processes=1, base=START + i) for i in range(5)]
    bad = _file(tmp_path / "rank5.sqlite", files[0].read_bytes()[:5000])
    told: list[tuple[str, int]] = []
    runs = []
    for name, least in (("apart", 0), ("here", 1 << 60)):
        monkeypatch.setattr("foretrace.tracer.ingest.reading.LEAST_BYTES", least)
        info = ingest([*files, bad], tmp_path / name, name="same", progress=lambda *said: told.append(said))
        runs.append((info.warnings, open_run(tmp_path / name).spans().to_pylist()))
    assert runs[0] == runs[1]
    assert len(runs[0][1]) > 0
    assert any("rank5" in warning for warning in runs[0][0])
    assert {name for name, _ in told} >= {str(path) for path in files}


def test_a_reader_that_is_ended_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [exported(tmp_path / f"rank{i}.sqlite", n_processes=1) for i in range(3)]
    monkeypatch.setattr("foretrace.tracer.ingest.reading.LEAST_BYTES", 0)
    monkeypatch.setattr("foretrace.tracer.ingest.reading.WORKER", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(IngestError, match="was ended, perhaps for want of memory"):
        ingest(files, tmp_path / "run")
    assert not (tmp_path / "run").exists()
