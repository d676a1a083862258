"""Shared links: as free links where nothing meets, and slower only where something does."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.made_programs import program_of

from foretrace.simulator.engine import contended, contended_compiled, event
from foretrace.simulator.engine.changes import FAR, IN, NEAR, OUT, Change, Way
from foretrace.simulator.errors import ProgramError
from foretrace.simulator.network.cost import Network
from foretrace.simulator.program import Label, Program, Transfer
from foretrace.simulator.workload.dispatch import Routing
from foretrace.topologies.catalog import load_cluster

STREAMS = ("compute", "tp", "dp")
KINDS = ("all_reduce", "send", "recv")


def program(
    meetings: list[tuple[int, tuple[int, ...], Transfer]],
    work_ns: int = 0,
    kinds: dict[int, str] | None = None,
) -> Program:
    """Return a program in which each rank computes, then takes part in its *meetings*, each on its stream.

    A meeting is a stream, the ranks, and what it costs; *kinds* may make a rank's part a send or receive.
    """
    ranks = sorted({rank for _, members, _ in meetings for rank in members})
    rows = [(rank, 0, work_ns, -1) for rank in ranks]
    for at, (lane, members, _) in enumerate(meetings):
        rows += [(rank, lane, 0, at) for rank in members]
    rank, stream, duration_ns, instance = zip(*rows, strict=True)
    labels = (
        Label("compute", "forward", "mlp"),
        *(Label("collective", kind, "", "tp") for kind in KINDS),
    )
    label = [
        0 if met < 0 else 1 + KINDS.index((kinds or {}).get(one, "all_reduce"))
        for one, met in zip(rank, instance, strict=True)
    ]
    return program_of(
        rank=rank,
        stream=stream,
        label=label,
        duration_ns=duration_ns,
        instance=instance,
        deps=[()] * len(rows),
        streams=STREAMS,
        labels=labels,
        transfers=[cost for _, _, cost in meetings],
    )


def end_ns(found: Program, changes: tuple[Change, ...] = ()) -> list[int]:
    """Return when each communication of *found* ends."""
    _, ends = contended.times(found, changes)
    return [int(ends[found.instance == at].max()) for at in range(found.n_instances)]


MEETINGS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True).map(tuple),
        st.builds(
            Transfer,
            st.integers(0, 50),
            st.integers(0, 1000),
            st.just(""),
            st.sampled_from([0.0, 0.5, 1.0]),
            st.sampled_from([0.0, 0.5, 1.0]),
        ),
    ),
    min_size=1,
    max_size=8,
)


def in_turn(
    meetings: list[tuple[int, tuple[int, ...], Transfer]],
) -> list[tuple[int, tuple[int, ...], Transfer]]:
    """Return *meetings* on one stream, so that they cannot wait for each other in a circle."""
    return [(1, members, cost) for _, members, cost in meetings]


@settings(max_examples=30)
@given(meetings=MEETINGS, work_ns=st.integers(0, 100))
def test_without_loads_it_is_the_event_engine(
    meetings: list[tuple[int, tuple[int, ...], Transfer]], work_ns: int
) -> None:
    free = [
        (stream, members, cost._replace(near=0.0, far=0.0)) for stream, members, cost in in_turn(meetings)
    ]
    found = program(free, work_ns)
    for ours, theirs in zip(contended.times(found), event.times(found), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=30)
@given(meetings=MEETINGS, work_ns=st.integers(0, 100))
def test_sharing_never_makes_a_transfer_shorter(
    meetings: list[tuple[int, tuple[int, ...], Transfer]], work_ns: int
) -> None:
    found = program(in_turn(meetings), work_ns)
    start, end = contended.times(found)
    for at, (_, _, cost) in enumerate(in_turn(meetings)):
        mine = found.instance == at
        assert end[mine].max() - start[mine].max() >= cost.latency_ns + cost.wire_ns


def test_two_transfers_on_one_way_take_twice_as_long() -> None:
    cost = Transfer(10, 1000, "", 0.0, 1.0)
    assert end_ns(program([(1, (0, 1), cost), (2, (0, 1), cost)])) == [2010, 2010]


@pytest.mark.parametrize("low_latency", [False, True])
@pytest.mark.parametrize("n_nodes", [1, 2, 8])
@pytest.mark.parametrize("engine", [contended, contended_compiled])
def test_two_equal_dispatches_to_experts_take_twice_what_the_fuller_link_takes(
    engine: ModuleType, n_nodes: int, low_latency: bool
) -> None:
    """On the NICs among eight nodes, or on NVLink in one; a third job beside them, in other nodes, does not.

    Between two nodes the kernels of one dispatch set its pace, and fill NVLink to 19 parts in 20.
    """
    network = Network(load_cluster("hgx-h800", 8 * n_nodes))
    ranks, others = tuple(range(8 * n_nodes)), tuple(range(8 * n_nodes, 16 * n_nodes))
    routing = Routing(tokens=4096, token_bytes=7168, top_k=8)
    cost = network.experts(routing, ranks, low_latency=low_latency)
    found = program([(1, ranks, cost), (2, ranks, cost), (1, others, cost)])
    _, ends = engine.times(found)
    alone_ns = cost.latency_ns + cost.wire_ns
    fuller = max(cost.near, cost.far)
    assert fuller == pytest.approx(0.93 if n_nodes == 2 and not low_latency else 1.0, abs=0.03)
    both_ns = cost.latency_ns + 2 * fuller * cost.wire_ns
    assert [int(ends[found.instance == at].max()) for at in range(3)] == pytest.approx(
        [both_ns, both_ns, alone_ns], abs=2
    )


def test_a_transfer_inside_a_node_does_not_hold_up_one_between_nodes() -> None:
    near, far = Transfer(0, 1000, "", 1.0, 0.0), Transfer(0, 1000, "", 0.0, 1.0)
    assert end_ns(program([(1, (0, 1), near), (2, (0, 2), far)])) == [1000, 1000]


def test_ranks_apart_do_not_hold_each_other_up() -> None:
    cost = Transfer(0, 1000, "", 0.0, 1.0)
    assert end_ns(program([(1, (0, 1), cost), (1, (2, 3), cost)])) == [1000, 1000]


def test_there_and_back_are_two_ways() -> None:
    cost = Transfer(0, 1000, "", 0.0, 1.0)
    found = program([(1, (0, 1), cost), (2, (0, 1), cost)], kinds={0: "send", 1: "recv"})
    assert end_ns(found) == [2000, 2000]
    away = replace(found, label=np.array([0, 0, 2, 3, 3, 2], np.int32))
    assert end_ns(away) == [1000, 1000]


def test_a_slow_nic_slows_those_who_use_it_from_then_on() -> None:
    cost = Transfer(0, 1000, "", 0.0, 1.0)
    change = Change(500, Way(0, FAR, OUT), 0.25)
    assert end_ns(program([(1, (0, 1), cost), (1, (2, 3), cost)]), (change,)) == [2500, 1000]


def test_a_link_that_flaps_delays_by_as_long_as_it_was_down() -> None:
    cost = Transfer(0, 1000, "", 1.0, 0.0)
    way = Way(1, NEAR, IN)
    assert end_ns(program([(1, (0, 1), cost)]), (Change(200, way, 0.0), Change(700, way, 1.0))) == [1500]


def test_a_link_that_stays_down_is_said() -> None:
    found = program([(1, (0, 1), Transfer(0, 1000, "", 1.0, 0.0))])
    with pytest.raises(ProgramError, match="is down and does not recover"):
        contended.times(found, [Change(0, Way(0, NEAR, IN), 0.0)])


def test_links_say_how_full_they_were() -> None:
    cost = Transfer(0, 1000, "", 0.5, 1.0)
    timeline, found = contended.watched(program([(1, (0, 1), cost)]))
    assert timeline.equals(contended.run(program([(1, (0, 1), cost)])))
    ways = [found.ways[at] for at in found.way]
    assert {(way.rank, way.tier): used for way, used in zip(ways, found.used, strict=True)} == {
        (0, NEAR): 0.5,
        (0, FAR): 1.0,
        (1, NEAR): 0.5,
        (1, FAR): 1.0,
    }
    assert set(found.start_ns) == {0}
    assert set(found.end_ns) == {1000}
