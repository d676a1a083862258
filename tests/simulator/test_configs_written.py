"""What is written for a tool and read back is the same job, or what differs is said."""

from __future__ import annotations

import subprocess
import sys
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.simulator.config import job_from
from foretrace.simulator.configs.megatron import FUSED_ROUTER_LAUNCHES
from foretrace.simulator.configs.write import TARGETS, read_back, written
from foretrace.simulator.errors import SimulationError
from foretrace.simulator.job import Job

READ_BACK = tuple(name for name, target in TARGETS.items() if target.parse is not None)
BASE: dict[str, Any] = {"cluster": "dgx-h100", "gpus": 64, "global_batch": 256, "seq_len": 4096}


def job(**given: Any) -> Job:
    """Return a job on 64 GPUs."""
    return job_from({**BASE, "model": "llama3-8b", **given})


def skip_without_yaml(target: str) -> None:
    """Skip a test of YAML where nothing reads it."""
    if target == "accelerate":
        pytest.importorskip("yaml", reason="PyYAML is not installed")


EXPRESSIBLE: list[tuple[str, dict[str, Any]]] = [
    ("megatron", {"tp": 8, "pp": 4, "schedule": "interleaved-1f1b", "virtual_stages": 4}),
    ("megatron", {"tp": 2, "cp": 2, "recompute": "full", "recompute_layers": 4, "pp": 4}),
    ("megatron", {"sharding": "fsdp", "recompute": "selective", "micro_batch": 2}),
    ("megatron", {"model": "mixtral-8x7b", "ep": 8, "sharding": "zero1"}),
    (
        "megatron",
        {
            "model": "mixtral-8x7b",
            "ep": 8,
            "pp": 2,
            "schedule": "combined-1f1b",
            "virtual_stages": 2,
            "conventions": {"expert_dispatch": "once", "router_launches": FUSED_ROUTER_LAUNCHES},
        },
    ),
    ("megatron", {"model": "gpt3-175b", "tp": 8, "pp": 8, "precision": "fp16"}),
    ("megatron", {"model": "deepseek-v2-lite", "ep": 8, "conventions": {"overlap_param_gather": True}}),
    ("megatron", {"tp": 4, "sequence_parallel": False, "fp8": True, "recipe": "current"}),
    ("megatron", {"cluster": "dgx-b200", "fp8": True, "recipe": "mxfp8"}),
    ("megatron", {"pp": 4, "layers_per_stage": (7, 9, 9, 7), "offload": "optimizer"}),
    ("megatron", {"pp": 4, "layers_per_stage": (7, 9, 8, 8)}),
    ("megatron", {"offload": "activations", "offload_layers": 8}),
    (
        "megatron",
        {"pp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2, "layers_per_stage": (7, 9, 9, 7)},
    ),
    ("megatron", {"model": "llama3-405b", "tp": 8, "pp": 8, "gpus": 512}),  # 126 layers
    ("torchtitan", {"sharding": "fsdp", "framework": "torchtitan", "tp": 4, "recompute": "full"}),
    ("torchtitan", {"sharding": "fsdp", "framework": "torchtitan", "shard_ranks": 8, "micro_batch": 2}),
    ("torchtitan", {"sharding": "ddp", "framework": "torchtitan", "recompute": "selective"}),
    (
        "torchtitan",
        {
            "sharding": "fsdp",
            "framework": "torchtitan",
            "pp": 4,
            "schedule": "interleaved-1f1b",
            "virtual_stages": 2,
            "recompute": "full",
            "recompute_every": 2,
            "offload": "states",
        },
    ),
    ("deepspeed", {"sharding": "zero1", "framework": "deepspeed", "micro_batch": 2}),
    ("deepspeed", {"sharding": "zero3", "framework": "deepspeed", "offload": "states"}),
    ("deepspeed", {"sharding": "zero2", "framework": "deepspeed", "offload": "optimizer", "tp": 2}),
    (
        "accelerate",
        {
            "sharding": "fsdp",
            "framework": "transformers",
            "recompute": "full",
        },
    ),
    ("accelerate", {"sharding": "ddp", "framework": "transformers"}),
]


@pytest.mark.parametrize(("target", "given"), EXPRESSIBLE)
def test_what_a_tool_can_express_comes_back_as_it_was(target: str, given: dict[str, Any]) -> None:
    skip_without_yaml(target)
    asked = job(**given)
    made = written(asked, target)
    assert made.differences == ()
    back = read_back(asked, target, made.text, made.asks)
    assert back.layout == asked.layout
    assert back.profile == asked.profile
    assert back.schedule == asked.schedule
    assert back.model.n_params == asked.model.n_params


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    micro_batch=st.sampled_from([1, 2]),
    sharding=st.sampled_from(["ddp", "zero1", "zero2", "zero3", "fsdp"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    schedule=st.sampled_from(["1f1b", "interleaved-1f1b", "zb-v", "gpipe"]),
    target=st.sampled_from(READ_BACK),
)
def test_nothing_is_lost_in_silence(target: str, **given: Any) -> None:
    """Whatever a tool is not told is among the differences: layout, batch, sharding, recomputation."""
    skip_without_yaml(target)
    try:
        asked = job(**given)
    except SimulationError:
        return
    made = written(asked, target)
    named = {one.setting for one in made.differences}
    if "layout" in named:
        return
    back = read_back(asked, target, made.text, made.asks)
    for name in ("tp", "pp", "cp"):
        assert (getattr(back.layout, name) == getattr(asked.layout, name)) != (name in named)
    for name in ("global_batch", "micro_batch", "seq_len", "recompute", "precision"):
        assert (getattr(back, name) == getattr(asked, name)) != (name in named)


def test_a_schedule_that_a_tool_lacks_is_said() -> None:
    made = written(job(pp=4, schedule="zb-v"), "megatron")
    assert [(one.setting, one.asked, one.gives) for one in made.differences] == [("schedule", "zb-v", "1f1b")]


def test_a_layout_that_a_file_cannot_hold_is_said() -> None:
    (difference,) = written(job(pp=4, framework="deepspeed"), "deepspeed").differences
    assert difference.setting == "layout"


@pytest.mark.parametrize("target", ["torchtitan", "accelerate", "deepspeed"])
def test_shards_that_a_file_cannot_hold_are_said(target: str) -> None:
    """A copy over fewer ranks than share a sequence; DeepSpeed has none over a part of the ranks."""
    skip_without_yaml(target)
    framework = {"accelerate": "transformers"}.get(target, target)
    sharding = "zero3" if target == "deepspeed" else "fsdp"
    few = job(sharding=sharding, framework=framework, cp=8, shard_ranks=4)
    named = {one.setting for one in written(few, target).differences}
    assert "shard_ranks" in named
    assert "layout" not in named


MESHES = {
    (cp, shard_ranks): written(
        job(sharding="fsdp", framework="torchtitan", cp=cp, shard_ranks=shard_ranks), "fsdp2"
    ).text
    for cp, shard_ranks in [(1, 1), (1, 8), (8, 4), (8, 1), (16, 32), (4, 8), (2, 0)]
}
"""What is written for context-parallel ranks, and ranks that share out one copy."""

SHARES = """
import sys

import torch.distributed as dist
import torch.distributed.fsdp
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
for text in sys.argv[1:]:
    before, _, _ = text.partition("for block in")
    names = {}
    exec(before.replace('"cuda"', '"cpu"'), names)
    print(*names["options"]["mesh"].shape)
"""


def test_states_are_shared_out_over_as_many_ranks_as_are_asked_for() -> None:
    """Asked of torch: context-parallel ranks share them out, too, all that share a sequence."""
    pytest.importorskip("torch")
    command = [sys.executable, "-c", SHARES, *MESHES.values()]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    for (cp, shard_ranks), shape in zip(MESHES, said, strict=True):
        *copies, shared = map(int, shape.split())
        assert shared == max(shard_ranks or 64, cp)
        assert shared * prod(copies) == 64


def test_fsdp2_is_code_that_compiles_and_names_every_axis() -> None:
    text = written(job(sharding="fsdp", framework="torchtitan", tp=8, shard_ranks=4), "fsdp2").text
    compile(text, "fsdp2.py", "exec")
    assert "(2, 4, 8), mesh_dim_names=('dp_replicate', 'dp_shard', 'tp')" in text
    assert "torchrun --nnodes 8 --nproc-per-node 8" in text


def test_as_many_ranks_are_launched_on_a_node_as_the_job_has_there() -> None:
    text = written(job(ranks_per_node=4), "megatron").text
    assert "--nproc-per-node 4 --nnodes 16" in text
