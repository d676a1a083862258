"""Configurations of other tools: every setting is used or listed, and contradictions have one clear line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.simulator.config_files import (
    BESIDE,
    CALCULON,
    CALCULON_MODEL,
    DEEPSPEED,
    FILES,
    MEGATRON,
    SIMUMAX_MODEL,
    job_of,
    written,
)

from foretrace.cli import main
from foretrace.simulator.config import job_from, job_settings, read_config, write_config
from foretrace.simulator.configs import write
from foretrace.simulator.configs.read import TOOLS, read_files, rules_of
from foretrace.simulator.configs.rules import SETTLED, Leave, Use, flattened
from foretrace.simulator.configs.shell import arguments
from foretrace.simulator.errors import ConfigError, JobError
from foretrace.simulator.framework import OVERRIDABLE
from foretrace.simulator.models.model import Model
from foretrace.simulator.models.sources import load_model
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
    "astra": {"world_size": 64, "global_batch": 16, "virtual_stages": 1},
    "simumax": {
        "world_size": 8,
        "global_batch": 16,
        "recompute": "full",
        "recompute_layers": 2,
        "virtual_stages": 2,
        "schedule": "interleaved-1f1b",
        "sharding": "zero1",
        "sequence_parallel": True,
    },
    "calculon": {
        "world_size": 64,
        "global_batch": 64,
        "precision": "fp16",
        "recompute": "selective",
        "virtual_stages": 3,
        "sharding": "zero1",
        "sequence_parallel": True,
    },
    "primus": {
        "world_size": 16,
        "global_batch": 64,
        "micro_batch": 2,
        "seq_len": 4096,
        "precision": "bf16",
        "sharding": "zero1",
        "framework": "megatron",
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
        assert set(listed) == set(flattened(json.loads(path.read_text())))
    if tool == "megatron":
        assert set(listed) == set(arguments(MEGATRON))


@pytest.mark.parametrize(
    ("tool", "model", "n_params"),
    [
        (
            "simumax",
            SIMUMAX_MODEL,
            8 * (512 * (12 * 64 + 512) + 3 * 512 * 1024 + 2 * 512) + 2 * 512 * 1000 + 512,
        ),
        ("calculon", CALCULON_MODEL, 96 * 12288 * (12 * 12288 + 13) + (51200 + 2048 + 2) * 12288),
    ],
)
def test_a_simulator_has_its_model_in_a_file_of_its_own(
    tool: str, model: Mapping[str, Any], n_params: int, tmp_path: Path
) -> None:
    """Named by that file unless it has a name; as many parameters as its matrices and norms have.

    Those of Calculon are what its ``num_parameters`` says for GPT-3, and the norm behind the last layer.
    """
    path = tmp_path / "gpt.json"
    path.write_text(json.dumps(model), encoding="utf-8")
    for files in ([written(tmp_path, tool), path], [path, written(tmp_path, tool)]):
        job = job_from(read_files(files, {"cluster": "dgx-a100"}).settings)
        assert job.model.name == model.get("model_name", "gpt")
        assert job.model.n_params == n_params


@pytest.mark.parametrize(
    ("key", "name", "meant"),
    [
        ("tensor_par_overlap", "async_tp", {"none": False, "ring": True, "pipe": True}),
        ("tensor_par_comm_type", "sequence_parallel", {"ar": False, "p2p_rs_ag": False, "rs_ag": True}),
        ("seq_par_ag_redo", "keeps_gathered_inputs", {True: False, False: True}),
        ("data_par_overlap", "overlap_grad_reduce", {True: True, False: False}),
        ("optimizer_sharding", "sharding", {True: "zero1", False: "ddp"}),
        ("activation_recompute", "recompute", {"full": "full", "attn_only": "selective", "none": "none"}),
        ("datatype", "precision", {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}),
    ],
)
def test_words_of_calculon_mean_settings_of_ours(
    key: str, name: str, meant: Mapping[Any, Any], tmp_path: Path
) -> None:
    found = {}
    for said in meant:
        (tmp_path / "a.json").write_text(json.dumps(CALCULON | {key: said}), encoding="utf-8")
        settings = read_files([tmp_path / "a.json"], {"cluster": "dgx-h100", **BESIDE["calculon"]}).settings
        found[said] = {**settings, **settings["conventions"]}[name]
    assert found == meant


def test_a_file_that_extends_others_has_their_settings(tmp_path: Path) -> None:
    """Its own go before those of the files beside it that it extends."""
    (tmp_path / "base.yaml").write_text(
        "{num_layers: 2, hidden_size: 512, num_attention_heads: 8, ffn_hidden_size: 1024, swiglu: true,"
        " add_bias_linear: false, normalization: RMSNorm, position_embedding_type: rope, model_type: gpt,"
        " untie_embeddings_and_output_weights: true, hidden_dropout: 0.0, vocab_size: 1000}"
    )
    (tmp_path / "small.yaml").write_text("{extends: [base.yaml], num_layers: 4}")
    files = [written(tmp_path, "primus"), tmp_path / "small.yaml"]
    model = job_from(read_files(files, {"cluster": "dgx-a100", "gpus": 16}).settings).model
    assert (model.name, model.n_layers, model.norm, model.tied_embeddings) == ("small", 4, "rmsnorm", False)
    layer = 4 * 512 * 512 + 3 * 512 * 1024 + 2 * 512
    assert model.n_params == 4 * layer + 512 + 2 * 512 * 1024  # padded to 128 on each of two ranks


LATENT = "multi_latent_attention: false, kv_lora_rank: 32, qk_pos_emb_head_dim: 64, v_head_dim: 128"


@pytest.mark.parametrize("is_first", [True, False])
def test_a_training_goes_before_the_file_of_its_model_in_either_order(is_first: bool, tmp_path: Path) -> None:
    """Its overrides and its trainer's settings, of which the model's own file may have others.

    Sizes of latent attention that is off mean nothing, and the tokenizer of a preset has its vocabulary.
    """
    (tmp_path / "llama.yaml").write_text(
        "{num_layers: 2, hidden_size: 512, num_attention_heads: 8, ffn_hidden_size: 1024, swiglu: true,"
        " add_bias_linear: false, normalization: RMSNorm, position_embedding_type: rope, hidden_dropout: 0.0,"
        " untie_embeddings_and_output_weights: true, gradient_accumulation_fusion: true,"
        f" tokenizer_model: meta-llama/Meta-Llama-3-8B, tensor_model_parallel_size: 1, {LATENT}}}"
    )
    (tmp_path / "train.yaml").write_text(
        "modules: {pre_trainer: {framework: megatron, config: pre_trainer.yaml, model: llama.yaml, overrides:"
        " {tensor_model_parallel_size: 2, gradient_accumulation_fusion: false, micro_batch_size: 1,"
        " global_batch_size: 16, seq_length: 2048}}}"
    )
    files = [tmp_path / "train.yaml", tmp_path / "llama.yaml"]
    found = read_files(files if is_first else files[::-1], {"cluster": "dgx-a100", "gpus": 8})
    job = job_from(found.settings)
    assert (job.layout.tp, job.precision, job.sharding, job.profile.fused_wgrad) == (
        2,
        "bf16",
        "zero1",
        False,
    )
    assert (job.model.kv_lora_rank, job.model.vocab) == (0, 128256)
    ignored = {one["key"]: one["reason"] for file in found.describe() for one in file["ignored"]}
    assert ignored["gradient-accumulation-fusion"] == "train.yaml goes before it"
    assert ignored["kv-lora-rank"] == "attention is not latent"
    assumed = [one for file in found.describe() for one in file["assumed"]]
    assert {"fact": "vocabulary", "value": 128256, "reason": "its tokenizer is that of llama3-8b"} in assumed


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", '{"tensor_par": 8, "training": false}', "training = False: true: inference is not"),
        ("a.yaml", "modules: {a: {framework: megatron}, b: {}}", "modules: a, b: one trainer is needed"),
        (
            "a.yaml",
            "modules: {a: {framework: maxtext}}",
            "framework = 'maxtext': megatron: of other trainers",
        ),
        (
            "a.yaml",
            "modules: {a: {overrides: {tp: '${TP}'}}}",
            "a variable of the environment without a default",
        ),
        (
            "a.txt",
            "DATA\n1\nlayer -1 1 NONE 0 1 NONE 0 1 ALLREDUCE 9 1\n",
            "policy = 'DATA': HYBRID_TRANSFORMER: a",
        ),
        (
            "a.txt",
            "HYBRID_TRANSFORMER model_parallel_NPU_group: 8\n2\na -1 1 NONE 0 1 NONE 0 1\nb -1 1 NONE 0 1\n",
            "it does not say how many GPUs there are: --gpus",
        ),
        (
            "a.txt",
            "HYBRID_TRANSFORMER model_parallel_NPU_group: 8\n1\nmicro_test -1 1 NONE 0 1 ALLREDUCE 9 1\n",
            "layers = 'micro_test': layers of several names: those of one name alone are a benchmark",
        ),
        ("a.yaml", "{num_layers: 4, model_type: mamba}", "model-type = 'mamba': gpt: layers of other kinds"),
        ("a.yaml", "{num_layers: 4, extends: a.yaml}", "a.yaml: extends itself"),
        ("a.yaml", "{num_layers: 4, extends: none.yaml}", "none.yaml"),
        ("a.sh", "train.py --pipeline-model-parallel-layout 'Et*99999999999|tL'", "a word of at most 65,536"),
        (
            "a.sh",
            "train.py --moe-layer-freq '[0]*10000*10000*10000'",
            "every so many layers, or lists of 0 and 1",
        ),
        (
            "a.sh",
            f"train.py --moe-layer-freq '[0]{'+[0]' * 9000}'",
            "every so many layers, or lists of 0 and 1",
        ),
        (
            "a.sh",
            "train.py --pipeline-model-parallel-layout 'E(tt|)*30000(t|)*9tL'",
            "a word of at most 65,536",
        ),
        ("a.txt", "HYBRID_TRANSFORMER ep: 1\n\N{SUPERSCRIPT TWO}\nlayer NONE\n", "no arguments such as"),
        ("a.json", '{"micro_batch_num": 1, "micro_batch_num": 2}', '"micro_batch_num" stands there with two'),
        ("a.yaml", "{num_layers: 4, num_layers: 8}", '"num_layers" stands there with two values: leave one'),
        ("a.json", json.dumps({"mem1": 1} | dict.fromkeys(map(str, range(4000)))), "4,001 settings; no tool"),
        ("a.et", "", "a graph of work, no settings: foretrace ingest"),
        ("a.json", '{"micro_batch_num": 0}', "micro_batch_num = 0: a whole number from 1 on"),
    ],
)
def test_what_a_file_of_another_simulator_cannot_say_is_refused(
    name: str, content: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_files([tmp_path / name], {"cluster": "dgx-a100", "model": "llama3-8b"})


def test_a_part_of_a_model_is_refused_with_what_it_lacks_and_the_keys_that_are_not_known(
    tmp_path: Path,
) -> None:
    """A file of yet another tool, of which one key is known."""
    (tmp_path / "a.json").write_text(
        '{"head_num": 128, "hidden_size": 7168, "num_layers": 61, "d_kv_c": 512}'
    )
    said = (
        "read as SimuMax, the model lacks n_layers, n_kv_heads, head_dim, ffn_hidden, vocab: --model may name"
    )
    with pytest.raises(ConfigError, match=f"{said} one; of these keys none is known: num_layers, d_kv_c"):
        read_files([tmp_path / "a.json"], {"cluster": "dgx-a100"})
    assert read_files([tmp_path / "a.json"], {"model": "llama3-8b"}).settings["model"] == "llama3-8b"


def test_a_model_of_calculon_without_heads_is_refused_as_others_are(tmp_path: Path) -> None:
    left = {name: value for name, value in CALCULON_MODEL.items() if name != "attn_heads"}
    (tmp_path / "a.json").write_text(json.dumps(CALCULON | left), encoding="utf-8")
    with pytest.raises(ConfigError, match="the model lacks n_heads, n_kv_heads: --model may name one"):
        read_files([tmp_path / "a.json"], {"cluster": "dgx-h100"})


def test_files_that_extend_many_are_read_a_bounded_number_of_times(tmp_path: Path) -> None:
    """Each reads the next ten times: a hundred thousand times the last one."""
    (tmp_path / "6.yaml").write_text("num_layers: 4", encoding="utf-8")
    for at in range(6):
        names = ", ".join([f"{at + 1}.yaml"] * 10)
        (tmp_path / f"{at}.yaml").write_text(f"{{num_layers: 4, extends: [{names}]}}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"0.yaml: extends itself, or more than 16 files"):
        read_files([tmp_path / "0.yaml"], {"cluster": "dgx-a100", "model": "llama3-8b"})


@pytest.mark.parametrize("tool", TOOLS)
def test_rules_give_facts_that_somebody_takes(tool: str) -> None:
    known = {*KINDS, *SETTLED, *(f"convention.{name}" for name in OVERRIDABLE)}
    known |= {f"model.{field.name}" for field in fields(Model)}
    folder = Path(__file__).parents[2] / "simulator" / "configs"
    source = "".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in (tool, "megatron"))
    for key, rule in rules_of(tool).items():
        if isinstance(rule, Use) and rule.fact:
            assert rule.fact in known or f'"{rule.fact}"' in source, key


@pytest.mark.parametrize("tool", TOOLS)
def test_reasons_name_conventions_that_there_are(tool: str) -> None:
    reasons = [rule.reason for rule in rules_of(tool).values() if isinstance(rule, Leave)]
    assert set(re.findall(r"--set (\w+)(?= gives|=)", " | ".join(reasons))) <= set(OVERRIDABLE)


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


SPARSE = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1024 --swiglu --num-experts 4"
    " --moe-router-topk 2 --vocab-size 1024 --seq-length 512 --micro-batch-size 1 --global-batch-size 8"
)


@pytest.mark.parametrize(
    ("every", "routed"),
    [
        ("1", [1, 1, 1, 1]),
        ("2", [1, 0, 1, 0]),
        ("'([0]*1+[1]*3)'", [0, 1, 1, 1]),
        ("'[0,1]*2'", [0, 1, 0, 1]),
        ("'([1]+[0]*3)'", [1, 0, 0, 0]),
    ],
)
def test_layers_have_experts_as_often_as_arguments_say_and_are_written_so(
    every: str, routed: list[int], tmp_path: Path
) -> None:
    (tmp_path / "train.sh").write_text(f"torchrun pretrain_gpt.py {SPARSE} --moe-layer-freq {every}\n")
    job = job_from(read_files([tmp_path / "train.sh"], {"cluster": "dgx-h100", "gpus": 8}).settings)
    assert [job.model.is_moe(layer) for layer in range(4)] == routed
    made = write.written(job, "megatron")
    again = write.read_back(job, "megatron", made.text, made.asks)
    assert [again.model.kinds(layer) for layer in range(4)] == [job.model.kinds(layer) for layer in range(4)]


@pytest.mark.parametrize(
    ("arguments", "capacity"),
    [
        ("--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity", 1.25),
        ("--moe-expert-capacity-factor 1.25", 0.0),
        ("--moe-expert-capacity-factor 0.5", 0.5),
    ],
)
def test_experts_compute_what_they_are_sent_unless_they_are_filled_or_cut(
    arguments: str, capacity: float, tmp_path: Path
) -> None:
    """Megatron-LM pads to the capacity only where it is told to; equal loads are not cut by more than 1."""
    (tmp_path / "train.sh").write_text(f"torchrun pretrain_gpt.py {SPARSE} {arguments}\n")
    found = read_files([tmp_path / "train.sh"], {"cluster": "dgx-h100", "gpus": 8})
    assert job_from(found.settings).capacity_factor == capacity
    assert ("moe-expert-capacity-factor" in {one.key for one in found.readings[0].ignored}) == (not capacity)


@pytest.mark.parametrize("every", ["0", "[0,1]", "[0,2]*2", "print(1)", "[1]*(2"])
def test_layers_with_experts_that_cannot_be_are_refused(every: str, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f"torchrun pretrain_gpt.py {SPARSE} --moe-layer-freq '{every}'\n")
    with pytest.raises(ConfigError, match="moe-layer-freq"):
        read_files([tmp_path / "train.sh"], {"cluster": "dgx-h100", "gpus": 8})


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_heads_of_megatron_share_the_width_and_have_keys_of_their_own(heads: int, tmp_path: Path) -> None:
    given = SPARSE.replace("--num-attention-heads 8", f"--num-attention-heads {heads}")
    (tmp_path / "train.sh").write_text(f"torchrun pretrain_gpt.py {given}\n")
    model = job_from(read_files([tmp_path / "train.sh"], {"cluster": "dgx-h100", "gpus": 8}).settings).model
    assert (model.n_heads, model.n_kv_heads, model.head_dim * heads) == (heads, heads, model.hidden)


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
    with pytest.raises(JobError, match="ep=2: llama3-8b is dense, it has no experts"):
        job_from(settings | {"model": "llama3-8b", "ep": 2})


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("{", "x.json", "is not JSON"),
        ("[1]", "x.json", "this is a list"),
        ('{"a": 1}', "x.json", "whose configuration is this"),
        ("echo hello", "x.sh", "no arguments such as"),
        ("--num-layers four", "x.sh", "num-layers = 'four': a whole number from 1 on"),
        ("--num-layers $LAYERS", "x.sh", r"num-layers = \$LAYERS is set outside of this file"),
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
    assert f"{path.name} (DeepSpeed): 11 settings used" in invoke("simulate", path, *flags)
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
