"""How tables of collectives were measured, where a row says so, and what that does to a time.

A network answers how long a collective takes that all ranks begin together, on links of their own. What is
in a table was timed by some program, on some machine, and a row may say which. Each rule here is about a
way to measure, never about who published.
"""

from __future__ import annotations

import re
from typing import Final

from foretrace.simulator.network.nccl import P2P_CHANNELS, PROTOCOLS, STAGED_ONE_WAY_BYTES_PER_S
from foretrace.simulator.program import Transfer
from foretrace.simulator.validate.table import Row
from foretrace.topologies.cluster import Cluster

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

BUFFERS_BYTES: Final = P2P_CHANNELS * 2 * 4 * 2**20
"""What a send may be ahead of a socket: in each of its channels NCCL's buffer (``NCCL_BUFFSIZE``, 4 MiB) and
that of Linux for what a connection has yet to send (``net.ipv4.tcp_wmem``, by default up to 4 MiB)."""

_ONE_SIDED: Final = frozenset({"send_recv"})


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


def timed_us(row: Row, kind: str, took: Transfer, cluster: Cluster) -> float:
    """Return what the clock of the row shows for a transfer that takes as long as *took* on *cluster*.

    A send is over for its rank when its bytes are in a buffer, so that it does not wait for the receiver's
    launch. Over a socket it does not wait for the wire either, until the buffers are full.
    """
    notes = row.text("notes")
    alone_us = (took.latency_ns + took.wire_ns) / 1e3
    if PROFILED.search(notes) and kind not in _ONE_SIDED:
        return max(alone_us, _launch_us(row))
    if PROFILED.search(notes) and kind in _ONE_SIDED and _over_socket(row, cluster):
        return _into_buffers_us(array_bytes(row), took.wire_ns / 1e3)
    if _copied(row, kind):
        device = cluster.device
        rate = device.memory_bound_fraction * device.memory_bytes_per_s
        return alone_us + 1e6 * (2 * array_bytes(row) / rate + device.memory_bound_latency_s)
    return alone_us + (CALL_US if ONE_BY_ONE.search(notes) else 0.0)


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


def _into_buffers_us(size_bytes: int, wire_us: float) -> float:
    """Return what the middle one of sends in a row takes, each of *size_bytes* into buffers.

    The wire, which takes *wire_us* for one, empties them. Bytes go in at the rate of copies to the host until
    the buffers are full, and then as the wire takes them.
    """
    protocol = PROTOCOLS["simple"]
    copy_us = max(size_bytes / STAGED_ONE_WAY_BYTES_PER_S * 1e6, 1e-9)
    left = max(1 - copy_us / wire_us, 1e-9) if wire_us else 1e-9

    def written_us(n_sends: int) -> float:
        free = BUFFERS_BYTES / left / max(size_bytes, 1)  # sends that find room at the rate of copies
        return min(n_sends, free) * copy_us + max(n_sends - free, 0.0) * wire_us

    middle = IN_A_ROW // 2 + 1
    base_us = 1e6 * (protocol.ring_base_s + protocol.ring_intra_s)
    return base_us + written_us(middle) - written_us(middle - 1)


def _copied(row: Row, kind: str) -> bool:
    return kind in FROM_LISTS and bool(MANY_RUNS.search(row.text("notes")))


def _launch_us(row: Row) -> float:
    hardware = row.text("hardware") or row.text("gpu")
    return LAUNCH_US["older" if OLDER.search(hardware) else "newer"]
