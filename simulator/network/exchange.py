"""An all-to-all in which ranks send each other different amounts: who has most to send or to receive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

from foretrace.simulator.errors import SimulationError
from foretrace.topologies.shape import GroupShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the busiest ranks of an exchange move; each figure is of the rank for which it is largest.

    Attributes:
        near_bytes: to, or from, ranks of the same node.
        far_bytes: to, or from, ranks of other nodes.
        far_peers: other nodes' ranks that it sends anything to, or gets anything from.
    """

    near_bytes: int
    far_bytes: int
    far_peers: int


def load(sent_bytes: Sequence[Sequence[int]], nodes: Sequence[int]) -> Load:
    """Return the load of an exchange in which rank *i* sends ``sent_bytes[i][j]`` to rank *j*.

    *sent_bytes*: a row per rank, as long as there are ranks; what a rank keeps counts for nothing. Raises
    SimulationError if the rows do not fit the ranks, or a figure is below zero.

    >>> load([[0, 5], [1, 0]], [0, 1])
    Load(near_bytes=0, far_bytes=5, far_peers=1)
    """
    n = len(nodes)
    if len(sent_bytes) != n or any(len(row) != n for row in sent_bytes):
        shape = f"{len(sent_bytes)} rows of {sorted({len(row) for row in sent_bytes})}"
        raise SimulationError(f"all_to_all_v among {n} ranks needs {n} rows of {n} sizes, not {shape}")
    if any(size < 0 for row in sent_bytes for size in row):
        raise SimulationError("all_to_all_v: a rank cannot send fewer than 0 bytes")
    near_bytes = far_bytes = far_peers = 0
    for rank, home in enumerate(nodes):
        others = [peer for peer in range(n) if peer != rank]
        # A port is full in one direction at a time: what goes out and what comes in are not added.
        for out in (True, False):
            sizes = {peer: sent_bytes[rank][peer] if out else sent_bytes[peer][rank] for peer in others}
            near_bytes = max(near_bytes, sum(size for peer, size in sizes.items() if nodes[peer] == home))
            # A rank of which nothing is wanted gets no message, and costs no posting.
            far = [size for peer, size in sizes.items() if nodes[peer] != home and size]
            far_bytes, far_peers = max(far_bytes, sum(far)), max(far_peers, len(far))
    return Load(near_bytes=near_bytes, far_bytes=far_bytes, far_peers=far_peers)


def is_even(sent_bytes: Sequence[Sequence[int]]) -> bool:
    """Return whether all ranks send all others as much.

    >>> is_even([[9, 2], [2, 0]]), is_even([[0, 1], [2, 0]])
    (True, False)
    """
    sizes = {size for i, row in enumerate(sent_bytes) for j, size in enumerate(row) if i != j}
    return len(sizes) < 2


def over_links(
    ports: Load,
    sent_bytes: Sequence[Sequence[int]],
    nodes: Sequence[int],
    shape: GroupShape,
    link: Callable[[int, int], float],
) -> Load:
    """Return *ports* with what the way between two ranks has to carry, if that takes longer.

    Between two ranks there may be less than what a rank sends to all others at once, as where each pair of
    GPUs has a cable of its own. Of the pair that has most to send, inside a node and between two, the bytes
    then count as those that a port would move in that time.

    *sent_bytes*: as ``load`` takes it. *link*: returns what the way between two ranks, by their place in the
    group, carries in bytes/s.
    """
    sizes = {(i, j): sent_bytes[i][j] for i, j in permutations(range(len(nodes)), 2)}
    # Bytes between nodes pass the NICs of all members of a node together; this is one member's part of that.
    wide = {True: shape.intra_bytes_per_s, False: shape.inter_bytes_per_s / shape.n_local}
    moved = {True: ports.near_bytes, False: ports.far_bytes}
    for is_near, bytes_per_s in wide.items():
        pairs = [pair for pair in sizes if (nodes[pair[0]] == nodes[pair[1]]) == is_near]
        if pairs:
            fullest = max(pairs, key=lambda pair: sizes[pair])
            # Bytes that a port would move in the time that this link takes.
            as_port = sizes[fullest] * bytes_per_s / link(*fullest)
            moved[is_near] = max(moved[is_near], round(as_port))
    return Load(near_bytes=moved[True], far_bytes=moved[False], far_peers=ports.far_peers)


def skewed(size_bytes: int, n_ranks: int, imbalance: float) -> list[list[int]]:
    """Return what ranks send if each has *size_bytes*, and the first gets *imbalance* times its share.

    The others get what is left, evenly: what a router does that likes one expert. Rows add up to
    *size_bytes*, up to rounding down. Raises SimulationError if the share of the first would be below zero or
    more than there is.

    >>> skewed(8, 4, 2.0)
    [[4, 1, 1, 1], [4, 1, 1, 1], [4, 1, 1, 1], [4, 1, 1, 1]]
    """
    if not 0 <= imbalance <= n_ranks or n_ranks < 2:
        raise SimulationError(
            f"imbalance = {imbalance} among {n_ranks} ranks: from 0 to {n_ranks}, 1 is even; at least 2 ranks"
        )
    first = imbalance * size_bytes / n_ranks
    rest = (size_bytes - first) / (n_ranks - 1)
    # Rounded down, so that no rank sends more than it has.
    return [[int(first), *[int(rest)] * (n_ranks - 1)] for _ in range(n_ranks)]
