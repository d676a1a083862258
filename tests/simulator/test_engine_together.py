"""Programs in which tasks hold each other up: shared GPUs, shared links, machines that change meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.made_programs import program_of

from foretrace.simulator.engine import compiled, contended, contended_compiled, event
from foretrace.simulator.engine.changes import (
    FAR,
    IN,
    NEAR,
    OUT,
    SWITCHES,
    WAYS,
    Above,
    Change,
    Throttle,
    Way,
    of_gpus,
    of_links,
)
from foretrace.simulator.engine.slowdown import MOST, slowdown
from foretrace.simulator.errors import EngineError, ProgramError
from foretrace.simulator.program import Label, Program, Transfer

STREAMS = ("compute", "tp", "dp", "host")
LABELS = (
    Label("compute", "forward", "mlp"),
    Label("host", "launch", "mlp"),
    Label("collective", "all_reduce", "", "tp"),
    Label("p2p", "send", "", "pp"),
    Label("p2p", "recv", "", "pp"),
)
PAIRS = [(event, compiled), (contended, contended_compiled)]

Row = tuple[int, int, int, int, int, list[int], int]
"""Rank, stream, label, duration in ns, communication, dependencies, share bound by memory."""


def make(rows: list[Row], transfers: list[Transfer]) -> Program:
    """Return the program of *rows*; communication *i* costs ``transfers[i]``."""
    rank, stream, label, duration_ns, instance, deps, bound = zip(*rows, strict=True) if rows else ((),) * 7
    return program_of(
        rank=rank,
        stream=stream,
        label=label,
        duration_ns=duration_ns,
        instance=instance,
        deps=deps,
        streams=STREAMS,
        labels=LABELS,
        transfers=transfers,
        memory_bound=np.array(bound, np.int32),
    )


shares = st.sampled_from([0.0, 0.25, 0.3, 0.7, 1.0])
parts = st.sampled_from([0, 1, 45_000, 181_818, 333_333, 500_000, 950_000])
costs = st.builds(Transfer, st.integers(0, 30), st.integers(0, 60), st.just(""), shares, shares, parts, parts)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Return a program that can run: everything waits only for what was drawn before it."""
    rows: list[Row] = []
    transfers: list[Transfer] = []
    n_ranks = draw(st.integers(1, 3))
    for _ in range(draw(st.integers(1, 25))):
        before = list(range(len(rows)))
        deps = st.lists(st.sampled_from(before), max_size=2, unique=True) if before else st.just([])
        if draw(st.booleans()):
            members = draw(st.lists(st.integers(0, n_ranks - 1), min_size=1, unique=True))
            label = draw(st.integers(2, 4))
            stream = draw(st.integers(1, 2))
            rows += [(rank, stream, label, 0, len(transfers), draw(deps), 0) for rank in members]
            transfers.append(draw(costs))
        else:
            stream = draw(st.sampled_from([0, 0, 0, 1, 3]))
            work_ns = draw(st.integers(0, 90))
            bound = draw(st.sampled_from([0, 300_000, 1_000_000]))
            rows.append(
                (draw(st.integers(0, n_ranks - 1)), stream, int(stream == 3), work_ns, -1, draw(deps), bound)
            )
    return make(rows, transfers)


ranks, moments = st.integers(0, 3), st.integers(0, 250)
link_changes = st.builds(
    lambda at, rank, way, capacity: Change(at, Way(rank, *way), capacity),
    *(moments, ranks, st.sampled_from(WAYS), st.sampled_from([0.0, 0.1, 0.5, 1.0])),
)
throttles = st.builds(Throttle, moments, ranks, st.sampled_from([1.0, 1.25, 1.7, 3.0]))


def outcome(engine: Any, program: Program, changes: list[Change | Throttle]) -> object:
    """Return start and end of every task, or why the program cannot run."""
    try:
        return [column.tolist() for column in engine.times(program, changes)]
    except ProgramError as error:
        return str(error)


@settings(max_examples=80, deadline=None)
@given(program=programs(), slow=st.lists(throttles, max_size=3), broken=st.lists(link_changes, max_size=4))
def test_engines_agree_to_the_nanosecond_whatever_happens(
    program: Program, slow: list[Throttle], broken: list[Change]
) -> None:
    """Also where a link stays down and the program cannot run to its end: the same error, word for word."""
    assert outcome(event, program, [*slow]) == outcome(compiled, program, [*slow])
    both: list[Change | Throttle] = [*slow, *broken]
    assert outcome(contended, program, both) == outcome(contended_compiled, program, both)


switches = st.builds(Way, st.integers(0, 2), st.sampled_from(SWITCHES), st.sampled_from([IN, OUT]))


@settings(max_examples=50, deadline=None)
@given(program=programs(), data=st.data())
def test_engines_agree_on_links_between_switches_and_on_how_full_all_were(
    program: Program, data: st.DataObject
) -> None:
    loads = st.dictionaries(switches, st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=3)
    filled = tuple(data.draw(st.lists(loads, min_size=1, max_size=3)))
    above = Above(filled, np.arange(program.n_instances, dtype=np.int64) % len(filled))
    capacities = st.sampled_from([0.1, 0.5, 1.0])
    links = switches | link_changes.map(lambda change: change.way)
    changes: list[Change | Throttle] = data.draw(
        st.lists(st.builds(Change, moments, links, capacities), max_size=3)
    )
    one, other = (engine.watched(program, changes, above) for engine in (contended, contended_compiled))
    assert one[0].equals(other[0])
    assert one[0].equals(contended_compiled.run(program, changes, above))
    ways = [[found.ways[at] for at in found.way.tolist()] for _, found in (one, other)]
    assert ways[0] == ways[1]
    for at in (2, 3):
        np.testing.assert_array_equal(one[1][at], other[1][at])
    np.testing.assert_allclose(one[1].used, other[1].used, rtol=0, atol=1e-8)


@settings(max_examples=30, deadline=None)
@given(program=programs())
def test_a_link_carries_what_its_transfers_bring(program: Program) -> None:
    """Used width times time, over a whole run, is the wire time of each transfer times its share."""
    moved: dict[Way, float] = {}
    for task in np.flatnonzero(program.instance >= 0).tolist():
        transfer = program.transfers[program.instance_transfer[program.instance[task]]]
        kind = program.labels[program.label[task]].kind
        for tier, share in ((NEAR, transfer.near), (FAR, transfer.far)):
            for direction in {"send": (OUT,), "recv": (IN,)}.get(kind, (IN, OUT)):
                way = Way(int(program.rank[task]), tier, direction)
                moved[way] = moved.get(way, 0.0) + share * transfer.wire_ns
    try:
        _, found = contended_compiled.watched(program)
    except ProgramError:
        return
    used: dict[Way, float] = {}
    for at, since, until, share in zip(*found[1:], strict=True):
        way = found.ways[at]
        used[way] = used.get(way, 0.0) + share * (until - since)
        assert share <= 1 + 1e-9
    slack = 1.0 * program.n_instances  # a transfer ends on a whole nanosecond
    for way, wanted in moved.items():
        assert wanted - 1e-6 <= used.get(way, 0.0) <= wanted + slack


@settings(max_examples=30, deadline=None)
@given(program=programs(), data=st.data())
def test_running_again_with_other_durations_is_running_another_program(
    program: Program, data: st.DataObject
) -> None:
    change: list[Change | Throttle] = [data.draw(throttles)]
    other = np.array(
        [data.draw(st.integers(0, 90)) if ns else 0 for ns in program.duration_ns.tolist()], np.int64
    )
    for specification, fast in PAIRS:
        clock = fast.Clock(program, change)
        clock.times()
        found = clock.times(other)
        wanted = specification.times(replace(program, duration_ns=other), change)
        assert [x.tolist() for x in found] == [x.tolist() for x in wanted]


@settings(max_examples=40, deadline=None)
@given(program=programs(), slow=st.lists(throttles, max_size=2))
def test_nothing_is_slower_for_a_gpu_that_is_not_shared_or_throttled(
    program: Program, slow: list[Throttle]
) -> None:
    free = replace(
        program, transfers=tuple(transfer._replace(processors=0, memory=0) for transfer in program.transfers)
    )
    for engine in (event, compiled):
        for with_it, without in zip(engine.times(program, [*slow]), engine.times(free), strict=True):
            assert (with_it >= without).all()


@settings(max_examples=30, deadline=None)
@given(program=programs())
def test_what_takes_nothing_of_the_gpus_leaves_the_times_alone(program: Program) -> None:
    """The pass without a queue and the one with it are the same where nobody holds anybody up."""
    free = replace(
        program, transfers=tuple(transfer._replace(processors=0, memory=0) for transfer in program.transfers)
    )
    wanted = [x.tolist() for x in compiled.times(free)]
    assert [x.tolist() for x in compiled.times(free, [Throttle(0, 0, 1.0)])] == wanted


@given(bound=st.integers(0, 1_000_000), taken=st.integers(0, MOST), more=st.integers(0, MOST), memory=parts)
def test_the_more_is_taken_the_slower(bound: int, taken: int, more: int, memory: int) -> None:
    assert 1.0 <= slowdown(bound, taken, memory) <= slowdown(bound, taken + more, memory)
    assert slowdown(bound, memory, taken) <= slowdown(bound, memory, taken + more) < 10.001
    assert slowdown(bound, 0, 0) == 1.0


def one_gpu(*, transfer: Transfer, work_ns: int = 1000, bound: int = 0, starts_ns: int = 0) -> Program:
    """Return a rank that computes, and beside it communicates with another after *starts_ns*."""
    return make(
        [
            (0, 0, 0, work_ns, -1, [], bound),
            (0, 3, 1, starts_ns, -1, [], 0),
            (0, 1, 2, 0, 0, [1], 0),
            (1, 1, 2, 0, 0, [], 0),
        ],
        [transfer],
    )


def test_a_fifth_of_the_processors_taken_is_a_quarter_more_time() -> None:
    program = one_gpu(transfer=Transfer(0, 10_000, processors=200_000))
    assert event.times(program)[1][0] == 1250


def test_only_the_time_beside_a_communication_is_longer() -> None:
    """400 ns alone, 500 ns beside a transfer that does 400 ns of the work, 200 ns alone again."""
    program = one_gpu(transfer=Transfer(0, 500, processors=200_000), starts_ns=400)
    assert event.times(program)[1].tolist() == [1100, 400, 900, 900]


def test_what_is_bound_by_memory_minds_bytes_that_move_and_not_kernels_that_wait() -> None:
    transfer = Transfer(0, 10_000, processors=200_000, memory=500_000)
    assert event.times(one_gpu(transfer=transfer, bound=1_000_000))[1][0] == 2000
    waits = make(
        [
            (0, 0, 0, 1000, -1, [], 1_000_000),
            (0, 1, 2, 0, 0, [], 0),
            (1, 3, 1, 600, -1, [], 0),
            (1, 1, 2, 0, 0, [2], 0),
        ],
        [transfer],
    )
    assert event.times(waits)[1][0] == 600 + 2 * 400


def test_a_gpu_throttles_and_recovers() -> None:
    program = make([(0, 0, 0, 1000, -1, [], 0), (1, 0, 0, 1000, -1, [], 0)], [])
    changes = [Throttle(200, 0, 2.0), Throttle(800, 0, 1.0)]
    for engine in (event, compiled, contended, contended_compiled):
        assert engine.times(program, changes)[1].tolist() == [1300, 1000]


def test_the_host_is_not_slowed() -> None:
    program = make([(0, 3, 1, 1000, -1, [], 0)], [])
    assert event.times(program, [Throttle(0, 0, 3.0)])[1].tolist() == [1000]


def test_a_link_that_flaps_on_the_compiled_engine() -> None:
    program = make([(0, 1, 2, 0, 0, [], 0), (1, 1, 2, 0, 0, [], 0)], [Transfer(0, 1000, near=1.0)])
    way = Way(1, NEAR, IN)
    changes = [Change(200, way, 0.0), Change(700, way, 1.0)]
    assert contended_compiled.times(program, changes)[1].tolist() == [1500, 1500]
    slow = [Change(500, Way(0, FAR, OUT), 0.25)]
    far = replace(program, transfers=(Transfer(0, 1000, far=1.0),))
    assert contended_compiled.times(far, slow)[1].tolist() == [2500, 2500]


@pytest.mark.parametrize("engine", [event, compiled])
def test_engines_without_shared_links_refuse_changes_of_links(engine: Any) -> None:
    with pytest.raises(EngineError, match=f"the engine is {engine.NAME}: --engine contended or"):
        engine.times(make([], []), [Change(0, Way(0, NEAR, IN), 0.5)])
    with pytest.raises(EngineError, match=f"links between switches need .* the engine is {engine.NAME}"):
        engine.run(make([], []), above=Above())


@pytest.mark.parametrize("engine", [event, compiled, contended, contended_compiled])
def test_a_throttle_that_cannot_be_is_refused(engine: Any) -> None:
    with pytest.raises(ProgramError, match=r"rank 0 computes 0.0 times as long from 5 ns on: .* above 0"):
        engine.times(make([], []), [Throttle(5, 0, 0.0)])


@pytest.mark.parametrize(
    "change",
    [
        *(Throttle(0, 0, factor) for factor in (-1.0, 0.0, float("inf"), float("nan"))),
        *(Throttle(-1, 0, 2.0), Throttle(0, -1, 2.0)),
        *(Change(0, Way(0, NEAR, IN), capacity) for capacity in (-1.0, float("nan"))),
        *(Change(-1, Way(0, NEAR, IN), 0.5), Change(0, Way(-1, NEAR, IN), 0.5)),
        *(Change(0, Way(0, "leaf", NEAR), 0.5), Change(0, Way(0, NEAR, "up"), 0.5)),
    ],
)
def test_what_cannot_happen_is_refused(change: Change | Throttle) -> None:
    of = of_gpus if isinstance(change, Throttle) else of_links
    with pytest.raises(ProgramError, match=r"times as long from|a capacity of at least 0"):
        of([change])
    possible: list[Change | Throttle] = [
        Throttle(0, 0, 0.5),
        *(Change(0, Way(0, NEAR, IN), 0.0), Change(0, Way(0, "leaf", OUT), 1.0)),
    ]
    assert [*of_gpus(possible), *of_links(possible)] == possible
