"""How long schedules take: closed forms, what their papers claim, and the whole job's program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foretrace.simulator.engine import compiled, event
from foretrace.simulator.program import Int64Array, Program, Transfer
from foretrace.simulator.schedules import ACTION_KINDS, SCHEDULES, Schedule
from foretrace.simulator.search.bubbles import bubble
from foretrace.simulator.search.schedule_program import ScheduleProgram, schedule_program

ranks, times = st.integers(1, 6), st.integers(1, 9)


def with_times(
    found: ScheduleProgram, action_ns: Int64Array, link_ns: Int64Array, pair_ns: Int64Array | None = None
) -> Program:
    """Return the program of a schedule with its durations filled in, for any engine to run."""
    return replace(
        found.program,
        duration_ns=found.durations(action_ns, pair_ns),
        transfers=tuple(Transfer(0, int(ns)) for ns in link_ns.ravel()),
        instance_transfer=found.link.astype(np.int32),
    )


def spans_of(
    name: str, p: int, m: int, v: int | None = None, *, f: int = 1, i: int = 1, w: int = 1, link: int = 0
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return rank, start and end of every action; each stage takes *f*, *i* and *w*, a message *link*."""
    found = schedule_program(name, p, m, v)
    by_kind = {"F": f, "B": i + w, "I": i, "W": w}
    action_ns = np.array([[by_kind[kind]] * found.n_stages for kind in ACTION_KINDS], np.int64)
    program = with_times(found, action_ns, np.full((p, p), link, np.int64))
    start_ns, end_ns = compiled.times(program)
    own = found.cell >= 0
    return program.rank[own].astype(np.int64), start_ns[own], end_ns[own]


def idle_inside(name: str, p: int, m: int, v: int | None = None) -> list[int]:
    """Return for each rank how long it idles between its first and its last action, if F = I = W = 1."""
    rank, start_ns, end_ns = spans_of(name, p, m, v)
    return [
        int(end_ns[rank == r].max() - start_ns[rank == r].min() - (end_ns - start_ns)[rank == r].sum())
        for r in range(p)
    ]


@settings(deadline=None)
@given(p=ranks, m=st.integers(1, 16), f=times, i=times, w=times)
def test_one_stage_per_rank_has_the_textbook_makespan(p: int, m: int, f: int, i: int, w: int) -> None:
    """(m + p - 1)(f + b), and m p (f + b) without pipelining: Narayanan et al. 2021, section 2.2."""
    for name, slots in (("gpipe", m + p - 1), ("1f1b", m + p - 1), ("naive", m * p)):
        assert spans_of(name, p, m, f=f, i=i, w=w)[2].max() == slots * (f + i + w)


@settings(deadline=None)
@given(p=ranks, rounds=st.integers(1, 4), v=st.integers(1, 4), f=times, i=times)
def test_v_stages_per_rank_divide_the_bubble_by_v(p: int, rounds: int, v: int, f: int, i: int) -> None:
    """(p - 1)(f + b) of stages that are 1/v as long: Narayanan et al. 2021, section 2.2."""
    m = rounds * p
    for name in ("interleaved-1f1b", "looped-bfs"):
        assert spans_of(name, p, m, v, f=f, i=i)[2].max() == (v * m + p - 1) * (f + i + 1)


@settings(deadline=None)
@given(p=ranks, extra=st.integers(0, 10), f=times, w=times)
def test_zb_h1_has_the_bubble_of_its_paper(p: int, extra: int, f: int, w: int) -> None:
    """(p - 1)(F + I - W) where F = I >= W, a third of 1F1B's if all are equal: Qi et al. 2023, table 1."""
    assume(w <= f)
    m = 2 * p - 1 + extra
    makespan = int(spans_of("zb-h1", p, m, f=f, i=f, w=w)[2].max())
    assert makespan - m * (2 * f + w) == (p - 1) * (2 * f - w)


@settings(deadline=None)
@given(p=ranks, extra=st.integers(0, 10))
def test_zero_bubble_schedules_never_idle_between_start_and_end(p: int, extra: int) -> None:
    """F = I = W and enough micro-batches: figures 3 and 5 of Qi et al. 2023."""
    m = 2 * p - 1 + extra
    assert idle_inside("zb-h2", p, m) == [0] * p
    assert idle_inside("zb-v", p, m) == [0] * p
    assert idle_inside("zb-h1", p, m)[0] == p - 1


@settings(deadline=None)
@given(p=st.integers(1, 9), extra=st.integers(0, 10))
def test_controllable_memory_schedules_idle_no_more_than_their_paper_says(p: int, extra: int) -> None:
    """A half and two thirds of 1F1B's 6 (p - 1) if F = I = W: Qi et al. 2024, arXiv:2405.15362, table 1."""
    m = 2 * p + extra
    assert max(idle_inside("v-half", p, m)) <= 3 * (p - 1)
    assert max(idle_inside("v-min", p, m)) <= 4 * (p - 1)


@settings(deadline=None)
@given(name=st.sampled_from(sorted(SCHEDULES)), p=st.integers(1, 8), extra=st.integers(0, 9))
def test_a_bubble_is_the_published_one_or_says_why_not(name: str, p: int, extra: int) -> None:
    m = 2 * p + extra
    assume(SCHEDULES[name].fits(p, m))
    found, has_pairs = bubble(name, p, m), SCHEDULES[name].pairs is not Schedule._field_defaults["pairs"]
    if not has_pairs:
        assert found.inside * m * 3 * found.virtual_stages == pytest.approx(max(idle_inside(name, p, m)))
    if found.published is None or found.overhead == pytest.approx(found.published):
        assert not found.differs
    else:
        assert found.differs
    if not has_pairs and not name.startswith("v-"):  # those formulas are of leading order
        assert found.published in (None, pytest.approx(found.inside))


@settings(deadline=None)
@given(p=ranks, rounds=st.integers(2, 5), v=st.integers(1, 3))
def test_interleaved_zero_bubble_is_not_slower_than_interleaved_1f1b(p: int, rounds: int, v: int) -> None:
    split, whole = (spans_of(n, p, rounds * p, v)[2].max() for n in ("interleaved-zb", "interleaved-1f1b"))
    assert split <= whole


@settings(deadline=None)
@given(half=st.integers(1, 5), extra=st.integers(0, 8), t=times, data=st.data())
def test_dualpipe_has_exactly_the_bubble_of_its_authors(
    half: int, extra: int, t: int, data: st.DataObject
) -> None:
    """(p/2 - 1)(F&B + B - 3W) on the rank that idles most: DeepSeek-V3, arXiv:2412.19437, table 2.

    F = I = W, and a pair F&B takes at least as long as a backward, at most as long as F and B after another.
    """
    pair = data.draw(st.integers(2 * t, 3 * t))
    for name, p, m in (
        ("dualpipe", 2 * half, 2 * (2 * half + extra)),
        ("dualpipe-v", half, 2 * half + extra),
    ):
        found = schedule_program(name, p, m)
        by_kind = {"F": t, "B": 2 * t, "I": t, "W": t}
        action_ns = np.array([[by_kind[kind]] * found.n_stages for kind in ACTION_KINDS], np.int64)
        pair_ns = np.full((found.n_stages, found.n_stages), pair, np.int64)
        program = with_times(found, action_ns, np.zeros((p, p), np.int64), pair_ns)
        idle = compiled.times(program)[1].max() - np.bincount(program.rank, program.duration_ns)
        assert idle.max() == (half - 1) * (pair + 2 * t - 3 * t)


@settings(deadline=None)
@given(half=st.integers(1, 5), extra=st.integers(0, 8))
def test_pairs_one_after_the_other_leave_half_of_that_bubble(half: int, extra: int) -> None:
    """Nothing is saved, but the next rank need not wait for the end of the pair: as torch runs it."""
    for name, p, m in (
        ("dualpipe", 2 * half, 2 * (2 * half + extra)),
        ("dualpipe-v", half, 2 * half + extra),
    ):
        found = schedule_program(name, p, m, overlap_pairs=False)
        action_ns = np.array([[2 if kind == "B" else 1] * found.n_stages for kind in ACTION_KINDS], np.int64)
        program = with_times(found, action_ns, np.zeros((p, p), np.int64))
        makespan = compiled.times(program)[1].max()
        assert makespan - np.bincount(program.rank, program.duration_ns).max() == half - 1


@settings(deadline=None)
@given(name=st.sampled_from(sorted(SCHEDULES)), p=ranks, m=st.integers(1, 12), link=st.integers(0, 5))
def test_both_engines_agree_and_no_rank_beats_its_own_work(name: str, p: int, m: int, link: int) -> None:
    assume(SCHEDULES[name].fits(p, m))
    found = schedule_program(name, p, m)
    draw = np.random.default_rng(p * 100 + m)
    action_ns = draw.integers(1, 9, (len(ACTION_KINDS), found.n_stages))
    program = with_times(found, action_ns, np.full((p, p), link, np.int64))
    times = compiled.times(program)
    assert [x.tolist() for x in times] == [x.tolist() for x in event.times(program)]
    again = compiled.Clock(found.program).times(
        found.durations(action_ns), found.transfers(np.full((p, p), link))
    )
    assert [x.tolist() for x in again] == [x.tolist() for x in times]
    assert times[1].max() >= np.bincount(program.rank, program.duration_ns).max()


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "naive"])
def test_no_schedule_is_slower_than_no_pipelining(name: str) -> None:
    p, m = 4, 16
    stages = schedule_program(name, p, m).n_stages
    scale = {4: 2}.get(stages, 1)  # the same model in half as many stages takes twice as long in each
    slow = spans_of("naive", p, m, f=2, i=2, w=2)[2].max()
    assert spans_of(name, p, m, f=scale, i=scale, w=scale)[2].max() < slow
