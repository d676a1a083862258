"""Experts as frameworks run them: exchanges beside other micro-batches, tokens sent once, one host."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foretrace.simulator.builder.chain import host_work
from foretrace.simulator.builder.step import build
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.config import job_from
from foretrace.simulator.engine import compiled
from foretrace.simulator.errors import JobError, ScheduleError
from foretrace.simulator.job import Job
from foretrace.simulator.network.cost import Network
from foretrace.simulator.schedules import Action, pairs, plan
from foretrace.simulator.search.schedule_program import schedule_program
from foretrace.simulator.workload.micro_batch import layer_blocks
from foretrace.simulator.workload.ops import Op
from foretrace.simulator.workload.recipes import MEMBER_LAUNCH


def make_job(**given: Any) -> Job:
    """Return a job whose 128 experts are far apart; anything may be given."""
    base = {"model": "qwen3-30b-a3b", "cluster": "dgx-h100", "gpus": 16, "ep": 16, "global_batch": 64}
    job = job_from({**base, "seq_len": 4096, "sharding": "zero1", "framework": "nemo", **given})
    return replace(job, model=replace(job.model, n_layers=4))


def step_ns(job: Job) -> int:
    program = build(job, Network(job.cluster), ComputeModel(job.cluster.device, job.precision))
    return int(compiled.times(program)[1].max())


@settings(deadline=None, max_examples=30)
@given(p=st.integers(1, 6), m=st.integers(1, 16), v=st.integers(1, 4))
def test_pairs_never_wait_for_themselves(p: int, m: int, v: int) -> None:
    """Neither half of a pair needs the other: not its own micro-batch, and no rank waits for ever."""
    try:
        orders, together = plan("combined-1f1b", p, m, v), pairs("combined-1f1b", p, m, v)
    except ScheduleError:
        assume(False)
    for own in orders:
        for forward, backward in pairwise(own):
            if forward in together:
                assert (forward.kind, backward.kind) == ("F", "B")
                assert forward[1:] != backward[1:]
    found = schedule_program("combined-1f1b", p, m, v)
    assert len(compiled.times(found.program)[1]) == found.program.n_tasks


@given(m=st.integers(1, 12))
def test_one_rank_pairs_all_but_its_first_forward(m: int) -> None:
    assert pairs("combined-1f1b", 1, m) == {Action("F", 0, at) for at in range(1, m)}


def test_exchanges_hide_behind_another_micro_batch() -> None:
    """Never faster than what the device computes; far faster than waiting for every exchange."""
    plain = replace(make_job(micro_batch=2, global_batch=512), conventions=(("host_work", 0.0),))
    combined = replace(plain, schedule="combined-1f1b")
    program = build(plain, Network(plain.cluster), ComputeModel(plain.cluster.device, plain.precision))
    assert program.duration_ns[program.rank == 0].sum() < step_ns(combined) < 0.8 * step_ns(plain)


@settings(deadline=None, max_examples=20)
@given(ep=st.sampled_from([2, 4, 8, 16]), top_k=st.integers(1, 8))
def test_a_token_sent_once_to_a_gpu_moves_no_more(ep: int, top_k: int) -> None:
    job = make_job(ep=ep)
    job = replace(job, model=replace(job.model, top_k=top_k))
    once = replace(job, conventions=(("expert_dispatch", "once"),))
    assert step_ns(once) <= 1.02 * step_ns(job)  # the two are priced apart, and agree for one copy


def test_sending_tokens_once_pays_most_where_many_experts_share_a_node() -> None:
    gains = []
    for ep in (8, 16):
        job = make_job(ep=ep)
        once = replace(job, conventions=(("expert_dispatch", "once"),))
        gains.append(step_ns(job) / step_ns(once))
    assert gains[1] > gains[0] > 1.0


@pytest.mark.parametrize(
    ("given_", "reason"),
    [
        ({"ep": 1}, "with ep=1 they exchange nothing; 1f1b would work"),
        ({"ep": 1, "pp": 2}, "with ep=1 they exchange nothing; interleaved-1f1b would work"),
        ({"ep": 8, "pp": 2}, "with pp=2 needs virtual_stages of 2 or more"),
        ({"ep": 8, "pp": 2, "virtual_stages": 1}, "with pp=2 needs virtual_stages of 2 or more"),
        ({"recompute": "full"}, "does not run with recompute=full"),
        ({"recompute": "selective", "recompute_modules": "core_attn,moe"}, "with recompute_modules moe"),
    ],
)
def test_what_megatron_does_not_pair_is_refused(given_: dict[str, Any], reason: str) -> None:
    with pytest.raises(JobError, match=reason):
        make_job(schedule="combined-1f1b", **given_)


def test_an_unknown_dispatch_is_refused() -> None:
    with pytest.raises(JobError, match="expert_dispatch='twice': one of copies, once"):
        replace(make_job(), conventions=(("expert_dispatch", "twice"),))


def test_the_host_sees_to_every_expert_unless_one_kernel_has_them_all() -> None:
    def launches(framework: str) -> float:
        phases = layer_blocks(make_job(framework=framework), 0)[1].phases
        ops = [op for op in phases["forward"] if isinstance(op, Op) and op.grouped]
        return sum(op.n_launches for op in ops)

    assert launches("nemo") == 2 * (1 + MEMBER_LAUNCH * 128 // 16)
    assert launches("torchtitan") == 2


def test_a_host_that_has_to_wait_for_the_router_is_no_faster() -> None:
    """The wait binds where the host is the slower; on one that takes no time nothing changes."""
    small = make_job(seq_len=512)
    free = replace(small, conventions=(("host_work", 0.0),))
    assert step_ns(free) < step_ns(small)
    program = build(small, Network(small.cluster), ComputeModel(small.cluster.device, "bf16"))
    assert np.any([label.category == "host" for label in program.labels])


def test_tensor_ranks_add_to_the_host_only_where_a_pipeline_leaves_the_node() -> None:
    def work(**given: Any) -> float:
        where = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 16, "global_batch": 16, **given}
        return host_work(job_from({**where, "framework": "nanotron"}))

    inside = work(gpus=8, pp=2, tp=4)
    assert inside == work(tp=8) == work(pp=2, tp=1)
    assert work(pp=2, tp=8) - inside == pytest.approx(7 / 3 * (work(pp=2, tp=4) - inside))
    assert work(pp=2, tp=4) > inside
