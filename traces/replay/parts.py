"""Plays a step in which only some ranks take as long as they did, each with those alike played once.

Where one rank of hundreds is singled out, the others still fall into a few kinds: those that meet it, those
that meet these, and so on. All ranks have one of few *forms*: what depends on what is the same in each, and
who meets whom. So the forms are one small graph, in which every rank of every scenario is a column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrace.traces.columns import BoolArray, Int64Array, factorized
from foretrace.traces.replay.waves import Edges, FloatArray, Graph
from foretrace.traces.replay.work import (
    Colours,
    Pairs,
    by_place,
    collected,
    coloured,
    dependencies,
    first_of_each,
    number_of,
    spread,
)
from foretrace.traces.run import Run

AT_ONCE: Final = 1 << 25
"""Times that are held at a time, of all chains in all columns: 256 MB in each of two arrays."""


class _Graph(NamedTuple):
    """Ranks of different colours, and the scenarios in which they have these."""

    nodes: Int64Array  # of a rank of each colour, which rank is played in its place
    forms: Int64Array  # of each of them
    met: list[Colours]  # for each of them by slot, what tells its channel from others
    recorded: list[int]  # for each of them its place in a scenario, -1 if it is ideal
    # what is played where ranks are as recorded, and the places of the questions it answers
    scenarios: dict[tuple[int, ...], list[int]]


class _Column(NamedTuple):
    """One rank in one scenario: which, how long its chains take, and what tells its channels from others."""

    scenario: int
    chain_ns: FloatArray
    met: Colours


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
        forms = np.array([self._shape(one) for one in range(len(first))], np.uint64)
        dressed = [number_of(int(form), ideal[self._rows(one)]) for one, form in enumerate(forms)]
        self._shapes = np.array(dressed, np.uint64)[self._node]
        self._form_graph(replay.meetings.refined(forms[self._node]))
        self._kept: dict[tuple[int, bool], FloatArray] = {}  # chains of a rank, ideal or as recorded

    def means_s(self, chosen: Sequence[BoolArray]) -> FloatArray:
        """Return the mean time of a step, in s, in each scenario: which stored ranks are as recorded."""
        graphs: dict[bytes, _Graph] = {}
        for question, ranks in enumerate(chosen):
            self._ask(graphs, question, ranks)
        found = np.zeros(len(chosen))
        for together in self._batches(graphs.values()):
            self._answer(together, found)
        return found

    def means_of_spans_s(self, chosen: Iterable[BoolArray]) -> FloatArray:
        """Return the mean time of a step, in s, in each scenario: which spans are as recorded."""
        nodes = np.unique(self._node, return_index=True)[1].tolist()
        met = [self._replay.meetings.channels(self._replay.colour, place) for place in nodes]
        n_columns = int(np.bincount(self._form[nodes]).max())
        found: list[float] = []
        left = iter(chosen)
        while together := list(islice(left, max(self._most() // n_columns, 1))):
            columns: list[list[_Column]] = [[] for _ in self._first[1:]]
            for number, mask in enumerate(together):
                span_ns = np.where(mask, self._actual, self._ideal)
                for node, form in enumerate(self._form[nodes].tolist()):
                    columns[form].append(_Column(number, self._chains_ns(node, form, span_ns), met[node]))
            found += self._mean_s(columns)
        return np.array(found)

    def _most(self) -> int:
        """Return how many columns are held at a time."""
        return max(AT_ONCE // len(self._forms.head), 1)

    def _shape(self, node: int) -> int:
        """Return a number that ranks share that differ in the durations of their spans at most."""
        rows, work = self._rows(node), self._replay.work
        of_spans = (values[rows] for values in (work.slot, work.code, self._replay.step))
        return number_of(*of_spans, *self._edges(node))

    def _rows(self, node: int) -> slice:
        return slice(int(self._at[node]), int(self._at[node + 1]))

    def _edges(self, node: int) -> tuple[Int64Array, Int64Array]:
        """Return the dependencies of the spans of *node*, counted from its first."""
        rows, edges = self._rows(node), self._replay.free
        own = slice(*np.searchsorted(edges.after, (rows.start, rows.stop)))
        return edges.after[own] - rows.start, edges.before[own] - rows.start

    def _form_graph(self, form: Colours) -> None:
        """Put together the graph of one rank of each of the forms, which ranks have in order."""
        work = self._replay.work
        _, first, self._form = np.unique(form, return_index=True, return_inverse=True)
        rows = [self._rows(node) for node in self._node[first].tolist()]
        sizes = [one.stop - one.start for one in rows]
        self._first = np.cumsum([0, *sizes])
        edges = [np.array(self._edges(int(node))) for node in self._node[first]]
        moved = [one + begin for one, begin in zip(edges, self._first.tolist(), strict=False)]
        slot, code, step = (
            np.concatenate([values[one] for one in rows])
            for values in (work.slot, work.code, self._replay.step)
        )
        form_of = np.repeat(np.arange(len(rows)), sizes)
        joins = slot >= 0
        met = [self._replay.meetings.channels(form, place) for place in first.tolist()]
        channel = np.concatenate(
            [own[work.slot[one][work.slot[one] >= 0]] for own, one in zip(met, rows, strict=True)]
        )
        instance = np.full(len(slot), -1, np.int64)
        instance[joins] = factorized(channel.view(np.int64), code[joins])
        self._forms = Graph(len(slot), Edges(*np.concatenate(moved, axis=1)), instance, apart=True)
        self._key = form_of * len(self._replay.steps) + step
        head, (wave, place) = self._forms.head, self._forms.wave_of()
        meets = np.flatnonzero(instance[head] >= 0)
        meets = meets[np.lexsort((slot[head[meets]], instance[head[meets]], wave[meets]))]
        room = np.cumsum(np.diff(instance[head[meets]], prepend=-1) != 0)
        bounds = np.flatnonzero(np.diff(wave[meets], prepend=-1))
        room -= np.repeat(room[bounds], np.diff(bounds, append=len(room)))
        sides = np.stack([room, form_of[head[meets]], slot[head[meets]], place[meets]], axis=1)
        self._sides = {
            int(wave[meets[low]]): sides[low:high].tobytes()
            for low, high in pairwise([*bounds.tolist(), len(room)])
        }

    def _ask(self, graphs: dict[bytes, _Graph], question: int, ranks: BoolArray) -> None:
        """Add a question to the graph of its kind."""
        recorded = np.unique(self._node[ranks])
        place = np.where(ranks, np.searchsorted(recorded, self._node), -1)
        colour = self._replay.meetings.refined(spread(self._shapes, (place + 1).astype(np.uint64)))
        distinct, first = np.unique(colour, return_index=True)
        graph = graphs.get(key := distinct.tobytes())
        if graph is None:
            met = [self._replay.meetings.channels(colour, one) for one in first.tolist()]
            graph = graphs[key] = _Graph(self._node[first], self._form[first], met, place[first].tolist(), {})
        graph.scenarios.setdefault(tuple(recorded.tolist()), []).append(question)

    def _batches(self, graphs: Iterable[_Graph]) -> Iterator[list[tuple[_Graph, tuple[int, ...]]]]:
        """Yield scenarios that are played at once: as many as have room."""
        batch: list[tuple[_Graph, tuple[int, ...]]] = []
        n_columns = np.zeros(len(self._first) - 1, np.int64)
        for graph in graphs:
            count = np.bincount(graph.forms, minlength=len(n_columns))
            for scenario in graph.scenarios:
                if batch and (n_columns + count).max() > self._most():
                    yield batch
                    batch, n_columns = [], np.zeros_like(n_columns)
                batch.append((graph, scenario))
                n_columns += count
        yield batch

    def _chains_ns(self, node: int, form: int, span_ns: FloatArray) -> FloatArray:
        """Return the duration of each chain of *node*, of those of its spans."""
        _, order, bounds = self._forms.chains(slice(self._first[form], self._first[form + 1]))
        total: FloatArray = np.add.reduceat(span_ns[self._rows(node)][order - self._first[form]], bounds)
        return total

    def _answer(self, scenarios: Sequence[tuple[_Graph, tuple[int, ...]]], found: FloatArray) -> None:
        """Play some scenarios beside each other, and write down the answers."""
        columns: list[list[_Column]] = [[] for _ in self._first[1:]]
        for number, (graph, said) in enumerate(scenarios):
            for node, form, met, place in zip(*graph[:4], strict=True):
                played = int(node) if place < 0 else said[place], place < 0
                if played not in self._kept:
                    span_ns = self._ideal if place < 0 else self._actual
                    self._kept[played] = self._chains_ns(played[0], int(form), span_ns)
                columns[form].append(_Column(number, self._kept[played], met))
        for (graph, said), seconds in zip(scenarios, self._mean_s(columns), strict=True):
            found[graph.scenarios[said]] = seconds

    def _mean_s(self, columns: Sequence[Sequence[_Column]]) -> list[float]:
        """Return the mean time of a step in each scenario."""
        steps = self._replay.first_ns
        last = self._played(columns, np.tile(steps, len(columns))).reshape(len(columns), len(steps), -1)
        times = np.full((len(steps), columns[0][-1].scenario + 1), -np.inf)
        for form, own in enumerate(columns):
            for at, column in enumerate(own):
                np.maximum(times[:, column.scenario], last[form, :, at], out=times[:, column.scenario])
        mean: list[float] = ((times - steps[:, None]).mean(axis=0) / 1e9).tolist()
        return mean

    def _played(self, columns: Sequence[Sequence[_Column]], first_ns: Int64Array) -> FloatArray:
        """Return when the last span of each form and step ends in each column of the form."""
        width = max(map(len, columns))
        chain_ns = np.zeros((len(self._forms.head), width))
        for form, own in enumerate(columns):
            mine, _, _ = self._forms.chains(slice(self._first[form], self._first[form + 1]))
            np.stack([one.chain_ns for one in own], axis=1, out=chain_ns[mine, : len(own)])
        met = [
            (np.array([one.scenario for one in own]), np.stack([one.met for one in own])) for own in columns
        ]
        seats: dict[bytes, tuple[Int64Array, Int64Array, Int64Array]] = {}

        def meet(wave: int, start: FloatArray) -> None:
            if (sides := self._sides.get(wave)) is None:
                return
            if sides not in seats:  # waves are few that differ in more than their times
                seats[sides] = _seats(np.frombuffer(sides, np.int64).reshape(-1, 4), met, width)
            order, begin, group = seats[sides]
            if len(order):
                flat = start.reshape(-1)
                flat[order] = np.maximum.reduceat(flat[order], begin)[group]

        return self._forms.played_apart(chain_ns, first_ns, self._key, meet)


def _seats(
    sides: Int64Array, met: Sequence[tuple[Int64Array, NDArray[np.uint64]]], width: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return which times of a wave are of ranks that meet, where each meeting begins, and which is whose.

    Args:
        sides: of communications: number, form, slot, place in the wave; shape ``(n, 4)``.
        met: by form the scenario of each column, and by slot what tells its channel from others.
        width: columns of the wave.
    """
    parts = [
        np.stack([place * width + np.arange(len(met[form][0])), np.full(len(met[form][0]), room)]).astype(
            np.int64
        )
        for room, form, _, place in sides.tolist()
    ]
    place, room = np.concatenate(parts, axis=1)
    scenario = np.concatenate([met[form][0] for _, form, _, _ in sides.tolist()])
    channel = np.concatenate([met[form][1][:, slot] for _, form, slot, _ in sides.tolist()])
    group = factorized(room, scenario, channel.view(np.int64))
    some = np.flatnonzero(np.bincount(group)[group] > 1)
    order = some[np.argsort(group[some], kind="stable")]
    begin = np.flatnonzero(np.diff(group[order], prepend=-1))
    return place[order], begin, np.repeat(np.arange(len(begin)), np.diff(begin, append=len(order)))


# Plays the steps of a recorded pipeline again with other durations: what would the step have taken?
#
# Every span of a step begins when what it depends on has ended, after the delay that the recording shows; a
# communication moves data once its last participant has come. ``traces.replay.work`` says what depends on
# what in pipeline training.
#
# With the recorded durations and delays the recorded times come out again, to the nanosecond. Method: Lin et
# al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025.


class Replay:
    """The steps of a run as graphs of dependencies, of one rank for all that do the same.

    Args:
        run: a run with forward and backward passes that say their micro-batch.

    Raises:
        RunError: the run has no such passes, too many spans, or its dependencies go round in a circle.
    """

    def __init__(self, run: Run) -> None:
        self.meetings, self.colour = coloured(run)
        self.ranks = np.array(run.stored_ranks, np.int64)
        self.work, line = collected(run, self.meetings, self.colour)
        needs, posted = Pairs(), Pairs()
        for rows in by_place(self.work):
            dependencies(self.work, rows, line, needs, posted)
        after, before = needs.joined()
        self.free = Edges.of(after, before).reduced(len(self.work.start_ns))
        self._every = Edges.of(*map(np.concatenate, zip((after, before), posted.joined(), strict=True)))
        self.steps, self.step = np.unique(self.work.step, return_inverse=True)
        self.first_ns = np.full(len(self.steps), np.iinfo(np.int64).max)
        np.minimum.at(self.first_ns, self.step, self.work.start_ns)

    def delayed_ns(self, work_ns: FloatArray) -> FloatArray:
        """Return how long each step takes on its slowest rank, in every scenario.

        Spans start as late after what they depend on as recorded.

        Args:
            work_ns: duration of each span in each scenario, shape ``(n_spans, n_scenarios)``.

        Returns:
            Times in ns, shape ``(n_steps, n_scenarios)``.
        """
        n = len(self.step)
        latest = self._every.latest(n, self.work.end_ns, self.first_ns[self.step])
        graph = Graph(n, self._every, self.work.instance, chains=False)
        return graph.played(work_ns, self.first_ns, self.step, self.work.start_ns - latest)


def replay(run: Run) -> Replay:
    """Return the steps of *run* as graphs; kept with the run."""
    return run.derived(Replay)
