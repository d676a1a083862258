"""How wide the rings are that a group of GPUs can form inside one node.

On a switch every ring is as wide as a GPU's links into it. Without a switch a ring needs a cycle through all
GPUs over direct links, and several cycles that share no link run side by side, as NCCL searches them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import inf
from typing import Final

import networkx as nx

MAX_MESH: Final = 16
"""Most GPUs among which cycles over direct links are searched; larger groups go through their switch."""

MAX_SHARED: Final = 8
"""Most GPUs among which cycles may share a link, half of it each; 8 have 2,520 cycles, 9 eight times more."""


def ring_bytes_per_s(inside: nx.DiGraph[str], gpus: Sequence[int]) -> float:
    """Return what every GPU of *gpus* can send to the next in all their rings together, in bytes/s.

    Args:
        inside: a domain: GPUs, their switches and hosts.
        gpus: members of the group in that domain; ``inf`` if there is only one.
    """
    if len(gpus) < 2:
        return inf
    names = [f"gpu:{gpu}" for gpu in gpus]
    # The slowest member sets the pace of a ring.
    through_hub = min(_hub_bytes_per_s(inside, name) for name in names)
    width = {(a, b): data["bandwidth_bytes_per_s"] for a, b, data in inside.subgraph(names).edges(data=True)}
    direct = 0.0
    if width and len(names) <= MAX_MESH:
        direct = min(width.values()) if len(names) == 2 else _side_by_side(width, names)
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


def _side_by_side(width: dict[tuple[str, str], float], names: Sequence[str]) -> float:
    """Return the width of all cycles through *names* together: disjoint ones, or more where links are shared.

    Four GPUs in a full mesh have one cycle that leaves the diagonals idle; three that share every link with
    another fill them all, as NCCL's six rings do on Jean Zay's V100 nodes (``Channel 00/12`` to ``05/12`` in
    bigscience-workshop/bigscience, experiments/bandwidth, n1_32gb_all_reduce_bench.txt).
    """
    disjoint = _cycles(width, names)
    # No set of cycles carries more than the GPU with the least has links for: nothing to gain beyond that.
    least = min(sum(w for (a, _), w in width.items() if a == name) for name in names)
    if disjoint >= least or len(names) > MAX_SHARED:
        return disjoint
    return max(disjoint, _shared_cycles(width, names))


def _shared_cycles(width: dict[tuple[str, str], float], names: Sequence[str]) -> float:
    """Return the width of cycles of half the narrowest link, each time that with most left on its links."""
    both = {(a, b): min(w, width.get((b, a), 0.0)) for (a, b), w in width.items()}
    step = min(w for w in both.values() if w > 0) / 2
    cycles = [hops for hops in _all_cycles(names) if all(both.get(hop, 0.0) >= step for hop in hops)]
    found = 0.0
    # The tolerance makes up for what the subtractions below lose.
    while open_ := [hops for hops in cycles if all(both[hop] >= step * (1 - 1e-9) for hop in hops)]:
        for a, b in max(open_, key=lambda hops: sum(both[hop] for hop in hops)):
            both[a, b] -= step
            both[b, a] -= step
        # Each cycle is used both ways round.
        found += 2 * step
    return found


def _all_cycles(names: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Yield every cycle through all *names* once, as its hops one way round."""
    for rest in permutations(names[1:]):
        # Every cycle is among the permutations twice, once for each way round: one of them is enough.
        if rest[0] < rest[-1]:
            yield list(zip((names[0], *rest), (*rest, names[0]), strict=True))


def _cycles(width: dict[tuple[str, str], float], names: Sequence[str]) -> float:
    """Return the width of disjoint cycles through all *names*, both ways round, the widest first."""
    left, found = dict(width), 0.0
    # This ends: the narrowest hop of each cycle is left with exactly 0, and no later cycle can use it.
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
