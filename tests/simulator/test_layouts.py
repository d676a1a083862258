"""The short way to the time of a pipeline gives what the whole program of the job gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pyarrow.compute as pc
import pytest
from tests.simulator.predicted import simulate

from foretrace.simulator.config import job_from
from foretrace.simulator.job import Job
from foretrace.simulator.schedules import SCHEDULES
from foretrace.simulator.search.layouts import PipelineTimes
from foretrace.topologies.catalog import load_cluster


def make_job(**given: Any) -> Job:
    base = {"model": "llama2-7b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 16, "seq_len": 8192}
    return job_from({**base, **given})


def last_backward_ns(job: Job) -> int:
    """Return when the last backward of the job's whole program ends."""
    spans = simulate(job).spans
    work = spans.filter(pc.greater_equal(spans["microbatch"], 0))
    work = work.filter(pc.equal(work["category"], "compute"))
    communication = spans.filter(pc.is_in(spans["axis"], value_set=pc.cast(["tp", "cp", "ep"], "string")))
    found = [
        pc.max(pc.add(table["start_ns"], table["duration_ns"])).as_py() or 0
        for table in (work, communication)
    ]
    return max(found)


_NO_HOST: Final = {"conventions": {"host_work": 0.0}}
"""Times of layouts leave out the host, which these would wait for."""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_takes_as_long_as_in_the_whole_program(schedule: str) -> None:
    if schedule == "combined-1f1b":
        experts = {**_NO_HOST, "model": "mixtral-8x7b", "pp": 4, "ep": 2, "virtual_stages": 2}
        job = make_job(**experts, schedule=schedule, sharding="ddp")
    else:
        job = make_job(pp=4, tp=2, schedule=schedule, sharding="ddp")
    assert PipelineTimes(job.cluster).pipeline_ns(job) == last_backward_ns(job)


@pytest.mark.parametrize(
    "given",
    [
        {**_NO_HOST, "pp": 1, "tp": 8},
        {"pp": 2, "cp": 4},
        {"pp": 8, "recompute": "full"},
        {"pp": 4, "tp": 2, "sequence_parallel": False, "recompute": "selective"},
        {"pp": 2, "tp": 4, "schedule": "interleaved-1f1b", "virtual_stages": 4, "overlap_p2p": False},
        {"model": "mixtral-8x7b", "pp": 4, "tp": 2, "schedule": "zb-v"},
        {**_NO_HOST, "model": "mixtral-8x7b", "pp": 2, "ep": 4, "schedule": "dualpipe", "sharding": "ddp"},
        {"pp": 2, "tp": 4, "schedule": "dualpipe-v", "sequence_parallel": False, "recompute": "full"},
        {"pp": 2, "tp": 4, "schedule": "dualpipe", "overlap_pairs": False},
        {"pp": 2, "tp": 4, "recompute": "full", "recompute_layers": 5, "recompute_every": 2},
        {"pp": 4, "tp": 2, "layers_per_stage": (6, 9, 9, 8)},
    ],
)
def test_every_layout_takes_as_long_as_in_the_whole_program(given: dict[str, Any]) -> None:
    job = make_job(**given)
    assert PipelineTimes(job.cluster).pipeline_ns(job) == last_backward_ns(job)


def test_what_is_remembered_does_not_leak_into_other_jobs() -> None:
    cluster = load_cluster("dgx-h100", 8)
    shared = PipelineTimes(cluster)
    jobs = [make_job(pp=pp, tp=tp, micro_batch=b) for pp, tp in ((2, 4), (4, 2), (8, 1)) for b in (1, 2)]
    jobs += [replace(job, recompute="full") for job in jobs]
    for job in jobs:
        assert shared.pipeline_ns(job) == PipelineTimes(cluster).pipeline_ns(job)
