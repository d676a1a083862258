"""Two steps communicate the same if no rank, channel or place in its order says otherwise."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.traces.hand_made import in_memory

from foretrace.traces.communicated import Call, Channel
from foretrace.traces.info import RunInfo
from foretrace.traces.join import join_spans
from foretrace.traces.layout import Group
from foretrace.traces.run import Run
from foretrace.traces.timeline import timeline

GROUPS = (Group(id=7, axis="dp", ranks=(0, 1)), Group(id=8, axis="tp", ranks=(0,)))
GATHER = {
    "category": "collective",
    "kind": "all_gather",
    "axis": "dp",
    "group": 7,
    "size_bytes": 64,
    "dtype": "bf16",
}
SEND = {"category": "p2p", "kind": "send", "axis": "pp", "peer": 1, "size_bytes": 32, "dtype": "bf16"}


def run_of(calls: Sequence[dict[str, Any]], world_size: int = 2) -> Run:
    """Return a run of one step of rank 0 that does *calls*, one after the other."""
    blank = {"axis": "", "group": -1, "peer": -1, "size_bytes": 0, "dtype": "", "sequence": -1}
    step = blank | {"category": "step", "kind": "step", "start_ns": 0, "duration_ns": 1000, "name": ""}
    rows = [step]
    for at, call in enumerate(calls):
        rows.append(blank | {"start_ns": 10 * at, "duration_ns": 5, "name": "x", "sequence": at} | call)
    columns: dict[str, object] = {name: [row[name] for row in rows] for name in step}
    columns |= {"rank": [0] * len(rows), "step": [0] * len(rows)}
    info = RunInfo(origin="simulated", world_size=world_size, name="run", groups=GROUPS)
    return in_memory(info, timeline(columns))


def run_of_steps(steps: Sequence[Sequence[dict[str, Any]]]) -> Run:
    """Return a run of rank 0 that does in each step the calls that it is given."""
    tables = [run_of(calls).spans([0]).to_pylist() for calls in steps]
    rows = [
        row | {"step": n, "start_ns": row["start_ns"] + 1000 * n}
        for n, table in enumerate(tables)
        for row in table
    ]
    columns: dict[str, object] = {name: [row[name] for row in rows] for name in rows[0]}
    info = RunInfo(origin="recorded", world_size=2, name="run", groups=GROUPS)
    return in_memory(info, timeline(columns))


def said(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> str:
    found = join_spans(run_of(a), 0, run_of(b), 0).communicated
    assert found is not None
    return found.words()


CALLS = st.lists(
    st.builds(
        lambda call, size, dtype: call | {"size_bytes": size, "dtype": dtype},
        st.sampled_from([GATHER, GATHER | {"axis": "tp", "group": 8}, GATHER | {"kind": "all_reduce"}, SEND]),
        st.sampled_from([64, 128]),
        st.sampled_from(["bf16", "fp32"]),
    ),
    max_size=6,
)


@given(calls=CALLS, at=st.integers(0, 5), late=st.integers(0, 400))
@settings(max_examples=30, deadline=None)
def test_only_what_is_the_same_is_said_to_be(calls: list[dict[str, Any]], at: int, late: int) -> None:
    """Times play no part; any one of a call's properties does."""
    later = [call | {"start_ns": late + 10 * n} for n, call in enumerate(calls)]
    assert not calls or said(calls, later).startswith(
        f"communication is the same in a and b: {len(calls)} on"
    )
    if at < len(calls):
        for change in (
            {"size_bytes": 65},
            {"dtype": "fp8"},
            {"kind": "broadcast"},
            {"group": 9},
            {"peer": 3},
        ):
            if "peer" in change and calls[at]["category"] != "p2p":
                continue
            if "group" in change and calls[at]["category"] == "p2p":
                continue
            other = [*calls[:at], calls[at] | change, *calls[at + 1 :]]
            assert said(calls, other).startswith("communication differs on 1 of 1 ranks")
        assert said(calls, calls[:at] + calls[at + 1 :]).startswith("communication differs")


def test_the_first_difference_is_named() -> None:
    other = GATHER | {"kind": "reduce_scatter", "size_bytes": 128}
    assert said([GATHER, GATHER], [GATHER, other]) == (
        "communication differs on 1 of 1 ranks (2 in a, 2 in b): first on rank 0 among ranks 0, 1, number 2 "
        "of the step is all_gather of 64 B bf16 in a, reduce_scatter of 128 B bf16 in b"
    )
    assert said([SEND], []).endswith(
        "with rank 1, number 1 of the step is send of 32 B bf16 in a, nothing in b"
    )


def test_the_order_within_a_group_counts_and_that_of_two_groups_does_not() -> None:
    reduced, split = GATHER | {"kind": "all_reduce"}, GATHER | {"axis": "tp", "group": 8}
    assert "differs" in said([GATHER, reduced], [reduced, GATHER])
    assert "is the same" in said([GATHER, split], [split, GATHER])


@pytest.mark.parametrize("unknown", [{"size_bytes": 0}, {"dtype": ""}])
def test_what_one_run_does_not_know_is_no_difference(unknown: dict[str, Any]) -> None:
    assert "is the same" in said([GATHER], [GATHER | unknown])
    assert "differs" in said([GATHER], [GATHER | unknown | {"kind": "broadcast"}])


def test_nothing_is_said_of_worlds_of_two_sizes_or_without_communication() -> None:
    assert join_spans(run_of([GATHER]), 0, run_of([GATHER], world_size=4), 0).communicated is None
    assert not said([], [])


def test_a_long_group_is_named_by_its_first_ranks() -> None:
    assert Channel("dp", tuple(range(64)), "").words() == "among ranks 0, 1, 2, 3, ..."
    assert Channel("dp", (), "").words() == "along dp"
    assert Call("barrier", 0, "").words() == "barrier"


def test_another_step_that_is_the_same_is_named() -> None:
    """As in the second step of DDP, which communicates more than every other."""
    a, b = run_of([GATHER]), run_of_steps([[GATHER, SEND], [SEND], [GATHER], [GATHER]])
    for one, other, name in ((a, b, "b"), (b, a, "a")):
        found = join_spans(one, 0, other, 0).communicated
        assert found is not None
        assert found.alike == (name, 2)
        assert f"step 2 of {name} communicates the same as" in found.words()
    none = join_spans(a, 0, run_of_steps([[SEND], [SEND]]), 0).communicated
    assert none is not None
    assert none.alike is None
    assert join_spans(a, 0, b, 2).communicated == join_spans(a, 0, a, 0).communicated
