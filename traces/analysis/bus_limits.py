"""The highest bus bandwidth of a group, where the run describes its machine or the user states a limit.

The bus bandwidth of nccl-tests does not depend on the number of ranks, so that it can be held against what a
rank's link carries inside of a node, and against the NICs that the members of a group in one node share
between nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

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
    return min(near, far * max(n_nics * min(nodes.values()) / per_node, 1.0))


def _bandwidth(link: object) -> float | None:
    value = link.get("bandwidth_bytes_per_s") if isinstance(link, Mapping) else None
    return float(value) if isinstance(value, int | float) and value > 0 else None


def group_limits(run: Run, given: float | None) -> dict[int, float]:
    """Return the highest bus bandwidth by group: the limit that the user states, else that of the links."""
    limits: dict[int, Any] = {
        group.id: given if given is not None else bus_limit(run, group.ranks) for group in run.info.groups
    }
    return {number: limit for number, limit in limits.items() if limit is not None}
