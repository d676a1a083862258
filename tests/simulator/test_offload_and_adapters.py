"""Adapters and offloading on the clock: what is frozen is not computed, what is elsewhere has to travel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.simulator.predicted import simulate

from foretrace.simulator.builder.offload import HOST_ADAM_PARAMS_PER_S, NVME_BYTES_PER_S
from foretrace.simulator.builder.program_builder import COPY, HOST
from foretrace.simulator.builder.stages import units_by_stage
from foretrace.simulator.builder.step import build, job_groups
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.errors import JobError
from foretrace.simulator.job import OFFLOADS, Job
from foretrace.simulator.memory.activations import kept_bytes
from foretrace.simulator.memory.ranks import fits, host_bytes, host_holds, rank_memories
from foretrace.simulator.memory.remedies import changes
from foretrace.simulator.memory.states import sharding_units
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.network.cost import Network
from foretrace.simulator.search.parts import search_parts
from foretrace.simulator.search.space import Space
from foretrace.simulator.workload.lora import NF4_BITS
from foretrace.simulator.workload.micro_batch import embedding_block, head_block, layer_blocks
from foretrace.simulator.workload.ops import Op
from foretrace.topologies.catalog import load_cluster
from foretrace.traces.layout import Layout

LLAMA = replace(load_model("llama2-7b"), n_layers=4)
EIGHT = Layout(dp=8)


def job(layout: Layout = EIGHT, **settings: Any) -> Job:
    found = {"global_batch": 2 * layout.dp, "seq_len": 2048, "sharding": "zero3", **settings}
    cluster = load_cluster("dgx-a100", layout.world_size)
    return Job(**{"model": LLAMA, "cluster": cluster, "layout": layout, **found})


def ops(some: Job, phase: str) -> list[Op]:
    blocks = [embedding_block(some), *layer_blocks(some, 0), head_block(some)]
    return [op for block in blocks for op in block.phases[phase] if isinstance(op, Op)]


def busy_ns(some: Job, stream: int) -> int:
    """Time of rank 0 on a stream of its program."""
    network = Network(some.cluster)
    groups = job_groups(some)
    program = build(some, network, ComputeModel(some.cluster.device, "bf16"), groups=groups)
    own = (program.rank == 0) & (program.stream == stream)
    return int(program.duration_ns[own].sum())


def step_s(some: Job) -> float:
    return float(simulate(some).summary["step_time_s"])


def test_a_frozen_matrix_has_no_weight_gradient_but_its_adapter_has() -> None:
    names = [op.name for op in ops(job(lora_rank=16), "backward") if op.name.endswith("wgrad")]
    assert names
    assert all(".lora_a." in name or ".lora_b." in name for name in names)
    gemms = {
        lora: sum(op.flops for op in ops(job(lora_rank=lora), "backward") if op.kind == "gemm")
        for lora in (0, 16)
    }
    assert gemms[16] == pytest.approx(gemms[0] / 2, rel=0.03)


@pytest.mark.parametrize("rank", [0, 16])
def test_mfu_counts_no_gradients_of_frozen_weights(rank: int) -> None:
    """Tokens of a step times the model's FLOPs for each, over what all GPUs could do in it."""
    some = job(lora_rank=rank)
    found, n_tokens = simulate(some).summary, 16 * 2048
    flops = n_tokens * LLAMA.flops_per_token(2048, frozen=rank > 0)
    could = 8 * some.cluster.device.peak("bf16") * found["step_time_s"]
    assert found["mfu"] == pytest.approx(flops / could)


def test_the_embedding_and_the_head_are_frozen_too() -> None:
    names = {op.name for op in ops(job(lora_rank=16), "backward")}
    assert not {"embedding.backward", "head.logits.wgrad"} & names
    assert "head.logits.dgrad" in names


@pytest.mark.parametrize("name", ["llama2-7b", "mixtral-8x7b", "deepseek-v3", "gpt3-175b"])
def test_blocks_have_the_adapters_that_memory_counts(name: str) -> None:
    some = job(Layout(dp=2), model=replace(load_model(name), n_layers=4), lora_rank=8)
    (units,) = units_by_stage(some, 1)
    counted = sharding_units(some, range(4), first=True, last=True)
    assert [unit.adapters for unit in units] == [unit.adapters for unit in counted]
    assert [unit.matrices + unit.expert_params for unit in units if unit.layer >= 0] == [
        unit.matrices for unit in counted[1:-1]
    ]


def test_four_bit_weights_are_made_whole_before_each_use() -> None:
    some = job(lora_rank=16, quantized_base=True)
    found = {op.name: op for op in ops(some, "forward")}
    assert found["mlp.down.dequantise"].bytes_moved == round(4096 * 11008 * (NF4_BITS / 8 + 2))
    assert "mlp.down.dequantise" in {op.name for op in ops(some, "backward")}
    assert step_s(some) > step_s(job(lora_rank=16))


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_adapters_take_less_time_and_less_memory(sharding: str) -> None:
    whole, adapted = job(sharding=sharding), job(sharding=sharding, lora_rank=16)
    assert step_s(adapted) < step_s(whole)
    assert rank_memories(adapted)[0].peak_bytes < rank_memories(whole)[0].peak_bytes


@pytest.mark.parametrize("offload", OFFLOADS[1:])
@pytest.mark.parametrize("sharding", ["zero2", "fsdp"])
def test_offloading_saves_memory_and_never_time(offload: str, sharding: str) -> None:
    here, away = job(sharding=sharding), job(sharding=sharding, offload=offload)
    assert step_s(away) >= step_s(here)
    assert rank_memories(away)[0].peak_bytes < rank_memories(here)[0].peak_bytes
    assert busy_ns(away, COPY) > busy_ns(here, COPY) == 0


def test_the_optimizer_on_the_host_takes_as_long_as_its_processors_need() -> None:
    """Eight GPUs of a node share its processors, and each updates an eighth of the parameters."""
    host_s = (busy_ns(job(offload="optimizer"), HOST) - busy_ns(job(), HOST)) / 1e9
    assert host_s == pytest.approx(LLAMA.n_params / HOST_ADAM_PARAMS_PER_S, rel=1e-3)


@pytest.mark.parametrize("offload", OFFLOADS[1:])
def test_drives_are_slower_than_memory_and_save_as_much(offload: str) -> None:
    memory, drives = (job(offload=offload, offload_to=place) for place in ("host", "nvme"))
    assert step_s(drives) > step_s(memory)
    assert rank_memories(drives)[0].peak_bytes == rank_memories(memory)[0].peak_bytes


def test_states_on_drives_are_read_and_written_once_per_step() -> None:
    host_s = (busy_ns(job(offload="optimizer", offload_to="nvme"), HOST) - busy_ns(job(), HOST)) / 1e9
    assert host_s == pytest.approx(LLAMA.n_params * 24 / NVME_BYTES_PER_S, rel=1e-3)


def of_node(some: Job, memory_bytes: int | None) -> Job:
    return replace(some, cluster=replace(some.cluster, node_memory_bytes=memory_bytes))


@pytest.mark.parametrize("offload", sorted(set(OFFLOADS) - {"none"}))
def test_what_leaves_the_devices_of_a_node_has_to_fit_into_its_memory(offload: str) -> None:
    """What a device no longer holds, for each of its ranks; drives hold all, an unknown node too."""
    some = job(sharding="fsdp", offload=offload)
    ranks, whole = rank_memories(some), rank_memories(replace(some, offload="none"))
    (away,) = {one.peak_bytes - other.peak_bytes for one, other in zip(whole, ranks, strict=True)}
    needed = host_bytes(some, ranks)
    assert needed == pytest.approx(8 * away, rel=0.01)
    assert [fits(of_node(some, size)) for size in (needed, needed - 1, None)] == [True, False, True]
    small = of_node(some, needed - 1)
    assert not host_holds(small, ranks)
    told = simulate(small)
    assert told.summary["fits"] is False
    assert told.summary["host_memory_bytes"] == needed
    assert any("what is offloaded does not fit" in warning for warning in told.info.warnings)
    assert fits(replace(small, offload_to="nvme"))
    assert not any(f"offload={offload}" == one.change for one in changes(replace(small, offload="none")))


def test_a_search_leaves_out_what_no_node_holds() -> None:
    found = {}
    for size in (None, 1):
        cluster = replace(load_cluster("dgx-h100", 8), node_memory_bytes=size)
        model = load_model("llama2-7b")
        only: dict[str, Any] = {
            "tp": (1,),
            "pp": (1,),
            "micro_batch": (1,),
            "sharding": ("fsdp",),
            "recompute": ("full",),
        }
        space = Space(
            model=model, cluster=cluster, global_batch=8, seq_len=1024, offload=("none", "optimizer"), **only
        )
        found[size] = {one.job.offload for one in search_parts([space], 9).best}
    assert found == {None: {"none", "optimizer"}, 1: {"none"}}


def test_a_faster_link_to_the_host_is_never_slower() -> None:
    slow = job(offload="all", recompute="full")
    device = replace(slow.cluster.device, host_bytes_per_s=4 * slow.cluster.device.host_bytes_per_s)
    fast = replace(slow, cluster=replace(slow.cluster, device=device))
    assert step_s(fast) < step_s(slow)
    assert busy_ns(fast, COPY) == pytest.approx(busy_ns(slow, COPY) / 4, rel=1e-3)


def test_activations_travel_once_each_way() -> None:
    """A quarter of a second per 6.25 GB at 25 GB/s, down in forward and up in backward."""
    some = job(offload="activations")
    moved = 2 * 2 * sum(kept_bytes(some, layer) for layer in range(4))
    assert busy_ns(some, COPY) / 1e9 == pytest.approx(moved / 25e9, rel=1e-3)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_of_some_layers_alone_activations_travel(number: int) -> None:
    """Their bytes there and back; what is left on the device is the rest, and a layer on its way."""
    here, some = job(), job(offload="activations", offload_layers=number)
    each = kept_bytes(some, 0)
    assert busy_ns(some, COPY) / 1e9 == pytest.approx(2 * 2 * number * each / 25e9, rel=1e-3)
    saved = rank_memories(here)[0].peak_bytes - rank_memories(some)[0].peak_bytes
    assert saved == (number - 1) * each
    assert step_s(here) <= step_s(some) <= step_s(job(offload="activations"))


def test_copies_of_some_layers_have_all_layers_to_leave_in() -> None:
    """A copy that takes two forwards of a layer hides behind four of them; three such copies do not."""
    here = job()
    forward_s = step_s(here) / (2 * 4 * 3)  # of 2 micro-batches and 4 layers, of which backward is the rest
    link = kept_bytes(here, 0) / (2 * forward_s)
    cluster = replace(here.cluster, device=replace(here.cluster.device, host_bytes_per_s=link))
    away = replace(here, cluster=cluster, offload="activations")
    assert step_s(replace(away, offload_layers=1)) < 1.02 * step_s(here)
    assert step_s(replace(away, offload_layers=3)) > 1.1 * step_s(here)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"offload_layers": 2}, "offload_layers=2 needs offload=activations"),
        ({"offload_layers": 2, "offload": "optimizer"}, "offload_layers=2 needs offload=activations"),
        ({"offload_layers": 4, "offload": "activations"}, "offload_layers=4: at most 3 of the 4 layers"),
        ({"offload_layers": -1, "offload": "activations"}, "at most 3 of the 4 layers"),
        (
            {"offload_layers": 2, "offload": "activations", "recompute": "full"},
            "layers whose activations travel are not computed again",
        ),
        ({"recompute": "save_qkv_proj"}, "one of none, selective, full; a policy of JAX"),
    ],
)
def test_layers_that_cannot_be_offloaded_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(JobError, match=reason):
        job(**given)
