"""How long collectives take: pure formulas, each with its symbols and its source.

Sizes are those of nccl-tests: ``S`` is the whole array, also for all-gather and reduce-scatter. Bandwidths
are per direction. A time has two parts: one that does not depend on size (latency) and one that does (wire).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import log, log2
from typing import Final

from foretrace.simulator.network.nccl import NVLS_INTRA_S, NVLS_RANKS
from foretrace.topologies.link import Curve, Table

KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")


def bus_factor(kind: str, n: int) -> float:
    """Return the traffic of the busiest rank as a multiple of the whole size ``S``, over *n* ranks.

    References: nccl-tests ``doc/PERFORMANCE.md``; Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("broadcast", 8)
    (1.75, 0.875, 1.0)
    """
    if n < 2:
        return 0.0
    return {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "reduce": 1.0, "p2p": 1.0}.get(kind, (n - 1) / n)


def ring_steps(kind: str, n: int) -> int:
    """Return the number of messages that follow one another in a ring of *n* ranks.

    >>> ring_steps("all_reduce", 8), ring_steps("reduce_scatter", 8)
    (14, 7)
    """
    return (2 if kind == "all_reduce" else 1) * (n - 1)


def tree_factor(n_domains: int) -> float:
    """Return what the busiest node sends in a double-binary-tree all-reduce, as a multiple of ``S``.

    Each of two trees reduces half of the array. A node is inner in one, where it sends ``S/2`` up and ``S/2``
    down to each of two children, and leaf in the other, where it sends ``S/2`` up: ``2 S`` together. Of two
    nodes each has the other as its only child, which makes ``S``.
    Reference: Sanders, Speck & Träff 2009, doi:10.1016/j.parco.2009.09.001.

    >>> tree_factor(2), tree_factor(64)
    (1.0, 2.0)
    """
    return 0.0 if n_domains < 2 else 1.0 if n_domains == 2 else 2.0


def tree_hops(n_domains: int) -> int:
    """Return the hops between nodes of a tree all-reduce: up and down again.

    >>> tree_hops(2), tree_hops(64), tree_hops(65)
    (2, 12, 14)
    """
    # The depth of a tree is log2 of its nodes, rounded up.
    return 2 * (n_domains - 1).bit_length()


def nvls_factor(n: int) -> float:
    """Return what a GPU sends or receives when switches reduce, as a multiple of ``S``: ``(n+1)/n``.

    Each GPU offers its array to the switches once (``S``) and gets back ``1/n`` of the result, which it sends
    out again for the switches to multicast. A ring moves ``2(n-1)/n``, 1.56 times as much for 8 GPUs.
    Reference: Klenk et al. 2020, doi:10.1109/ISCA45697.2020.00085; NVIDIA's NVLink SHARP is the product.

    >>> nvls_factor(8)
    1.125
    """
    return (n + 1) / n


def half_size_s(
    curve: Curve, size_bytes: float, n: int, wire_bytes: float, bytes_per_s: float
) -> tuple[float, float]:
    """Return latency and wire time from a fitted curve: ``W / (e B) (1 + (S_half / S)^g)``.

    The bandwidth rises with size as in Hockney's ``n_1/2``, more slowly for an exponent below 1. Reference:
    Hockney 1994, doi:10.1016/S0167-8191(06)80021-9; the exponent is fitted.
    """
    # The latency of the curve is that of two ranks.
    latency_s = curve.latency_s + curve.latency_per_rank_s * max(n - 2, 0)
    if not size_bytes:
        return latency_s, 0.0
    ramp = 1 + (curve.half_size_bytes / size_bytes) ** curve.exponent
    return latency_s, wire_bytes / (curve.efficiency * bytes_per_s) * ramp


def measured_s(
    table: Table, kind: str, size_bytes: float, n: int, *, reduces: bool = False
) -> tuple[float, float]:
    """Return latency and wire time from measured times, at the bandwidth they were measured at.

    The latency is the time at the smallest size. Between sizes the time is a straight line in the logarithms,
    beyond the largest it goes on at the rate between the last two. Between numbers of ranks both parts are
    lines in ``log2 n``; beyond the largest number the latency goes on along that line, and the wire time
    grows as the bus factor of *kind* does. Where switches reduce (*reduces*), the wire time of an all-reduce
    stays, for a GPU then offers its array once and gets it back once, among however many; and its latency is
    at most that of the switches, which take one step. Among fewer ranks than were measured on such switches,
    but no fewer than they reduce for, it follows what a GPU moves, ``(n+1)/n``.
    """
    known = sorted(table.times_s)
    on_switches = [k for k in known if k >= NVLS_RANKS] if reduces and kind == "all_reduce" else []
    if on_switches and NVLS_RANKS <= n < on_switches[0]:
        latency_s, wire_s = _at_size(table, size_bytes, on_switches[0])
        return latency_s, wire_s * nvls_factor(n) / nvls_factor(on_switches[0])
    above = next((k for k in known if k >= n), known[-1])
    below = max((k for k in known if k < n), default=above)
    low, high = _at_size(table, size_bytes, below), _at_size(table, size_bytes, above)
    if n > above:
        growth = bus_factor(kind, n) / bus_factor(kind, above)
        latency_s = high[0] + _rise_s(table, known) * log2(n / above)
        if reduces and kind == "all_reduce":
            return min(latency_s, max(high[0], NVLS_INTRA_S)), high[1]
        return latency_s, high[1] * growth
    weight = 1.0 if above == below else log2(n / below) / log2(above / below)
    return low[0] + (high[0] - low[0]) * weight, low[1] + (high[1] - low[1]) * weight


def _rise_s(table: Table, known: Sequence[int]) -> float:
    """Return what the latency grows by per doubling of ranks, at the largest numbers measured."""
    if len(known) < 2:
        return 0.0
    last, before = known[-1], known[-2]
    # Noise may make more ranks look faster; no group gets faster by growing.
    return max(table.times_s[last][0] - table.times_s[before][0], 0.0) / log2(last / before)


def _at_size(table: Table, size_bytes: float, n: int) -> tuple[float, float]:
    """Return latency and wire time for a number of ranks that was measured."""
    sizes, times = table.sizes_bytes, table.times_s[n]
    if size_bytes <= sizes[0]:
        return times[0], 0.0
    if size_bytes >= sizes[-1]:
        rate = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        return times[0], times[-1] - times[0] + rate * (size_bytes - sizes[-1])
    return times[0], _log_line(sizes, times, size_bytes) - times[0]


def _log_line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return the straight line through the points in logarithms, between two of them."""
    # The caller has seen to it that *x* lies between two of the points.
    right = bisect_right(xs, x)
    left = right - 1
    weight = log(x / xs[left]) / log(xs[right] / xs[left])
    return float(ys[left] * (ys[right] / ys[left]) ** weight)
