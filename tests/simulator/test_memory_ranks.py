"""Memory of the ranks of a pipeline: pairs of a forward and a backward, communicators of all groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis.strategies import sampled_from
from tests.simulator.made_jobs import cut, job

from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.memory.states import COMMUNICATOR_BYTES, reserved_bytes
from foretrace.traces.layout import Layout

COMBINED = Layout(pp=4, dp=2, ep=2)
"""Only experts that exchange tokens run combined."""


def paired(schedule: str, *, together: bool) -> Job:
    dense, experts = job(cut("llama3-8b", 16), Layout(tp=2, pp=4)), job(cut("mixtral-8x7b", 16), COMBINED)
    return replace(
        experts if schedule == "combined-1f1b" else dense,
        schedule=schedule,
        virtual_stages=2,
        global_batch=16,
        overlap_pairs=together,
    )


@given(schedule=sampled_from(["dualpipe", "dualpipe-v", "combined-1f1b"]))
def test_a_forward_takes_up_what_the_backward_beside_it_frees(schedule: str) -> None:
    """One after the other a rank may hold all of both, together a layer more than the larger."""
    at_once, in_turn = (rank_memories(paired(schedule, together=on)) for on in (True, False))
    for one, other in zip(at_once, in_turn, strict=True):
        assert one.kept_bytes == other.kept_bytes
        less = other.items["activations"] - one.items["activations"]
        assert 0 <= less <= max(size - one.ahead_bytes[stage] for stage, size in one.kept_bytes.items())
    assert sum(one.peak_bytes for one in at_once) < sum(one.peak_bytes for one in in_turn)


def test_a_layer_of_a_stage_is_ahead() -> None:
    for rank in rank_memories(paired("dualpipe-v", together=True)):
        for stage, size in rank.kept_bytes.items():
            assert rank.ahead_bytes[stage] == pytest.approx(size / 2, abs=1)  # 16 layers on 8 stages


@pytest.mark.parametrize(
    ("layout", "communicators"),
    [
        (Layout(), 0),
        (Layout(dp=8), 0),
        (Layout(tp=8, dp=2), 2),
        (Layout(tp=2, pp=2, dp=2), 3),
        (Layout(dp=8, ep=8), 2),
    ],
)
def test_every_axis_has_a_communicator_and_all_ranks_one(layout: Layout, communicators: int) -> None:
    """The first one is in what the device reserves."""
    some = job(cut("mixtral-8x7b", 4), layout)
    more = reserved_bytes(some) - some.cluster.device.reserved_bytes
    assert more == communicators * COMMUNICATOR_BYTES


def test_processors_have_no_communicators_of_nccl() -> None:
    some = job(cut("llama3-8b", 4), Layout(cp=2, dp=2))
    device = some.cluster.device
    host = replace(some, cluster=replace(some.cluster, device=replace(device, kind="cpu")))
    assert reserved_bytes(some) - reserved_bytes(host) == 2 * COMMUNICATOR_BYTES
    assert reserved_bytes(host) == device.reserved_bytes
