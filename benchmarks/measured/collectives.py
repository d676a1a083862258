"""Tables of published collectives in the columns of ``foretrace validate collectives``.

A row may say how it was timed, and on which machine. Each rule here is about a way to measure, never about
who published.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from foretrace.simulator import table as product_table
from foretrace.simulator.errors import SimulationError, TableError
from foretrace.simulator.network.collectives import KINDS, bus_factor
from foretrace.simulator.validate.collectives import EXPERTS, GROUPS, scored_collectives
from foretrace.simulator.validate.scores import Failed, Validation
from foretrace.simulator.workload.dispatch import Routing, traffic
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.errors import TopologyError
from measured.machines import RACK, SHARP, Machines, assumed, machine
from measured.table import Row, read_table

KIND: Final = {
    **{kind.replace("_", ""): kind for kind in (*KINDS, "send_recv")},
    "alltoallv": "all_to_all",
    "alltoallsingle": "all_to_all",
    "allgatherintotensor": "all_gather",
    "reducescattertensor": "reduce_scatter",
    "bcast": "broadcast",
    "p2p": "send_recv",
    "send": "send_recv",
    "recv": "send_recv",
}
"""What an operation is called in tables, in small letters alone."""

FP8_BLOCK: Final = 128
"""Values of fp8 that share a scale of four bytes. DeepSeek-V3 technical report 2024, arXiv:2412.19437."""

_ROUTING: Final = {
    "tokens": r"(\d+) tokens",
    "hidden": r"hidden (\d+)",
    "top_k": r"top-(\d+)(?! groups)",
    "groups": r"top-(\d+) groups",
}

FORMS: Final = (("gpu", "n"), ("hardware", "nodes", "gpus"))
"""Columns that say where a row was measured, of a table of one node and of one that names its hardware."""

SHARED: Final = "aws-p5-shared"
"""Machine of the catalogue whose ``crowding`` stands for that of a cluster which many jobs share."""

PROFILED: Final = re.compile(r"kernel time")
"""The time is that of the kernel in a profile. One kernel follows another, so that it lasts at least until
the slowest rank has launched its own."""

LAUNCH_US: Final = {"older": 58.0, "newer": 36.0}
"""Time in which one process launches collective after collective under a profiler, on hosts of A100 and
before and on those since: what small all-reduces take in the profiles of microsoft/vidur 7d47513 over any
link, 52 to 62 us on two kinds of host with A100, 38 to 44 and 28 us on two with H100."""

OLDER: Final = re.compile(r"[ab]?a\d+|v100|t4|[234]0[789]0", re.IGNORECASE)
"""GPUs whose servers came before 2022."""

ONE_BY_ONE: Final = re.compile(r"all_reduce_bench\.py(?!.*back-computed)")
"""The time lies between two CUDA events around one call from Python, with a wait before the next."""

CALL_US: Final = 20.0
"""What such a call adds: 20.5 us on B200 and 21.4 us on H200 beyond nccl-tests, from 32 KiB to 1 MiB alike
(stas00/ml-engineering 744d01e, against ai-dynamo/aiconfigurator)."""

BOTH_WAYS: Final = re.compile(r"all_reduce_bench\.py.*back-computed from throughput")
"""The size was worked back from a throughput that counts what is sent and what is received: twice the array.
In experiments/bandwidth/all_reduce_bench.py of bigscience-workshop/bigscience 161870a: ``*2 is for send +
receive``; it prints ``data size: 4.0 GB`` where the size so found is 8 GB."""

RING: Final = re.compile(r"algo Ring|(?:^|; ?)Ring\b")
WITHOUT_SWITCHES: Final = re.compile(r"NVLS_ENABLE=0|NVLS off")
"""All went round rings; the switches inside a node were kept from reducing."""

SETTING: Final = r"\s*[=:]\s*[\"']?(\^?\w+(?:[,:;^]+\w+)*)"
"""What follows the name of a variable of NCCL that was set."""

MANY_RUNS: Final = re.compile(r"percentile")
"""The middle of many runs that came and went on a cluster beside others."""

FROM_LISTS: Final = frozenset({"all_gather", "reduce_scatter"})
"""Operations which frameworks offer for a list of arrays, one per rank. What is gathered lies in one array,
and is copied out of it then; what is scattered is copied into one before. Medians over many runs come from
such a program: inside a node both operations take 0.20 ms longer for 256 MB than NCCL alone, and 0.19 ms is
what reading and writing the array takes. Found on one node, used for all (docs/network-evidence.md)."""

IN_A_ROW: Final = 11
"""Launches one after another of which a profile shows the middle one (microsoft/vidur 7d47513,
vidur/profiling/collectives/collectives_wrapper.py)."""

_ONE_SIDED: Final = frozenset({"send_recv"})


def score_collectives(table: str | Path, machines: Sequence[tuple[str, str]] = ()) -> Validation:
    """Return what ``validate_collectives`` does, and keep no file."""
    with TemporaryDirectory() as folder:
        return validate_collectives(Path(table), machines, Path(folder))[0]


def validate_collectives(
    table: Path, machines: Sequence[tuple[str, str]], folder: Path
) -> tuple[Validation, list[dict[str, Any]]]:
    """Return what every row of *table* takes, predicted and measured, in microseconds, and the rows.

    Two forms are read: columns ``source_group, hardware, nodes, gpus, op, bytes, notes`` and one of
    ``time_us``, ``algbw_GBps``, ``busbw_GBps``; or ``gpu, op, n, bytes, us``, on one node.

    Args:
        table: path of the table.
        machines: words, and the machine that hardware beginning with them is; the first that fits counts.
        folder: where files of machines are written.

    Raises:
        TableError: the table cannot be read, has neither form, or no hardware in it begins with such words.
        TopologyError: there is no such machine.
    """
    rows = read_table(table, ("op", "bytes"))
    product_table.require(rows[0], FORMS["hardware" in rows[0].columns], table)
    meant = _Meant.of(rows, machines)
    files = Machines(folder)
    written: list[dict[str, Any]] = []
    groups: list[str] = []
    failed: list[Failed] = []
    notes: Counter[str] = Counter()
    for row in rows:
        source = row.text("source_group", table.stem)
        n_gpus = row.text("gpus") or row.text("n")
        family = f"{source} · {_hardware(row)} · {row.text('op')} · {n_gpus} GPUs"
        try:
            cluster, per_node = _machine(row, meant)
            cells = {**columns(row, cluster), "ranks_per_node": per_node, "cluster": files.name(cluster)}
        except (SimulationError, TopologyError) as error:
            failed.append(Failed(id=row.id, family=family, reason=str(error)))
            continue
        named = {"id": row.id, "family": family, **cells}
        written.append({name: str(cell) for name, cell in named.items()})
        groups.append(GROUPS[row.integer("nodes", 1) > 1])
        notes.update(_said(row, meant, cluster))
    scored = []
    for cells, group in zip(written, groups, strict=True):
        found = scored_collectives([product_table.Row(cells, 1)], str(table))
        scored += [replace(one, group=group) for one in found.rows]
        failed += found.failures
    lines = [f"{count} rows: {words}" for words, count in notes.most_common()]
    validation = Validation(
        kind="collectives", table=str(table), unit="us", rows=scored, failures=failed, notes=lines
    )
    return validation, written


def columns(row: Row, cluster: Cluster) -> dict[str, Any]:
    """Return *row*, measured on *cluster*, in the columns of ``foretrace validate collectives``.

    Raises:
        TableError: the row does not say enough.
    """
    kind = _kind(row)
    cells: dict[str, Any] = {"op": kind, "gpus": _n_gpus(row), "time_us": _measured_us(row)}
    if kind.startswith("ep_"):
        routing = _routing(row)
        sizes = {name: getattr(routing, name) for name in ("tokens", "token_bytes", "top_k", "max_nodes")}
        return {**cells, "op": EXPERTS, **sizes, "low_latency": kind.endswith("_ll")}
    settings = {name: setting(row, name.upper()) for name in ("nccl_algo", "nccl_proto")}
    return {**cells, "bytes": array_bytes(row), **settings, **_clock(row, kind, cluster)}


def _clock(row: Row, kind: str, cluster: Cluster) -> dict[str, float]:
    """Return how the clock of *row* differs from that of ranks which begin together.

    A send is over for its rank when its bytes are in a buffer, so that it does not wait for the receiver's
    launch.
    """
    notes = row.text("notes")
    if PROFILED.search(notes):
        if kind in _ONE_SIDED:
            return {"nth_send": IN_A_ROW // 2 + 1} if _over_socket(row, cluster) else {}
        return {"least_us": _launch_us(row)}
    if _copied(row, kind):
        device = cluster.device
        rate = device.memory_bound_fraction * device.memory_bytes_per_s
        return {"added_us": 1e6 * (2 * array_bytes(row) / rate + device.memory_bound_latency_s)}
    return {"added_us": CALL_US} if ONE_BY_ONE.search(notes) else {}


def array_bytes(row: Row) -> int:
    """Return the bytes of the whole array of *row*, as nccl-tests counts them."""
    return row.integer("bytes") // (2 if BOTH_WAYS.search(row.text("notes")) else 1)


def setting(row: Row, name: str) -> str:
    """Return what the row says that ``NCCL_ALGO`` or ``NCCL_PROTO``, *name*, was; empty if nothing."""
    notes = row.text("notes")
    if said_ := re.search(name + SETTING, notes):
        return said_[1]
    if name != "NCCL_ALGO":
        return ""
    return "ring" if RING.search(notes) else "^nvls,nvls_tree" if WITHOUT_SWITCHES.search(notes) else ""


def among_others(row: Row) -> bool:
    """Return whether the row was measured beside the jobs of others."""
    return bool(MANY_RUNS.search(row.text("notes")))


def said(row: Row, kind: str, cluster: Cluster) -> list[str]:
    """Return in words what the rules of this module did to *row*, measured on *cluster*."""
    notes, found = row.text("notes"), []
    if BOTH_WAYS.search(notes):
        found.append("size halved: the throughput it comes from counts both directions")
    if PROFILED.search(notes) and kind not in _ONE_SIDED:
        found.append(f"a kernel in a profile: at least {_launch_us(row):g} µs, until every rank has launched")
    if ONE_BY_ONE.search(notes):
        found.append(f"timed around one call from Python: {CALL_US:g} µs more")
    if PROFILED.search(notes) and kind in _ONE_SIDED and _over_socket(row, cluster):
        found.append("a send in a profile over a socket: over when its bytes are in buffers")
    if _copied(row, kind):
        found.append("middle of many runs of a framework: the array is copied out of, or into, a list")
    if among_others(row) and row.integer("nodes", 1) > 1:
        found.append("middle of many runs on a shared cluster: links shared with other jobs")
    return found


def _over_socket(row: Row, cluster: Cluster) -> bool:
    return row.integer("nodes", 1) > 1 and cluster.nic is not None and cluster.nic.kind == "ethernet"


def _copied(row: Row, kind: str) -> bool:
    return kind in FROM_LISTS and bool(MANY_RUNS.search(row.text("notes")))


def _launch_us(row: Row) -> float:
    return LAUNCH_US["older" if OLDER.search(_hardware(row)) else "newer"]


@dataclass(frozen=True, slots=True)
class _Meant:
    """Which machine the hardware of a row is, beyond what its own words say.

    Attributes:
        stated: words that hardware begins with, and a machine of the catalogue or a file.
        most_per_node: GPUs of one node that took part, at most, by hardware.
    """

    stated: tuple[tuple[str, str], ...]
    most_per_node: Mapping[str, int]

    @classmethod
    def of(cls, rows: Sequence[Row], stated: Sequence[tuple[str, str]]) -> _Meant:
        """Return what *rows* and a user say. Raises TableError or TopologyError, see validate_collectives."""
        most: dict[str, int] = {}
        for row in rows:
            n_gpus, n_nodes = (row.text(key) for key in ("gpus" if row.text("gpus") else "n", "nodes"))
            if n_gpus.isdecimal() and (n_nodes or "1").isdecimal():
                per_node = -(-int(n_gpus) // max(int(n_nodes or 1), 1))
                most[_hardware(row)] = max(most.get(_hardware(row), 0), per_node)
        for words, machine_ in stated:
            load_cluster(machine_)
            if not any(name.startswith(words) for name in most):
                raise TableError(f"machine {words!r}: no hardware of the table begins so; {', '.join(most)}")
        return cls(tuple(stated), most)

    def stated_for(self, hardware: str) -> str:
        """Return the machine that a user states *hardware* to be; empty if none."""
        return next((machine_ for words, machine_ in self.stated if hardware.startswith(words)), "")


def _hardware(row: Row) -> str:
    return row.text("hardware") or row.text("gpu")


def _said(row: Row, meant: _Meant, cluster: Cluster) -> list[str]:
    """Return what a prediction rests on beside the row's own figures."""
    words = _hardware(row)
    found = said(row, _kind(row), cluster)
    if name := meant.stated_for(words):
        found.append(f"hardware stated to be {name}")
    elif name := assumed(words):
        found.append(f"hardware not stated; taken as {name}")
    return found


def _n_gpus(row: Row) -> int:
    return row.integer("gpus") if row.text("gpus") else row.integer("n")


def _kind(row: Row) -> str:
    name = row.text("op").lower()
    return KIND.get(re.sub(r"[^a-z0-9]", "", name), name)


def _measured_us(row: Row) -> float:
    """Return the time of a row, from its bandwidth where the time is not given."""
    for column in ("time_us", "us"):
        if row.text(column):
            return row.number_in(column)
    kind, column = _kind(row), "algbw_GBps" if row.text("algbw_GBps") else "busbw_GBps"
    if (bandwidth := row.number_in(column)) <= 0:
        raise TableError(f"{column} = {bandwidth:g}: must be above 0")
    if column == "algbw_GBps":
        return array_bytes(row) / bandwidth * 1e-3
    if kind.startswith("ep_"):
        return _counted_bytes(row) / bandwidth * 1e-3
    factor = bus_factor("p2p" if kind == "send_recv" else kind, _n_gpus(row))
    return factor * array_bytes(row) / bandwidth * 1e-3


def _routing(row: Row) -> Routing:
    """Return the routing that the notes of a row describe, e.g. ``4096 tokens/batch, hidden 7168, top-8``."""
    notes = row.text("notes")
    found = {name: re.search(form, notes) for name, form in _ROUTING.items()}
    tokens, hidden, top_k, groups = (int(match[1]) if match else 0 for match in found.values())
    if not (tokens and hidden and top_k):
        raise TableError("the notes do not say how many tokens, how wide, and to how many experts")
    fp8 = "dispatch" in row.text("op")
    token_bytes = hidden + hidden // FP8_BLOCK * 4 if fp8 else 2 * hidden
    return Routing(tokens=tokens, token_bytes=token_bytes, top_k=top_k, max_nodes=groups)


def _counted_bytes(row: Row) -> float:
    """Return the bytes per rank that DeepEP's bandwidth counts: also those that stay where they are."""
    n_nodes = row.integer("nodes", 1)
    routing = _routing(row)
    copies = traffic(routing, n_nodes, _n_gpus(row) // n_nodes)
    return (copies.nodes if n_nodes > 1 else copies.gpus) * routing.tokens * routing.token_bytes


def _machine(row: Row, meant: _Meant) -> tuple[Cluster, int]:
    """Return the machine of a row, and how many ranks were on each of its nodes.

    Raises:
        TableError: its GPUs do not fit into its nodes.
        TopologyError: its words name no machine.
    """
    n_gpus, n_nodes = _n_gpus(row), row.integer("nodes", 1)
    if not 1 <= n_nodes <= n_gpus:
        raise TableError(f"{n_gpus} GPUs in {n_nodes} nodes")
    hardware = _hardware(row)
    experts = _kind(row).startswith("ep_")
    stated = "" if experts else meant.stated_for(hardware)
    most = 0 if experts else meant.most_per_node.get(hardware, 0)
    words = hardware
    if not experts and n_nodes > 1 and SHARP.search(row.text("notes").lower()):
        words += ", SHARP"
    cluster = _stated(stated, n_gpus, n_nodes) if stated else machine(words, n_gpus, n_nodes, most)
    if not experts and n_nodes > 1 and among_others(row):
        crowding = load_cluster(SHARED).fabric_spec.crowding
        cluster = replace(cluster, fabric_spec=replace(cluster.fabric_spec, crowding=crowding))
    per_node = _per_node(hardware, n_gpus, n_nodes, cluster.gpus_per_node)
    if per_node * cluster.n_nodes < n_gpus:
        raise TableError(f"{n_gpus} GPUs in {n_nodes} nodes of {cluster.gpus_per_node} do not fit")
    return cluster, per_node


def _stated(name: str, n_gpus: int, n_nodes: int) -> Cluster:
    """Return the machine *name* with *n_nodes* nodes, or the one of it that has room for *n_gpus*."""
    cluster = load_cluster(name)
    if cluster.gpus_per_node >= RACK:
        n_nodes = -(-n_gpus // cluster.gpus_per_node)
    return cluster.sized(n_nodes * cluster.gpus_per_node)


def _per_node(hardware: str, n_gpus: int, n_nodes: int, most: int) -> int:
    """Return how many GPUs of each NVLink domain took part; tables count the trays of a rack as nodes."""
    if most >= RACK:
        return most
    said_ = re.search(r"(\d+) devices? used per node", hardware)
    return min(most, int(said_[1]) if said_ and n_nodes < n_gpus + 1 else -(-n_gpus // n_nodes))
