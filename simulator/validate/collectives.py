"""``foretrace validate collectives``: predicted against measured times of collectives and transfers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Final

from foretrace.simulator.errors import SimulationError, TableError
from foretrace.simulator.network.collectives import KINDS, bus_factor
from foretrace.simulator.network.cost import Network
from foretrace.simulator.network.nccl import choice
from foretrace.simulator.validate.conventions import among_others, array_bytes, said, setting, timed_us
from foretrace.simulator.validate.scores import Failed, Scored, Validation
from foretrace.simulator.validate.table import Row, read_table, require
from foretrace.simulator.workload.dispatch import Routing, traffic
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.errors import TopologyError
from foretrace.topologies.words import RACK, SHARP, assumed, machine

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

ROOTED: Final = ("scatter", "gather")
"""One rank sends each other its part of the array, or gets it from them."""

FP8_BLOCK: Final = 128
"""Values of fp8 that share a scale of four bytes. DeepSeek-V3 technical report 2024, arXiv:2412.19437."""

_ROUTING: Final = {
    "tokens": r"(\d+) tokens",
    "hidden": r"hidden (\d+)",
    "top_k": r"top-(\d+)(?! groups)",
    "groups": r"top-(\d+) groups",
}

GROUPS: Final = ("single-node", "multi-node")

FORMS: Final = (("gpu", "n"), ("hardware", "nodes", "gpus"))
"""Columns that say where a row was measured, of a table of one node and of one that names its hardware."""

SHARED: Final = "aws-p5-shared"
"""Machine of the catalogue whose ``crowding`` stands for that of a cluster which many jobs share."""


def validate_collectives(table: str | Path, machines: Sequence[tuple[str, str]] = ()) -> Validation:
    """Return what every row of *table* takes, predicted and measured, in microseconds.

    Two forms are read: columns ``source_group, hardware, nodes, gpus, op, bytes`` and one of ``time_us``,
    ``algbw_GBps``, ``busbw_GBps``; or ``gpu, op, n, bytes, us``, on one node. Sizes are those of nccl-tests.

    Args:
        table: path of the table.
        machines: words, and the machine that hardware beginning with them is; the first that fits counts.

    Raises:
        TableError: the table cannot be read, has neither form, or no hardware in it begins with such words.
        TopologyError: there is no such machine.
    """
    rows = read_table(table, ("op", "bytes"))
    require(rows[0], FORMS["hardware" in rows[0].columns], table)
    meant = _Meant.of(rows, machines)
    scored, failed = [], []
    notes: Counter[str] = Counter()
    for row in rows:
        hardware, n_gpus = row.text("hardware") or row.text("gpu"), row.text("gpus") or row.text("n")
        source, kind = row.text("source_group", Path(table).stem), row.text("op")
        family = f"{source} · {hardware} · {kind} · {n_gpus} GPUs"
        try:
            (predicted_us, by, cluster), measured_us = _predicted_us(row, meant), _measured_us(row)
            if not (predicted_us > 0 and 0 < measured_us < inf):
                raise TableError(f"{predicted_us:g} µs against {measured_us:g}: there is nothing to compare")
        except (SimulationError, TopologyError) as error:
            failed.append(Failed(id=row.id, family=family, reason=str(error)))
            continue
        notes.update(_said(row, meant, cluster))
        scored.append(
            Scored(
                id=row.id,
                family=family,
                group=GROUPS[row.integer("nodes", 1) > 1],
                what=f"{kind} of {row.text('bytes')} bytes on {n_gpus} GPUs, {hardware}",
                predicted=predicted_us,
                measured=measured_us,
                by=by,
            )
        )
    lines = [f"{count} rows: {words}" for words, count in notes.most_common()]
    return Validation(
        kind="collectives", table=str(table), unit="us", rows=scored, failures=failed, notes=lines
    )


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


def _predicted_us(row: Row, meant: _Meant) -> tuple[float, str, Cluster]:
    """Return what the network answers for a row, by which formula, and the machine that it is taken for."""
    kind, n_gpus = _kind(row), _n_gpus(row)
    if kind.startswith("ep_"):
        return _experts_us(row, kind, n_gpus)
    words, n_nodes = _hardware(row), row.integer("nodes", 1)
    if not 1 <= n_nodes <= n_gpus:
        raise TableError(f"{n_gpus} GPUs in {n_nodes} nodes")
    stated, most = meant.stated_for(words), meant.most_per_node.get(words, 0)
    if n_nodes > 1 and SHARP.search(row.text("notes").lower()):
        words += ", SHARP"
    shared = among_others(row) and n_nodes > 1
    settings = setting(row, "NCCL_ALGO"), setting(row, "NCCL_PROTO")
    network, ranks = _network(words, n_gpus, n_nodes, settings, shared=shared, most=most, stated=stated)
    if (size_bytes := array_bytes(row)) < 0:
        raise TableError(f"{size_bytes} bytes")
    if kind == "send_recv":
        around = n_gpus > 2  # every rank sends to the next, as sendrecv_perf of nccl-tests does
        transfer = network.shift(size_bytes, ranks) if around else network.p2p(size_bytes, *ranks[:2])
    elif kind in KINDS:
        transfer = network.collective(kind, size_bytes, ranks)
    elif kind in ROOTED:
        transfer = network.all_to_all_v(_rooted(kind, size_bytes // n_gpus, n_gpus), ranks)
    elif kind == "barrier":
        transfer = network.barrier(ranks)
    else:
        known = (*KINDS, "send_recv", *ROOTED, "barrier")
        raise TableError(f"operation {kind!r}: one of {', '.join(known)}")
    return timed_us(row, kind, transfer, network.cluster), transfer.algorithm, network.cluster


def _rooted(kind: str, part_bytes: int, n_ranks: int) -> list[list[int]]:
    """Return what each rank sends each other when the first sends, or gets, *part_bytes* of each."""
    none = [0] * n_ranks
    if kind == "scatter":
        return [[0, *[part_bytes] * (n_ranks - 1)], *[none] * (n_ranks - 1)]
    return [none, *[[part_bytes, *none[1:]]] * (n_ranks - 1)]


def _experts_us(row: Row, kind: str, n_gpus: int) -> tuple[float, str, Cluster]:
    """Return what a dispatch or combine of experts takes; the routing is in the notes of the row."""
    network, ranks = _network(row.text("hardware"), n_gpus, row.integer("nodes", 1))
    transfer = network.experts(_routing(row), ranks, low_latency=kind.endswith("_ll"))
    return (transfer.latency_ns + transfer.wire_ns) / 1e3, transfer.algorithm, network.cluster


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


@cache
def _network(
    hardware: str,
    n_gpus: int,
    n_nodes: int,
    settings: tuple[str, str] = ("", ""),
    *,
    shared: bool = False,
    most: int = 0,
    stated: str = "",
) -> tuple[Network, tuple[int, ...]]:
    """Return the machine of a row and its ranks, which are spread evenly over the nodes."""
    cluster = _stated(stated, n_gpus, n_nodes) if stated else machine(hardware, n_gpus, n_nodes, most)
    if shared:
        crowding = load_cluster(SHARED).fabric_spec.crowding
        cluster = replace(cluster, fabric_spec=replace(cluster.fabric_spec, crowding=crowding))
    per_node = _per_node(hardware, n_gpus, n_nodes, cluster.gpus_per_node)
    gpus = tuple(
        node * cluster.gpus_per_node + local for node in range(cluster.n_nodes) for local in range(per_node)
    )[:n_gpus]
    if len(gpus) < n_gpus:
        raise TableError(f"{n_gpus} GPUs in {n_nodes} nodes of {cluster.gpus_per_node} do not fit")
    return Network(cluster, gpus, choice(*settings)), tuple(range(n_gpus))


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
