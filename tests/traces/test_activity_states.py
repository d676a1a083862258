"""Every nanosecond of a step is in one state: held against a reference that looks at each of them."""

from collections import Counter

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.traces.hand_made import Span, collective, compute, opened, window

from foretrace.traces.analysis.activity import activity, states
from foretrace.traces.analysis.metrics import breakdown
from foretrace.traces.layout import AXES, Layout
from foretrace.traces.run import Run

END_NS = 30
TO_HOST = {("copy", "offload"), ("copy", "input")}
PASSES = {"forward", "backward", "backward_input", "backward_weight", "recompute"}

TIME = st.tuples(st.integers(0, END_NS), st.integers(0, 12))
SPAN = st.one_of(
    st.builds(
        lambda r, k, t: Span(r, "compute", k, t[0], t[1]),
        st.integers(0, 2),
        st.sampled_from([*sorted(PASSES), "optimizer"]),
        TIME,
    ),
    st.builds(
        lambda r, said, t: Span(r, *said, *t),
        st.integers(0, 2),
        st.sampled_from(
            [*sorted(TO_HOST), ("host", "data"), ("host", "optimizer"), ("copy", "host_to_device")]
        ),
        TIME,
    ),
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
    said = {(s.category, s.kind) for s, _ in alive}
    if any(category in {"compute", "copy"} for category, _ in said - TO_HOST):
        return "compute"
    talking = [(s.axis or "unknown", ready <= t) for s, ready in alive if s.category in {"collective", "p2p"}]
    talking += [(s.axis, False) for s, _ in alive if s.category == "wait" and s.axis]
    order = [*AXES, "unknown", "world"]
    moving = [axis for axis, moves in talking if moves]
    if moving or said & TO_HOST:
        return f"exposed:{min(moving, key=order.index, default='host')}"
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
    if not talking:
        return "host:optimizer" if ("host", "optimizer") in said else "other"
    return f"wait:{min((axis for axis, _ in talking), key=order.index)}"


NORM = [Span(rank, "collective", "all_reduce", at, 20 - at, "world", 0, 0) for rank, at in ((0, 10), (1, 15))]
LESS_COMMON = ("recompute", "backward_weight", "backward")


@given(spans=st.lists(SPAN, min_size=1, max_size=14), pp=st.sampled_from([1, 2]), edges=TIME)
@example(spans=[compute(0, "forward", 0, 5), *NORM], pp=2, edges=(0, 20))
@example(spans=[compute(rank, kind, 5, 5) for rank, kind in enumerate(LESS_COMMON)], pp=2, edges=(0, 20))
@settings(max_examples=60, deadline=None)
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
@settings(max_examples=30, deadline=None)
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
