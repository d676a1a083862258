"""Laws of single figures of an analysis: what each counts, what it leaves out, and for how many ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from tests.simulator.predicted import simulate
from tests.traces.hand_made import in_memory

from foretrace.simulator.config import job_from
from foretrace.traces.analysis import metrics
from foretrace.traces.analysis.collectives import bandwidths, collectives
from foretrace.traces.analysis.critical_path import critical_path
from foretrace.traces.analysis.device_time import device_times
from foretrace.traces.analysis.findings import findings
from foretrace.traces.analysis.gaps import gaps, gaps_on_path
from foretrace.traces.analysis.kernels import kernel_groups, kernels
from foretrace.traces.analysis.metrics import breakdown, summarize
from foretrace.traces.analysis.roots import held_up
from foretrace.traces.compare import compare
from foretrace.traces.errors import RunError
from foretrace.traces.info import RunInfo
from foretrace.traces.layout import Group
from foretrace.traces.run import Run
from foretrace.traces.timeline import timeline

MS = 1_000_000


def span(rank: int, start: int, end: int, kind: str = "forward", **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"rank": rank, "start_ns": start, "duration_ns": end - start, "kind": kind}
    row |= {"category": "compute", "name": kind, "stream": "compute", "step": 0}
    return row | {"axis": "", "group": -1, "sequence": -1, "size_bytes": 0} | more


def reduced(rank: int, start: int, end: int, group: int = 0, **more: Any) -> dict[str, Any]:
    said = {"category": "collective", "stream": "dp", "axis": "dp", "group": group, "sequence": 0}
    return span(rank, start, end, "all_reduce", **said | more)


def idle(rank: int, start: int, end: int, cause: str) -> dict[str, Any]:
    return span(rank, start, end, cause, category="host", stream="idle", name="load")


def made(rows: list[dict[str, Any]], *groups: tuple[int, ...], **more: Any) -> Run:
    columns: dict[str, object] = {name: [row[name] for row in rows] for name in rows[0]}
    info = RunInfo(
        origin="ingested",
        world_size=1 + max(row["rank"] for row in rows),
        groups=tuple(Group(id=i, axis="dp", ranks=ranks) for i, ranks in enumerate(groups)),
        **more,
    )
    return in_memory(info, timeline(columns))


NODES = {
    "gpus_per_node": 2,
    "intra": {"bandwidth_bytes_per_s": 100e9},
    "nic": {"bandwidth_bytes_per_s": 10e9},
    "nics_per_node": 1,
}


def test_a_communication_is_held_against_the_links_of_its_own_group() -> None:
    """Two pairs meet at 80 GB/s inside of nodes, one at 8 between them; what is above its links is refused.

    What a person says of the links refuses nothing below it, and nothing that the links carry.
    """
    pairs = ((0, 1), (2, 3), (0, 2))
    rows = [
        reduced(rank, group * MS, (group + 1) * MS, group, size_bytes=80 * MS)
        for group in range(3)
        for rank in pairs[group]
    ]
    for one in rows[-2:]:
        one["duration_ns"] = MS // 10
    (far,) = bandwidths(made(rows, *pairs, cluster=NODES))
    assert (far["median_busbw_bytes_per_s"], far["refused_bytes_per_s"]) == (80e9, 800e9)
    assert (far["count"], far["limit_bytes_per_s"], far["share_of_limit"]) == (3, 100e9, 0.8)
    for one in rows[-2:]:
        one["duration_ns"] = 10 * MS
    run = made(rows, *pairs, cluster=NODES)
    (row,) = bandwidths(run)
    assert (row["median_busbw_bytes_per_s"], row["refused_bytes_per_s"]) == (80e9, None)
    (row,) = bandwidths(run, limit_bytes_per_s=1e9)
    assert (row["median_busbw_bytes_per_s"], row["share_of_limit"]) == (80e9, 80)


def test_a_transfer_has_the_links_of_its_two_ends_whatever_its_group() -> None:
    """Inside of a node 80 GB/s is no wonder, though others of the group send between nodes."""
    said = {"category": "p2p", "size_bytes": 80 * MS}
    rows = [reduced(rank, 0, MS, 0, **said) for rank in (2, 3)]
    rows[0] |= {"kind": "send", "peer": 3}
    rows[1] |= {"kind": "recv", "peer": 2}
    (row,) = bandwidths(made(rows, (0, 1, 2, 3), cluster=NODES))
    assert (row["limit_bytes_per_s"], row["share_of_limit"]) == (100e9, 0.8)


def test_a_rank_that_stands_for_others_waits_for_each_of_them() -> None:
    """Waiting for transfers between stages is the same in a folded run as in one of all ranks."""
    job = job_from({"model": "llama3-8b", "cluster": "dgx-h100", "pp": 2, "dp": 4, "global_batch": 16})
    waits = []
    for folded in (True, False):
        rows = collectives(simulate(job, folded=folded).run).to_pylist()
        waits.append(sum(row["waiting_ns"] for row in rows if row["axis"] == "pp"))
    assert waits[0] == waits[1] > 0


def test_a_rank_without_a_device_is_left_out() -> None:
    rows = [span(0, 0, 10), span(1, 0, 10, "load", category="host", stream="host")]
    assert [one.rank for one in device_times(made(rows))] == [0]


def test_idle_devices_are_said_by_cause_with_their_share_of_the_step() -> None:
    """20 of 100 ms the host is late, 10 launches take; what no word is for is not said."""
    rows = [span(0, 0, 60 * MS), span(0, 95 * MS, 100 * MS), idle(0, 60 * MS, 80 * MS, "host")]
    rows += [idle(0, 80 * MS, 90 * MS, "launch"), idle(0, 90 * MS, 95 * MS, "moon")]
    found = {one.what: one.share for one in findings(made(rows)) if one.what.startswith("idle:")}
    assert found == pytest.approx({"idle:host": 0.2, "idle:launch": 0.1})


def test_pauses_that_lie_over_one_another_count_in_each_step_that_they_reach() -> None:
    """One pause ends after the next has begun and ended, and reaches into the second of three steps."""
    rows = [span(0, at, at + 2, step=at // 10) for at in (0, 10, 20)]
    rows += [span(0, at, at + 10, category="step", stream="step", step=at // 10) for at in (0, 10, 20)]
    rows += [idle(0, 2, 14, "host"), idle(0, 4, 6, "launch"), idle(0, 22, 30, "after")]
    told = {row["cause"]: (row["count"], round(row["total_s"] * 1e9)) for row in gaps(made(rows))}
    assert told | {"short": None} == {"host": (2, 12), "after": (1, 8), "launch": (1, 2), "short": None}


def test_why_steps_are_left_out_is_asked_as_often_for_many_as_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a summary takes the square of their number."""
    asked = Mock(wraps=metrics._unaveraged)
    monkeypatch.setattr(metrics, "_unaveraged", asked)
    for n in (1, 5):
        rows = [span(0, at, at + 1, step=at) for at in range(n, 2 * n)]
        rows += [span(0, at, at + 1, category="step", stream="step", step=at) for at in range(2 * n)]
        whys = [step.get("why_not") for step in summarize(made(rows))["steps"]]
        assert whys == ["runs nothing"] * n + [None] * n
    assert asked.call_count == 2


def test_a_run_of_phases_alone_holds_nothing_to_compare() -> None:
    run = made([span(0, 0, 10, "evaluation", category="phase", step=-1)])
    with pytest.raises(RunError, match="nothing to compare"):
        compare(run, run)


def test_pauses_beside_work_on_the_critical_path_explain_no_gap_of_it() -> None:
    """Another stream of rank 0 is idle from 5 on; the path has a gap from 10 to 30 only."""
    rows = [span(0, 0, 10), span(0, 30, 40), idle(0, 5, 25, "host")]
    run = made(rows)
    assert gaps_on_path(run, critical_path(run, 0)) == {"host": 15}


def test_kernels_count_each_launch_and_their_groups_add_them_up() -> None:
    """Three products of 1, 2 and 3 ms under two names, and a copy of 4."""
    names = [("sgemm_a", 1), ("sgemm_a", 3), ("sgemm_b", 2), ("Memcpy HtoD", 4)]
    rows = [span(0, at * 5 * MS, (at * 5 + ms) * MS, name=name) for at, (name, ms) in enumerate(names)]
    run = made(rows)
    of = {row["name"]: row for row in kernels(run)}
    assert of["sgemm_a"]["count"] == 2
    assert [of["sgemm_a"][name] for name in ("total_s", "mean_s", "longest_s")] == [4e-3, 2e-3, 3e-3]
    groups = {row["group"]: (row["count"], row["total_s"]) for row in kernel_groups(run)}
    assert groups == {"gemm": (3, pytest.approx(6e-3)), "copy and layout": (1, pytest.approx(4e-3))}


@pytest.mark.parametrize(
    ("flops", "moved", "kind", "share", "nearest"),
    [
        (50e9, 1e8, "forward", 0.5, "flops_per_s"),
        (10e9, 8e8, "forward", 0.8, "bytes_per_s"),
        (0, 3e8, "device_to_device", 0.6, "bytes_per_s"),  # read and written
        (0, 3e8, "host_to_device", None, "bytes_per_s"),  # by another link
        (0, 0, "forward", None, None),
    ],
)
def test_a_kernel_is_held_against_the_nearer_bound_of_its_device(
    flops: float, moved: float, kind: str, share: float | None, nearest: str | None
) -> None:
    category = "compute" if kind == "forward" else "copy"
    works = {"category": category, "dtype": "bf16", "flops": int(flops), "bytes_moved": int(moved)}
    device = {"peak_flops_per_s": {"bf16": 100e12}, "memory_bytes_per_s": 1e12}
    rows = [span(0, at * MS, (at + 1) * MS, kind, **works) for at in range(2)]
    found, unknown = (kernels(made(rows, cluster=said))[0] for said in ({"device": device}, {}))
    assert (found["of_peak"], found["nearest"]) == (share and pytest.approx(share), nearest)
    assert (found["flops_per_s"] or 0, found["bytes_per_s"] or 0) == pytest.approx((1e3 * flops, 1e3 * moved))
    assert unknown["of_peak"] is None


@pytest.mark.parametrize("short", [True, False])
def test_many_collectives_of_unknown_size_are_said_if_they_are_short(short: bool) -> None:
    """120 in a step, of 0.5 or of 2 ms: only short ones may be small."""
    each = MS // 2 if short else 2 * MS
    rows = [span(rank, 0, MS) for rank in (0, 1)]
    for rank in (0, 1):
        rows += [reduced(rank, MS + n * each, MS + (n + 1) * each, sequence=n) for n in range(120)]
    found = [one for one in findings(made(rows, (0, 1))) if one.what == "small:dp"]
    assert len(found) == short
    for one in found:
        assert "of unknown size" in one.text
        assert one.share == pytest.approx(60 / 61)


def test_the_bubble_of_a_pipeline_is_nobodys_fault() -> None:
    """All stages wait for others; only what one causes beyond the one in the middle is held against it."""
    job = job_from({"model": "llama3-8b", "cluster": "dgx-h100", "pp": 4, "dp": 2, "global_batch": 16})
    run = simulate(job, folded=False).run
    waiting_ns = sum(row["waiting_ns"] for row in collectives(run).to_pylist())
    assert 0 < sum(one.cost_ns for one in held_up(run)) < 0.5 * waiting_ns
    assert held_up(run)[0].text.startswith("stage 3 (rank 6-7) computes")  # which has the head of the model


def test_a_communication_whose_times_are_bounds_is_in_no_time() -> None:
    """All but the counts is as it would be without it: it may have moved data, or not, at each moment."""
    passes = [span(rank, 0, 30) for rank in range(2)]
    windows = [span(rank, 0, 100, "step", category="step", stream="step") for rank in range(2)]
    exact = [reduced(rank, 20 + 5 * rank, 60, size_bytes=100) for rank in range(2)]
    bound = [
        reduced(rank, 10, 90, sequence=1, stream="dp.1", size_bytes=100, is_bound=rank == 1)
        for rank in range(2)
    ]
    plain = [{"is_bound": False, **row} for row in passes + windows + exact]
    without, run = made(plain, (0, 1)), made([*plain, bound[1]], (0, 1))
    assert [row.ns for row in breakdown(run)] == [row.ns for row in breakdown(without)]
    assert [row.hidden_ns for row in breakdown(run)] == [row.hidden_ns for row in breakdown(without)]
    assert [row.hidden_ns["dp"] > 0 for row in breakdown(run)] == [True, True]
    assert device_times(run) == device_times(without)
    assert (summarize(run)["n_bounds"], summarize(without)["n_bounds"]) == (1, 0)
    # One member of which the times are bounds takes its communication out of all figures of both.
    (row,) = bandwidths(made([*plain, *({"is_bound": False, **one} for one in bound)], (0, 1)))
    (same,) = bandwidths(without)
    assert (row["count"], row["n_bounds"], same["count"], same["n_bounds"]) == (2, 1, 1, 0)
    assert {**row, "count": 1, "n_bounds": 0} == same
