"""Plays a step in which only some ranks take as long as they did, each with those alike played once.

Where one rank of hundreds is singled out, the others still fall into a few kinds: those that meet it, those
that meet these, and so on. Which kinds there are is the same for all ranks in the same place, so that their
scenarios are columns of one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from foretrace.traces.columns import BoolArray, Int64Array, factorized
from foretrace.traces.replay.alike import Colours, first_of_each, number_of, spread
from foretrace.traces.replay.play import Replay
from foretrace.traces.replay.waves import Edges, FloatArray, Graph

AT_ONCE: Final = 1 << 22
"""Durations that are held at a time, of all spans of a graph in all its scenarios."""


class _Graph(NamedTuple):
    """Ranks of different colours, and the scenarios in which they have these.

    Attributes:
        nodes: of a rank of each colour, which rank is played in its place.
        met: for each of them by slot, what tells its channel from others.
        recorded: for each of them its place in a scenario, -1 if it is ideal.
        scenarios: what is played where ranks are as recorded, and the places of the questions it answers.
    """

    nodes: Int64Array
    met: list[Colours]
    recorded: list[int]
    scenarios: dict[tuple[int, ...], list[int]]


class Parts:
    """Scenarios in which some ranks are as recorded, and all others ideal.

    Args:
        replay: of a run.
        actual: duration of each of its spans, in ns.
        ideal: the same if all spans were like others that do the same.
    """

    def __init__(self, replay: Replay, actual: FloatArray, ideal: FloatArray) -> None:
        self._replay, self._actual, self._ideal = replay, actual, ideal
        first, _ = first_of_each(replay.colour)
        order = np.argsort(first)  # spans are by rank
        node = np.empty(len(first), np.int64)
        node[order] = np.arange(len(first))
        self._node = node[np.unique(replay.colour, return_inverse=True)[1]]
        ranks = replay.ranks[first[order]]  # some may have no work
        self._at = np.append(np.searchsorted(replay.work.rank, ranks), len(actual))
        shapes = [self._shape(one) for one in range(len(first))]
        self._shapes = np.array(shapes, np.uint64)[self._node]

    def means_s(self, chosen: Sequence[BoolArray]) -> FloatArray:
        """Return the mean time of a step, in s, in each scenario: which stored ranks are as recorded."""
        graphs: dict[bytes, _Graph] = {}
        for question, ranks in enumerate(chosen):
            self._ask(graphs, question, ranks)
        found = np.zeros(len(chosen))
        for together in _batches(graphs.values(), self._size):
            self._answer(together, found)
        return found

    def _shape(self, node: int) -> int:
        """Return a number that ranks share that differ in the recorded durations of their spans at most."""
        rows, (after, before) = self._rows(node), self._edges(node)
        work = self._replay.work
        return number_of(
            *(values[rows] for values in (work.slot, work.code, self._replay.step, self._ideal)),
            after,
            before,
        )

    def _rows(self, node: int) -> slice:
        return slice(int(self._at[node]), int(self._at[node + 1]))

    def _edges(self, node: int) -> tuple[Int64Array, Int64Array]:
        """Return the dependencies of the spans of *node*, counted from its first."""
        rows, edges = self._rows(node), self._replay.free
        own = slice(*np.searchsorted(edges.after, (rows.start, rows.stop)))
        return edges.after[own] - rows.start, edges.before[own] - rows.start

    def _size(self, graph: _Graph) -> int:
        return int((self._at[graph.nodes + 1] - self._at[graph.nodes]).sum())

    def _ask(self, graphs: dict[bytes, _Graph], question: int, ranks: BoolArray) -> None:
        """Add a question to the graph of its kind."""
        recorded = np.unique(self._node[ranks])
        place = np.where(ranks, np.searchsorted(recorded, self._node), -1)
        colour = self._replay.meetings.refined(spread(self._shapes, (place + 1).astype(np.uint64)))
        distinct, first = np.unique(colour, return_index=True)
        graph = graphs.get(key := distinct.tobytes())
        if graph is None:
            met = [self._replay.meetings.channels(colour, one) for one in first.tolist()]
            graph = graphs[key] = _Graph(self._node[first], met, place[first].tolist(), {})
        graph.scenarios.setdefault(tuple(recorded.tolist()), []).append(question)

    def _answer(self, graphs: Sequence[_Graph], found: FloatArray) -> None:
        """Play some graphs beside each other, as one, and write down the answers."""
        work, n_steps = self._replay.work, len(self._replay.steps)
        nodes = [
            (number, *one) for number, graph in enumerate(graphs) for one in zip(*graph[:3], strict=True)
        ]
        at = np.concatenate([np.arange(*self._at[node : node + 2]) for _, node, _, _ in nodes])
        sizes = [int(self._at[node + 1] - self._at[node]) for _, node, _, _ in nodes]
        graph_of = np.repeat([number for number, _, _, _ in nodes], sizes)
        joins = work.slot[at] >= 0
        met = [
            own[work.slot[self._rows(node)][work.slot[self._rows(node)] >= 0]] for _, node, own, _ in nodes
        ]
        instance = np.full(len(at), -1, np.int64)
        instance[joins] = factorized(
            graph_of[joins], np.concatenate(met).view(np.int64), work.code[at][joins]
        )
        begin = np.cumsum(sizes) - sizes
        edges = [
            np.array(self._edges(node)) + first for (_, node, _, _), first in zip(nodes, begin, strict=True)
        ]
        played = Graph(len(at), Edges(*np.concatenate(edges, axis=1)), instance)
        step = graph_of * n_steps + self._replay.step[at]
        first_ns = np.tile(self._replay.first_ns, len(graphs))
        columns = [list(graph.scenarios) for graph in graphs]
        most, wide = max(map(len, columns)), max(AT_ONCE // len(played.head), 1)
        ideal = played.summed(self._ideal[at, None])
        for low in range(0, most, wide):
            chosen = range(low, min(low + wide, most))
            chain_ns = np.repeat(ideal, len(chosen), axis=1)
            for (number, _, _, place), first, size in zip(nodes, begin.tolist(), sizes, strict=True):
                if place < 0:
                    continue
                mine, order, bounds = played.chains(slice(first, first + size))
                for column, scenario in enumerate(chosen):
                    said = columns[number][min(scenario, len(columns[number]) - 1)]
                    durations = self._actual[self._rows(said[place])]
                    chain_ns[mine, column] = np.add.reduceat(durations[order - first], bounds)
            times = played.played(chain_ns, first_ns, step).reshape(len(graphs), n_steps, len(chosen))
            for graph, own, of_steps in zip(graphs, columns, times, strict=True):
                for column, scenario in enumerate(chosen[: max(len(own) - low, 0)]):
                    found[graph.scenarios[own[scenario]]] = of_steps.mean(axis=0)[column] / 1e9


def _batches(graphs: Iterable[_Graph], size: Callable[[_Graph], int]) -> Iterator[list[_Graph]]:
    """Yield graphs that are played at once: those with as many scenarios, as far as they have room."""
    batch: list[_Graph] = []
    room = 0
    for graph in sorted(graphs, key=lambda graph: len(graph.scenarios)):
        n = size(graph)
        if batch and (n > room or len(graph.scenarios) > 2 * len(batch[0].scenarios)):
            yield batch
            batch = []
        room = (room if batch else AT_ONCE) - n
        batch.append(graph)
    yield batch
