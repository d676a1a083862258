"""Every nanosecond of a step is in one state, the parts add up to the whole, joins find the last arrival."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.analysis.activity import activity, states
from traces.analysis.arrivals import arrivals
from traces.analysis.metrics import breakdown, summarize
from traces.errors import RunError
from traces.info import Clock, RunInfo
from traces.layout import AXES, Group, Layout
from traces.run import Run
from traces.store import open_run, write_run
from traces.timeline import timeline

END_NS = 30
PASSES = {"forward", "backward", "backward_input", "backward_weight", "recompute"}


class Span(NamedTuple):
    """A span of a hand-made timeline."""

    rank: int
    category: str
    kind: str
    start_ns: int
    duration_ns: int
    axis: str = ""
    group: int = -1
    sequence: int = -1
    peer: int = -1
    step: int = 0


def opened(spans: list[Span], **values: Any) -> Run:
    given: dict[str, Any] = {"origin": "simulated", "world_size": 4} | values
    info = RunInfo(**given)
    columns: dict[str, object] = dict(zip(Span._fields, zip(*spans, strict=True), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        run = open_run(write_run(Path(folder) / "run", info, timeline(columns)))
        run.spans()  # decoded while the files are there
        return run


def compute(rank: int, kind: str, start: int, duration: int) -> Span:
    return Span(rank, "compute", kind, start, duration)


def collective(rank: int, start: int, duration: int, *, axis: str = "dp", group: int = 0, n: int = 0) -> Span:
    return Span(rank, "collective", "all_reduce", start, duration, axis, group, n)


def p2p(rank: int, kind: str, start: int, duration: int, peer: int) -> Span:
    return Span(rank, "p2p", kind, start, duration, "pp", 9, 0, peer)


def window(rank: int, start: int, duration: int, step: int = 0) -> Span:
    return Span(rank, "step", "step", start, duration, step=step)


# --- against a reference that looks at every nanosecond

TIME = st.tuples(st.integers(0, END_NS), st.integers(0, 12))
SPAN = st.one_of(
    st.builds(
        lambda r, k, t: Span(r, "compute", k, t[0], t[1]),
        st.integers(0, 2),
        st.sampled_from(["forward", "backward_input", "optimizer"]),
        TIME,
    ),
    st.builds(lambda r, t: Span(r, "host", "data", t[0], t[1]), st.integers(0, 2), TIME),
    st.builds(
        lambda r, a, t: Span(r, "wait", "wait", t[0], t[1], a),
        st.integers(0, 2),
        st.sampled_from(["", "tp", "pp"]),
        TIME,
    ),
    st.builds(
        lambda r, a, t, n: Span(
            r, "collective", "all_reduce", t[0], t[1], a, [*AXES, "world"].index(a) if a else -1, n
        ),
        st.integers(0, 2),
        st.sampled_from(["tp", "dp", "pp", "world", ""]),
        TIME,
        st.integers(-1, 2),
    ),
    st.builds(
        lambda r, k, t, p, n: Span(r, "p2p", k, t[0], t[1], "pp", 9, n, p),
        st.integers(0, 2),
        st.sampled_from(["send", "recv"]),
        TIME,
        st.integers(-1, 2),
        st.integers(-1, 1),
    ),
)


def key(span: Span) -> object:
    """Return what joins a span with its partners; unique to the span where nothing does."""
    if span.category == "collective" and span.group >= 0 and span.sequence >= 0:
        return span.group, span.sequence
    if span.category == "p2p" and span.peer >= 0 and span.sequence >= 0:
        ends = (span.rank, span.peer) if span.kind == "send" else (span.peer, span.rank)
        return span.group, ends, span.sequence
    return object()


def last_arrival(span: Span, arrived: dict[object, int], its_key: object) -> int:
    last = max(span.start_ns, arrived.get(its_key, span.start_ns))
    return span.start_ns if last > span.start_ns + span.duration_ns else last


def state_at(t: int, spans: list[tuple[Span, int]], passes: list[Span], *, pipelined: bool) -> str:
    """Return the state by the table of docs/architecture.md, read literally."""
    alive = [(s, ready) for s, ready in spans if s.start_ns <= t < s.start_ns + s.duration_ns]
    if any(s.category in {"compute", "copy"} for s, _ in alive):
        return "compute"
    talking = [(s.axis or "unknown", ready <= t) for s, ready in alive if s.category in {"collective", "p2p"}]
    talking += [(s.axis, False) for s, _ in alive if s.category == "wait" and s.axis]
    order = [*AXES, "unknown", "world"]
    if moving := [axis for axis, moves in talking if moves]:
        return f"exposed:{min(moving, key=order.index)}"
    if any(axis == "pp" for axis, _ in talking):
        return "bubble"
    if (
        passes
        and pipelined
        and (not alive or min((axis for axis, _ in talking), key=order.index, default="") == "world")
    ):
        begun, done = min(s.start_ns for s in passes), max(s.start_ns + s.duration_ns for s in passes)
        if t < begun or t >= done:
            return "bubble"
    if talking:
        return f"wait:{min((axis for axis, _ in talking), key=order.index)}"
    return "other"


@given(spans=st.lists(SPAN, min_size=1, max_size=14), pp=st.sampled_from([1, 2]), edges=TIME)
@settings(max_examples=300, deadline=None)
def test_states_are_those_of_every_single_nanosecond(
    spans: list[Span], pp: int, edges: tuple[int, int]
) -> None:
    start, length = edges
    spans = [*spans, *(window(rank, start, length + 1) for rank in range(3))]
    run = opened(spans, layout=Layout(pp=pp, dp=4 // pp))
    keys = [key(span) for span in spans]
    arrived: dict[object, int] = {}
    for span, its_key in zip(spans, keys, strict=True):
        arrived[its_key] = max(arrived.get(its_key, -1), span.start_ns)
    for row in breakdown(run):
        own = [
            (span, last_arrival(span, arrived, its_key))
            for span, its_key in zip(spans, keys, strict=True)
            if span.rank == row.rank and span.category != "step"
        ]
        inside = range(start, start + length + 1)
        passes = [
            s
            for s, _ in own
            if s.category == "compute"
            and s.kind in PASSES
            and s.start_ns < inside.stop
            and s.start_ns + s.duration_ns > start
        ]
        expected = [state_at(t, own, passes, pipelined=pp > 1) for t in inside]
        found = activity(run, row.rank, 0)
        drawn = [
            found.states[code]
            for a, b, code in zip(found.start_ns, found.end_ns, found.state, strict=True)
            for _ in range(a, b)
        ]
        assert drawn == expected
        assert {state: ns for state, ns in row.ns.items() if ns} == Counter(expected)
        check_laws(run, row.rank)


def check_laws(run: Run, rank: int) -> None:
    """The parts are the whole: intervals, nanoseconds, shares, and communication in its three ways."""
    row = next(row for row in breakdown(run) if row.rank == rank)
    found = activity(run, rank, row.step)
    assert (found.start_ns[1:] == found.end_ns[:-1]).all()
    assert (found.state[1:] != found.state[:-1]).all()
    assert (found.end_ns > found.start_ns).all()
    assert found.end_ns[-1] - found.start_ns[0] == row.window_ns == sum(row.ns.values())
    assert abs(sum(row.shares.values()) - 1) < 1e-12
    assert tuple(row.ns) == states(run)
    for axis, communication in row.communication_ns.items():
        exposed, waiting = row.ns[f"exposed:{axis}"], row.ns.get(f"wait:{axis}", 0)
        assert row.hidden_ns[axis] + exposed + waiting <= communication <= row.window_ns


@given(
    shape=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=6
    ),
    compute_ns=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_hidden_exposed_and_waiting_make_up_communication(
    shape: list[tuple[int, int, int]], compute_ns: list[tuple[int, int]]
) -> None:
    """On one in-order stream, where nothing competes: every wait and every transfer is counted once."""
    spans = [compute(0, "forward", *times) for times in compute_ns]
    clock = {0: 0, 1: 0}
    moving_ns = 0
    for n, (gap, skew, transfer) in enumerate(shape):
        arrived = {0: clock[0] + gap, 1: clock[0] + gap + skew}
        end = max(arrived.values()) + transfer
        spans += [collective(rank, at, end - at, n=n) for rank, at in arrived.items()]
        clock = {0: end, 1: end}
        moving_ns += transfer
    run = opened([*spans, window(0, 0, 200), window(1, 0, 200)])
    for row in breakdown(run):
        behind_ns = sum(
            int(n)
            for n in _overlap(
                [s for s in spans if s.rank == row.rank and s.category == "collective"],
                compute_ns if row.rank == 0 else [],
            )
        )
        waiting_hidden = behind_ns - row.hidden_ns["dp"]
        exposed, waiting = row.ns["exposed:dp"], row.ns["wait:dp"]
        assert row.hidden_ns["dp"] + exposed == moving_ns
        assert row.hidden_ns["dp"] + waiting_hidden + exposed + waiting == row.communication_ns["dp"]


def _overlap(spans: list[Span], compute_ns: list[tuple[int, int]]) -> list[int]:
    """Return for each span how many of its nanoseconds lie under any compute span."""
    busy = np.zeros(300, bool)
    for start, duration in compute_ns:
        busy[start : start + duration] = True
    return [int(busy[s.start_ns : s.start_ns + s.duration_ns].sum()) for s in spans]


# --- hand-computed


def test_a_hand_made_pipeline() -> None:
    """Two stages, one micro-batch: F0 0-10, send 10-12, F1 12-22, B1 22-42, back 42-44, B0 44-64."""
    spans = [
        compute(0, "forward", 0, 10),
        p2p(0, "send", 10, 2, 1),
        p2p(0, "recv", 12, 32, 1),
        compute(0, "backward", 44, 20),
        p2p(1, "recv", 0, 12, 0),
        compute(1, "forward", 12, 10),
        compute(1, "backward", 22, 20),
        p2p(1, "send", 42, 2, 0),
        *(window(rank, 0, 64) for rank in (0, 1)),
    ]
    run = opened(spans, world_size=2, layout=Layout(pp=2))
    first, last = breakdown(run)
    assert first.ns == {"compute": 30, "exposed:pp": 4, "bubble": 30, "other": 0}
    assert last.ns == {"compute": 30, "exposed:pp": 4, "bubble": 30, "other": 0}
    assert summarize(run)["bubble_fraction"] == pytest.approx(30 / 64)


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 8)])
def test_gpipe_has_its_bubble(p: int, m: int, marked: bool) -> None:
    """(p - 1) / (m + p - 1) of total, with free communication; also where no row marks the step."""
    f, b = 3, 5
    spans = [
        compute(s, kind, start, d)
        for s in range(p)
        for i in range(m)
        for kind, start, d in (
            ("forward", (s + i) * f, f),
            ("backward", (m + p - 1) * f + (p - 1 - s + i) * b, b),
        )
    ]
    total = (m + p - 1) * (f + b)
    if marked:
        spans += [window(s, 0, total) for s in range(p)]
    run = opened(spans, world_size=p, layout=Layout(pp=p))
    summary = summarize(run)
    idle_inside = {row.rank: row.ns["other"] for row in breakdown(run)}
    assert summary["step_time_s"] == total / 1e9
    assert summary["bubble_fraction"] + sum(idle_inside.values()) / (p * total) == pytest.approx(
        (p - 1) / (m + p - 1)
    )
    assert idle_inside[p - 1] == 0  # the last stage turns around at once


def test_a_late_rank_makes_the_others_wait() -> None:
    spans = [
        compute(0, "forward", 0, 10),
        collective(0, 10, 25),
        compute(1, "forward", 0, 30),
        collective(1, 30, 5),
    ]
    early, late = breakdown(opened(spans, world_size=2))
    assert early.ns == {"compute": 10, "exposed:dp": 5, "wait:dp": 20, "other": 0, "bubble": 0}
    assert late.ns == {"compute": 30, "exposed:dp": 5, "wait:dp": 0, "other": 0, "bubble": 0}


def test_communication_behind_compute_is_beside_the_sum() -> None:
    spans = [compute(0, "backward", 0, 10), collective(0, 4, 10)]
    (row,) = breakdown(opened(spans, world_size=1))
    assert row.ns == {"compute": 10, "exposed:dp": 4, "bubble": 0, "wait:dp": 0, "other": 0}
    assert row.hidden_ns == {"dp": 6}


def test_a_buffered_send_did_not_wait() -> None:
    spans = [p2p(0, "send", 0, 5, 1), p2p(1, "recv", 100, 3, 0)]
    run = opened(spans, world_size=2, layout=Layout(pp=2))
    assert arrivals(run).last_ns[0].tolist() == [0]
    assert arrivals(run).n_joined == 2


def test_clocks_are_forgiven_their_uncertainty() -> None:
    """Rank 1 seems to arrive after the all-reduce ended on rank 0, by less than the clocks are known."""
    spans = [collective(0, 0, 100), collective(1, 104, 6)]
    for uncertainty_ns, expected in ((1, 0), (2, 100)):
        clock = {rank: Clock(uncertainty_ns=uncertainty_ns) for rank in (0, 1)}
        assert arrivals(opened(spans, clock=clock)).last_ns[0].tolist() == [expected]


def test_transfers_of_both_directions_and_groups_do_not_mix() -> None:
    spans = [
        p2p(0, "send", 0, 50, 1),
        p2p(1, "recv", 10, 40, 0),
        p2p(1, "send", 20, 30, 0),
        p2p(0, "recv", 30, 20, 1),
        collective(0, 0, 50, group=7),
        collective(1, 40, 10, group=8),
    ]
    last = arrivals(opened(spans)).last_ns
    assert last[0].tolist() == [10, 30, 0]
    assert last[1].tolist() == [10, 30, 40]


def test_windows_may_differ_between_ranks_and_steps() -> None:
    spans = [
        *(compute(rank, "forward", 0, 100) for rank in (0, 1)),
        window(0, 0, 10, 1),
        window(0, 10, 20, 2),
        window(1, 5, 10, 1),
        window(1, 15, 0, 2),
    ]
    rows = breakdown(opened(spans))
    assert [(row.rank, row.step, row.window_ns) for row in rows] == [(0, 1, 10), (0, 2, 20), (1, 1, 10)]


def test_a_rank_without_step_rows_gets_the_windows_of_the_others() -> None:
    spans = [window(0, 3, 10), compute(1, "forward", 0, 5)]
    rows = breakdown(opened(spans))
    assert [(row.rank, row.window_ns, row.ns["compute"]) for row in rows] == [(0, 10, 0), (1, 10, 2)]


def test_spans_without_a_step_number_make_one_step() -> None:
    spans = [compute(0, "forward", 5, 5)._replace(step=-1), compute(1, "forward", 0, 5)._replace(step=-1)]
    rows = breakdown(opened(spans))
    assert [(row.rank, row.step, row.window_ns) for row in rows] == [(0, -1, 10), (1, -1, 10)]


def test_folded_ranks_weigh_as_many_as_they_stand_for() -> None:
    layout = Layout(pp=2, dp=3)
    spans = [compute(0, "forward", 0, 10), compute(3, "forward", 0, 5), window(0, 0, 10), window(3, 0, 10)]
    run = opened(
        spans,
        world_size=6,
        layout=layout,
        groups=tuple(layout.process_groups()),
        representatives=(0, 0, 0, 3, 3, 3),
    )
    summary = summarize(run)
    assert summary["n_spans"] == 12
    assert summary["shares"]["compute"] == pytest.approx(0.75)
    assert activity(run, 5, 0).total_ns() == activity(run, 3, 0).total_ns()
    assert activity(run, 5, 0).rank == 5
    assert {kind["kind"]: kind["count"] for kind in summary["kinds"]} == {"forward": 6, "step": 6}


def test_the_first_recorded_step_is_not_averaged() -> None:
    spans = [window(0, 100 * n, 50 if n else 100, n) for n in range(3)]
    recorded = summarize(opened(spans, origin="recorded"))
    assert [step["averaged"] for step in recorded["steps"]] == [False, True, True]
    assert recorded["step_time_s"] == 50e-9
    assert all(step["averaged"] for step in summarize(opened(spans))["steps"])


def test_kinds_add_up() -> None:
    spans = [
        compute(0, "forward", 0, 3),
        compute(0, "forward", 3, 4),
        collective(0, 7, 2),
        collective(1, 7, 2),
    ]
    rows = summarize(opened(spans))["kinds"]
    assert [(row["kind"], row["axis"], row["count"], row["total_s"]) for row in rows] == [
        ("all_reduce", "dp", 2, 4e-9),
        ("forward", "", 2, 7e-9),
    ]


def test_what_is_not_there_is_named() -> None:
    run = opened([compute(0, "forward", 0, 3)])
    with pytest.raises(RunError, match=r"no step 7 on rank 0 in .*; it has steps 0"):
        activity(run, 0, 7)
    with pytest.raises(RunError, match="no spans of rank 3"):
        activity(run, 3, 0)
    with pytest.raises(RunError, match="nothing to analyse"):
        summarize(opened([compute(0, "forward", 0, 0)]))


def test_groups_are_not_needed_to_join() -> None:
    """The key is in the rows; the members in run.json are for people and for expanding."""
    spans = [collective(0, 0, 10), collective(1, 6, 4)]
    groups = (Group(id=0, axis="dp", ranks=(0, 1)),)
    with_groups, without = (breakdown(opened(spans, groups=known)) for known in (groups, ()))
    assert with_groups == without
