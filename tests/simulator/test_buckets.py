"""Laws of buckets of gradients: no tensor is cut, and a full one is no smaller than asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulator.predicted import simulate

from foretrace.simulator.builder.gradients import buckets, tensors
from foretrace.simulator.builder.groups import OF_REPLICAS
from foretrace.simulator.builder.stages import Unit, units_by_stage
from foretrace.simulator.config import job_from
from foretrace.simulator.framework import framework_names
from foretrace.simulator.job import Job
from foretrace.simulator.workload.ops import DTYPE_BYTES

MIB = 2**20
MODELS = ("llama3-8b", "gpt2", "command-r-35b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b")


def some(model: str = "llama3-8b", **settings: object) -> Job:
    return job_from({"model": model, "cluster": "dgx-h100", "global_batch": 32, "dp": 8, **settings})


def in_buckets(mib: float) -> Job:
    return replace(some(sharding="ddp"), conventions=(("bucket_mib", mib),))


def units_of(job: Job) -> list[Unit]:
    return [unit for units in units_by_stage(job, job.layout.pp) for unit in units]


@pytest.mark.parametrize("framework", framework_names())
@pytest.mark.parametrize("model", MODELS)
def test_the_tensors_of_a_unit_are_its_parameters(model: str, framework: str) -> None:
    experts = {"ep": 4} if some(model).model.n_experts else {}
    for cut in ({}, {"tp": 2, **experts}, {"pp": 2, **experts}):
        job = some(model, framework=framework, **cut)
        for unit in units_of(job):
            found = {scope: tensors(job, unit, scope) for scope in OF_REPLICAS}
            assert all(n > 0 for sizes in found.values() for n in sizes)
            assert (sum(found["dp"]), sum(found["edp"])) == (unit.params, unit.expert_params)


def test_of_adapters_only_they_have_gradients() -> None:
    job = some(lora_rank=16)
    assert [tensors(job, unit, "dp") for unit in units_of(job)] == [
        (unit.adapters,) if unit.adapters else () for unit in units_of(job)
    ]


def test_matrices_of_their_own_are_tensors_of_their_own() -> None:
    joined, apart = (some(framework=name) for name in ("megatron", "torchtitan"))
    layer = units_of(joined)[1]
    assert len(tensors(apart, layer, "dp")) == len(tensors(joined, layer, "dp")) + 3


@given(st.lists(st.lists(st.integers(1, 50), max_size=5), max_size=8), st.integers(1, 100))
def test_buckets_hold_every_tensor_once_and_are_full_but_for_the_last(
    sizes: list[list[int]], cap: int
) -> None:
    found = buckets(sizes, cap)
    assert sum(n for n, _ in found) == sum(map(sum, sizes))
    assert all(n >= cap for n, _ in found[:-1])
    assert [unit for _, unit in found] == sorted(unit for _, unit in found)
    largest = max((n for part in sizes for n in part), default=0)
    assert all(n < cap + largest for n, _ in found)


def reduced(job: Job) -> list[int]:
    """Sizes in bytes of what data-parallel ranks sum in one step."""
    rows = simulate(job).spans.to_pylist()
    return [row["size_bytes"] for row in rows if row["axis"] == "dp" and row["kind"] == "all_reduce"]


def test_a_matrix_larger_than_a_bucket_travels_whole() -> None:
    """PyTorch never splits a parameter: with buckets of a byte there is one all-reduce for each."""
    job = in_buckets(1e-6)
    sizes = [n * DTYPE_BYTES["fp32"] for unit in reversed(units_of(job)) for n in tensors(job, unit, "dp")]
    assert reduced(job) == sizes
    assert max(sizes) > 100 * MIB


def test_buckets_that_hold_everything_are_one() -> None:
    job = in_buckets(1e6)
    assert reduced(job) == [job.model.n_params * DTYPE_BYTES["fp32"]]


@pytest.mark.parametrize("framework", ["deepspeed", "megatron-deepspeed"])
def test_deepspeed_reduces_half_a_billion_elements_at_once(framework: str) -> None:
    """``reduce_bucket_size``; the last bucket is what is left."""
    job = some(sharding="ddp", framework=framework, precision="fp16")
    *full, last = reduced(job)
    largest = max(n for unit in units_of(job) for n in tensors(job, unit, "dp"))
    assert all(5e8 <= size / DTYPE_BYTES["fp16"] < 5e8 + largest for size in full)
    assert last > 0


def test_from_the_smallest_matrix_down_smaller_buckets_are_the_same() -> None:
    assert len(reduced(in_buckets(5.0))) == len(reduced(in_buckets(1.0))) < len(reduced(in_buckets(1e-6)))


def test_experts_are_reduced_with_their_layer_not_after_all_else() -> None:
    """Experts have other replicas than the rest of a layer; neither sum waits for the other's last."""
    job = some("mixtral-8x7b", dp=16, ep=8, sharding="zero1")
    rows = [r for r in simulate(job).spans.to_pylist() if (r["axis"], r["kind"]) == ("dp", "reduce_scatter")]
    groups = [row["group"] for row in sorted(rows, key=lambda row: row["start_ns"])]
    every, experts = sorted(set(groups), key=groups.index)
    assert groups.index(experts) < 5
    assert groups.count(every) >= job.model.n_layers
    assert groups[-1] == every, "the embedding comes last"


@pytest.mark.parametrize(("schedule", "virtual_stages"), [("1f1b", 1), ("interleaved-1f1b", 2)])
def test_megatron_has_buckets_in_its_first_chunk_only(schedule: str, virtual_stages: int) -> None:
    """Every other stage, and chunk of a stage, reduces in one message; nobody sends more or less in all."""
    job = some(pp=2, schedule=schedule, virtual_stages=virtual_stages, sharding="zero1")
    one = messages(job)
    each = messages(replace(job, conventions=(("buckets_first_chunk_only", False),)))
    assert [sum(sizes) for sizes in one] == [sum(sizes) for sizes in each]
    assert len(one[1]) == virtual_stages < len(each[1])
    assert virtual_stages < len(one[0])


def messages(job: Job) -> list[list[int]]:
    """Sizes of what the first rank of each of two stages scatters in a step."""
    rows = [row for row in simulate(job).spans.to_pylist() if row["kind"] == "reduce_scatter"]
    return [
        [row["size_bytes"] for row in rows if (row["axis"], row["rank"]) == ("dp", first)]
        for first in (0, job.layout.dp)
    ]
