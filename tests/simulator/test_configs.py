"""Configurations of other tools: every setting is used or listed, and contradictions have one clear line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.simulator.config_files import BESIDE, DEEPSPEED, FILES, MEGATRON, job_of, written

from foretrace.cli import main
from foretrace.simulator.config import job_from, job_settings, read_config, write_config
from foretrace.simulator.configs.read import TOOLS, read_files
from foretrace.simulator.configs.rules import SETTLED, Use, flattened
from foretrace.simulator.configs.shell import arguments
from foretrace.simulator.errors import ConfigError, JobError
from foretrace.simulator.models.model import Model
from foretrace.simulator.models.sources import load_model
from foretrace.simulator.profiles import OVERRIDABLE
from foretrace.simulator.settings import KINDS

EXPECTED: Mapping[str, Mapping[str, Any]] = {
    "megatron": {
        "world_size": 512,
        "global_batch": 1024,
        "micro_batch": 1,
        "schedule": "interleaved-1f1b",
        "virtual_stages": 4,
        "sharding": "zero1",
        "recompute": "selective",
        "sequence_parallel": True,
        "precision": "bf16",
        "fp8": False,
    },
    "deepspeed": {
        "world_size": 8,
        "global_batch": 64,
        "sharding": "zero3",
        "offload": "all",
        "offload_to": "host",
        "framework": "deepspeed",
    },
    "torchtitan": {
        "world_size": 256,
        "global_batch": 128,
        "micro_batch": 2,
        "sharding": "fsdp",
        "shard_ranks": 4,
        "schedule": "interleaved-1f1b",
        "virtual_stages": 2,
        "recompute": "full",
        "recompute_every": 2,
        "fp8": True,
        "recipe": "rowwise",
    },
    "accelerate": {
        "world_size": 16,
        "global_batch": 16,
        "sharding": "fsdp",
        "shard_ranks": 8,
        "recompute": "full",
    },
    "nanotron": {
        "world_size": 8,
        "global_batch": 32,
        "schedule": "gpipe",
        "sharding": "zero1",
        "framework": "nanotron",
        "fp32_gradients": True,
    },
}


@pytest.mark.parametrize("tool", FILES)
def test_a_file_gives_the_job_that_its_tool_would_run(tool: str, tmp_path: Path) -> None:
    job = job_of(tmp_path, tool)
    found = {"world_size": job.layout.world_size}
    found |= {name: getattr(job, name) for name in EXPECTED[tool] if name != "world_size"}
    assert found == EXPECTED[tool]


@pytest.mark.parametrize("tool", FILES)
def test_every_setting_is_used_or_listed_with_a_reason(tool: str, tmp_path: Path) -> None:
    path = written(tmp_path, tool)
    (reading,) = read_files([path], {"cluster": "dgx-h100", **BESIDE.get(tool, {})}).readings
    listed = [*(one.key for one in reading.used), *(one.key for one in reading.ignored)]
    assert len(listed) == len(set(listed))
    assert all(one.reason for one in reading.ignored)
    if path.suffix == ".json":
        assert set(listed) == set(flattened(DEEPSPEED))
    if tool == "megatron":
        assert set(listed) == set(arguments(MEGATRON))


@pytest.mark.parametrize("tool", TOOLS)
def test_rules_give_facts_that_somebody_takes(tool: str) -> None:
    known = {*KINDS, *SETTLED, *(f"convention.{name}" for name in OVERRIDABLE)}
    known |= {f"model.{field.name}" for field in fields(Model)}
    module = {"megatron": "megatron.py", "torchtitan": "torchtitan.py", "nanotron": "nanotron.py"}
    module["deepspeed"] = "deepspeed.py"
    source = ""
    if tool in module:
        folder = Path(__file__).parents[2] / "simulator" / "configs"
        source = (folder / module[tool]).read_text(encoding="utf-8")
    for key, rule in TOOLS[tool].rules.items():
        if isinstance(rule, Use):
            assert rule.fact in known or f'"{rule.fact}"' in source, key


def test_unknown_settings_are_listed_with_the_nearest_that_exists(tmp_path: Path) -> None:
    path = written(tmp_path, "deepspeed")
    (reading,) = read_files([path], {"cluster": "dgx-h100", **BESIDE["deepspeed"]}).readings
    reasons = {one.key: one.reason for one in reading.ignored}
    assert "did you mean train_micro_batch_size_per_gpu?" in reasons["train_microbatch_size_per_gpu"]
    assert reasons["train_batch_size"].startswith("auto")
    assert "learning rates" in reasons["optimizer.params.lr"]


def test_the_model_of_megatron_arguments_is_the_preset(tmp_path: Path) -> None:
    model, preset = job_of(tmp_path, "megatron").model, load_model("llama3-70b")
    assert (model.name, model.n_params) == ("train", preset.n_params)
    assert model.flops_per_token(8192) == preset.flops_per_token(8192)


def test_vocabularies_are_padded_on_every_tensor_parallel_rank(tmp_path: Path) -> None:
    path = tmp_path / "args.txt"
    path.write_text(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --tensor-model-parallel-size 8\n"
        "--tokenizer-type GPT2BPETokenizer --max-position-embeddings 128 --micro-batch-size 1",
        encoding="utf-8",
    )
    job = job_from(read_files([path], {"cluster": "dgx-h100", "gpus": 8, "seq_len": 128}).settings)
    assert job.model.vocab == 51200  # 50257, a multiple of 128 * 8
    assert (job.model.max_positions, job.model.tied_embeddings, job.model.norm) == (128, True, "layernorm")


def test_a_model_without_a_preset_survives_a_run_toml(tmp_path: Path) -> None:
    job = job_of(tmp_path, "megatron")
    path = tmp_path / "run.toml"
    path.write_text(write_config(job_settings(job)), encoding="utf-8")
    assert job_from(read_config(path)) == job


def test_flags_go_before_files(tmp_path: Path) -> None:
    job = job_of(tmp_path, "megatron", gpus=1024, model="llama2-70b", recompute="full", virtual_stages=2)
    assert (job.layout.dp, job.model.name, job.recompute) == (32, "llama2-70b", "full")
    assert job.virtual_stages == 2


def test_what_a_flag_replaces_is_not_listed_as_used(tmp_path: Path) -> None:
    given = {"cluster": "dgx-h100", "gpus": 256, "model": "llama3-70b", "tp": 4}
    found = read_files([written(tmp_path, "megatron")], given)
    (reading,) = found.readings
    used = {one.fact for one in reading.used}
    assert not used & {"gpus_per_node", "nodes", "tp", "model.n_layers"}
    assert "micro_batch" in used
    replaced = {one.key: one.reason for one in reading.ignored}
    assert replaced["tensor-model-parallel-size"] == "the flag --tp 4 goes instead"
    assert all(found.settings[name] == value for name, value in given.items())


def test_files_complete_each_other(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "vocab_size": 32000,
                "num_hidden_layers": 4,
                "num_attention_heads": 16,
            }
        ),
        encoding="utf-8",
    )
    given = {"cluster": "dgx-a100", "gpus": 8, "seq_len": 2048}
    found = read_files([config, written(tmp_path, "deepspeed")], given)
    assert job_from(found.settings).model.n_layers == 4
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**DEEPSPEED, "train_micro_batch_size_per_gpu": 4}), encoding="utf-8")
    with pytest.raises(ConfigError, match="says micro_batch is 4, another file 2"):
        read_files([config, written(tmp_path, "deepspeed"), other], given)


@pytest.mark.parametrize(
    ("tool", "given", "message"),
    [
        ("megatron", {"gpus": 500}, "500 GPUs do not factor .* = 8.1.4 = 32 .*; 480 or 512 GPUs would work"),
        (
            "megatron",
            {"tp": 6, "gpus": 96, "global_batch": 96},
            "64 attention heads of train; 4 or 8 would work",
        ),
        ("megatron", {"global_batch": 1000}, "1.16 = 16; 992 or 1008 would work"),
        ("megatron", {"pp": 3, "gpus": 48}, "80 layers do not divide into 3 ranks of stages of 5 layers"),
        ("deepspeed", {"tp": 3}, "8 GPUs do not factor .*; 6 or 9 GPUs would work"),
        ("torchtitan", {"gpus": 512}, "4 shards times 2 copies .* are 256 ranks, not 512 GPUs; 8 shards"),
        ("torchtitan", {"pp": 8}, "gpus|ranks|GPUs"),
    ],
)
def test_contradictions_name_the_nearest_values_that_work(
    tool: str, given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if message == "gpus|ranks|GPUs":  # with as many GPUs as that needs there is none
        assert job_of(tmp_path, tool, **given, virtual_stages=1).layout.world_size == 512
        return
    with pytest.raises((ConfigError, JobError), match=message):
        job_of(tmp_path, tool, **given)


def test_batch_and_accumulation_that_disagree_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**DEEPSPEED, "train_batch_size": 128}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"2\*4\*8 = 64; accumulation 8 or a batch of 64 would work"):
        read_files([path], {"cluster": "dgx-a100", **BESIDE["deepspeed"]})


def test_experts_that_do_not_divide_are_refused() -> None:
    settings = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "gpus": 24, "ep": 3, "global_batch": 24}
    with pytest.raises(
        JobError, match="ep=3 does not divide the 8 experts of mixtral-8x7b; 2 or 4 would work"
    ):
        job_from(settings)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("{", "x.json", "is not JSON"),
        ("[1]", "x.json", "this is a list"),
        ('{"a": 1}', "x.json", "whose configuration is this"),
        ("echo hello", "x.sh", "no arguments such as"),
        ("--num-layers four", "x.sh", "num-layers = 'four': a whole number from 1 on"),
        ("--num-layers $LAYERS", "x.sh", r"num-layers = '\$LAYERS'"),
        ("--num-layers 4", "x.sh", "--hidden-size is missing"),
        ("--bf16 --fp16 --num-layers 4", "x.sh", "bf16 and fp16 contradict each other"),
        ('{"zero_optimization": {"stage": 4}}', "x.json", "stage = 4: one of 0, 1, 2, 3"),
    ],
)
def test_files_that_cannot_be_read_say_why(content: str, name: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_files([path], {"cluster": "dgx-h100", "gpus": 8})


def invoke(*args: object) -> str:
    """Return what the command line prints."""
    done = CliRunner().invoke(main, [str(arg) for arg in args])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_simulate_takes_the_file_of_another_tool(tmp_path: Path) -> None:
    path = written(tmp_path, "deepspeed")
    flags = ("--model", "llama2-7b", "--cluster", "dgx-a100", "--gpus", "8", "--seq-len", "2048")
    found = json.loads(invoke("simulate", path, *flags, "--json"))
    assert found["job"]["sharding"] == "zero3"
    assert found["configs"][0]["tool"] == "DeepSpeed"
    assert f"{path.name} (DeepSpeed): 10 settings used" in invoke("simulate", path, *flags)
    assert json.loads(invoke("simulate", *flags, "--from", path, "--json"))["job"] == found["job"]


def test_config_shows_what_counts_and_writes_a_run_toml(tmp_path: Path) -> None:
    path, output = written(tmp_path, "megatron"), tmp_path / "run.toml"
    shown = invoke("config", path, "--cluster", "dgx-h100", "-o", output)
    assert "not-an-argument" in shown
    assert "not a setting that this reader knows" in " ".join(shown.split())
    job = job_from(read_config(output))
    assert (job.layout.tp, job.layout.pp, job.layout.dp) == (8, 4, 16)
    found = json.loads(invoke("config", output, "--to", "megatron", "--json"))
    assert found["written"]["differences"] == []
    assert "--tensor-model-parallel-size 8" in found["written"]["text"]
