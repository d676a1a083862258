"""What optimizers keep and do: bytes by hand, order among them, and time that follows bytes and products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.simulator.predicted import simulate

from foretrace.simulator.config import job_from
from foretrace.simulator.errors import JobError
from foretrace.simulator.job import Job
from foretrace.simulator.memory.stage import StageMemory, stage_memory, state_bytes
from foretrace.simulator.optimizers import OPTIMIZERS
from foretrace.simulator.workload.ends import optimizer_ops

WHERE: Mapping[str, Any] = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 16, "tp": 2}


def _job(**settings: Any) -> Job:
    return job_from({**WHERE, "global_batch": 16, **settings})


def _memory(job: Job) -> StageMemory:
    return stage_memory(job, range(job.model.n_layers), 0, 1, first=True, last=True)


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_entry"),
    [
        *(("adamw", 12), ("adamw-bf16", 8), ("adamw-8bit", 6.03125)),
        *(("muon", 8), ("adafactor", 4), ("sgd", 4), ("sgd-momentum", 8)),
    ],
)
def test_states_of_a_matrix_are_its_master_weight_and_what_the_optimizer_remembers(
    optimizer: str, bytes_per_entry: float
) -> None:
    """Without a master weight four bytes less; in fp32 and under fsdp the parameter is the master."""
    job = _job(optimizer=optimizer)
    assert state_bytes(job, 4096, 1, 4096).optimizer == 4096 * bytes_per_entry
    assert state_bytes(replace(job, master_weights=False), 4096, 1, 4096).optimizer == 4096 * (
        bytes_per_entry - 4
    )
    for whole in (replace(job, precision="fp32"), replace(job, sharding="fsdp")):
        found = state_bytes(whole, 4096, 1, 4096)
        assert (found.parameters, found.optimizer) == (4 * 4096, 4096 * (bytes_per_entry - 4))


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_entry"),
    [*(("adamw", 12), ("adamw-bf16", 8), ("muon", 12)), *(("adafactor", 4), ("sgd", 4), ("sgd-momentum", 8))],
)
def test_states_of_what_is_no_matrix_are_those_of_its_entries(optimizer: str, bytes_per_entry: float) -> None:
    """As of norms: Muon leaves them to AdamW, and sums over rows and columns are none."""
    assert state_bytes(_job(optimizer=optimizer), 4096, 1).optimizer == 4096 * bytes_per_entry


def test_whoever_remembers_less_needs_less_memory_and_no_more_time() -> None:
    order = ("adamw", "adamw-bf16", "adamw-8bit", "sgd")
    jobs = [_job(optimizer=name, sharding="ddp") for name in order]
    peaks = [_memory(job).peak_bytes for job in jobs]
    steps = [simulate(job).summary["step_time_s"] for job in jobs]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(order)
    assert steps == sorted(steps, reverse=True)


def test_every_optimizer_moves_no_less_than_gradient_weight_and_parameter() -> None:
    for name in OPTIMIZERS:
        job = _job(optimizer=name)
        assert optimizer_ops(job, 1000)[-1].bytes_moved >= 1000 * (4 + 2 * 4 + 2)


def test_muon_multiplies_so_much_as_its_iterations_say_and_its_ranks_share_it() -> None:
    """Five times 2 m^2 n + 2 m^3 + 2 m^2 n of each matrix; eight replicas take an eighth each."""
    alone = _job(optimizer="muon", sharding="ddp", tp=1)
    shapes = [(linear.n_in, linear.n_out) for linear in alone.model.linears(0)]
    by_hand = sum(5 * (4 * min(one) ** 2 * max(one) + 2 * min(one) ** 3) for one in shapes)
    layers = range(16)
    flops = sum(op.flops for op in optimizer_ops(alone, 1000, layers))
    assert flops == 16 * by_hand
    shared = replace(alone, sharding="zero1")
    assert sum(op.flops for op in optimizer_ops(shared, 1000, layers)) == flops // 16
    adamw, muon = (simulate(_job(optimizer=name)).summary for name in ("adamw", "muon"))
    assert muon["step_time_s"] > adamw["step_time_s"]


def test_bytes_that_go_to_the_host_follow_the_optimizer() -> None:
    steps = [
        simulate(_job(optimizer=name, offload="optimizer")).summary["step_time_s"]
        for name in ("adamw", "adamw-bf16", "sgd")
    ]
    assert steps == sorted(steps, reverse=True)
    assert len(set(steps)) == len(steps)
    with pytest.raises(
        JobError, match="offload=optimizer with optimizer=muon: its products run on the device"
    ):
        _job(optimizer="muon", offload="optimizer")


def test_a_misspelt_optimizer_is_answered_with_those_there_are() -> None:
    with pytest.raises(JobError, match="optimizer='adam': one of adamw, adamw-bf16, adamw-8bit, muon"):
        _job(optimizer="adam")
