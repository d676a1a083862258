"""torchtitan's files of several years, and nanotron's mixtures of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.simulator.config_files import NANOTRON

from foretrace.simulator.config import job_from
from foretrace.simulator.configs.read import read_files
from foretrace.simulator.job import Job

TRAINING = """
[model]
name = "llama3"
flavor = "8B"
{model}
[training]
local_batch_size = 1
seq_len = 8192
{training}
[activation_checkpoint]
mode = "full"
{more}
"""


def job_of(path: Path, text: str, **given: Any) -> Job:
    """Return the job that *text* describes."""
    path.write_text(text, encoding="utf-8")
    return job_from(read_files([path], {"cluster": "dgx-h100", **given}).settings)


def titan(folder: Path, model: str = "", training: str = "", more: str = "") -> Job:
    """Return the job of a file of torchtitan on 64 GPUs."""
    text = TRAINING.format(model=model, training=training, more=more)
    return job_of(folder / "train.toml", text, gpus=64)


def test_degrees_count_in_the_tables_where_they_used_to_be(tmp_path: Path) -> None:
    old = titan(
        tmp_path,
        training="tensor_parallel_degree = 4\ndata_parallel_shard_degree = -1",
        more="[experimental]\npipeline_parallel_degree = 2",
    )
    new = titan(tmp_path, more="[parallelism]\ntensor_parallel_degree = 4\npipeline_parallel_degree = 2")
    assert old == new
    assert (old.layout.tp, old.layout.pp, old.layout.dp) == (4, 2, 8)


@pytest.mark.parametrize(("cp", "sharding", "sharing"), [(1, "ddp", 64), (4, "fsdp", 4)])
def test_context_parallel_ranks_share_out_the_states(
    cp: int, sharding: str, sharing: int, tmp_path: Path
) -> None:
    degrees = f"data_parallel_replicate_degree = {64 // cp}\ndata_parallel_shard_degree = 1"
    found = titan(tmp_path, more=f"[parallelism]\n{degrees}\ncontext_parallel_degree = {cp}")
    assert (found.sharding, found.layout.dp) == (sharding, 64 // cp)
    if sharding == "fsdp":
        assert found.shard_ranks == sharing


@pytest.mark.parametrize(
    ("model", "more", "fp8"),
    [
        ('converters = ["quantize.linear.float8"]', "", True),
        ('converters = "float8"', "", True),
        ("converters = []", "", False),
        ("", "[float8]\nenable_float8_linear = true", True),
        ("", "[float8]\nenable_float8_linear = false", False),
    ],
)
def test_eight_bits_however_they_are_asked_for(model: str, more: str, *, fp8: bool, tmp_path: Path) -> None:
    assert titan(tmp_path, model=model, more=more).fp8 == fp8


@pytest.mark.parametrize(("components", "kernels"), [('["model", "loss"]', "fused"), ('["loss"]', "")])
def test_a_compiled_loss_is_no_compiled_model(components: str, kernels: str, tmp_path: Path) -> None:
    more = f"[compile]\nenable = true\ncomponents = {components}"
    assert titan(tmp_path, more=more).kernels == kernels


def test_experts_of_nanotron_are_experts(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    mixture = NANOTRON.replace(
        "hidden_size: 64", "hidden_size: 64\n    moe_config: {num_experts: 4, top_k: 2}"
    )
    dense, sparse = (job_of(tmp_path / "n.yaml", text).model for text in (NANOTRON, mixture))
    assert (dense.n_experts, sparse.n_experts, sparse.top_k) == (0, 4, 2)
    assert sparse.n_params > 2 * dense.n_params - dense.vocab * dense.hidden


def test_the_optimizer_is_that_of_the_file(tmp_path: Path) -> None:
    assert titan(tmp_path, more='[optimizer]\nname = "Muon"').optimizer == "muon"
