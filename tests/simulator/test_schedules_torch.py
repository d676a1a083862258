"""Equality with torch.distributed.pipelining: the order of actions per rank, and its CSV format."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretrace.simulator.errors import ScheduleError
from foretrace.simulator.schedules import (
    SCHEDULES,
    Action,
    Plan,
    pairs,
    plan,
    read_csv,
    read_pairs,
    write_csv,
)

RUNTIME = {
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""Schedules that torch writes down as a whole before it runs them."""


torch_schedules: Any = None
"""Torch's own, from the first test on: loading them takes as long as all other files."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Torch logs every schedule that it is given."""
    globals()["torch_schedules"] = pytest.importorskip("torch.distributed.pipelining.schedules")
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def built(kind: str, p: int, m: int, v: int) -> Any:
    """Return torch's schedule *kind*, on stages that are nothing but their numbers."""
    stages = [
        SimpleNamespace(
            group_size=p, group_rank=0, num_stages=p * v, stage_index=at, submod=None, has_backward=True
        )
        for at in range(v)
    ]
    return getattr(torch_schedules, kind)(stages, m)


def ordered(rows: Any) -> Plan:
    """Return the actions in torch's *rows*, pairs one after the other, without idle slots."""

    def flat(action: Any) -> Iterator[Action]:
        if action is not None and action.sub_actions:
            for part in action.sub_actions:
                yield from flat(part)
        elif action is not None:
            yield Action(action.computation_type.value, action.stage_index, action.microbatch_index)

    return tuple(tuple(one for action in rows[rank] for one in flat(action)) for rank in sorted(rows))


def grid(name: str) -> Iterator[tuple[int, int, int]]:
    """Yield ranks, micro-batches and stages per rank that the schedule allows."""
    for p in range(1, 9):
        for m in sorted({*range(1, p + 2), 2 * p, 2 * p + 1, 2 * p + 3, 3 * p, 4 * p + 1}):
            for v in (1, 2, 3) if SCHEDULES[name].is_flexible else (2,):
                if SCHEDULES[name].fits(p, m):
                    yield p, m, v


@pytest.mark.parametrize("name", RUNTIME)
def test_order_is_that_of_torch(name: str) -> None:
    sizes = list(grid(name))
    assert len(sizes) > 30
    for p, m, v in sizes:
        if name == "dualpipe-v" and p == 1:
            continue  # torch 2.13 overlaps a forward with the backward of the same stage, which it refuses
        assert ordered(built(RUNTIME[name], p, m, v).pipeline_order) == plan(name, p, m, v), (p, m, v)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zb", "dualpipe-v"])
def test_what_torch_refuses_is_refused(name: str) -> None:
    for p in range(1, 7):
        for m in range(1, 3 * p):
            if not SCHEDULES[name].fits(p, m):
                with pytest.raises(ValueError, match="micro"):
                    built(RUNTIME[name], p, m, 2)


def test_one_stage_of_interleaved_zero_bubble_is_zb_h1() -> None:
    """Torch's ZB1P on one stage per rank is the hand-made schedule H1 of the paper."""
    for p in range(1, 9):
        for m in range(p, 33, p):
            assert ordered(built(RUNTIME["interleaved-zb"], p, m, 1).pipeline_order) == plan("zb-h1", p, m)


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


@pytest.mark.parametrize(("name", "kind"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_order_is_what_torch_executes(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs torch's own schedules over stages that record their calls, for many sizes."""
    schedule: Any = getattr(torch_schedules, kind)
    monkeypatch.setattr(schedule, "_initialize_stage", lambda *_: None)
    for p in range(1, 9):
        for m in range(p, 3 * p + 2):
            stages = [_Stage(index, p) for index in range(p)]
            for stage in stages:
                schedule(stage, m)._step_microbatches([()] * m, [{}] * m)
            assert tuple(tuple(stage.did) for stage in stages) == plan(name, p, m), (p, m)


@pytest.mark.parametrize("name", RUNTIME)
def test_csv_of_torch_is_read_and_ours_is_read_by_torch(name: str, tmp_path: Path) -> None:
    p, m, v = 4, 8, 2
    theirs = built(RUNTIME[name], p, m, v)
    theirs._dump_csv(tmp_path / "torch.csv", format="compute_only")
    assert read_csv(tmp_path / "torch.csv", p, m) == plan(name, p, m, v)
    write_csv(tmp_path / "ours.csv", plan(name, p, m, v))
    reader = built("_PipelineScheduleRuntime", p, m, v)
    reader._load_csv(tmp_path / "ours.csv")
    assert ordered(reader.pipeline_order) == plan(name, p, m, v)


def overlapped(rows: Any) -> set[Action]:
    """Return the forwards that torch's *rows* run together with a backward."""
    found = set()
    for row in rows.values():
        for action in row:
            if action is not None and action.sub_actions:
                forward, backward = action.sub_actions
                assert (forward.computation_type.value, backward.computation_type.value) == ("F", "B")
                found.add(Action("F", forward.stage_index, forward.microbatch_index))
    return found


def test_pairs_are_those_of_torch() -> None:
    for p, m, v in grid("dualpipe-v"):
        if p > 1:
            theirs = overlapped(built("ScheduleDualPipeV", p, m, v).pipeline_order)
            assert theirs == pairs("dualpipe-v", p, m), (p, m)


def test_pairs_survive_a_file_of_torch_and_one_of_ours(tmp_path: Path) -> None:
    p, m = 4, 10
    theirs = built("ScheduleDualPipeV", p, m, 2)
    theirs._dump_csv(tmp_path / "torch.csv", format="compute_only")
    assert read_pairs(tmp_path / "torch.csv") == pairs("dualpipe-v", p, m)
    write_csv(tmp_path / "ours.csv", plan("dualpipe-v", p, m), pairs("dualpipe-v", p, m))
    assert read_csv(tmp_path / "ours.csv", p, m) == plan("dualpipe-v", p, m)
    assert pairs(str(tmp_path / "ours.csv"), p, m) == pairs("dualpipe-v", p, m)
    reader = built("_PipelineScheduleRuntime", p, m, 2)
    reader._load_csv(tmp_path / "ours.csv")
    assert overlapped(reader.pipeline_order) == pairs("dualpipe-v", p, m)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", r"rank 1: '1X0' is not an action; it is stage, one of F B I W"),
        (f"0F0,0B{'9' * 5000}\n", r"rank 0: '0B9{5000}' is not an action"),
        ("0F0\n1F0,1B0\n", "stage 0 does F 1 times with micro-batch 0"),
        ("0F0,0B0\n1B0,1F0\n", "rank 0 waits for ever to begin 0B0"),
        ("0F0,0B0\n(1F0;1B0)OVERLAP_F_B\n", "rank 0 waits for ever to begin 0B0"),
        ("0F0,0B0\n(1B0;1F0)OVERLAP_F_B\n", "rank 1: .* is not a pair of F and B"),
        ("", "is for 0 ranks, the job has 2"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n", "is for 2 micro-batches, the job has 1"),
    ],
)
def test_a_damaged_csv_is_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ScheduleError, match=message):
        plan(str(path), 2, 1)
    with pytest.raises(ScheduleError, match=r"absent\.csv cannot be read: No such file"):
        read_csv(tmp_path / "absent.csv")
