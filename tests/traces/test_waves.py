"""Spans played in waves start and end as when each is played by itself, in order."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.traces.errors import RunError
from foretrace.traces.replay.waves import Edges, Graph
from foretrace.traces.replay.work import _belonging, _Pass


def edges_of(after: list[int], before: list[int]) -> Edges:
    return Edges.of(np.array(after, np.int64), np.array(before, np.int64))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], list[int], list[float]]:
    """Spans in an order that their dependencies follow; some end together, none depends on a mate."""
    n = draw(st.integers(1, 12))
    layer = sorted(draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))
    instance = [draw(st.sampled_from([-1, 0, 1])) for _ in range(n)]
    named = [-1 if i < 0 else 2 * layer[row] + i for row, i in enumerate(instance)]
    pairs = [(a, b) for a in range(n) for b in range(n) if layer[b] < layer[a]]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=20)) if pairs else []
    work = draw(st.lists(st.integers(0, 9).map(float), min_size=n, max_size=n))
    return n, edges, named, work


def numbered(named: list[int]) -> list[int]:
    """Return communications numbered from 0 without holes."""
    distinct = sorted(set(named) - {-1})
    return [distinct.index(name) if name >= 0 else -1 for name in named]


@settings(max_examples=120, deadline=None)
@given(case=graphs())
def test_waves_end_spans_when_playing_them_one_by_one_does(
    case: tuple[int, list[tuple[int, int]], list[int], list[float]],
) -> None:
    n, edges, named, work = case
    instance = numbered(named)
    start, end = [0.0] * n, [0.0] * n
    for _ in range(n):  # until nothing changes: as deep as there are spans
        for row in range(n):
            start[row] = max((end[b] for a, b in edges if a == row), default=0.0)
        for row in range(n):
            mates = [m for m in range(n) if instance[m] == instance[row] >= 0] or [row]
            end[row] = max(start[m] for m in mates) + work[row]
    graph = Graph(n, edges_of([a for a, _ in edges], [b for _, b in edges]), np.array(instance), chains=False)
    each = np.arange(n)  # a step of its own, so that all ends are told
    assert graph.played(np.array(work)[:, None], np.zeros(n, np.int64), each)[:, 0].tolist() == end


@settings(max_examples=120, deadline=None)
@given(graph=graphs())
def test_chains_take_as_long_as_their_spans_one_by_one(
    graph: tuple[int, list[tuple[int, int]], list[int], list[float]],
) -> None:
    n, pairs, named, work = graph
    edges, instance = edges_of([a for a, _ in pairs], [b for _, b in pairs]), np.array(numbered(named))
    work_ns, first_ns, step = np.array([work, [1.0] * n]).T, np.array([5]), np.zeros(n, np.int64)
    chains, alone = Graph(n, edges.reduced(n), instance), Graph(n, edges, instance, chains=False)
    assert (
        chains.played(chains.summed(work_ns), first_ns, step).tolist()
        == alone.played(work_ns, first_ns, step).tolist()
    )


def test_what_follows_one_another_is_one_chain() -> None:
    """A communication that only one span takes part in is a link, too; the edge from 0 to 2 says nothing."""
    graph = Graph(4, edges_of([1, 2, 2, 3], [0, 1, 0, 2]).reduced(4), np.array([-1, 0, -1, -1]))
    assert graph.head.tolist() == [0]


def test_a_circle_is_refused() -> None:
    """0 waits for 1, whose communication waits for 2, which waits for 0; 1 itself starts."""
    edges = edges_of([0, 2], [1, 0])
    for chains in (False, True):
        with pytest.raises(RunError, match="wait for one another in a circle"):
            Graph(3, edges, np.array([-1, 0, 0]), chains=chains)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_chain_that_bites_its_tail_is_refused(n: int) -> None:
    edges = edges_of(list(range(n)), [(row + 1) % n for row in range(n)])
    with pytest.raises(RunError, match=f"^{n} spans of a step wait"):
        Graph(n + 1, edges.reduced(n), np.full(n + 1, -1))


def test_what_depends_on_nothing_starts_when_it_may() -> None:
    """The latest end of what a span depends on, and what is given where there is nothing."""
    edges = edges_of([2, 2], [0, 1])
    assert edges.latest(3, np.array([4, 7, 9]), np.array([1, 1, 1])).tolist() == [1, 1, 7]


def test_a_transfer_that_names_no_part_of_the_model_belongs_to_its_micro_batch() -> None:
    """In whatever order they come; where a micro-batch has two passes, their order tells."""
    work: Any = SimpleNamespace(microbatch=np.array([1, 0, 1]), chunk=np.array([-1, -1, 1]))
    own = [_Pass(at, at, "forward", *named) for at, named in enumerate([(0, 0), (1, 0)])]
    assert _belonging(work, [0, 1], own, skip=0) == [1, 0]
    own.append(_Pass(2, 2, "forward", 1, 1))
    assert _belonging(work, [0, 1, 2], own, skip=0) == [0, 0, 2]
