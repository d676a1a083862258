"""The least that has to be cut so that nothing flows from a source to a sink (Dinic's algorithm)."""

from __future__ import annotations

from collections import deque


class Network:
    """Edges with capacities between the nodes 0 to ``n_nodes - 1``.

    Args:
        n_nodes: how many nodes there are.
    """

    def __init__(self, n_nodes: int) -> None:
        self._ends, self._room = list[int](), list[int]()  # of edge e; that of its reverse is e ^ 1
        self._edges: list[list[int]] = [[] for _ in range(n_nodes)]

    def add(self, begin: int, end: int, capacity: int) -> None:
        """Add an edge."""
        for at, to, room in ((begin, end, capacity), (end, begin, 0)):
            self._edges[at].append(len(self._ends))
            self._ends.append(to)
            self._room.append(room)

    def side_of_sink(self, source: int, sink: int) -> set[int]:
        """Return the nodes behind the minimum cut that is nearest to *sink*: the edges into them are cut.

        >>> network = Network(4)
        >>> for begin, end, capacity in ((0, 1, 9), (1, 2, 5), (2, 3, 7)):
        ...     network.add(begin, end, capacity)
        >>> sorted(network.side_of_sink(0, 3))
        [2, 3]

        Reference: Dinic 1970; the cut nearest to the sink is that of ``networkx.minimum_cut``.
        """
        while (levels := self._levels(source, sink))[sink] >= 0:
            tried = [0] * len(self._edges)
            while self._push(source, sink, levels, tried):
                pass
        found, waiting = {sink}, [sink]
        while waiting:
            for edge in self._edges[waiting.pop()]:
                before = self._ends[edge]
                if self._room[edge ^ 1] > 0 and before not in found:
                    found.add(before)
                    waiting.append(before)
        return found

    def _levels(self, source: int, sink: int) -> list[int]:
        """Return how many edges with room each node is away from *source*, -1 if it is out of reach."""
        levels = [-1] * len(self._edges)
        levels[source], waiting = 0, deque([source])
        while waiting and levels[sink] < 0:
            at = waiting.popleft()
            for edge in self._edges[at]:
                end = self._ends[edge]
                if self._room[edge] > 0 and levels[end] < 0:
                    levels[end] = levels[at] + 1
                    waiting.append(end)
        return levels

    def _push(self, source: int, sink: int, levels: list[int], tried: list[int]) -> bool:
        """Fill one path to *sink* along *levels*; return whether there was one.

        Args:
            source: where it begins.
            sink: where it ends.
            levels: as of ``_levels``.
            tried: of each node, how many of its edges lead nowhere.
        """
        path, at = list[int](), source
        while at != sink:
            edges = self._edges[at]
            while tried[at] < len(edges):
                edge = edges[tried[at]]
                if self._room[edge] > 0 and levels[self._ends[edge]] == levels[at] + 1:
                    path.append(edge)
                    at = self._ends[edge]
                    break
                tried[at] += 1
            else:
                if not path:
                    return False
                at = self._ends[path.pop() ^ 1]
                tried[at] += 1
        most = min(self._room[edge] for edge in path)
        for edge in path:
            self._room[edge] -= most
            self._room[edge ^ 1] += most
        return True
