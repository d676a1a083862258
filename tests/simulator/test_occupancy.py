"""What communication takes of a GPU, and what that does to steps of jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.simulator.predicted import simulate

from foretrace.simulator.builder.instances import Message
from foretrace.simulator.builder.step import build
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.config import job_from
from foretrace.simulator.engine import compiled, contended, contended_compiled, event
from foretrace.simulator.engine.slowdown import MILLION, slowdown
from foretrace.simulator.errors import JobError
from foretrace.simulator.network.cost import Network
from foretrace.simulator.network.occupancy import occupied
from foretrace.simulator.program import Program, Transfer
from foretrace.topologies.catalog import load_cluster

H100 = load_cluster("dgx-h100", 8).device
WIRE = Transfer(10_000, 1_000_000, near=1.0)
GATHER = Message("all_gather", "dp", 2**28, "bf16")


def program(scale: float, **given: Any) -> Program:
    """Return the program of a small job on one node, with so much of the GPUs taken by communication."""
    base = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 16, "seq_len": 4096}
    job = job_from({**base, "sharding": "fsdp", "overlap_slowdown": scale, **given})
    return build(job, Network(job.cluster), ComputeModel(job.cluster.device, job.precision))


def test_a_large_collective_holds_a_processor_per_channel_and_three_times_its_wire_bandwidth() -> None:
    """24 of 132 processors; 7/8 of 256 MiB in 1 ms, three times, of 3.35 TB/s."""
    found = occupied(WIRE, GATHER, 8, H100)
    assert found.processors == round(24 / 132 * MILLION)
    assert found.memory == pytest.approx(3 * 7 / 8 * 2**28 / 1e-3 / 3.35e12 * MILLION, rel=1e-5)
    assert found._replace(processors=0, memory=0) == WIRE


def test_small_arrays_messages_and_other_nodes_take_fewer_channels() -> None:
    def channels(transfer: Transfer, message: Message) -> float:
        return occupied(transfer, message, 8, H100).processors * 132 / MILLION

    assert channels(WIRE, GATHER._replace(size_bytes=65_536)) == pytest.approx(2, rel=1e-4)
    assert channels(WIRE._replace(far=1.0), GATHER) == pytest.approx(16, rel=1e-4)
    message = Message("send", "pp", 2**24, "bf16", peer_pp=1)
    assert channels(WIRE._replace(far=1.0), message) == pytest.approx(2, rel=1e-4)


def test_nothing_is_taken_if_switched_off_without_bytes_or_without_a_gpu() -> None:
    assert occupied(WIRE, GATHER, 8, H100, 0.0) == WIRE
    assert occupied(Transfer(0, 0, "none"), GATHER, 1, H100) == Transfer(0, 0, "none")
    assert occupied(WIRE, GATHER, 8, load_cluster("localhost", 8).device) == WIRE


def test_a_product_beside_an_all_gather_is_slowed_as_published() -> None:
    """Lee et al. 2025 (arXiv:2507.03114): 18.9 % on average, 40 % at most, on H100, A100 and AMD."""
    for machine in ("dgx-h100", "dgx-a100"):
        cluster = load_cluster(machine, 8)
        transfer = Network(cluster).collective("all_gather", 2**28, range(8))
        taken = occupied(transfer, GATHER, 8, cluster.device)
        assert 1.15 < slowdown(0, taken.processors, taken.memory) < 1.40


def test_all_engines_agree_on_a_job_whose_communication_takes_part_of_the_gpus() -> None:
    made = program(1.0)
    wanted = [x.tolist() for x in event.times(made)]
    assert [x.tolist() for x in compiled.times(made)] == wanted
    shared = [x.tolist() for x in contended.times(made)]
    assert [x.tolist() for x in contended_compiled.times(made)] == shared


@pytest.mark.parametrize("given", [{}, {"sharding": "ddp"}, {"pp": 4, "tp": 2, "schedule": "zb-v"}])
def test_the_more_is_taken_the_longer_the_step_and_nothing_is_slower_without(given: dict[str, Any]) -> None:
    free, half, whole = (compiled.times(program(scale, **given)) for scale in (0.0, 0.5, 1.0))
    for column in (0, 1):
        assert (free[column] <= half[column]).all()
    assert free[1].max() < half[1].max() < whole[1].max()


def test_what_waits_for_its_communication_is_not_slower() -> None:
    """A forward with tensor parallelism: nothing computes beside its collectives."""
    made = program(1.0, tp=8, sharding="ddp", global_batch=1)
    start_ns, end_ns = compiled.times(made)
    forward = np.array([label.kind == "forward" for label in made.labels])[made.label]
    assert forward.sum() > 100
    assert (end_ns - start_ns)[forward].tolist() == made.duration_ns[forward].tolist()


def test_simulate_takes_the_setting_and_refuses_nonsense() -> None:
    base = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 8, "sharding": "fsdp"}
    free, taken = (simulate(job_from({**base, "overlap_slowdown": scale})) for scale in (0.0, 1.0))
    assert free.summary["step_time_s"] < taken.summary["step_time_s"] < 1.4 * free.summary["step_time_s"]
    with pytest.raises(JobError, match=r"overlap_slowdown=-1.0: from 0, none, to 4.0; 1 is what NCCL takes"):
        job_from({**base, "overlap_slowdown": -1.0})


def test_memory_bound_work_is_known_by_task() -> None:
    made = program(1.0)
    assert made.memory_bound is not None
    shares = made.memory_bound / MILLION
    computes = made.slowed >= 0
    assert 0 < shares[computes].min() < shares[computes].max() == 1.0
    assert (made.slowed[made.instance >= 0] == -1).all()
    hidden = replace(made, memory_bound=np.zeros(made.n_tasks, np.int32))
    assert compiled.times(hidden)[1].max() != compiled.times(made)[1].max()
