"""Full sharding in pipelines: gathered and reduced once a step or in every micro-batch, and what it keeps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from foretrace.simulator.builder.step import build
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.config import job_from
from foretrace.simulator.engine import compiled
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.memory.states import gathered_parameters_bytes, sharding_units, whole_gradient_bytes
from foretrace.simulator.models.model import Linear
from foretrace.simulator.network.cost import Network
from foretrace.simulator.program import Program
from foretrace.simulator.workload.linear import weight_gradients

LAYERS = 8
MICRO_BATCHES = 8


def make_job(**given: Any) -> Job:
    base = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 16, "global_batch": 8 * MICRO_BATCHES}
    where = {**base, "seq_len": 1024, "pp": 2, "sharding": "fsdp", "framework": "torchtitan", **given}
    job = job_from(where)
    return replace(job, model=replace(job.model, n_layers=LAYERS))


def program_of(job: Job) -> Program:
    return build(job, Network(job.cluster), ComputeModel(job.cluster.device, job.precision))


def counts(job: Job, kind: str) -> list[int]:
    """Return how often each simulated rank does a collective of *kind* over its replicas."""
    program = program_of(job)
    wanted = [at for at, label in enumerate(program.labels) if (label.kind, label.axis) == (kind, "dp")]
    ranks, found = np.unique(program.rank[np.isin(program.label, wanted)], return_counts=True)
    assert len(ranks) == job.layout.pp
    return [int(count) for count in found]


UNITS = LAYERS // 2 + 1
"""Half of the layers, and the embedding or the head."""


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_a_stage_that_stays_whole_is_gathered_and_reduced_once(schedule: str) -> None:
    job = make_job(schedule=schedule)
    assert job.keeps_stages_whole
    assert counts(job, "all_gather") == [UNITS, UNITS]
    assert counts(job, "reduce_scatter") == [UNITS, UNITS]


def test_otherwise_in_every_microbatch() -> None:
    """The head is not gathered again for its backward, which follows its forward."""
    job = make_job(conventions={"pipeline_keeps_whole": False})
    assert counts(job, "all_gather") == [2 * UNITS * MICRO_BATCHES, (2 * UNITS - 1) * MICRO_BATCHES]
    assert counts(job, "reduce_scatter") == [UNITS * MICRO_BATCHES] * 2


def test_whole_gradients_are_added_to_a_sum_in_every_microbatch() -> None:
    """Where a stage is scattered each time there is nothing whole to add to."""
    for is_whole in (True, False):
        job = make_job(conventions={"pipeline_keeps_whole": is_whole})
        made = weight_gradients(job, "up", Linear("up", 512, 2048), 1024, "bf16")
        assert len(made) == 1 + is_whole


def test_every_stage_of_a_rank_is_gathered_when_it_comes_first() -> None:
    job = make_job(schedule="interleaved-1f1b", virtual_stages=2)
    assert counts(job, "all_gather") == [LAYERS // 2 + 1] * 2
    assert counts(job, "reduce_scatter") == [LAYERS // 2 + 1] * 2


def test_all_stages_of_a_rank_are_whole_together() -> None:
    """As much as one stage of the same layers, but for the one gradient that is on its way in each."""
    one, two = (rank_memories(make_job(schedule="interleaved-1f1b", virtual_stages=v))[0] for v in (1, 2))
    again = make_job(schedule="interleaved-1f1b", virtual_stages=2)
    width, units = 2, sharding_units(again, range(LAYERS // 4), first=False, last=False)
    on_its_way = width * max(unit.params for unit in units)
    assert two.items["gathered"] == one.items["gathered"] + on_its_way


def test_staying_whole_saves_time_and_costs_memory() -> None:
    def end_ns(job: Job) -> int:
        return int(compiled.times(program_of(job))[1].max())

    whole, freed = (make_job(conventions={"pipeline_keeps_whole": on}) for on in (True, False))
    assert end_ns(whole) < end_ns(freed)
    units = sharding_units(whole, range(LAYERS // 2), first=True, last=False)
    n_params = sum(unit.params for unit in units)
    assert gathered_parameters_bytes(whole, units) == 2 * n_params
    assert whole_gradient_bytes(whole, units) == 4 * n_params + 2 * max(unit.params for unit in units)
    assert gathered_parameters_bytes(freed, units) < 2 * n_params


@pytest.mark.parametrize(
    "convention", [{"wrap": "model"}, {"reshard_after_forward": False}, {"limit_all_gathers": False}]
)
def test_what_is_not_freed_by_unit_is_whole_at_once(convention: dict[str, Any]) -> None:
    plain, other = make_job(pp=1), make_job(pp=1, conventions=convention)
    units = sharding_units(plain, range(LAYERS), first=True, last=True)
    assert gathered_parameters_bytes(other, units) == 2 * sum(unit.params for unit in units)
    assert gathered_parameters_bytes(plain, units) == 2 * max(a.params + b.params for a, b in pairwise(units))
    sizes = [unit.params for unit in units]  # gradients are computed in 16 bit and reduced in 32
    assert whole_gradient_bytes(plain, units) == (2 + 4) * max(sizes)
    at_once = sum(sizes) if "wrap" in convention else max(sizes)
    assert whole_gradient_bytes(other, units) == (2 + 4) * at_once
