"""``foretrace validate collectives``: predicted against measured times of collectives and transfers.

A network answers how long a collective takes that all ranks begin together. What is in a table was timed by
some program, and columns say how its clock differs: ``least_us``, ``added_us``, ``nth_send``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import inf
from pathlib import Path
from typing import Final

from foretrace.simulator.errors import SimulationError, TableError
from foretrace.simulator.network.collectives import KINDS, bus_factor
from foretrace.simulator.network.cost import Network, network_of
from foretrace.simulator.network.nccl import P2P_CHANNELS, PROTOCOLS, STAGED_ONE_WAY_BYTES_PER_S
from foretrace.simulator.program import Transfer
from foretrace.simulator.table import Row, read_table
from foretrace.simulator.validate.scores import Failed, Scored, Validation
from foretrace.simulator.workload.dispatch import Routing
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.errors import TopologyError

ROOTED: Final = ("scatter", "gather")
"""One rank sends each other its part of the array, or gets it from them."""

EXPERTS: Final = "experts"
"""Tokens to their experts, or back: columns ``tokens, token_bytes, top_k, max_nodes, low_latency``."""

OPERATIONS: Final = (*KINDS, "send_recv", *ROOTED, "barrier", EXPERTS)

BUFFERS_BYTES: Final = P2P_CHANNELS * 2 * 4 * 2**20
"""What a send may be ahead of a socket: in each of its channels NCCL's buffer (``NCCL_BUFFSIZE``, 4 MiB) and
that of Linux for what a connection has yet to send (``net.ipv4.tcp_wmem``, by default up to 4 MiB)."""

GROUPS: Final = ("single-node", "multi-node")


def validate_collectives(table: str | Path) -> Validation:
    """Return what every row of *table* takes, predicted and measured, in microseconds.

    *table*: CSV or Parquet, with columns ``cluster, gpus, op, bytes`` and one of ``time_us``, ``algbw_GBps``,
    ``busbw_GBps``; sizes and bandwidths are those of nccl-tests. Beside these it may have ``ranks_per_node,
    nccl_algo, nccl_proto``, as ``foretrace simulate``. Raises TableError if the table cannot be read, or a
    column is missing.
    """
    folder = Path(table).parent
    rows = [row.beside(folder, ("cluster",)) for row in read_table(table, ("cluster", "gpus", "op", "bytes"))]
    return scored_collectives(rows, str(table))


def scored_collectives(rows: Sequence[Row], table: str) -> Validation:
    """Return what ``validate_collectives`` does, of *rows* that were read from *table*."""
    scored: list[Scored] = []
    failed: list[Failed] = []
    for row in rows:
        op, n_gpus, cluster = (row.text(name) for name in ("op", "gpus", "cluster"))
        family = row.text("family") or f"{cluster} · {op} · {n_gpus} GPUs"
        try:
            took, network = _transfer(row)
            predicted_us, measured_us = _timed_us(row, took, network.cluster), _measured_us(row)
            if not (predicted_us > 0 and 0 < measured_us < inf):
                raise TableError(f"{predicted_us:g} µs against {measured_us:g}: there is nothing to compare")
        except (SimulationError, TopologyError) as error:
            failed.append(Failed(id=row.id, family=family, reason=str(error)))
            continue
        scored.append(
            Scored(
                id=row.id,
                family=family,
                group=GROUPS[network.cluster.n_nodes > 1],
                what=f"{op} of {row.text('bytes')} bytes on {n_gpus} GPUs, {cluster}",
                predicted=predicted_us,
                measured=measured_us,
                by=took.algorithm,
            )
        )
    return Validation(kind="collectives", table=table, unit="us", rows=scored, failures=failed)


def _measured_us(row: Row) -> float:
    """Return the time of a row, from its bandwidth where the time is not given."""
    if row.text("time_us"):
        return row.number_in("time_us")
    kind, column = row.text("op"), "algbw_GBps" if row.text("algbw_GBps") else "busbw_GBps"
    if (bandwidth := row.number_in(column)) <= 0:
        raise TableError(f"{column} = {bandwidth:g}: must be above 0")
    if column == "algbw_GBps":
        # Bytes over GB/s are ns; a thousandth of that is µs.
        return row.integer("bytes") / bandwidth * 1e-3
    factor = bus_factor("p2p" if kind == "send_recv" else kind, row.integer("gpus"))
    return factor * row.integer("bytes") / bandwidth * 1e-3


def _transfer(row: Row) -> tuple[Transfer, Network]:
    kind, n_gpus = row.text("op"), row.integer("gpus")
    if kind not in OPERATIONS:
        raise TableError(f"operation {kind!r}: one of {', '.join(OPERATIONS)}")
    if (size_bytes := row.integer("bytes", 0)) < 0:
        raise TableError(f"{size_bytes} bytes")
    settings = row.text("nccl_algo"), row.text("nccl_proto")
    network = _network(row.text("cluster"), n_gpus, row.integer("ranks_per_node", 0), settings)
    ranks = tuple(range(n_gpus))
    if kind == EXPERTS:
        tokens, token_bytes, top_k = (row.integer(name) for name in ("tokens", "token_bytes", "top_k"))
        routing = Routing(
            tokens=tokens, token_bytes=token_bytes, top_k=top_k, max_nodes=row.integer("max_nodes", 0)
        )
        low_latency = row.flag("low_latency", default=False)
        return network.experts(routing, ranks, low_latency=low_latency), network
    if kind == "send_recv":
        around = n_gpus > 2  # every rank sends to the next, as sendrecv_perf of nccl-tests does
        transfer = network.shift(size_bytes, ranks) if around else network.p2p(size_bytes, *ranks[:2])
    elif kind in ROOTED:
        transfer = network.all_to_all_v(_rooted(kind, size_bytes // n_gpus, n_gpus), ranks)
    elif kind == "barrier":
        transfer = network.barrier(ranks)
    else:
        transfer = network.collective(kind, size_bytes, ranks)
    return transfer, network


def _rooted(kind: str, part_bytes: int, n_ranks: int) -> list[list[int]]:
    """Return what each rank sends each other when the first sends, or gets, *part_bytes* of each."""
    # One list for all rows: nothing is ever written to it.
    none = [0] * n_ranks
    if kind == "scatter":
        return [[0, *[part_bytes] * (n_ranks - 1)], *[none] * (n_ranks - 1)]
    return [none, *[[part_bytes, *none[1:]]] * (n_ranks - 1)]


@cache
def _network(name: str, n_gpus: int, per_node: int, settings: tuple[str, str]) -> Network:
    """Return the machine of a row, with *per_node* ranks on each node, or as many as it has GPUs."""
    cluster = load_cluster(name)
    per_node = per_node or min(cluster.gpus_per_node, n_gpus)
    if n_gpus < 1 or not 1 <= per_node <= cluster.gpus_per_node:
        raise TableError(
            f"{n_gpus} GPUs, {per_node} on each node: a node of {cluster.name} has {cluster.gpus_per_node}"
        )
    algo, proto = settings
    return network_of(cluster, n_gpus, ranks_per_node=per_node, nccl_algo=algo, nccl_proto=proto)


def _timed_us(row: Row, took: Transfer, cluster: Cluster) -> float:
    """Return what the clock of the row shows for a transfer that takes as long as *took* on *cluster*.

    ``least_us`` is the time in which the slowest rank begins, ``added_us`` what the program does beside the
    transfer. A send over a socket does not wait for the wire until buffers are full: ``nth_send`` says of how
    many sends in a row it was the last.
    """
    alone_us = (took.latency_ns + took.wire_ns) / 1e3
    over_socket = cluster.n_nodes > 1 and cluster.nic is not None and cluster.nic.kind == "ethernet"
    if (nth := row.integer("nth_send", 0)) and over_socket:
        return _into_buffers_us(row.integer("bytes"), took.wire_ns / 1e3, nth)
    return max(alone_us + row.number_in("added_us", 0.0), row.number_in("least_us", 0.0))


def _into_buffers_us(size_bytes: int, wire_us: float, nth: int) -> float:
    """Return what the *nth* of sends in a row takes, each of *size_bytes* into buffers.

    The wire, which takes *wire_us* for one, empties them. Bytes go in at the rate of copies to the host until
    the buffers are full, and then as the wire takes them.
    """
    protocol = PROTOCOLS["simple"]
    # At least a hair: an empty send takes no time, and is divided by below.
    copy_us = max(size_bytes / STAGED_ONE_WAY_BYTES_PER_S * 1e6, 1e-9)
    # Share of the copied bytes that stays in the buffers; the wire empties them meanwhile.
    left = max(1 - copy_us / wire_us, 1e-9) if wire_us else 1e-9

    def written_us(n_sends: int) -> float:
        free = BUFFERS_BYTES / left / max(size_bytes, 1)  # sends that find room at the rate of copies
        return min(n_sends, free) * copy_us + max(n_sends - free, 0.0) * wire_us

    base_us = 1e6 * (protocol.ring_base_s + protocol.ring_intra_s)
    # Of the last send alone: what all take, less what all before it take.
    return base_us + written_us(nth) - written_us(nth - 1)
