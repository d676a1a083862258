"""The causes add up to the difference, and equal work is found in both runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.traces.hand_made import in_memory

from foretrace.traces.analysis.metrics import typical_step
from foretrace.traces.compare import RANK_SPREAD, causes, compare
from foretrace.traces.errors import RunError
from foretrace.traces.info import RunInfo
from foretrace.traces.join import JOINED
from foretrace.traces.layout import Layout
from foretrace.traces.run import Run
from foretrace.traces.store import open_run, write_run
from foretrace.traces.timeline import timeline

Row = dict[str, Any]


def opened(rows: Sequence[Row], **values: Any) -> Run:
    given: dict[str, Any] = {"origin": "simulated", "world_size": 4, "name": "run"} | values
    names = {name for row in rows for name in row}
    empty = {"axis": "", "name": ""}
    columns: dict[str, object] = {
        name: [row.get(name, empty.get(name, -1)) for row in rows] for name in names
    }
    return in_memory(RunInfo(**given), timeline(columns))


def span(rank: int, kind: str, start: int, duration: int, **more: Any) -> Row:
    category = {"step": "step", "all_reduce": "collective", "send": "p2p"}.get(kind, "compute")
    return {
        "rank": rank,
        "category": category,
        "kind": kind,
        "start_ns": start,
        "duration_ns": duration,
        "step": 0,
    } | more


SPANS = st.lists(
    st.builds(
        lambda rank, kind, start, duration, axis, n: span(
            rank,
            kind,
            start,
            duration,
            **({"axis": axis, "group": 0, "sequence": n} if kind == "all_reduce" else {}),
        ),
        st.integers(0, 3),
        st.sampled_from(["forward", "backward", "optimizer", "all_reduce"]),
        st.integers(0, 50),
        st.integers(0, 20),
        st.sampled_from(["tp", "dp"]),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=15,
)
WINDOWS = st.lists(st.integers(1, 70), min_size=4, max_size=4)


@given(a=SPANS, b=SPANS, a_ns=WINDOWS, b_ns=WINDOWS)
@settings(max_examples=30, deadline=None)
def test_causes_add_up_to_the_difference(
    a: list[Row], b: list[Row], a_ns: list[int], b_ns: list[int]
) -> None:
    runs = [
        opened([*rows, *(span(rank, "step", 0, ns) for rank, ns in enumerate(windows))])
        for rows, windows in ((a, a_ns), (b, b_ns))
    ]
    found = compare(*runs)
    assert sum(cause.a_ns for cause in found.causes) == found.a_step_ns == max(a_ns)
    assert sum(cause.b_ns for cause in found.causes) == found.b_step_ns == max(b_ns)
    assert sum(cause.difference_ns for cause in found.causes) == found.b_step_ns - found.a_step_ns
    for sides in (found.causes, found.details):
        assert sum(cause.a_ns for cause in sides) == found.a_step_ns
        assert sum(cause.b_ns for cause in sides) == found.b_step_ns
    for cause in found.causes:  # details are parts of causes
        parts = [
            one for one in found.details if one.name == cause.name or one.name.startswith(f"{cause.name}:")
        ]
        assert abs(sum(one.a_ns for one in parts) - cause.a_ns) <= len(found.details)
    bars = found.waterfall()
    level = found.a_step_ns
    for bar in bars:
        assert bar["start_ns"] == level
        level = bar["end_ns"]
    assert level == found.b_step_ns
    inside = [
        sum(row["start_ns"] < windows[row["rank"]] for row in rows)
        for rows, windows in ((a, a_ns), (b, b_ns))
    ]
    for side, unjoined, n_spans in zip(
        "ab", (found.spans.a_unjoined, found.spans.b_unjoined), inside, strict=True
    ):
        assert sum(found.joined[f"{side}_spans"].to_pylist()) + unjoined == n_spans


@given(rows=SPANS)
@settings(max_examples=25, deadline=None)
def test_a_run_equals_itself(rows: list[Row]) -> None:
    run = opened([*rows, span(0, "step", 0, 71), span(1, "step", 0, 71)])
    found = compare(run, run)
    assert found.ratio == 1
    assert all(cause.difference_ns == 0 for cause in found.causes)
    assert (found.spans.a_unjoined, found.spans.b_unjoined) == (0, 0)
    for name in ("start_ns", "duration_ns", "waiting_ns"):
        assert found.joined[f"a_{name}"].equals(found.joined[f"b_{name}"])


def test_a_slower_kernel_is_the_cause() -> None:
    def run(backward_ns: int) -> Run:
        end = 10 + backward_ns
        return opened(
            [
                span(0, "forward", 0, 10),
                span(0, "backward", 10, backward_ns),
                span(0, "all_reduce", end, 5, axis="dp", group=0, sequence=0),
                span(0, "step", 0, end + 8),
            ],
            world_size=1,
        )

    found = compare(run(20), run(26))
    assert {c.name: (c.a_ns, c.b_ns) for c in found.causes if c.b_ns} == {
        "compute:forward": (10, 10),
        "compute:backward": (20, 26),
        "exposed:dp": (5, 5),
        "other": (3, 3),
    }
    assert found.ratio == 38 / 44
    kinds = {kind["kind"]: kind for kind in found.spans.to_dict()["kinds"]}
    assert kinds["backward"]["median_ratio"] == pytest.approx(20 / 26)


def test_a_slower_kind_of_collective_is_told_from_another() -> None:
    """Two kinds on one axis are two details of one cause, waiting apart from moving data."""

    def run(gather_ns: int) -> Run:
        kinds = (("all_reduce", 0, 5), ("all_gather", 5, gather_ns))
        rows = []
        for rank in (0, 1):
            for n, (kind, start, took) in enumerate(kinds):
                late = 2 if rank and kind == "all_gather" else 0  # rank 1 comes last
                more = {"category": "collective", "axis": "dp", "group": 0, "sequence": n}
                rows.append(span(rank, kind, start + late, took - late, **more))
            rows.append(span(rank, "step", 0, 5 + gather_ns))
        return opened(rows, world_size=2)

    found = compare(run(10), run(16))
    details = {c.name: (c.a_ns, c.b_ns) for c in found.details if c.b_ns}
    assert details["exposed:dp:all_reduce"] == (5, 5)
    assert details["exposed:dp:all_gather"] == (8, 14)
    assert sum(b for name, (_, b) in details.items() if not name.startswith("exposed")) == 2


def test_the_mean_rank_and_the_slowest_one() -> None:
    run = opened(
        [span(0, "step", 0, 10), span(1, "step", 0, 20), span(0, "forward", 0, 10), span(1, "forward", 0, 20)]
    )
    assert causes(run, 0) == {"compute:forward": 15, RANK_SPREAD: 5, "bubble": 0, "other": 0}


def test_a_third_of_a_nanosecond_is_not_lost() -> None:
    rows = [span(0, "forward", 0, 1), span(1, "backward", 0, 1), span(2, "optimizer", 0, 1)]
    run = opened([*rows, *(span(rank, "step", 0, 1) for rank in range(3))])
    assert sum(causes(run, 0).values()) == 1


def test_the_typical_step_is_the_median_of_the_warm_ones() -> None:
    lengths = [900, 10, 30, 20]
    steps = [span(0, "step", 1000 * n, length, step=n) for n, length in enumerate(lengths)]
    assert typical_step(opened(steps, origin="recorded")) == (3, 20)
    assert typical_step(opened(steps)) == (3, 20)
    assert typical_step(opened(steps[:2], origin="recorded")) == (1, 10)


def test_spans_join_on_what_both_runs_know() -> None:
    known = [span(0, "forward", t, 1, microbatch=m, layer=t % 2) for t, m in enumerate((1, 1, 0, 0))]
    blind = [span(0, "forward", t, 2, layer=t % 2) for t in range(4)]
    with_order = compare(opened(known), opened(blind)).joined
    assert with_order["a_start_ns"].to_pylist() == with_order["b_start_ns"].to_pylist() == [0, 1, 2, 3]
    swapped = [span(0, "forward", t, 2, microbatch=m, layer=t % 2) for t, m in enumerate((0, 0, 1, 1))]
    with_number = compare(opened(known), opened(swapped)).joined
    assert with_number["b_start_ns"].to_pylist() == [2, 3, 0, 1]
    assert with_number.schema.equals(JOINED)


def test_what_only_one_run_has_is_counted() -> None:
    gather = {"axis": "dp", "group": 0}
    a = [span(0, "all_reduce", t, 1, sequence=t, **gather) for t in range(2)]
    found = compare(opened([*a, span(0, "optimizer", 2, 1)]), opened(a[:1])).spans
    assert (found.table.num_rows, found.a_unjoined, found.b_unjoined) == (1, 2, 0)


def test_compute_that_is_cut_finer_is_joined_as_one_piece() -> None:
    """A simulated layer against the recorded modules of the same layer."""
    whole = [span(0, "forward", 10 * layer, 10, layer=layer, name=f"block {layer}") for layer in range(2)]
    cut = [span(0, "forward", 4 * n, 3, layer=n // 3, name=f"module {n}") for n in range(6)]
    found = compare(opened(whole), opened(cut))
    assert found.joined.select(
        ["a_spans", "b_spans", "a_duration_ns", "b_duration_ns", "b_name"]
    ).to_pylist() == [
        {"a_spans": 1, "b_spans": 3, "a_duration_ns": 10, "b_duration_ns": 9, "b_name": name}
        for name in ("module 0", "module 3")
    ]
    assert (found.spans.a_unjoined, found.spans.b_unjoined) == (0, 0)


def test_runs_of_different_size_are_joined_stage_by_stage() -> None:
    small = opened(
        [span(rank, "forward", 0, 1 + rank, stage=rank) for rank in range(2)],
        world_size=2,
        layout=Layout(pp=2),
    )
    large = opened(
        [span(rank, "forward", 0, 1, stage=rank // 4) for rank in range(8)],
        world_size=8,
        layout=Layout(pp=2, dp=4),
    )
    found = compare(small, large).spans
    assert found.rank_pairs == ((0, 0), (1, 4))
    assert found.table["a_duration_ns"].to_pylist() == [1, 2]


def test_other_ranks_of_a_world_of_one_size_are_not_compared_call_by_call() -> None:
    """They have other peers and groups, so that nothing differs for being another rank's."""
    layout = Layout(pp=2, tp=2)

    def one(rank: int) -> Run:
        shared = span(rank, "all_reduce", 0, 1, axis="tp", group=0, sequence=0)
        return opened([shared, span(rank, "send", 1, 1, peer=rank + 2)], layout=layout)

    assert compare(one(0), one(1)).spans.communicated is None
    assert compare(one(0), one(0)).spans.communicated is not None


def test_folded_against_recorded() -> None:
    layout = Layout(pp=2, dp=2)
    folded = opened(
        [span(rank, "forward", 0, 5) for rank in (0, 2)],
        layout=layout,
        groups=tuple(layout.process_groups()),
        representatives=(0, 0, 2, 2),
    )
    recorded = opened([span(rank, "forward", 0, 6) for rank in range(4)], layout=layout, origin="recorded")
    found = compare(folded, recorded)
    assert found.spans.rank_pairs == ((0, 0), (2, 2))
    assert found.ratio == 5 / 6


def test_a_comparison_is_one_json_object() -> None:
    run = opened([span(0, "forward", 0, 5)], world_size=2)
    document = json.loads(json.dumps(compare(run, run).to_dict()))
    assert document["ratio"] == 1
    assert document["difference_s"] == sum(cause["difference_s"] for cause in document["causes"])
    assert any("no spans of rank 1" in warning for warning in document["warnings"])


def test_nothing_to_compare_is_said() -> None:
    with pytest.raises(RunError, match="nothing to compare"):
        compare(opened([span(0, "forward", 0, 0)]), opened([span(0, "forward", 0, 1)]))


def test_a_split_backward_is_compared_with_a_whole_one_as_one_cause(tmp_path: Path) -> None:
    def opened(name: str, kinds: list[str]) -> Run:
        n = len(kinds)
        columns: dict[str, object] = {
            "rank": [0] * (n + 1), "stream": ["compute"] * n + ["step"],
            "category": ["compute"] * n + ["step"], "kind": [*kinds, "step"],
            "start_ns": [*range(0, 10 * n, 10), 0], "duration_ns": [10] * n + [10 * n],
            "step": [0] * (n + 1),
        }  # fmt: skip
        info = RunInfo(origin="recorded", world_size=1, name=name)
        return open_run(write_run(tmp_path / name, info, timeline(columns)))

    whole = opened("whole", ["forward", "backward", "backward"])
    split = opened("split", ["forward", "backward_input", "backward_weight", "backward_weight"])
    found = {cause.name: (cause.a_ns, cause.b_ns) for cause in compare(whole, split).causes}
    assert found["compute:backward"] == (20, 30)
    assert not {"compute:backward_input", "compute:backward_weight"} & set(found)
    same = {cause.name: (cause.a_ns, cause.b_ns) for cause in compare(split, split).causes}
    assert same["compute:backward_weight"] == (20, 20)


JOB: dict[str, Any] = {"global_batch": 8, "seq_len": 4, "precision": "bf16"}


@given(st.integers(1, 9), st.integers(1, 9))
def test_more_work_in_more_time_is_not_slower(batch: int, pace: int) -> None:
    """A step of ``batch`` times the sequences at ``pace`` times the speed: what a token takes says so."""
    a = opened([span(0, "forward", 0, 3600), span(0, "step", 0, 3600)], job=JOB)
    length = 3600 * batch
    more = JOB | {"global_batch": 8 * batch}
    b = opened([span(0, "forward", 0, length), span(0, "step", 0, length)], job=more)
    found = compare(a, b)
    assert found.ratio == pytest.approx(1 / batch)
    assert found.ratio_per_work == pytest.approx(1)
    assert ("work per step" in found.warned) == (batch > 1)
    fast = opened([span(0, "forward", 0, length * pace), span(0, "step", 0, length * pace)], job=more)
    assert compare(fast, b).ratio_per_work == pytest.approx(pace)
    assert compare(fast, b).warned == ""


def test_what_makes_two_jobs_of_two_runs_is_said_first() -> None:
    rows = [span(0, "forward", 0, 10), span(0, "step", 0, 10)]
    given: dict[str, Any] = {"job": JOB, "model": {"n_params": 7e9}, "cluster": {"device": {"name": "a100"}}}
    a = opened(rows, **given)
    others: dict[str, dict[str, Any]] = {
        "model": {"model": {"n_params": 8e9}},
        "machine": {"cluster": {"device": {"name": "h100"}}},
        "precision": {"job": JOB | {"precision": "fp8"}},
        "sequence length": {"job": JOB | {"seq_len": 8, "global_batch": 4}},
    }
    for name, changed in others.items():
        found = compare(a, opened(rows, **given | changed))
        assert list(found.differs) == [name]
        assert found.to_dict()["differs"][name] == list(found.differs[name])
    assert compare(a, opened(rows, job={"input_shape": [4, 4, 16], "forwards_per_step": 1})).scale is None
