"""DeepSpeed's files: whose conventions they bring, alone and beside those of Accelerate and Megatron-LM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.simulator.config_files import BESIDE, DEEPSPEED, MEGATRON, written

from foretrace.simulator.config import job_from
from foretrace.simulator.configs.read import read_files
from foretrace.simulator.framework import load_framework
from foretrace.simulator.job import Job


def job_of(folder: Path, document: dict[str, Any], **given: Any) -> Job:
    """Return the job that a file with *document* in it describes."""
    path = folder / "ds.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return job_from(read_files([path], {"cluster": "dgx-h100", **BESIDE["deepspeed"], **given}).settings)


def test_accelerate_and_its_deepspeed_file_complete_each_other(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    path = tmp_path / "ds.yaml"
    path.write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 8\n"
        "deepspeed_config:\n  deepspeed_config_file: ds.json\n",
        encoding="utf-8",
    )
    given = {"cluster": "dgx-a100", "model": "llama2-7b", "seq_len": 4096}
    job = job_from(read_files([path, written(tmp_path, "deepspeed")], given).settings)
    assert (job.sharding, job.layout.dp, job.global_batch) == ("zero3", 8, 64)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_gradients_are_summed_and_sent_in_the_types_of_the_file(tmp_path: Path, dtype: str) -> None:
    types = {"data_types": {"grad_accum_dtype": dtype}, "communication_data_type": dtype}
    job = job_of(tmp_path, DEEPSPEED | types)
    assert (job.fp32_gradients, job.profile.reduces_in_16_bit) == (dtype == "fp32", dtype != "fp32")


def test_a_file_alone_is_zero_under_a_model_of_hugging_face(tmp_path: Path) -> None:
    profile = job_of(tmp_path, DEEPSPEED).profile
    plain, megatron = load_framework("deepspeed"), load_framework("megatron-deepspeed")
    assert (profile.name, profile.eager) == ("deepspeed", plain.eager)
    assert set(plain.eager) > set(megatron.eager)


def test_beside_the_arguments_of_megatron_it_is_megatron_deepspeed(tmp_path: Path) -> None:
    """What either tool takes of itself yields to what the file of the other says."""
    script, file = tmp_path / "train.sh", tmp_path / "ds.json"
    plain = MEGATRON.replace("--use-distributed-optimizer --overlap-grad-reduce", "--deepspeed")
    script.write_text(plain, encoding="utf-8")
    document = {"zero_optimization": {"stage": 1, "overlap_comm": True}, "bf16": {"enabled": True}}
    file.write_text(json.dumps(document), encoding="utf-8")
    for paths in ([script, file], [file, script]):
        found = read_files(paths, {"cluster": "dgx-h100"})
        job = job_from(found.settings)
        assert (job.framework, job.sharding) == ("megatron-deepspeed", "zero1")
        assert job.profile.overlap_grad_reduce
        assumed = {one.fact for reading in found.readings for one in reading.assumed}
        assert not assumed & {"framework", "convention.overlap_grad_reduce"}


@pytest.mark.parametrize(
    ("stage", "precision", "sharding", "fp32_gradients"),
    [
        (0, "bf16", "zero1", True),
        (0, "fp16", "ddp", False),
        (1, "bf16", "zero1", False),
        (2, "fp16", "zero2", False),
    ],
)
def test_gradients_are_summed_as_the_stage_and_precision_have_it(
    stage: int, precision: str, sharding: str, *, fp32_gradients: bool, tmp_path: Path
) -> None:
    job = job_of(
        tmp_path, {"zero_optimization": {"stage": stage}, precision: {"enabled": True}}, micro_batch=1
    )
    assert (job.sharding, job.fp32_gradients) == (sharding, fp32_gradients)
    given = {"cluster": "dgx-h100", **BESIDE["deepspeed"], "micro_batch": 1}
    (reading,) = read_files([tmp_path / "ds.json"], given).readings
    assumed = [one.fact for one in reading.assumed]
    assert len(set(assumed)) == len(assumed)
    assert "framework" in assumed


def test_overlapping_reductions_have_two_buffers(tmp_path: Path) -> None:
    def buffers(**zero: Any) -> int:
        document = {"zero_optimization": {"stage": 1, **zero}, "fp16": {"enabled": True}}
        return job_of(tmp_path, document, micro_batch=1).profile.flat_bucket_bytes

    assert buffers() == 1_000_000_000
    assert buffers(overlap_comm=True) == 2_000_000_000
    assert buffers(overlap_comm=True, reduce_bucket_size=2e8) == 800_000_000


def test_nothing_is_gathered_ahead_without_a_bucket_for_it(tmp_path: Path) -> None:
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 0}
    job = job_of(tmp_path, {"zero_optimization": zero, "bf16": {"enabled": True}}, micro_batch=1)
    assert not job.profile.prefetch_forward
    assert not job.profile.prefetch_backward


def test_an_automatic_precision_is_taken_as_bf16(tmp_path: Path) -> None:
    document = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    assert job_of(tmp_path, document, micro_batch=1).precision == "bf16"
    assert job_of(tmp_path, document, micro_batch=1, precision="fp16").precision == "fp16"


@pytest.mark.parametrize(
    ("name", "optimizer"), [("AdamW", "adamw"), ("SGD", "sgd-momentum"), ("Muon", "muon"), ("Lion", "adamw")]
)
def test_the_optimizer_is_that_of_the_file(name: str, optimizer: str, tmp_path: Path) -> None:
    """One that is not known stands beside AdamW, with a reason."""
    document = DEEPSPEED | {"zero_optimization": {"stage": 2}, "optimizer": {"type": name}}
    assert job_of(tmp_path, document).optimizer == optimizer
    found = read_files([tmp_path / "ds.json"], {"cluster": "dgx-h100", **BESIDE["deepspeed"]})
    left = [
        one.reason for reading in found.readings for one in reading.ignored if one.key == "optimizer.type"
    ]
    assert bool(left) == (name == "Lion")


def test_gradients_of_one_bit_are_said_not_to_be_simulated(tmp_path: Path) -> None:
    job_of(tmp_path, DEEPSPEED | {"optimizer": {"type": "OneBitAdam"}})
    found = read_files([tmp_path / "ds.json"], {"cluster": "dgx-h100", **BESIDE["deepspeed"]})
    (one,) = (one for reading in found.readings for one in reading.ignored if one.key == "optimizer.type")
    assert one.reason.startswith("gradients of one bit are not simulated")


def test_sequences_that_accelerate_has_cut_are_context_parallel(tmp_path: Path) -> None:
    """Shards times parts of a sequence are the GPUs; a key that is not known is not explained away."""
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    path = tmp_path / "ds.yaml"
    path.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 4\n"
        "deepspeed_config:\n  zero_stage: 3\n  gradient_clipping: 1.0\n"
        "  zero_of_tomorrow: true\n"
        "parallelism_config:\n  parallelism_config_dp_shard_size: 2\n  parallelism_config_sp_size: 2\n"
        "  parallelism_config_sp_backend: deepspeed\n",
        encoding="utf-8",
    )
    given = {"cluster": "dgx-a100", "model": "llama2-7b", "seq_len": 4096, "micro_batch": 1}
    found = read_files([path], given)
    job = job_from(found.settings)
    assert (job.layout.cp, job.layout.dp, job.profile.context) == (2, 2, "ulysses")
    assert job.profile.grad_norm
    reasons = {one.key: one.reason for reading in found.readings for one in reading.ignored}
    assert reasons["deepspeed_config.zero_of_tomorrow"].startswith("not a setting that this reader knows")
