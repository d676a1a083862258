"""Any ranks, micro-batches and stages: a schedule makes a plan that runs, or says which size does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.simulator.engine import compiled
from foretrace.simulator.errors import ScheduleError
from foretrace.simulator.schedules import SCHEDULES, Plan, check, pairs, plan, read_csv, read_pairs, write_csv
from foretrace.simulator.search.schedule_program import schedule_program

names = st.sampled_from(sorted(SCHEDULES))
ranks, microbatches, stages = st.integers(1, 20), st.integers(1, 70), st.sampled_from([None, 1, 2, 3, 5])


def said_to_work(message: str, p: int, v: int | None) -> list[tuple[int, int, int | None]]:
    """Return the sizes that the message of a refusal names."""
    if "stages per rank, not" in message:
        own = re.search(r"has (\d+) stages per rank", message)
        assert own
        return [(p, 0, int(own[1]))]
    advice = message.rpartition("; ")[2]
    found = re.fullmatch(r"(\d+)(?: or (\d+))? micro-batches(?: on (\d+) ranks)? would work", advice)
    assert found, message
    return [(int(found[3] or p), int(m), v) for m in found.groups()[:2] if m]


@settings(max_examples=100, deadline=None)
@given(name=names, p=ranks, m=microbatches, v=stages)
def test_every_size_runs_or_the_nearest_that_does_is_named(name: str, p: int, m: int, v: int | None) -> None:
    try:
        made = plan(name, p, m, v)
    except ScheduleError as error:
        for p_works, m_works, v_works in said_to_work(str(error), p, v):
            if m_works:
                check(plan(name, p_works, m_works, v_works), pairs(name, p_works, m_works))
            else:
                assert SCHEDULES[name].virtual_stages == v_works
        return
    check(made, pairs(name, p, m))
    done = [action for actions in made for action in actions]
    assert len(made) == p
    assert {action.microbatch for action in done} == set(range(m))
    assert len(done) == len(set(done))


@settings(max_examples=30, deadline=None)
@given(name=names, p=st.integers(1, 8), m=st.integers(1, 24), v=stages)
def test_what_makes_a_plan_makes_a_program_that_ends(name: str, p: int, m: int, v: int | None) -> None:
    try:
        found = schedule_program(name, p, m, v)
    except ScheduleError:
        return
    start_ns, end_ns = compiled.times(found.program)
    assert len(start_ns) == found.program.n_tasks
    assert (end_ns >= start_ns).all()


@settings(max_examples=30, deadline=None)
@given(name=names, p=st.integers(1, 8), m=st.integers(1, 24))
def test_a_plan_comes_back_from_a_file(
    name: str, p: int, m: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    try:
        made: Plan = plan(name, p, m)
    except ScheduleError:
        return
    path = tmp_path_factory.mktemp("plans") / "mine.csv"
    write_csv(path, made, pairs(name, p, m))
    assert read_csv(path, p, m) == made
    assert read_pairs(path) == pairs(name, p, m)


def test_a_file_for_other_sizes_is_refused_by_both(tmp_path: Path) -> None:
    write_csv(tmp_path / "mine.csv", plan("1f1b", 2, 4))
    with pytest.raises(ScheduleError, match="is for 2 ranks, the job has 4"):
        plan(str(tmp_path / "mine.csv"), 4, 4)
    with pytest.raises(ScheduleError, match="is for 4 micro-batches, the job has 8"):
        plan(str(tmp_path / "mine.csv"), 2, 8)
