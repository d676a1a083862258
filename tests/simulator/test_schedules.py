"""Laws of pipeline schedules: what each does, that it can be carried out, what it holds, what it allows."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import chain

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foretrace.simulator.errors import ScheduleError
from foretrace.simulator.schedules import (
    SCHEDULES,
    Action,
    Plan,
    check,
    held_stages,
    holders,
    in_flight,
    plan,
)

names = st.sampled_from(sorted(SCHEDULES))
sizes = st.integers(1, 9)


def planned(name: str, p: int, m: int, v: int) -> Plan:
    """Return a plan, with *v* stages per rank where the schedule leaves a choice; skip what it refuses."""
    schedule = SCHEDULES[name]
    assume(schedule.fits(p, m))
    return plan(name, p, m, v if schedule.is_flexible else None)


@settings(deadline=None)
@given(name=names, p=sizes, m=st.integers(1, 20), v=st.integers(1, 4))
def test_a_plan_is_complete_and_can_be_carried_out(name: str, p: int, m: int, v: int) -> None:
    made = planned(name, p, m, v)
    check(made)
    assert len(made) == p
    assert {action.microbatch for actions in made for action in actions} == set(range(m))


@settings(deadline=None)
@given(name=names, p=sizes, m=st.integers(1, 20), v=st.integers(1, 4))
def test_every_rank_holds_as_many_stages_and_has_as_much_to_do(name: str, p: int, m: int, v: int) -> None:
    made = planned(name, p, m, v)
    assert len({len(held_stages(actions)) for actions in made}) == 1
    assert len({sum(action.kind == "F" for action in actions) for actions in made}) == 1


@settings(deadline=None)
@given(name=names, p=sizes, m=st.integers(1, 20), v=st.integers(1, 4))
def test_micro_batches_do_not_overtake_each_other_between_two_stages(
    name: str, p: int, m: int, v: int
) -> None:
    """Sender and receiver see the transfers between their stages in one order, so that pairs are clear."""
    made = planned(name, p, m, v)
    rank_of = holders(made)
    for kinds, step in (("F", -1), ("BI", 1)):
        order: dict[tuple[int, int], list[int]] = defaultdict(list)
        for rank, actions in enumerate(made):
            for action in actions:
                if action.kind in kinds:
                    order[rank, action.stage].append(action.microbatch)
        for (rank, stage), received in order.items():
            for other in range(p):
                sent = [i for i in order.get((other, stage + step), []) if rank_of[stage, i] == rank]
                assert [i for i in received if rank_of.get((stage + step, i)) == other] == sent


@settings(deadline=None)
@given(p=sizes, m=st.integers(1, 20))
def test_in_flight_microbatches_are_the_closed_forms(p: int, m: int) -> None:
    assert [in_flight(a) for a in plan("gpipe", p, m)] == [m] * p
    assert [in_flight(a) for a in plan("1f1b", p, m)] == [min(p - s, m) for s in range(p)]
    assert [in_flight(a) for a in plan("naive", p, m)] == [1] * p
    assert [in_flight(a) for a in plan("looped-bfs", p, m, 3)] == [3 * m] * p


@settings(deadline=None)
@given(p=sizes, rounds=st.integers(2, 4), v=st.integers(2, 4))
def test_interleaving_holds_more_in_flight_than_1f1b(p: int, rounds: int, v: int) -> None:
    """(v-1)p + 2(p-1-r) + 1 stage inputs on rank r: 1 + (p-1)/(pv) times 1F1B on the first rank
    (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.3)."""
    held = [in_flight(a) for a in plan("interleaved-1f1b", p, rounds * p, v)]
    assert held == [(v - 1) * p + 2 * (p - 1 - r) + 1 for r in range(p)]


@settings(deadline=None)
@given(p=sizes, extra=st.integers(0, 12))
def test_zero_bubble_schedules_hold_what_their_paper_says(p: int, extra: int) -> None:
    """Qi et al. 2023, table 2 and section 6, in micro-batches: H1 and V hold p as 1F1B does, H2 2p - 1."""
    m = 2 * p - 1 + extra
    assert {in_flight(a) for a in plan("zb-h1", p, m)} == {p}
    assert {in_flight(a) for a in plan("zb-h2", p, m)} == {2 * p - 1}
    assert {in_flight(a) for a in plan("zb-v", p, m)} == {2 * p}  # half as large


@settings(deadline=None)
@given(p=sizes, m=st.integers(1, 40))
def test_controllable_memory_schedules_hold_what_their_paper_says(p: int, m: int) -> None:
    """(p + 2) // 2 micro-batches for V-Half, (p + 4) // 3 for V-Min (Qi et al. 2024, arXiv:2405.15362)."""
    assert max(map(in_flight, plan("v-half", p, m))) <= 2 * ((p + 2) // 2)
    assert max(map(in_flight, plan("v-min", p, m))) <= 2 * ((p + 4) // 3)


def test_v_half_is_in_the_order_of_its_authors() -> None:
    """``zbv_greedy.py`` of github.com/sail-sg/zero-bubble-pipeline-parallelism @ 39f2c186, printed by it."""
    first, second = (" ".join(map(str, actions)) for actions in plan("v-half", 2, 4))
    assert first == (
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 3W1 3F2 0W0 0F3 0I1 3I2 3W2 3F3 3I3 0I2 3W3 0I3 0W1 0W2 0W3"
    )
    assert second == (
        "1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 1I1 2W1 1F3 1W1 2F3 2I2 1I2 2I3 1I3 2W2 2W3 1W2 1W3"
    )


@settings(deadline=None)
@given(half=st.integers(1, 5), extra=st.integers(0, 9))
def test_dualpipe_holds_one_micro_batch_more_than_ranks(half: int, extra: int) -> None:
    """Table in github.com/deepseek-ai/DualPipe: activations of p + 1 micro-batches per rank, at most."""
    p, m = 2 * half, 2 * (2 * half + extra)
    assert max(in_flight(a) for a in plan("dualpipe", p, m)) <= p + 1
    assert max(in_flight(a) for a in plan("dualpipe-v", p, m)) <= 2 * p + 1  # half as large


@settings(deadline=None)
@given(half=st.integers(1, 5), extra=st.integers(0, 9))
def test_dualpipe_is_the_same_seen_from_both_ends(half: int, extra: int) -> None:
    p, n = 2 * half, 2 * half + extra
    made = plan("dualpipe", p, 2 * n)
    for rank, actions in enumerate(made):
        turned = (action._replace(microbatch=(action.microbatch + n) % (2 * n)) for action in actions)
        assert tuple(turned) == made[p - 1 - rank]
        assert set(held_stages(actions)) == {rank, p - 1 - rank}


def test_split_backward_holds_activations_until_the_weight_gradient() -> None:
    split = (Action("F", 0, 0), Action("I", 0, 0), Action("F", 0, 1), Action("W", 0, 0))
    assert in_flight(split) == 2


@settings(deadline=None)
@given(p=st.integers(1, 5), m=st.integers(1, 6))
def test_checking_finds_what_is_missing_done_twice_or_upside_down(p: int, m: int) -> None:
    made = plan("1f1b", p, m)
    first = made[0]
    counts = Counter(chain.from_iterable(made))
    assert set(counts.values()) == {1}
    for damaged in (first[1:], (*first, first[0]), first[::-1]):
        with pytest.raises(ScheduleError):
            check((damaged, *made[1:]))


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "message"),
    [
        ("zb-x", 2, 2, None, r"unknown schedule 'zb-x': one of naive, gpipe, 1f1b.* or a .csv file"),
        ("1f1b", 2, 0, None, "0 micro-batches; at least 1"),
        ("1f1b", 0, 2, None, "0 ranks; at least 1"),
        ("1f1b", 2, 4, 2, "1f1b has 1 stages per rank, not 2; interleaved-1f1b, combined-1f1b, looped-bfs"),
        ("zb-v", 2, 4, 3, "zb-v has 2 stages per rank, not 3"),
        ("interleaved-1f1b", 4, 9, None, "9 micro-batches on 4 ranks: .*; 8 or 10 micro-batches would work"),
        ("dualpipe-v", 4, 3, None, "at least two micro-batches per rank; 8 micro-batches would work"),
        ("dualpipe", 4, 9, None, "8 or 10 micro-batches would work"),
        ("dualpipe", 3, 9, None, "8 or 10 micro-batches on 2 ranks would work"),
    ],
)
def test_what_a_schedule_does_not_allow_is_one_line_that_says_what_works(
    name: str, p: int, m: int, v: int | None, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        plan(name, p, m, v)


@pytest.mark.parametrize("name", [name for name, schedule in SCHEDULES.items() if schedule.needs])
def test_what_is_said_to_work_works(name: str) -> None:
    refused = [(p, m) for p in range(1, 8) for m in range(1, 30) if not SCHEDULES[name].fits(p, m)]
    assert refused
    for p, m in refused:
        with pytest.raises(ScheduleError) as error:
            plan(name, p, m)
        advice = str(error.value).rpartition("; ")[2].split()
        works = [int(word) for word in advice if word.isdigit()]
        ranks = works.pop() if "on" in advice else p
        assert works
        for n in works:
            check(plan(name, ranks, n))
