"""Laws of pipeline schedules, and equality with torch.distributed.pipelining."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.errors import ScheduleError
from simulator.schedules import SCHEDULES, Action, Plan, in_flight, plan

names = st.sampled_from(sorted(SCHEDULES))
sizes = st.integers(1, 9)


@settings(deadline=None)
@given(name=names, p=sizes, m=st.integers(1, 20))
def test_every_stage_does_every_microbatch_forward_then_backward(name: str, p: int, m: int) -> None:
    made = plan(name, p, m)
    counts = Counter(action for actions in made for action in actions)
    assert counts == {Action(kind, s, i): 1 for kind in "FB" for s in range(p) for i in range(m)}
    for actions in made:
        order = {action: at for at, action in enumerate(actions)}
        assert all(order[a] < order[a._replace(kind="B")] for a in actions if a.kind == "F")


@settings(deadline=None)
@given(name=names, p=sizes, m=st.integers(1, 20))
def test_a_plan_can_be_carried_out(name: str, p: int, m: int) -> None:
    """Each rank in turn does its next action if its input is there: all of them get to the end."""
    made = plan(name, p, m)
    done: set[Action] = set()
    cursor = [0] * p
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(made):
            while cursor[rank] < len(actions) and _inputs(actions[cursor[rank]], p) <= done:
                done.add(actions[cursor[rank]])
                cursor[rank] += 1
                moved = True
    assert cursor == [len(actions) for actions in made]


def _inputs(action: Action, p: int) -> set[Action]:
    if action.kind == "F":
        return {action._replace(stage=action.stage - 1)} if action.stage else set()
    needed = {action._replace(kind="F")}
    return needed | ({action._replace(stage=action.stage + 1)} if action.stage < p - 1 else set())


@settings(deadline=None)
@given(p=sizes, m=st.integers(1, 20))
def test_in_flight_microbatches_are_the_closed_forms(p: int, m: int) -> None:
    assert [in_flight(a) for a in plan("gpipe", p, m)] == [m] * p
    assert [in_flight(a) for a in plan("1f1b", p, m)] == [min(p - s, m) for s in range(p)]
    assert [in_flight(a) for a in plan("naive", p, m)] == [1] * p


def test_split_backward_holds_activations_until_the_weight_gradient() -> None:
    split = (Action("F", 0, 0), Action("I", 0, 0), Action("F", 0, 1), Action("W", 0, 0))
    assert in_flight(split) == 2


def test_unknown_or_empty_is_one_clear_line() -> None:
    with pytest.raises(ScheduleError, match=r"unknown schedule 'zb-x': one of naive, gpipe, 1f1b"):
        plan("zb-x", 2, 2)
    with pytest.raises(ScheduleError, match="0 micro-batches"):
        plan("1f1b", 2, 0)


class _Stage:
    """A stage of torch.distributed.pipelining that writes down what it is asked to do."""

    def __init__(self, index: int, n_stages: int) -> None:
        self.stage_index, self.num_stages = index, n_stages
        self.is_first, self.is_last = index == 0, index == n_stages - 1
        self.has_backward = True
        self.did: list[Action] = []

    def forward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self.did.append(Action("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, **_: object) -> None:
        self.did.append(Action("B", self.stage_index, microbatch))

    def _no_ops(self, _: int) -> list[object]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_ops

    def perform_reduce_grad(self, _: int) -> None:
        """Nothing to reduce."""


@pytest.mark.parametrize(("name", "torch_name"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_order_is_what_torch_executes(name: str, torch_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs torch's own schedules over stages that record their calls, for many sizes."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind: Any = getattr(schedules, torch_name)
    monkeypatch.setattr(kind, "_initialize_stage", lambda *_: None)
    for p in range(1, 9):
        for m in range(p, 3 * p + 2):
            assert _torch_plan(kind, p, m) == plan(name, p, m), (p, m)


def _torch_plan(kind: Any, p: int, m: int) -> Plan:
    stages = [_Stage(index, p) for index in range(p)]
    for stage in stages:
        kind(stage, m)._step_microbatches([()] * m, [{}] * m)
    return tuple(tuple(stage.did) for stage in stages)
