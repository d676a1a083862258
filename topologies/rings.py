"""How wide the rings are that a group of GPUs can form inside one node.

On a switch every ring is as wide as a GPU's links into it. Without a switch a ring needs a cycle through all
GPUs over direct links, and several cycles that share no link run side by side, as NCCL searches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

import networkx as nx

MAX_MESH: Final = 16
"""Most GPUs among which cycles over direct links are searched; larger groups go through their switch."""


def ring_bytes_per_s(inside: nx.DiGraph[str], gpus: Sequence[int]) -> float:
    """Return what every GPU of *gpus* can send to the next in all their rings together, in bytes/s.

    Args:
        inside: a domain: GPUs, their switches and hosts.
        gpus: members of the group in that domain; ``inf`` if there is only one.
    """
    if len(gpus) < 2:
        return inf
    names = [f"gpu:{gpu}" for gpu in gpus]
    through_hub = min(_hub_bytes_per_s(inside, name) for name in names)
    width = {(a, b): data["bandwidth_bytes_per_s"] for a, b, data in inside.subgraph(names).edges(data=True)}
    direct = 0.0
    if width and len(names) <= MAX_MESH:
        direct = min(width.values()) if len(names) == 2 else _cycles(width, names)
    return max(direct, through_hub) or _detour_bytes_per_s(inside, names)


def _hub_bytes_per_s(inside: nx.DiGraph[str], name: str) -> float:
    """Return what a GPU can send into switches and hosts."""
    return float(
        sum(
            data["bandwidth_bytes_per_s"]
            for _, to, data in inside.out_edges(name, data=True)
            if not to.startswith("gpu:")
        )
    )


def _detour_bytes_per_s(inside: nx.DiGraph[str], names: Sequence[str]) -> float:
    """Return the narrowest link on the widest ways between *names*, by way of other GPUs."""
    widths = {data["bandwidth_bytes_per_s"] for _, _, data in inside.edges(data=True)}
    for least in sorted(widths, reverse=True):
        wide: nx.Graph[str] = nx.Graph()
        wide.add_nodes_from(names)
        wide.add_edges_from(
            (a, b) for a, b, data in inside.edges(data=True) if data["bandwidth_bytes_per_s"] >= least
        )
        if set(names) <= nx.node_connected_component(wide, names[0]):
            return float(least)
    return 0.0


def _cycles(width: dict[tuple[str, str], float], names: Sequence[str]) -> float:
    """Return the width of disjoint cycles through all *names*, both ways round, the widest first."""
    left, found = dict(width), 0.0
    while cycle := _widest_cycle(left, names):
        hops = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        narrow = min(min(left[hop], left[hop[::-1]]) for hop in hops)
        found += 2 * narrow
        for a, b in hops:
            left[a, b] -= narrow
            left[b, a] -= narrow
    return found


def _widest_cycle(width: dict[tuple[str, str], float], names: Sequence[str]) -> list[str]:
    """Return a cycle through all *names* over links that have something left, the widest first."""
    for least in sorted({both for hop, w in width.items() if (both := min(w, width[hop[::-1]])) > 0})[::-1]:
        near = {
            a: [b for b in names if min(width.get((a, b), 0.0), width.get((b, a), 0.0)) >= least]
            for a in names
        }
        if cycle := _cycle(near, [names[0]], len(names)):
            return cycle
    return []


def _cycle(near: dict[str, list[str]], path: list[str], n: int) -> list[str]:
    """Return *path* closed to a cycle of *n*, or nothing."""
    if len(path) == n:
        return path if path[0] in near[path[-1]] else []
    for name in near[path[-1]]:
        if name not in path and (cycle := _cycle(near, [*path, name], n)):
            return cycle
    return []
