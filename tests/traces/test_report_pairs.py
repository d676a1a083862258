"""Passes that take turns are found as pairs, whatever lies around them, and drawn in two halves of a cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulator.predicted import simulate

from foretrace.simulator.config import job_from
from foretrace.traces.info import RunInfo
from foretrace.traces.report.cells import RankStep, pairs_of, rank_step
from foretrace.traces.report.kinds import Kinds, Labels
from foretrace.traces.run import Run
from foretrace.traces.store import open_run, write_run
from foretrace.traces.timeline import timeline

Turn = tuple[str, int, int]
"""Kind, micro-batch, virtual stage."""


def spans_of(turns: list[Turn]) -> pa.Table:
    kinds, batches, stages = ([turn[i] for turn in turns] for i in range(3))
    n = len(turns)
    columns: dict[str, object] = {
        "rank": [0] * n, "stream": ["compute"] * n, "category": ["compute"] * n, "kind": kinds,
        "start_ns": [10 * i for i in range(n)], "duration_ns": [8] * n, "microbatch": batches,
        "virtual_stage": stages, "step": [0] * n,
    }  # fmt: skip
    return timeline(columns)


def found(turns: list[Turn]) -> list[int]:
    """Return the pair of each turn where an idle gap follows every one."""
    row = np.full(2 * len(turns), -1, np.int64)
    row[::2] = np.arange(len(turns))
    return [int(pair) for pair in pairs_of(spans_of(turns), row)[::2]]


F, B = ("forward", 5, 1), ("backward", 2, 0)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([F, B, F, B], [1, 1, 1, 1]),
        ([F, B, F], [1, 1, 1]),
        ([F, B], [0, 0]),  # one after the other, as in 1F1B
        ([F, F, B, F, ("forward", 6, 1)], [1, 1, 1, 1, 0]),
        ([F, ("recompute", 2, 0), B, F, ("recompute", 2, 0), B], [1] * 6),
        ([F, ("forward", 6, 1), F], [0, 0, 0]),  # two forwards are no pair
        ([("forward", 2, 0), B, ("forward", 2, 0)], [0, 0, 0]),  # computing it again
        ([F, B, F, ("backward", 3, 0), F], [1, 1, 1, 2, 2]),  # one forward beside two backwards
        ([F, B, F, B, ("forward", 6, 1), ("backward", 3, 0), ("forward", 6, 1)], [1, 1, 1, 1, 2, 2, 2]),
        ([("optimizer", -1, -1), F, ("optimizer", -1, -1)], [0, 0, 0]),
    ],
)
def test_a_pair_is_a_forward_and_a_backward_in_turns(turns: list[Turn], expected: list[int]) -> None:
    assert found(turns) == expected


turn = st.tuples(st.sampled_from(["forward", "backward", "optimizer"]), st.integers(0, 1), st.integers(0, 1))


@given(st.lists(turn, max_size=24))
def test_every_pair_is_one_stretch_of_two_passes(turns: list[Turn]) -> None:
    number = found(turns)
    for pair in set(number) - {0}:
        at = [i for i, own in enumerate(number) if own == pair]
        assert at == list(range(at[0], at[-1] + 1))
        passes = {turns[i] for i in at}
        assert {kind for kind, *_ in passes} == {"forward", "backward"}
        assert len(passes) == 2


@given(st.lists(turn, min_size=1, max_size=24))
def test_idle_time_belongs_to_a_pair_only_between_its_turns(turns: list[Turn]) -> None:
    row = np.full(2 * len(turns) + 1, -1, np.int64)
    row[1::2] = np.arange(len(turns))
    number = pairs_of(spans_of(turns), row)
    for i in range(2, len(row) - 1, 2):
        assert number[i] == (number[i - 1] if number[i - 1] == number[i + 1] else 0)
    assert number[0] == number[-1] == 0


def dualpipe(schedule: str = "dualpipe") -> Run:
    settings: dict[str, Any] = {
        "model": "deepseek-v2-lite", "cluster": "dgx-h100", "gpus": 16, "pp": 4, "tp": 1, "ep": 4,
        "global_batch": 40, "seq_len": 2048, "schedule": schedule,
    }  # fmt: skip
    return simulate(job_from(settings)).run


def taken_apart(run: Run, rank: int) -> RankStep:
    labels = Labels(Kinds((run,)))
    return rank_step(run, rank, 0, labels, labels.of_rank(run, rank))


def test_dualpipe_pairs_and_one_f_one_b_does_not() -> None:
    run = dualpipe()
    for rank in run.stored_ranks:
        done = taken_apart(run, rank)
        n_pairs = int(done.pair.max())
        assert n_pairs >= 2
        for pair in range(1, n_pairs + 1):
            at = np.flatnonzero(done.pair == pair)
            forward, backward = done.halves(int(at[0]), int(at[-1]))
            assert done.forward[forward]
            assert not done.forward[backward]
            assert done.microbatch[forward] != done.microbatch[backward]
    assert not taken_apart(dualpipe("1f1b"), 0).pair.any()


def test_a_figure_draws_a_pair_in_the_two_halves_of_its_row(tmp_path: Path) -> None:
    figures = pytest.importorskip("foretrace.traces.figures", reason="plotly is not installed")
    table = spans_of([F, B, F, B, ("forward", 7, 1)])
    path = write_run(tmp_path / "run", RunInfo(origin="recorded", world_size=1), table)
    figure = figures.schedule(open_run(path))
    drawn = {
        (trace.name, text, base, length): (top, height)
        for trace in figure.data
        for text, base, length, top, height in zip(
            trace.text, trace.base, trace.x, trace.offset, trace.width, strict=True
        )
        if text
    }
    third = pytest.approx
    assert drawn == {
        ("Forward", "5", 0.0, 32e-6): (third(-0.4), third(0.4)),
        ("Backward", "2", 0.0, 32e-6): (third(0.0), third(0.4)),
        ("Forward", "7", 40e-6, 8e-6): (-0.4, 0.8),
    }


def test_rows_of_one_name_stay_two_rows_in_a_figure() -> None:
    figures = pytest.importorskip("foretrace.traces.figures", reason="plotly is not installed")
    run = dualpipe()
    names = {name for trace in figures.schedule(run).data for name in trace.y}
    assert len(names) == len(run.stored_ranks)
