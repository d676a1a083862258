"""Ranks agree on delayed 8-bit scales once after every forward and backward, and on no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foretrace.simulator.builder.groups import Groups
from foretrace.simulator.builder.step import build
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.config import job_from
from foretrace.simulator.engine import compiled
from foretrace.simulator.job import Job
from foretrace.simulator.network.cost import Network
from foretrace.simulator.program import Program
from foretrace.traces.layout import Layout


def make_job(**given: Any) -> Job:
    base = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 32, "global_batch": 32, "seq_len": 1024}
    job = job_from({**base, "tp": 2, "pp": 4, "fp8": True, **given})
    return replace(job, model=replace(job.model, n_layers=8))


def program_of(job: Job) -> Program:
    return build(job, Network(job.cluster), ComputeModel(job.cluster.device, job.precision))


def agreed(program: Program) -> dict[int, int]:
    """Return how often each rank agrees on scales."""
    wanted = [at for at, label in enumerate(program.labels) if label.name == "largest values"]
    ranks, counts = np.unique(program.rank[np.isin(program.label, wanted)], return_counts=True)
    return dict(zip(ranks.tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_once_per_forward_and_backward_of_every_stage(virtual_stages: int) -> None:
    more = {"schedule": "interleaved-1f1b", "virtual_stages": 2} if virtual_stages == 2 else {}
    job = make_job(**more)
    found = agreed(program_of(job))
    assert set(found.values()) == {2 * virtual_stages * job.n_microbatches}
    assert len(found) == job.layout.pp


@pytest.mark.parametrize(
    "given", [{"fp8": False}, {"recipe": "mxfp8"}, {"recipe": "current"}, {"framework": "torchtitan"}]
)
def test_scales_that_are_not_delayed_are_nobody_elses(given: dict[str, Any]) -> None:
    given = {"cluster": "dgx-b200", **given} if given.get("recipe") == "mxfp8" else given
    assert agreed(program_of(make_job(**given))) == {}


def test_one_rank_agrees_with_itself() -> None:
    alone = make_job(gpus=1, tp=1, pp=1, conventions={"grad_norm": False})
    assert agreed(program_of(alone)) == {}


def test_agreeing_takes_longer_among_more_ranks_and_less_if_only_tensor_parallel_ranks_do() -> None:
    def seconds(job: Job) -> float:
        return float(compiled.times(program_of(job))[1].max()) / 1e9

    everyone, few = (seconds(make_job(conventions={"amax_ranks": name})) for name in ("stage", "tp"))
    assert few < everyone
    job = make_job()
    rounds = 2 * (job.n_microbatches + job.layout.pp - 1)
    transfer = Network(job.cluster).collective("all_reduce", 96, list(range(8)), "fp32")
    assert everyone < few + rounds * (transfer.latency_ns + transfer.wire_ns) / 1e9


def test_groups_of_whole_stages_are_a_partition() -> None:
    groups = Groups(Layout(pp=2, dp=3, tp=2), whole_stages=True)
    assert [groups.of("stage", rank).ranks for rank in (0, 6)] == [(0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11)]  # type: ignore[union-attr]
    assert groups.of("stage", 0).axis == "dp"  # type: ignore[union-attr]
    assert Groups(Layout(pp=2, dp=3, tp=2)).of("stage", 0) is None
    assert Groups(Layout(dp=4), whole_stages=True).of("stage", 0) == Groups(Layout(dp=4)).of("dp", 0)
