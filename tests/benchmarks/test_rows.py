"""Rows of a table as strangers write them: each is simulated as it says, or refused in a line of words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from measured.jobs import FILLED, job_of, step_job
from measured.judge import Step, run_rows
from measured.table import Row
from tests.simulator.predicted import simulate

from foretrace.simulator.errors import TableError
from foretrace.simulator.memory.ranks import peak_bytes
from foretrace.simulator.validate.scores import Failed
from foretrace.topologies.catalog import load_cluster

pytest.importorskip("numba")

DENSE: dict[str, Any] = {
    "model": "small",
    "arch": "llama",
    "layers": 4,
    "hidden": 1024,
    "heads": 16,
    "kv_heads": 4,
    "ffn_hidden": 4096,
    "vocab": 32000,
    "seq_len": 4096,
    "hardware": "H100",
    "world_size": 16,
    "sharding": "none",
    "global_batch": 32,
    "micro_batch": 1,
    "recompute": "none",
    "step_time_s": 1.0,
}
"""A row that says the least: everything else is left out."""


def job(**cells: object) -> Any:
    return step_job(Row({**DENSE, **cells}, 1)).job


def test_data_parallelism_is_what_is_left_of_the_gpus() -> None:
    assert job().layout.dp == 16
    assert job(tp=2, pp=2, cp=2).layout.dp == 2
    with pytest.raises(TableError, match=r"world_size=16: tp\*pp\*dp\*cp is 8"):
        job(dp=8)


@pytest.mark.parametrize("hardware", ["H100", "A100", "GB300-NVL72", "MI355X"])
def test_a_gpu_in_the_node_of_another_brings_neither_its_power_nor_its_price(hardware: str) -> None:
    cluster = job_of(Row({**DENSE, "hardware": hardware, "dp": 16}, 1)).cluster
    alike = cluster.device == load_cluster("dgx-h100").device
    assert alike is (hardware == "H100")
    assert (cluster.node_power_w is not None, cluster.price_usd_per_gpu_hour is not None) == (alike, alike)


def test_ranks_with_less_than_a_micro_batch_compute_what_they_have() -> None:
    few = step_job(Row({**DENSE, "micro_batch": 12}, 1))
    assert (few.job.micro_batch, few.job.n_microbatches, few.share) == (2, 1, 1.0)
    with pytest.raises(TableError, match="fewer sequences than the 16"):
        job(global_batch=8)


def test_hybrid_sharding_is_inside_nodes_unless_a_group_is_given() -> None:
    assert job(sharding="HSDP").shard_ranks == 8
    assert job(sharding="HYBRID_SHARD", gpus_per_node=4).shard_ranks == 4
    assert job(sharding="HSDP", shard_group=2).shard_ranks == 2
    assert job(sharding="FULL_SHARD").shard_ranks == 0
    assert job(sharding="SHARD_GRAD_OP").profile.reshard_after_forward is False


@pytest.mark.parametrize(
    ("framework", "sharding", "profile"),
    [
        ("fms-fsdp", "fsdp", "torchtitan"),
        ("Hugging Face Accelerate", "FSDP", "transformers"),
        ("something new", "FULL_SHARD", "torchtitan"),
        ("something new", "zero1", "megatron"),
        ("llm-foundry/composer FSDP", "fsdp", "composer"),
        ("Megatron-FSDP", "megatron-fsdp", "megatron"),
        ("levanter", "fsdp", "jax"),
        ("deepspeed-ulysses", "zero3", "deepspeed"),
        ("gpt-neox", "zero1", "megatron-deepspeed"),
        ("", "none", "megatron"),
    ],
)
def test_a_framework_without_a_profile_has_that_of_its_sharding(
    framework: str, sharding: str, profile: str
) -> None:
    assert job(framework=framework, sharding=sharding).framework == profile


def test_adapters_alone_are_trained_where_the_task_says_so() -> None:
    assert (job(task="LoRA").lora_rank, job(task="sft").lora_rank) == (16, 0)
    assert job(task="peft", notes="LoRA").lora_rank == 0  # notes may compare; the task decides
    quantised = job(task="qlora", notes="rank 64")
    assert (quantised.lora_rank, quantised.quantized_base) == (64, True)


def test_sharded_states_live_on_the_host_where_the_sharding_says_so() -> None:
    assert job(sharding="zero3-offload").offload == "states"
    assert job(sharding="ZeRO-2 offload").offload == "optimizer"
    assert job(sharding="zero2").offload == "none"


def test_documents_of_packed_sequences_do_not_see_each_other() -> None:
    """Attention alone gets shorter, and what had to be assumed is said."""
    plain, packed = (step_job(Row({**DENSE, "notes": notes}, 1)) for notes in ("", "packed SQuAD"))
    assert not plain.assumed
    recipe = Row({**DENSE, "notes": "recipe v0.5.0:A_SFT_CONFIG_GB200_FP8_MX_V1 {}"}, 1)
    assert step_job(recipe).job.model == packed.job.model
    assert packed.assumed == ("documents of a packed sequence not stated: 512 tokens each",)
    summaries = [simulate(one.job).summary for one in (plain, packed)]
    assert summaries[1]["step_time_s"] < summaries[0]["step_time_s"]
    assert plain.job.model.n_params == packed.job.model.n_params
    short = step_job(Row({**DENSE, "seq_len": 512, "notes": "packed"}, 1))
    assert (short.job.model.window, short.assumed) == (0, ())


@pytest.mark.parametrize(
    ("schedule", "virtual", "meant"),
    [
        ("", "", "1f1b"),
        ("1f1b", "", "1f1b"),
        ("1f1b", 2, "interleaved-1f1b"),
        ("GPipe", "", "gpipe"),
        ("zero bubble", "", "zb-h1"),
        ("not stated", 2, "interleaved-1f1b"),
    ],
)
def test_a_pipeline_has_the_schedule_of_its_column(schedule: str, virtual: object, meant: str) -> None:
    assert job(pp=2, schedule=schedule, virtual_pp=virtual).schedule == meant
    assert job(pp=1, schedule=schedule).schedule == "1f1b"


def test_ends_and_capacities_that_notes_state_are_simulated() -> None:
    notes = "pp-partition type:transformer|embedding"
    assert (job(pp=2, notes=notes).counted_ends, job(notes=notes).counted_ends) == ("both", "none")
    experts = {"experts": 8, "top_k": 2, "notes": "capacity factor 1.25 with padding"}
    assert job(**experts).capacity_factor == 1.25
    assert job(notes="capacity factor 1.25").capacity_factor == 0
    assert job(notes="expert TP 2").layout.expert_tp == 0  # a dense model has no experts to cut


def test_more_stages_than_layers_hold_embedding_and_head_alone() -> None:
    cells = {"layers": 14, "pp": 4, "virtual_pp": 4, "dp": 4, "global_batch": 64}
    assert job(**cells).counted_ends == "both"
    assert job(**{**cells, "layers": 15}).counted_ends == "head"
    assert job(**{**cells, "layers": 16}).counted_ends == "none"
    for layers, error in ((14, False), (13, True)):
        (found,) = run_rows([Row({**DENSE, **cells, "layers": layers}, 1)], 1)
        assert isinstance(found, Failed) is error


def test_experts_are_as_wide_as_the_mlp_unless_a_column_says() -> None:
    assert job(experts=8, top_k=2).model.moe_ffn_hidden == 4096
    assert job(experts=8, top_k=2, moe_ffn_hidden=512).model.moe_ffn_hidden == 512
    assert job(experts=1).model.n_experts == 0


def test_latent_attention_is_known_by_its_width_where_the_name_is_not() -> None:
    cells = {"model": "V3 671B", "arch": "moe-mla", "hidden": 7168, "heads": 128, "layers": 61}
    assert job(**cells).model.kv_lora_rank == 512
    with pytest.raises(TableError, match="latent attention are not given"):
        job(arch="mla")


@pytest.mark.parametrize("arch", ["t5", "mamba", "hybrid-mamba", "ViT"])
def test_what_is_no_stack_of_transformer_layers_is_refused(arch: str) -> None:
    with pytest.raises(TableError, match="one stack of transformer layers"):
        job(arch=arch)


def test_an_encoder_sees_both_ways() -> None:
    assert (job(arch="bert").model.causal, job(arch="gpt").model.causal) == (False, True)


@pytest.mark.parametrize(
    ("hardware", "memory", "device"),
    [
        ("A100-SXM", 40, "a100-40gb"),
        ("A100-SXM", "", "a100-80gb"),
        ("A100-SXM", "40GB", "a100-40gb"),
        ("V100", 16.0, "v100-16gb"),
        ("A100-SXM-80GB", 80, "a100-80gb"),
        ("V100", 16, "v100-16gb"),
        ("NVIDIA H100 80GB HBM3", 80, "h100-sxm"),
        ("p4d.24xlarge", "", "a100-40gb"),
        ("p5.48xlarge", "", "h100-sxm"),
        ("a3-ultragpu-8g", "", "h200-sxm"),
        ("AMD Instinct MI300X", 192, "mi300x"),
        ("RTX 4090", 24, "rtx-4090"),
        ("H20", 96, "h20"),
    ],
)
def test_a_device_is_found_by_what_people_write(hardware: str, memory: object, device: str) -> None:
    assert job(hardware=hardware, gpu_mem_gb=memory).cluster.device.name == device


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("hardware", "TPU v5e"),
        ("hardware", ""),
        ("precision", "int8"),
        ("precision", "nvfp4"),  # Hopper has no such products
        ("sharding", "zero++"),
        ("recompute", "sometimes"),
        ("schedule", "by hand"),
        ("sp", "perhaps"),
        ("seq_len", "8k"),
        ("kv_heads", "3"),
        ("micro_batch", "0.5"),
        *((name, "0") for name in ("tp", "heads", "hidden", "gpus_per_node", "micro_batch", "layers")),
        ("ep", "-1"),
        ("world_size", "0"),
        ("global_batch", "none of it"),
        ("interconnect", "pigeons; NVLink"),
    ],
)
def test_an_odd_cell_is_refused_in_one_line_or_simulated(column: str, value: str) -> None:
    (found,) = run_rows([Row({**DENSE, "pp": 2, column: value}, 1)], 1)
    if column == "interconnect":
        assert isinstance(found, Step)
    else:
        assert isinstance(found, Failed)
        assert found.reason
        assert "\n" not in found.reason


def test_frameworks_that_recompute_by_default_do_so_where_nothing_is_said() -> None:
    for framework, recompute in (("MaxText/JAX", "full"), ("Megatron-LM", "none")):
        step = step_job(Row({**DENSE, "framework": framework, "recompute": "see notes"}, 1))
        assert step.job.recompute == recompute
        assert step.assumed == (f"recompute not stated: {recompute}",)
    assert job(framework="MaxText/JAX", recompute="minimal").recompute == "selective"


@pytest.mark.parametrize("layers", [4, 64, 256])
def test_a_micro_batch_that_is_not_stated_is_the_largest_that_fits(layers: int) -> None:
    cells = {"layers": layers, "micro_batch": "", "global_batch": 4096, "sharding": "zero3"}
    found = job(**cells)
    most = 4096 // 16
    assert most % found.micro_batch == 0
    peaks = [
        peak_bytes(replace(found, micro_batch=size))
        for size in (found.micro_batch, 2 * found.micro_batch)
        if most % size == 0
    ]
    assert found.micro_batch == 1 or peaks[0] <= found.cluster.device.memory_bytes
    assert len(peaks) == 1 or peaks[1] > FILLED * found.cluster.device.memory_bytes
    assert job(**cells, pp=2).micro_batch == 1
