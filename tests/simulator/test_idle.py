"""Settings that can have no effect are refused or said, and what is said to have none has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.predicted import simulate

from foretrace.simulator.builder.step import build
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.config import job_from
from foretrace.simulator.engine import compiled
from foretrace.simulator.errors import JobError
from foretrace.simulator.framework import OVERRIDABLE
from foretrace.simulator.idle import NEEDS, idle, idle_conventions, needed_by
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.network.cost import Network

REASONS, SETTINGS = needed_by()["conventions"], needed_by()["settings"]

OTHER = {
    **dict.fromkeys(REASONS, (False, True)),
    "bucket_mib": (0.0, 5.0),
    "host_per_tensor_rank": (0.0, 3.0),
    "context": ("all_gather", "ulysses"),
    "expert_dispatch": ("copies", "once"),
    "grouped": ("streams", "torch"),
    "wrap": ("block", "model"),
    "selective": ("core", "operations"),
    "fp8_recipe": ("delayed", "rowwise"),
    "amax_ranks": ("stage", "tp"),
    "norm_reductions": (0, 3),
    "router_launches": (0, 50),
    "dispatch_launches": (0, 50),
    **dict.fromkeys(("latent_launches", "update_launches"), (0, 50)),
    **dict.fromkeys(("unit_calls", "tensor_calls", "update_calls"), (0, 5000)),
    "dispatch_processors": (0, 60),
    "split": ("even", "cost"),
    "rotary": ("complex", "halves"),
}
"""Two values of each convention."""


def make_job(**given: Any) -> Job:
    base = {"model": "mixtral-8x7b" if given.get("ep") else "llama3-8b", "cluster": "dgx-h100", "gpus": 16}
    job = job_from({**base, "global_batch": 32, "seq_len": 1024, **given})
    return replace(job, model=replace(job.model, n_layers=4))


def times(job: Job) -> tuple[int, int]:
    """Return the number of tasks and the end of the last one."""
    program = build(job, Network(job.cluster), ComputeModel(job.cluster.device, job.precision))
    return program.n_tasks, int(compiled.times(program)[1].max())


layouts = st.sampled_from(
    [{}, {"tp": 8}, {"tp": 2, "pp": 4}, {"tp": 4, "cp": 4}, {"ep": 8}, {"tp": 8, "pp": 2}]
)
shardings = st.sampled_from(["ddp", "zero1", "zero2", "zero3", "fsdp"])
further = st.sampled_from([{}, {"recompute": "selective"}, {"fp8": True}, {"sequence_parallel": False}])


@settings(deadline=None, max_examples=30)
@given(layout=layouts, sharding=shardings, more=further, name=st.sampled_from(sorted(REASONS)))
def test_what_is_said_to_have_no_effect_has_none(
    layout: dict[str, Any], sharding: str, more: dict[str, Any], name: str
) -> None:
    job = make_job(**layout, **more, sharding=sharding)
    one, other = (replace(job, conventions=((name, value),)) for value in OTHER[name])
    if idle_conventions(one):
        assert times(one) == times(other)


def test_every_reason_is_of_a_convention() -> None:
    assert set(REASONS) <= set(OVERRIDABLE)
    assert set(OTHER) == set(REASONS)
    assert set(SAID) == set(SETTINGS)
    assert {need for part in (REASONS, SETTINGS) for needed in part.values() for need in needed} == set(NEEDS)


def test_a_convention_that_has_an_effect_is_not_complained_of() -> None:
    assert not idle_conventions(make_job(tp=8, conventions={"async_tp": True, "host_work": 2.0}))
    job = make_job(conventions={"async_tp": True, "context": "ring"})
    assert [words.split(" = ")[0] for words in idle_conventions(job)] == ["async_tp", "context"]
    assert set(idle_conventions(job)) <= set(simulate(job).info.warnings)


SAID: dict[str, tuple[dict[str, Any], str]] = {
    "sequence_parallel": ({"sequence_parallel": False}, "tp is 1"),
    "overlap_p2p": ({"overlap_p2p": True}, "pp is 1"),
    "deallocate_outputs": ({"deallocate_outputs": False}, "pp is 1"),
    "virtual_stages": ({"virtual_stages": 1}, "pp is 1"),
    "overlap_pairs": ({"overlap_pairs": False}, "the schedule pairs nothing"),
    "counted_ends": ({"pp": 2, "counted_ends": "both"}, "stages have the same layers without"),
    "shard_ranks": ({"shard_ranks": 16}, "that many are all there are"),
    "expert_imbalance": ({"model": "mixtral-8x7b", "expert_imbalance": 0.5}, "ep is 1"),
    "checkpoint_bytes_per_s": ({"checkpoint_bytes_per_s": 1e9}, "checkpoint_every is 0"),
    "image_tokens": ({"model": "qwen2.5-vl-7b", "image_tokens": 256}, "sequences have no images"),
    **{name: ({name: 4}, "outer_every is 0") for name in ("outer_fragments", "outer_overlap", "outer_bits")},
}
"""For every setting a job in which it plays no part, and what is said of it."""


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_setting_that_plays_no_part_is_said_to_and_changes_nothing(name: str) -> None:
    changes, words = SAID[name]
    job = make_job(**changes)
    (said,) = idle(job)
    assert said.startswith(name)
    assert words in said
    plain = make_job(**{key: value for key, value in changes.items() if key in ("pp", "model")})
    assert times(job) == times(plain)
    assert [rank.peak_bytes for rank in rank_memories(job)] == [
        rank.peak_bytes for rank in rank_memories(plain)
    ]
    assert not [one for one in idle(plain) if one.startswith(name)]


def test_what_plays_no_part_in_the_fullest_moment_is_said() -> None:
    (said,) = idle(make_job(sharding="fsdp", conventions={"bucket_bytes": 4}))
    assert said == "bucket_bytes = 4 has no effect here: memory is fullest where it plays no part"
    assert not idle(make_job(conventions={"keeps_norm_in_fp32": True}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"capacity_factor": 1.5}, "llama3-8b has no experts"),
        ({"expert_imbalance": 0.5}, "llama3-8b has no experts"),
        ({"offload_to": "nvme"}, "needs offload"),
    ],
)
def test_what_needs_something_else_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        make_job(**given)


def test_frozen_weights_have_no_gradients_to_count() -> None:
    """4 N for 6 N: two thirds, and all of the attention, whose FLOPs are not those of weights."""
    model = make_job().model
    assert model.flops_per_token(0, frozen=True) * 3 == model.flops_per_token(0) * 2
    attention = model.flops_per_token(4096) - model.flops_per_token(0)
    assert model.flops_per_token(4096, frozen=True) - model.flops_per_token(0, frozen=True) == attention
