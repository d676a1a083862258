"""The highest bus bandwidth of a group, where the run describes its machine or the user states a limit.

The bus bandwidth of nccl-tests does not depend on the number of ranks, so that it can be held against what a
rank's link carries inside of a node, and against the NICs that the members of a group in one node share
between nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.columns import Int64Array, factorized
from foretrace.traces.errors import RunError
from foretrace.traces.run import Run

_UNITS: Final = {"Gb/s": 1e9 / 8, "GB/s": 1e9, "GiB/s": 2.0**30, "MB/s": 1e6, "TB/s": 1e12}


def parse_limit(text: str) -> float:
    """Return a bandwidth such as ``"400 GB/s"`` in bytes per second; a bare number is refused.

    Raises:
        RunError: it is no bandwidth.

    >>> parse_limit("400 Gb/s")
    50000000000.0
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+/s)\s*", text)
    if found is None or found[2] not in _UNITS or not float(found[1]):
        raise RunError(f"bandwidth {text!r}: write a number and one of {', '.join(_UNITS)}, e.g. '400 GB/s'")
    return float(found[1]) * _UNITS[found[2]]


def bus_limit(run: Run, ranks: Sequence[int]) -> float | None:
    """Return the bus bandwidth that the links of *ranks* allow, in bytes per second; None if not described.

    Ranks are taken to be on GPUs of their own number. Between nodes, the members of a group in one node share
    as large a part of its NICs as they are of its GPUs.
    """
    cluster = run.info.cluster or {}
    per_node = cluster.get("gpus_per_node")
    near = _bandwidth(cluster.get("intra"))
    if not isinstance(per_node, int) or per_node < 1 or near is None:
        return None
    nodes: dict[int, int] = {}
    for rank in ranks:
        nodes[rank // per_node] = nodes.get(rank // per_node, 0) + 1
    if len(nodes) < 2:
        return near
    far, n_nics = _bandwidth(cluster.get("nic")), cluster.get("nics_per_node")
    if far is None or not isinstance(n_nics, int) or n_nics < 1:
        return None
    # Members that are few in a node have one NIC at least.
    return min(near, far * max(n_nics * min(nodes.values()) / per_node, 1.0))


def _bandwidth(link: object) -> float | None:
    value = link.get("bandwidth_bytes_per_s") if isinstance(link, Mapping) else None
    return float(value) if isinstance(value, int | float) and value > 0 else None


def bus_limits(run: Run, group: Int64Array, ends: Int64Array) -> NDArray[np.float64]:
    """Return what the links of each *group* allow, or of the two *ends* where they are known; 0 if unknown.

    Args:
        run: an open run.
        group: numbers of groups.
        ends: sender and receiver, -1 where there are none, of shape ``(n, 2)``.
    """
    members = {known.id: known.ranks for known in run.info.groups}
    key = factorized(group, *ends.T)
    _, first = np.unique(key, return_index=True)
    limits = []
    for row in first.tolist():
        ranks = ends[row].tolist() if ends[row].min() >= 0 else members.get(int(group[row]), ())
        limits.append((bus_limit(run, ranks) if ranks else None) or 0.0)
    return np.array(limits, np.float64)[key]
