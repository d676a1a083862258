"""Uneven all-to-alls of a rehearsal: what was rehearsed counts, others are as who stands for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import DrawFn, composite, integers, lists

from foretrace.simulator.network.cost import Network
from foretrace.simulator.program import Transfer
from foretrace.simulator.rehearsed.program import Joiner
from foretrace.simulator.rehearsed.rank import Meeting, Splits, sent_bytes
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.layout import Group

N = 4
NETWORK = Network(load_cluster("dgx-h100", 8))
GROUP = Group(id=1, axis="ep", ranks=tuple(range(N)))


@composite
def matrices(draw: DrawFn) -> list[list[int]]:
    return draw(lists(lists(integers(0, 1 << 26), min_size=N, max_size=N), min_size=N, max_size=N))


def splits(sent: list[list[int]], rank: int) -> Splits:
    """Return what *rank* sends and gets."""
    return Splits(tuple(sent[rank]), tuple(row[rank] for row in sent))


def joined(parts: dict[int, Meeting], stands_for: tuple[int, ...]) -> tuple[Transfer, list[str]]:
    """Return what an exchange costs, and what is assumed."""
    joiner = Joiner(NETWORK, {1: GROUP}, stands_for)
    for rank, part in parts.items():
        joiner.number(rank, part)
    (found,), _ = joiner.costs()
    return found, joiner.assumed()


def part(found: Splits | None, size_bytes: int) -> Meeting:
    return Meeting("all_to_all", 1, 0, size_bytes, -1, found)


@given(sent=matrices())
def test_what_all_ranks_say_is_what_they_send(sent: list[list[int]]) -> None:
    known = {rank: splits(sent, rank) for rank in range(N)}
    assert sent_bytes(range(N), known, range(N)) == sent
    found, assumed = joined({rank: part(one, sum(one.sent)) for rank, one in known.items()}, tuple(range(N)))
    assert found == NETWORK.all_to_all_v(sent, range(N))
    assert not assumed


@given(row=lists(integers(0, 1 << 26), min_size=N, max_size=N), place=integers(0, N - 1))
def test_a_rank_that_stands_for_all_tells_what_each_of_them_sends(row: list[int], place: int) -> None:
    """Where all send alike, as to experts that routers choose alike, and back, where all get alike."""
    there = [row] * N
    for alike in (there, [list(column) for column in zip(*there, strict=True)]):
        known = {place: splits(alike, place)}
        assert sent_bytes(range(N), known, (place,) * N) == alike
        found, assumed = joined({place: part(known[place], sum(alike[place]))}, (place,) * N)
        assert found == NETWORK.all_to_all_v(alike, range(N))
        assert len(assumed) == 1
        assert "stands for them" in assumed[0]


def test_the_fullest_receiver_decides_as_the_fullest_sender_does() -> None:
    """A rank told to get 1.5 times what it sends: there it gets that much, back it sends it."""
    each = 1 << 24
    there, back = (each,) * N, (3 * each // 2,) * N
    dispatch, _ = joined({0: part(Splits(there, back), sum(there))}, (0,) * N)
    combine, _ = joined({0: part(Splits(back, there), sum(back))}, (0,) * N)
    assert dispatch == combine
    even, _ = joined({0: part(None, sum(there))}, (0,) * N)
    assert even == NETWORK.collective("all_to_all", sum(there), range(N))
    assert dispatch.wire_ns > even.wire_ns * 1.2


def test_a_rank_with_even_sizes_beside_others_counts_as_it_is() -> None:
    """A rank whose tokens all went elsewhere sends nothing, and gets nothing."""
    sent = [[0, 8 << 20, 8 << 20, 0], [1 << 20] * 3 + [0], [2 << 20] * 3 + [0], [0] * 4]
    parts = {rank: part(splits(sent, rank), sum(sent[rank])) for rank in range(3)}
    found, _ = joined({**parts, 3: part(None, 0)}, tuple(range(N)))
    assert found == NETWORK.all_to_all_v(sent, range(N))
    sent[3] = [9 << 20] * 4
    found, _ = joined({**parts, 3: part(None, 36 << 20)}, tuple(range(N)))
    sent = [[*row[:3], max(row[3], 9 << 20)] for row in sent]  # it gets as much, too, from each
    assert found == NETWORK.all_to_all_v(sent, range(N))


@given(rows=lists(lists(integers(1, 1 << 26), min_size=N, max_size=N), min_size=2, max_size=2))
def test_each_rank_that_stands_for_others_tells_what_those_send(rows: list[list[int]]) -> None:
    """Two kinds of ranks; so, too, where a rank from outside the group stands for them."""
    sent = [rows[0], rows[0], rows[1], rows[1]]
    known = {rank: splits(sent, rank) for rank in (0, 2)}
    assert sent_bytes(range(N), known, (0, 0, 2, 2)) == sent
    alike = [rows[0]] * N
    ranks, first = range(4, 8), {4: splits(alike, 0)}
    assert sent_bytes(ranks, first, (0,) * 8) == alike


@pytest.mark.parametrize("stands_for", [(1, 1, 1, 1), (0, 0, 2, 2)])
@given(sent=matrices())
def test_what_rehearsed_ranks_send_and_get_is_as_they_say(
    stands_for: tuple[int, ...], sent: list[list[int]]
) -> None:
    known = sorted({*stands_for})
    found = sent_bytes(range(N), {rank: splits(sent, rank) for rank in known}, stands_for)
    assert [found[rank] for rank in known] == [sent[rank] for rank in known]
    assert [[row[rank] for row in found] for rank in known] == [[row[rank] for row in sent] for rank in known]


def test_where_ranks_do_not_agree_the_larger_counts() -> None:
    """What a rank was told to get, and what another sends it; for others it is as if they agreed."""
    told = {0: Splits((4, 4), (6, 6))}
    assert sent_bytes((0, 1), told, (0, 0)) == [[6, 4], [6, 4]]
    assert sent_bytes((0, 1), {0: Splits((6, 6), (4, 4))}, (0, 0)) == [[6, 6], [4, 4]]
    assert sent_bytes((0, 1), {0: Splits((0, 8), (0, 2)), 1: Splits((5, 0), (3, 0))}, (0, 1)) == [
        [0, 8],
        [5, 0],
    ]
    assert sent_bytes((0, 1), {0: Splits((0, 8), (0, 2))}, (0, 0)) == [[0, 8], [2, 8]]


def test_a_collective_of_unlike_parts_costs_the_largest() -> None:
    """Where no rank says that it is uneven."""
    found, _ = joined({0: part(None, 4096), 1: part(None, 1 << 28)}, (0, 1, 0, 1))
    assert found.wire_ns == pytest.approx(NETWORK.collective("all_to_all", 1 << 28, range(N)).wire_ns)
