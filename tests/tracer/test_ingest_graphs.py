"""Graphs, communication traces and flight-recorder dumps become runs; without times, they say so."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from foretrace.simulator.network.cost import Network
from foretrace.simulator.network.nccl import choice
from foretrace.simulator.rehearsed.run import simulate_rehearsal
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.placement import place
from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.ingest import ingest
from foretrace.traces.analysis.findings import findings
from foretrace.traces.run import Run
from foretrace.traces.store import open_run

REAL = Path(os.environ.get("FORETRACE_REAL_TRACES", Path(__file__).parents[3] / "shared" / "real_traces"))
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason=f"no real traces at {REAL} (FORETRACE_REAL_TRACES)")


def opened(source: Path, at: Path) -> Run:
    ingest([source], at)
    return open_run(at)


def varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def message(*fields: tuple[int, int | bytes]) -> bytes:
    found = b""
    for tag, value in fields:
        if isinstance(value, int):
            found += varint(tag << 3) + varint(value)
        else:
            found += varint(tag << 3 | 2) + varint(len(value)) + value
    return found


NODES = [
    {"Id": 1, "Name": "aten::mm", "NodeType": 4, "data_deps": [], "runtime": 10, "is_cpu_op": True},
    {"Id": 2, "Name": "sgemm", "NodeType": 4, "data_deps": [1], "runtime": 30, "is_cpu_op": False},
    {
        "Id": 3,
        "Name": "ncclDevKernel_AllReduce",
        "NodeType": 7,
        "data_deps": [2],
        "runtime": 5,
        "comm_size": 64,
    },
    {"Id": 4, "Name": "aten::add", "NodeType": 4, "data_deps": [1], "runtime": 7, "is_cpu_op": True},
]


def test_nodes_are_laid_out_as_early_as_they_may_be(tmp_path: Path) -> None:
    (tmp_path / "g.json").write_text(json.dumps({"workload_graph": NODES}))
    spans = opened(tmp_path / "g.json", tmp_path / "run").spans().to_pylist()
    placed = {row["name"]: (row["stream"], row["start_ns"], row["duration_ns"]) for row in spans}
    assert placed == {
        "aten::mm": ("host", 0, 10_000),
        "sgemm": ("compute", 10_000, 30_000),
        "ncclDevKernel_AllReduce": ("communication", 40_000, 5_000),
        "aten::add": ("host", 10_000, 7_000),
    }


@pytest.mark.parametrize(
    "metadata", [[(1, b"\x0a\x06schema")], [(1, b"0.0.4")], [(1, b"0.0.4"), (2, message((29, b" " * 200)))]]
)
def test_protobuf_reads_as_json_does(metadata: list[tuple[int, bytes]], tmp_path: Path) -> None:
    """Whether the file begins with an attribute, with the version as ASTRA-sim's own do, or with much."""
    (tmp_path / "g.json").write_text(json.dumps({"workload_graph": NODES}))
    data = b""
    for part in [message(*metadata), *map(encoded, NODES)]:
        data += varint(len(part)) + part
    (tmp_path / "g.et").write_bytes(b"".join([data]))
    assert opened(tmp_path / "g.et", tmp_path / "a").spans().to_pylist() == (
        opened(tmp_path / "g.json", tmp_path / "b").spans().to_pylist()
    )


def encoded(node: dict[str, Any]) -> bytes:
    on_host = message((1, b"is_cpu_op"), (27, int(node.get("is_cpu_op", False))))
    size = message((1, b"comm_size"), (13, node.get("comm_size", 0)))
    depends = b"".join(varint(number) for number in node["data_deps"])
    fields: list[tuple[int, int | bytes]] = [
        (1, node["Id"]),
        (2, node["Name"].encode()),
        (3, node["NodeType"]),
    ]
    fields += [(5, depends)] if depends else []
    return message(*fields, (7, node["runtime"]), (10, on_host), (10, size))


def test_a_circle_is_refused(tmp_path: Path) -> None:
    nodes = [NODES[0] | {"data_deps": [2]}, NODES[1]]
    (tmp_path / "g.json").write_text(json.dumps({"workload_graph": nodes}))
    with pytest.raises(IngestError, match="2 nodes wait for one another"):
        ingest([tmp_path / "g.json"], tmp_path / "run")


def dump(**more: Any) -> dict[str, Any]:
    entry = {
        "collective_seq_id": 4,
        "profiling_name": "nccl:all_reduce",
        "process_group": ["0", "default_pg"],
    }
    entry |= {"time_created_ns": 1_000, "time_discovered_started_ns": 2_000, "duration_ms": 0.003}
    entry |= {"input_sizes": [[4, 2]], "input_dtypes": ["Float"], "state": "completed"}
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.10", "pg_config": config, "entries": [entry | more]}


@pytest.mark.parametrize("how", ["json", "pickle"])
def test_a_dump_gives_its_collectives(how: str, tmp_path: Path) -> None:
    source = tmp_path / "nccl_trace_rank_1"
    source.write_bytes(json.dumps(dump()).encode() if how == "json" else pickle.dumps(dump()))
    (row,) = opened(source, tmp_path / "run").spans().to_pylist()
    assert (row["rank"], row["kind"], row["duration_ns"], row["sequence"]) == (1, "all_reduce", 3_000, 4)
    assert (row["axis"], row["size_bytes"], row["dtype"]) == ("world", 32, "fp32")


def test_the_size_of_a_gather_in_a_dump_is_that_of_the_whole(tmp_path: Path) -> None:
    """A dump has what a rank gives."""
    (tmp_path / "rank_0").write_text(json.dumps(dump(profiling_name="nccl:_all_gather_base")))
    (row,) = opened(tmp_path / "rank_0", tmp_path / "run").spans().to_pylist()
    assert (row["kind"], row["size_bytes"]) == ("all_gather", 2 * 32)


@pytest.mark.parametrize(
    ("measured_ms", "ended_ns", "took_ns"),
    [
        (0.003, 9_000, 3_000),  # what the device measured is closer than what was seen
        (0, 9_000, 0),
        (-1, 9_000, 7_000),
        (1e9, 9_000, 7_000),
        (None, 2_000, 0),
        (None, 1_999, None),
        (None, 1 << 62, None),
        (None, None, None),
    ],
)
def test_a_collective_of_a_dump_ends_when_its_device_says_or_is_counted_as_without_an_end(
    measured_ms: float | None, ended_ns: int | None, took_ns: int | None, tmp_path: Path
) -> None:
    """It began at 2,000 ns."""
    said = dump(duration_ms=measured_ms, time_discovered_completed_ns=ended_ns)
    (tmp_path / "rank_0").write_text(json.dumps(said))
    found = ingest([tmp_path / "rank_0"], tmp_path / "run")
    is_lost = {"collective without an end: only its arrival is known": 1}
    assert found.dropped == (is_lost if took_ns is None else {})
    (row,) = open_run(tmp_path / "run").spans().to_pylist()
    assert row["duration_ns"] == (took_ns or 0)


@pytest.mark.parametrize(("said", "kept"), [(4, 4), (0, 0), (-1, -1), (None, -1)])
def test_a_collective_of_a_dump_keeps_its_number(said: int | None, kept: int, tmp_path: Path) -> None:
    (tmp_path / "rank_0").write_text(json.dumps(dump(collective_seq_id=said)))
    (row,) = opened(tmp_path / "rank_0", tmp_path / "run").spans().to_pylist()
    assert row["sequence"] == kept


@pytest.mark.parametrize("at", [{}, {"time_created_ns": 0}, {"time_created_ns": 1 << 62}])
def test_a_dump_without_a_time_is_refused(at: dict[str, int], tmp_path: Path) -> None:
    known = {"time_created_ns": None, "time_discovered_started_ns": None}
    (tmp_path / "rank_0").write_text(json.dumps(dump(**known | at)))
    with pytest.raises(IngestError, match="holds no collective with a time"):
        ingest([tmp_path / "rank_0"], tmp_path / "run")


def test_a_pickle_that_calls_something_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "owned"),)

    (tmp_path / "rank_0").write_bytes(pickle.dumps({"entries": [Evil()]}))
    with pytest.raises(IngestError, match="not a dump"):
        ingest([tmp_path / "rank_0"], tmp_path / "run")
    assert not (tmp_path / "owned").exists()


def test_a_pickle_that_would_need_gigabytes_is_refused(tmp_path: Path) -> None:
    """A memo index of 200,000,000 in 19 bytes."""
    index = (200_000_000).to_bytes(4, "little")
    (tmp_path / "rank_0").write_bytes(b"\x80\x02" + b"]r" + index + b"j" + index + b"X\x07\x00entries.")
    with pytest.raises(IngestError, match="not a dump"):
        ingest([tmp_path / "rank_0"], tmp_path / "run")


@pytest.mark.parametrize("ranks", ["[0, 1", "[" * 100_000, "{}", 7, [[0]], ["x", -1]])
def test_members_that_cannot_be_read_are_unknown(tmp_path: Path, ranks: Any) -> None:
    (tmp_path / "rank_0").write_text(json.dumps(dump(), default=str).replace('"[0, 1]"', json.dumps(ranks)))
    assert opened(tmp_path / "rank_0", tmp_path / "run").spans().num_rows == 1


def test_a_chakra_graph_without_work_is_refused(tmp_path: Path) -> None:
    timeless = [{**one, "runtime": 0, "NodeType": 4, "Name": "sgemm"} for one in NODES]
    (tmp_path / "g.json").write_text(json.dumps({"workload_graph": timeless}))
    with pytest.raises(IngestError, match="no duration, nor any work"):
        ingest([tmp_path / "g.json"], tmp_path / "run")


def graph_node(number: int, kind: int, *before: int, **said: int | str) -> bytes:
    """Return a node of a workload: attributes as ASTRA-sim has them."""
    attributes = [
        (10, message((1, name.encode()), (29, value.encode()) if isinstance(value, str) else (9, value)))
        for name, value in said.items()
        if name != "us"
    ]
    name, after = f"node{number}".encode(), b"".join(map(varint, before))
    return message((1, number), (2, name), (3, kind), (5, after), (7, int(said.get("us", 0))), *attributes)


def workload(at: Path, *ranks: list[bytes], **groups: list[int]) -> Path:
    """Write a workload of ASTRA-sim: a file for each rank, and one of the groups, if there are any."""
    at.mkdir()
    for rank, nodes in enumerate(ranks):
        parts = [message((1, b"0.0.4")), *nodes]
        (at / f"w.{rank}.et").write_bytes(b"".join(varint(len(part)) + part for part in parts))
    if groups:
        named = {name.strip("_"): ranks for name, ranks in groups.items()}
        (at / "groups.json").write_text(json.dumps(named))
    return at


def simulated(source: Path, at: Path) -> Run:
    """Return what a workload is on H100s."""
    ingest([source], at)
    return simulate_rehearsal(at, lambda n: load_cluster("dgx-h100", n)).run


ALL_REDUCE, ALL_GATHER = 0, 2
COMPUTE, SEND, RECV, COLLECTIVE = 4, 5, 6, 7


def test_a_workload_is_simulated_with_the_dependencies_that_it_has(tmp_path: Path) -> None:
    """Durations are the file's, communication that of the machine; what depends on nothing runs beside."""
    size = 1 << 30
    nodes = [
        graph_node(0, COMPUTE, us=1_000),
        graph_node(1, COLLECTIVE, 0, comm_type=ALL_REDUCE, comm_size=size),
        graph_node(2, COMPUTE, 1, us=500),
    ]
    machine = load_cluster("dgx-h100", 8)
    network = Network(machine, place(8, machine, "packed"), choice("", ""))
    transfer = network.collective("all_reduce", size, tuple(range(8)))
    own_ns = transfer.latency_ns + transfer.wire_ns
    run = simulated(workload(tmp_path / "w", *[nodes] * 8), tmp_path / "a")
    assert run.info.summary["step_time_s"] * 1e9 == pytest.approx(1_500_000 + own_ns, abs=2)
    beside = [nodes[0], graph_node(1, COLLECTIVE, comm_type=ALL_REDUCE, comm_size=size), nodes[2]]
    run = simulated(workload(tmp_path / "v", *[beside] * 8), tmp_path / "b")
    assert run.info.summary["step_time_s"] * 1e9 == pytest.approx(own_ns + 500_000, abs=2)


def test_ranks_that_all_send_first_do_not_wait_for_one_another(tmp_path: Path) -> None:
    """As in a collective that is written out: a send is in a buffer, and tags tell which receive it meets."""
    n, ranks = 4, []
    for rank in range(n):
        to, of = {"comm_dst": (rank + 1) % n}, {"comm_src": (rank - 1) % n}
        size = {"comm_size": 1 << 20}
        ranks.append(
            [
                graph_node(0, SEND, comm_tag=0, **to, **size),
                graph_node(1, RECV, 0, comm_tag=1, **of, **size),
                graph_node(2, RECV, 0, comm_tag=0, **of, **size),
                graph_node(3, SEND, 2, comm_tag=1, **to, **size),
                graph_node(4, COMPUTE, 1, us=10),
            ]
        )
    spans = simulated(workload(tmp_path / "w", *ranks), tmp_path / "a").spans([0]).to_pylist()
    received = max(row["start_ns"] + row["duration_ns"] for row in spans if row["kind"] == "recv")
    assert [row["start_ns"] for row in spans if row["category"] == "compute"] == [received]
    assert sum(row["kind"] == "send" for row in spans) == 2


def test_a_collective_that_a_rank_leaves_out_is_told(tmp_path: Path) -> None:
    gather = {"comm_type": ALL_GATHER, "comm_size": 1 << 20}
    first, second = graph_node(0, COLLECTIVE, **gather), graph_node(1, COLLECTIVE, 0, **gather)
    run = simulated(workload(tmp_path / "w", [first, second], [first]), tmp_path / "a")
    assert any(said.startswith("1 collectives lack ranks of their group") for said in run.warnings)
    run = simulated(workload(tmp_path / "v", [first, second], [first, second]), tmp_path / "b")
    assert not any("lack ranks" in said for said in run.warnings)


def test_work_is_priced_by_its_operations_or_its_bytes(tmp_path: Path) -> None:
    """Twice the bytes take twice as long, and so do operations that are many; the host is not asked."""
    took = {}
    for name, said in {
        "bytes": {"tensor_size": 1 << 30},
        "more bytes": {"tensor_size": 1 << 31},
        "flops": {"num_ops": 10**14, "tensor_size": 1 << 20},
        "more flops": {"num_ops": 2 * 10**14, "tensor_size": 1 << 20},
    }.items():
        run = simulated(workload(tmp_path / name, [graph_node(0, COMPUTE, **said)]), tmp_path / f"of {name}")
        took[name] = run.info.summary["step_time_s"]
    assert took["more bytes"] / took["bytes"] == pytest.approx(2, rel=0.02)
    assert took["more flops"] / took["flops"] == pytest.approx(2, rel=0.02)
    assert took["flops"] > 10**14 / load_cluster("dgx-h100", 8).device.peak("bf16")


def test_groups_of_a_workload_are_those_of_its_file(tmp_path: Path) -> None:
    """What nobody says the members of is named, and not simulated. A gather's size is what a rank gives."""
    gather = graph_node(0, COLLECTIVE, comm_type=ALL_GATHER, comm_size=1 << 20, pg_name="7", odd=1)
    ranks = [[gather]] * 4
    info = ingest([workload(tmp_path / "w", *ranks, _7=[0, 1])], tmp_path / "a")
    assert [group.ranks for group in info.groups] == [(0, 1)]
    assert info.dropped["attribute odd, which is not read"] == 4
    (row,) = open_run(tmp_path / "a").spans([1]).to_pylist()
    assert (row["size_bytes"], row["group"]) == (2 << 20, info.groups[0].id)
    with pytest.raises(IngestError, match="nor any work"):
        ingest([workload(tmp_path / "v", *ranks)], tmp_path / "b")
    timed = graph_node(1, COMPUTE, us=5)
    info = ingest([workload(tmp_path / "u", [gather, timed])], tmp_path / "c")
    assert any("nothing says who group '7' is" in said for said in info.warnings)
    assert not (tmp_path / "c" / "rehearsal").exists()


@needs_real
def test_a_real_graph_in_protobuf_is_read(tmp_path: Path) -> None:
    run = opened(REAL / "chakra_et" / "feeder_tests_trace.tar.gz", tmp_path / "run")
    assert run.spans().num_rows > 1_000


def entry(comms: str, start_ns: int | None = None, **more: Any) -> dict[str, Any]:
    """Return one entry of a communication trace of PARAM."""
    size = {"in_msg_size": 1024, "out_msg_size": 1024, "dtype": "Float"}
    started = {} if start_ns is None else {"startTime_ns": start_ns}
    return {
        "comms": comms,
        "world_size": 4,
        "pg_id": 0,
        "global_ranks": [0, 1, 2, 3],
        **size,
        **started,
        **more,
    }


def test_a_param_trace_gives_its_collectives(tmp_path: Path) -> None:
    """Measured durations count; what was only called lasts until it is waited for, or is counted."""
    listed = [
        entry("init"),
        entry("all_reduce", 1_000, req=1),
        entry("all_gather", 2_000, latency_us=3.5, out_msg_size=4096),
        {"comms": "wait", "req": 1, "startTime_ns": 9_000},
        entry("all_to_allv", 20_000),
        {"compute": "gemm", "mm_dim": 64, "startTime_ns": 30_000, "latency_us": 2.0},
        entry("isend", 40_000, latency_us=1.0, src_rank=2, dst_rank=3, use_batch=False),
        entry("something_else", 50_000),
        7,
    ]
    (tmp_path / "rank2.json").write_text(json.dumps(listed))
    run = opened(tmp_path / "rank2.json", tmp_path / "run")
    found = {row["kind"]: row for row in run.spans([2]).to_pylist()}
    assert found["all_reduce"]["duration_ns"] == 8_000
    assert (found["all_reduce"]["size_bytes"], found["all_reduce"]["dtype"]) == (4096, "fp32")
    assert (found["all_gather"]["duration_ns"], found["all_gather"]["size_bytes"]) == (3_500, 16384)
    assert found["all_to_all"]["duration_ns"] == 0
    assert (found["send"]["peer"], found["send"]["category"]) == (3, "p2p")
    assert found["kernel"]["name"] == "gemm"
    assert run.info.world_size == 4
    assert run.info.groups[0].ranks == (0, 1, 2, 3)
    assert sum(run.info.dropped.values()) == 3


def test_a_param_trace_without_starts_is_laid_end_to_end(tmp_path: Path) -> None:
    """As a replay writes it."""
    listed = [entry("all_reduce", latency_us=5.0), entry("all_reduce", latency_us=7.0)]
    (tmp_path / "rank0.json").write_text(json.dumps(listed))
    run = opened(tmp_path / "rank0.json", tmp_path / "run")
    assert run.spans()["start_ns"].to_pylist() == [0, 5_000]
    assert run.spans()["sequence"].to_pylist() == [0, 1]
    (tmp_path / "rank0.json").write_text(json.dumps([entry("all_reduce", 5)]))
    with pytest.raises(IngestError, match="no collective with a length"):
        ingest([tmp_path / "rank0.json"], tmp_path / "other")


def node(number: int, name: str, caller: int, *shapes: list[int]) -> dict[str, Any]:
    """Return one node of an execution trace of PyTorch."""
    tensors = {"values": [], "shapes": list(shapes), "types": ["Tensor(float)"] * len(shapes)}
    attributes = [{"name": "tid", "type": "uint64", "value": 1}]
    return {"id": number, "name": name, "ctrl_deps": caller, "inputs": tensors, "attrs": attributes}


def test_an_execution_trace_gives_counts_and_no_times(tmp_path: Path) -> None:
    """Operators that call others are not counted twice; no finding is made of drawn times."""
    groups = json.dumps([{"pg_name": "0", "ranks": [], "group_size": 2}])
    nodes = [
        node(1, "[pytorch|profiler|execution_trace|thread]", 0),
        {
            **node(2, "## process_group:init ##", 1),
            "inputs": {"values": [groups], "shapes": [[]], "types": ["String"]},
        },
        node(3, "aten::linear", 1, [8, 16], [16, 4]),
        node(4, "aten::mm", 3, [8, 16], [16, 4]),
        node(5, "nccl:all_reduce", 1, [100]),
    ]
    (tmp_path / "et.json").write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": nodes}))
    run = opened(tmp_path / "et.json", tmp_path / "run")
    found = {row["name"]: row for row in run.spans().to_pylist()}
    assert set(found) == {"aten::mm", "nccl:all_reduce"}
    assert found["aten::mm"]["flops"] == 2 * 8 * 16 * 4
    assert (found["nccl:all_reduce"]["size_bytes"], found["nccl:all_reduce"]["axis"]) == (400, "world")
    assert run.is_timeless
    assert findings(run) == []
    assert sum("no times in the files" in said for said in run.warnings) == 1


@needs_real
@pytest.mark.parametrize(
    "name",
    [
        "param_resnet_1gpu_et_1.1.1.json.tar.gz",
        "param_resnet_2gpu_et_1.1.0.json.gz",
        "1.0.2-chakra.0.0.4.tgz",
    ],
)
def test_real_execution_traces_are_read(name: str, tmp_path: Path) -> None:
    """Of every schema."""
    run = opened(REAL / "chakra_et" / name, tmp_path / "run")
    assert run.is_timeless
    assert run.spans().num_rows > 100


@needs_real
def test_graphs_beside_traces_are_left_out_and_counted(tmp_path: Path) -> None:
    """A profiler that was asked for both writes both into one folder; one of them has times."""
    found = ingest(
        [REAL / "param_dlrm_v100x8" / "kineto", REAL / "param_dlrm_v100x8" / "et"], tmp_path / "run"
    )
    assert sum("a graph beside traces that have times" in said for said in found.warnings) == 8
    run = open_run(tmp_path / "run")
    assert not run.is_timeless
    assert len(run.stored_ranks) == 8
