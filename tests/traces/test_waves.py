"""Spans played in waves start and end as when each is played by itself, in order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.traces.errors import RunError
from foretrace.traces.replay.waves import Edges, waves


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


@settings(max_examples=300, deadline=None)
@given(graph=graphs())
def test_waves_end_spans_when_playing_them_one_by_one_does(
    graph: tuple[int, list[tuple[int, int]], list[int], list[float]],
) -> None:
    n, edges, named, work = graph
    instance = numbered(named)
    start, end = [0.0] * n, [0.0] * n
    for _ in range(n):  # until nothing changes: as deep as there are spans
        for row in range(n):
            start[row] = max((end[b] for a, b in edges if a == row), default=0.0)
        for row in range(n):
            mates = [m for m in range(n) if instance[m] == instance[row] >= 0] or [row]
            end[row] = max(start[m] for m in mates) + work[row]
    begun, ended, seen = np.zeros(n), np.zeros(n), []
    found = waves(n, Edges.of([a for a, _ in edges], [b for _, b in edges]), np.array(instance))
    for wave in found:
        seen += wave.rows.tolist()
        if len(wave.targets):
            begun[wave.rows[wave.targets]] = np.maximum.reduceat(ended[wave.sources], wave.offsets)
        ended[wave.singles] = begun[wave.singles] + np.array(work)[wave.singles]
        if len(wave.members):
            arrived = np.maximum.reduceat(begun[wave.members], wave.bounds)
            ended[wave.members] = np.repeat(arrived, wave.sizes) + np.array(work)[wave.members]
    assert sorted(seen) == list(range(n))
    assert begun.tolist() == start
    assert ended.tolist() == end


def test_a_circle_is_refused() -> None:
    """0 waits for 1, whose communication waits for 2, which waits for 0; 1 itself starts."""
    edges = Edges.of([0, 2], [1, 0])
    with pytest.raises(RunError, match="2 spans of a step wait for one another in a circle"):
        waves(3, edges, np.array([-1, 0, 0]))


def test_what_depends_on_nothing_starts_when_it_may() -> None:
    """The latest end of what a span depends on, and what is given where there is nothing."""
    edges = Edges.of([2, 2], [0, 1])
    assert edges.latest(3, np.array([4, 7, 9]), np.array([1, 1, 1])).tolist() == [1, 1, 7]
