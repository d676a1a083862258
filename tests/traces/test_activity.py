"""What a step is made of, in timelines written by hand: bubbles, late ranks, hidden communication."""

import pytest
from tests.traces.hand_made import collective, compute, opened, p2p, window

from foretrace.traces.analysis.activity import activity
from foretrace.traces.analysis.communications import arrivals
from foretrace.traces.analysis.metrics import breakdown, summarize
from foretrace.traces.errors import RunError
from foretrace.traces.info import Clock
from foretrace.traces.layout import Group, Layout


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
    found = arrivals(opened(spans))
    assert found.last_ns[0].tolist() == [10, 30, 0]
    assert found.last_ns[1].tolist() == [10, 30, 40]
    assert found.n_joined == 4  # not the collectives


def test_what_does_not_say_its_group_or_its_peer_is_joined_with_nothing() -> None:
    """Of others with the same number it is not known whether they are the same."""
    for spans in (
        [collective(0, 0, 50, group=-1), collective(1, 20, 30, group=-1)],
        [p2p(0, "send", 0, 50, -1), p2p(1, "recv", 20, 30, -1)],
    ):
        found = arrivals(opened(spans))
        assert (found.last_ns[0].tolist(), found.last_ns[1].tolist(), found.n_joined) == ([0], [20], 0)


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


def test_spans_without_a_step_number_are_of_no_step_beside_others() -> None:
    """They come before the first step, as setting up does."""
    spans = [compute(0, "forward", 0, 5)._replace(step=-1), compute(0, "forward", 10, 5)]
    assert [(row.step, row.window_ns) for row in breakdown(opened(spans))] == [(0, 5)]


def test_a_step_is_as_long_as_on_its_slowest_rank_and_a_run_takes_the_median_of_its_steps() -> None:
    """The lower one of two."""
    lengths = {0: (10, 7, 30, 20), 1: (8, 9, 20, 25)}
    spans = [
        window(rank, sum(own[:step]), length, step)
        for rank, own in lengths.items()
        for step, length in enumerate(own)
    ]
    found = summarize(opened(spans))
    assert [step["step_time_s"] for step in found["steps"]] == [10e-9, 9e-9, 30e-9, 25e-9]
    assert found["step_time_s"] == 10e-9


def test_shares_of_a_run_are_means_over_all_ranks_that_its_own_stand_for() -> None:
    """Three ranks do what rank 0 does; communication of all axes is exposed."""
    spans = [
        compute(0, "forward", 0, 4),
        collective(0, 4, 3, axis="dp"),
        collective(0, 7, 3, axis="tp", group=1),
    ]
    spans += [compute(3, "forward", 0, 8), window(0, 0, 10), window(3, 0, 10)]
    found = summarize(opened(spans, representatives=(0, 0, 0, 3)))
    assert found["shares"]["compute"] == pytest.approx((3 * 0.4 + 0.8) / 4)
    assert found["exposed_comm_fraction"] == pytest.approx(3 * 0.6 / 4)


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
