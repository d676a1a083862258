"""Every parallelism: each choice changes time the right way, and any product of them runs or is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.simulator.predicted import simulate

from foretrace.simulator.builder.gradients import DataParallel
from foretrace.simulator.builder.groups import shard_size
from foretrace.simulator.builder.stages import job_plan, n_stages, units_by_stage
from foretrace.simulator.builder.step import build, job_groups
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.config import job_from
from foretrace.simulator.engine import choose
from foretrace.simulator.errors import JobError, SimulationError
from foretrace.simulator.framework import OVERRIDABLE, framework_names
from foretrace.simulator.job import OFFLOADS, RECOMPUTES, Job
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.network.cost import Network
from foretrace.simulator.sharding import SHARDINGS
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.errors import TopologyError
from foretrace.traces.errors import TraceError
from foretrace.traces.layout import Layout


@cache
def network(n_gpus: int, cluster: str = "dgx-h100") -> Network:
    return Network(load_cluster(cluster, n_gpus))


def job(layout: Layout, model: str = "llama3-8b", n_layers: int = 4, **given: object) -> Job:
    settings_ = {"global_batch": 4 * layout.dp, "seq_len": 4096, **given}
    return Job(
        model=replace(load_model(model), n_layers=n_layers),
        cluster=network(layout.world_size).cluster,
        layout=layout,
        **settings_,  # type: ignore[arg-type]
    )


def step_s(some: Job) -> float:
    """Return the time from the start of a step to its end, on the engine that needs no compiling."""
    wires = network(some.layout.world_size, some.cluster.name)
    program = build(some, wires, ComputeModel(some.cluster.device, some.precision))
    _, end_ns = choose("event", program.n_tasks).times(program)
    return int(end_ns.max()) / 1e9


def told(some: Job, **conventions: object) -> Job:
    return replace(some, conventions=tuple(conventions.items()))


def dp(n: int = 16) -> Layout:
    return Layout(dp=n)


SLOWER: dict[str, tuple[Job, Mapping[str, object]]] = {
    "reducing after backward": (job(dp(), sharding="ddp"), {"overlap_grad_reduce": False}),
    "reducing for every micro-batch": (job(dp(), sharding="ddp", seq_len=512), {"no_sync": False}),
    "gathering after the optimizer": (
        told(job(dp()), overlap_param_gather=True),
        {"overlap_param_gather": False},
    ),
    "no prefetch": (job(dp(), sharding="fsdp"), {"prefetch_forward": False, "prefetch_backward": False}),
    "gathering again for backward": (
        told(job(dp(), sharding="fsdp", seq_len=512), reshard_after_forward=False),
        {"reshard_after_forward": True},
    ),
    "one unit for the model": (job(dp(), sharding="fsdp"), {"wrap": "model"}),
    "copies out of the gathered buffer": (job(dp(), sharding="fsdp"), {"copies_gathered": True}),
    "one tensor of all gradients of a unit": (job(dp(), sharding="fsdp"), {"joins_gradients": True}),
    "casts of autocast": (
        job(dp(), sharding="ddp", fp32_gradients=True, kernels="eager"),
        {"autocast": True},
    ),
    "recomputing to the end": (
        told(job(dp(), sharding="fsdp", recompute="full"), stops_early=True),
        {"stops_early": False},
    ),
    "sums of gradients apart": (job(dp()), {"fused_wgrad": False}),
    "waiting for tensor-parallel gathers": (
        told(job(Layout(tp=8), n_layers=2), async_tp=True),
        {"async_tp": False},
    ),
    "waiting in backward too": (job(Layout(tp=8), n_layers=2), {"overlap_tp_backward": False}),
    "sequences cut apart": (job(Layout(tp=8), micro_batch=2), {"batch_first": True}),
    "tensors updated one by one": (job(dp(1)), {"update_launches": 100.0}),
    "a slower host": (job(Layout(tp=8), n_layers=2), {"host_work": 5.0}),
    "data that comes late": (job(dp(2)), {"step_host_s": 0.1}),
    "the loss averaged": (job(dp()), {"loss_all_reduce": True}),
    "gathering keys instead of a ring": (
        told(job(Layout(cp=4), seq_len=16384), context="ring"),
        {"context": "all_gather"},
    ),
    "whole messages between stages": (
        job(Layout(pp=2, tp=8), sequence_parallel=False, n_layers=2),
        {"p2p_scattered": False},
    ),
}


@pytest.mark.parametrize("name", SLOWER)
def test_what_a_framework_does_not_overlap_costs_time(name: str) -> None:
    some, changed = SLOWER[name]
    conventions: dict[str, object] = {**dict(some.conventions), **dict(changed)}
    assert step_s(told(some, **conventions)) > step_s(some)


CALLS: dict[str, object] = {"unit_calls": 50, "tensor_calls": 5, "update_calls": 20}


def test_the_host_of_full_sharding_costs_time_where_the_device_waits_for_it() -> None:
    """It runs ahead of a device with much to do; few tokens do not keep one busy."""
    large = told(job(dp(), sharding="fsdp"))
    assert step_s(told(large, **CALLS)) == step_s(large)
    small = told(job(dp(), "qwen2.5-0.5b", sharding="fsdp", seq_len=128))
    for name, calls in CALLS.items():
        assert step_s(told(small, **{name: calls})) > step_s(small)
    whole = told(replace(small, sharding="zero1"))
    assert step_s(told(whole, **CALLS)) == step_s(whole)


def test_on_a_processor_every_call_for_a_unit_is_part_of_the_step() -> None:
    cluster = load_cluster("localhost", 2)
    plain = replace(job(dp(2), "llama3.2-1b", sharding="fsdp", seq_len=64, precision="fp32"), cluster=cluster)
    compute = ComputeModel(cluster.device, "fp32")
    n_units = sum(map(len, units_by_stage(plain, 1)))
    actions = 2 * plain.n_microbatches  # forward and backward
    for calls in (100, 1000):
        more = step_s(told(plain, unit_calls=calls)) - step_s(plain)
        assert more == pytest.approx(actions * n_units * calls * compute.call_s, rel=1e-6)


def test_gradients_in_16_bit_travel_faster() -> None:
    some = told(job(dp(), sharding="ddp"), overlap_grad_reduce=False)
    assert step_s(told(some, overlap_grad_reduce=False, reduces_in_16_bit=True)) < step_s(some)


def test_small_buckets_cost_more_and_large_ones_start_later() -> None:
    some = job(dp(), "qwen2.5-0.5b", sharding="ddp", seq_len=512)
    late = {mib: step_s(told(some, bucket_mib=mib, overlap_grad_reduce=False)) for mib in (0.5, 25.0)}
    assert late[0.5] > late[25.0]
    large = job(dp(), sharding="ddp")
    assert step_s(told(large, bucket_mib=1e5)) > step_s(told(large, bucket_mib=25.0))


def test_shards_within_a_node_are_gathered_without_leaving_it() -> None:
    some = job(dp(32), sharding="fsdp", global_batch=32, seq_len=1024)
    some = replace(some, cluster=network(32, "a100-ethernet").cluster)
    assert step_s(replace(some, shard_ranks=8)) < step_s(some)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_fewer_layers_takes_less_time(recompute: str) -> None:
    none, every = (job(dp(2), recompute=one) for one in ("none", recompute))
    some, other = replace(every, recompute_layers=1), replace(every, recompute_every=2)
    assert step_s(none) < step_s(some) < step_s(other) < step_s(every)


def test_a_checkpoint_is_waited_for_every_so_many_steps() -> None:
    some = job(dp(2), n_steps=2)
    saved = replace(some, checkpoint_every=2, checkpoint_bytes_per_s=1e9)
    assert step_s(saved) > step_s(some) + 1
    assert step_s(replace(saved, checkpoint_every=1)) > step_s(saved) + 1


@pytest.mark.parametrize(("every", "n_steps"), [(1, 1), (2, 4), (3, 4), (5, 1)])
def test_throughput_mfu_and_dollars_count_the_share_of_a_checkpoint(every: int, n_steps: int) -> None:
    """However many steps are simulated: (every * step + checkpoint) / every, for all that is per token."""
    plain = job(dp(2))
    without = simulate(plain).summary
    saved = replace(plain, checkpoint_every=every, checkpoint_bytes_per_s=1e9, n_steps=n_steps)
    found = simulate(saved).summary
    average_s = without["step_time_s"] + found["checkpoint_s"] / every
    assert found["average_step_time_s"] == pytest.approx(average_s, rel=1e-3)
    for name in ("tokens_per_s", "tokens_per_s_per_gpu", "mfu"):
        assert found[name] == pytest.approx(without[name] * without["step_time_s"] / average_s, rel=1e-3)
    assert without["average_step_time_s"] == without["step_time_s"]
    assert without["checkpoint_s"] == 0


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"layout": Layout(cp=3), "seq_len": 3072, "conventions": (("context", "ulysses"),)}, "Ulysses"),
        ({"layout": Layout(dp=8), "sharding": "ddp", "shard_ranks": 4}, "needs a sharding"),
        ({"layout": Layout(cp=2, tp=4), "seq_len": 10}, r"over cp\*tp = 2\*4 ranks; 8 or 16 would work"),
        (
            {"layout": Layout(cp=4, tp=2), "seq_len": 10, "sequence_parallel": False},
            "over cp = 4 ranks; 8 or 12 would work",
        ),
        ({"layout": Layout(), "recompute_layers": 2}, "need recompute"),
        ({"layout": Layout(), "checkpoint_every": 1}, "checkpoint_bytes_per_s"),
        ({"layout": Layout(), "conventions": (("overlap_grad_redce", True),)}, "overlap_grad_reduce"),
        ({"layout": Layout(), "conventions": (("no_sync", 1),)}, "must be true or false"),
        ({"layout": Layout(), "conventions": (("wrap", "row"),)}, "block, model"),
        ({"layout": Layout(), "conventions": (("host_work", -1.0),)}, "not negative"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(given_: dict[str, object], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        job(**given_)  # type: ignore[arg-type]


def test_every_convention_can_be_set_to_what_it_is() -> None:
    some = job(Layout())
    same = {name: getattr(some.profile, name) for name in OVERRIDABLE}
    assert told(some, **same).profile == some.profile


SWITCHES = (
    *("async_tp", "overlap_grad_reduce", "overlap_param_gather", "reshard_after_forward"),
    *("limit_all_gathers", "prefetch_forward", "copies_gathered", "no_sync"),
    *("joins_gradients", "autocast", "stops_early"),
)
degrees = st.sampled_from([1, 1, 2, 4])


@st.composite
def products(draw: st.DrawFn) -> Callable[[], Job]:
    """Return what makes a job of any product of degrees with any sharding, or refuses to."""
    layout = Layout(**{axis: draw(degrees) for axis in ("pp", "dp", "cp", "tp")})
    model = draw(st.sampled_from(["llama3-8b", "mixtral-8x7b", "gpt2-xl", "deepseek-v2-lite"]))
    ep = draw(st.sampled_from([1, 2])) if model in ("mixtral-8x7b", "deepseek-v2-lite") else 1
    assume((layout.dp * layout.cp) % ep == 0)
    given_: dict[str, Any] = {
        "seq_len": 512,
        "global_batch": layout.dp * draw(st.sampled_from([1, 4])),
        "schedule": draw(st.sampled_from(["1f1b", "gpipe", "interleaved-1f1b", "combined-1f1b", "zb-h1"])),
        "sharding": draw(st.sampled_from(sorted(SHARDINGS))),
        "recompute": draw(st.sampled_from(RECOMPUTES)),
        "offload": draw(st.sampled_from(OFFLOADS)),
        "sequence_parallel": draw(st.booleans()),
        "fp8": draw(st.booleans()),
        "lora_rank": draw(st.sampled_from([0, 0, 8])),
        "shard_ranks": draw(st.sampled_from([0, 0, 2])),
        "expert_imbalance": draw(st.sampled_from([0.0, 0.5])),
        "framework": draw(st.sampled_from(framework_names())),
    }
    conventions = {
        "context": draw(st.sampled_from(["all_gather", "ring", "ulysses"])),
        "wrap": draw(st.sampled_from(["block", "model"])),
        **{name: draw(st.booleans()) for name in SWITCHES},
    }
    return lambda: told(job(replace(layout, ep=ep), model, **given_), **conventions)


def refusal(make: Callable[[], object]) -> str:
    """Return why *make* refuses, empty if it does not; any other error is the test's."""
    try:
        make()
    except (SimulationError, TopologyError, TraceError) as error:
        return str(error)
    return ""


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(products())
def test_any_product_runs_or_is_refused_in_one_line(make: Callable[[], Job]) -> None:
    took: list[float] = []
    reason = refusal(lambda: took.append(step_s(make())))
    assert "\n" not in reason
    assert reason or took[0] > 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(products())
def test_shards_of_parameters_sum_to_the_whole(make: Callable[[], Job]) -> None:
    """What the ranks of a shard group own is at least all they share, and less than a rank's worth more."""
    assume(not refusal(lambda: job_plan(make())))
    some = make()
    orders = job_plan(some)
    assume(n_stages(orders) <= some.model.n_layers)
    assume(not refusal(lambda: units_by_stage(some, n_stages(orders))))
    stages = units_by_stage(some, n_stages(orders))
    assume(not some.lora_rank)
    groups = job_groups(some)
    data_parallel = DataParallel(some, groups)
    for units in stages:
        whole = sum(unit.params_in_all for unit in units)
        owned = data_parallel.owned_params(units)
        if some.sharding == "ddp":
            assert owned == whole
            continue
        shards = groups.size("dp.shard"), groups.size("edp.shard")
        parts = (
            -(-sum(unit.params for unit in units) // shards[0]),
            -(-sum(unit.expert_params for unit in units) // shards[1]),
        )
        assert owned == sum(parts)
        assert whole <= sum(part * n for part, n in zip(parts, shards, strict=True)) < whole + sum(shards)


@given(st.integers(1, 256), st.integers(0, 256), st.sampled_from(["dp", "edp"]), st.sampled_from([1, 2, 4]))
def test_a_shard_group_divides_the_replicas(n: int, shard_ranks: int, scope: str, ep: int) -> None:
    layout = Layout(dp=n * ep, ep=ep)
    n_replicas = layout.expert_replicas if scope == "edp" else layout.dp
    assert n_replicas % shard_size(layout, scope, n_replicas, shard_ranks) == 0


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"sharding": "hsdp"}, "fsdp with shard_ranks"),
        ({"precision": "fp8"}, "fp8 says that products run in 8 bits"),
        ({"recompute": "partial"}, "recompute_layers or recompute_every"),
    ],
)
def test_what_people_write_leads_to_what_they_mean(setting: dict[str, str], says: str) -> None:
    where = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 8}
    with pytest.raises(JobError, match=says):
        job_from({**where, **setting})


@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_a_processor_hides_nothing_of_full_sharding_and_what_a_reducer_overlaps(sharding: str) -> None:
    """The same job, as fast, on what has streams and on what has none."""
    on_gpu = job(dp(), sharding=sharding)
    device = replace(on_gpu.cluster.device, kind="cpu")
    on_cpu = replace(on_gpu, cluster=replace(on_gpu.cluster, device=device))
    gpu, cpu = (simulate(where).summary for where in (on_gpu, on_cpu))
    assert gpu["hidden_by_axis"]["dp"] > 0
    if sharding == "fsdp":
        assert cpu["hidden_by_axis"]["dp"] == 0
    else:
        assert cpu["step_time_s"] == gpu["step_time_s"]
    assert any("no streams" in note for note in cpu["rests_on"]) == (sharding == "fsdp")
