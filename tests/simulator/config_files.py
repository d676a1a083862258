"""One configuration of each tool, as people have them, and what they describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretrace.simulator.config import job_from
from foretrace.simulator.configs.read import read_files
from foretrace.simulator.job import Job

MEGATRON = (Path(__file__).parents[1] / "corpus" / "train.sh").read_text(encoding="utf-8")

DEEPSPEED: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
    },
    "activation_checkpointing": {"cpu_checkpointing": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "train_microbatch_size_per_gpu": 7,
}

TORCHTITAN = """
[model]
name = "llama3"
flavor = "70B"
converters = ["float8"]
[training]
local_batch_size = 16
seq_len = 8192
[parallelism]
data_parallel_shard_degree = 4
data_parallel_replicate_degree = 2
tensor_parallel_degree = 8
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_layers_per_stage = 10
pipeline_parallel_microbatch_size = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[float8]
recipe_name = "rowwise"
[optimizer]
lr = 1e-4
"""

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: 'bf16'
num_processes: 16
num_machines: 2
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""

NANOTRON = """
parallelism: {dp: 2, tp: 2, pp: 2, pp_engine: afab, tp_mode: REDUCE_SCATTER, expert_parallel_size: 1}
tokens: {micro_batch_size: 2, batch_accumulation_per_replica: 8, sequence_length: 256, train_steps: 15}
model:
  dtype: bfloat16
  make_vocab_size_divisible_by: 1
  model_config:
    is_llama_config: true
    hidden_size: 64
    intermediate_size: 256
    num_attention_heads: 4
    num_key_value_heads: 2
    num_hidden_layers: 4
    vocab_size: 1000
    tie_word_embeddings: true
optimizer: {zero_stage: 1, accumulate_grad_in_fp32: true, clip_grad: 1.0, weight_decay: 0.01}
general: {project: debug, seed: 42}
"""

SIMUMAX: dict[str, Any] = {
    "seq_len": 4096,
    "micro_batch_size": 1,
    "micro_batch_num": 8,
    "dtype": "bf16",
    "world_size": 8,
    "tp_size": 2,
    "pp_size": 2,
    "ep_size": 1,
    "etp_size": 1,
    "enable_sequence_parallel": True,
    "interleaving_size": 2,
    "zero_state": 1,
    "enable_recompute": True,
    "recompute_granularity": "full_block",
    "recompute_layer_num": 2,
    "use_math_sdp": False,
    "mem_factor": 0.94,
    "enable_foo": True,
}
SIMUMAX_MODEL: dict[str, Any] = {
    "model_type": "dense",
    "model_name": "small",
    "hidden_size": 512,
    "head_num": 8,
    "kv_head_num": 2,
    "head_size": 64,
    "intermediate_size": 1024,
    "layer_num": 8,
    "vocab_size": 1000,
    "use_swiglu": True,
}

CALCULON: dict[str, Any] = {
    "num_procs": 64,
    "tensor_par": 8,
    "pipeline_par": 4,
    "data_par": 2,
    "tensor_par_net": 0,
    "pipeline_par_net": 1,
    "data_par_net": 1,
    "batch_size": 64,
    "microbatch_size": 1,
    "datatype": "float16",
    "fused_activation": False,
    "attention_type": "multihead",
    "activation_recompute": "attn_only",
    "pipeline_interleaving": 3,
    "optimizer_sharding": True,
    "tensor_par_comm_type": "rs_ag",
    "tensor_par_overlap": "none",
    "seq_par_ag_redo": True,
    "data_par_overlap": True,
    "weight_offload": False,
    "activations_offload": False,
    "optimizer_offload": True,
    "training": True,
}
CALCULON_MODEL: dict[str, Any] = {
    "hidden": 12288,
    "feedforward": 49152,
    "seq_size": 2048,
    "attn_heads": 96,
    "attn_size": 128,
    "num_blocks": 96,
}

PRIMUS = """
work_group: ${PRIMUS_TEAM:amd}
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: ${PRIMUS_MODEL:llama}.yaml
    overrides:
      micro_batch_size: 2
      global_batch_size: 64
      seq_length: ${PRIMUS_SEQ_LENGTH:4096}
      tensor_model_parallel_size: ${PRIMUS_TP:2}
      pipeline_model_parallel_size: 1
      mtp_num_layers: 0
      overlap_grad_reduce: true
      train_data_path: ${DATA:null}
      disable_foo: true
"""

ASTRA = """HYBRID_TRANSFORMER model_parallel_NPU_group: 8 ep: 1 pp: 2 vpp: 1 ga: 4 all_gpus: 64 foo: 1
3
grad_gather -1 1 NONE 0 13848000 NONE 0 1 ALLGATHER 1 100
embedding_layer -1 523895 ALLREDUCE 150994944 1 NONE 0 1 NONE 0 100
attention_norm -1 2571000 ALLREDUCE 50331648 2454000 NONE 0 2454000 NONE 0 100
"""

FILES = {
    "astra": ("gpt.txt", ASTRA),
    "simumax": ("strategy.json", json.dumps(SIMUMAX)),
    "calculon": ("execution.json", json.dumps(CALCULON)),
    "primus": ("pretrain.yaml", PRIMUS),
    "megatron": ("train.sh", MEGATRON),
    "deepspeed": ("ds.json", json.dumps(DEEPSPEED)),
    "torchtitan": ("llama.toml", TORCHTITAN),
    "accelerate": ("fsdp.yaml", ACCELERATE),
    "nanotron": ("tiny.yaml", NANOTRON),
}
BESIDE: dict[str, dict[str, Any]] = {
    "astra": {"model": "gpt3-175b", "seq_len": 2048, "micro_batch": 1},
    "simumax": {"model": "llama3-8b"},
    "calculon": {"model": "gpt3-175b", "seq_len": 2048},
    "primus": {"model": "llama3-8b", "gpus": 16},
    "deepspeed": {"model": "llama2-7b", "gpus": 8, "seq_len": 4096},
    "accelerate": {"model": "llama2-7b", "micro_batch": 1, "seq_len": 4096},
}
"""What a training script would say."""


def written(folder: Path, tool: str) -> Path:
    """Return the example of a *tool* as a file."""
    if FILES[tool][0].endswith(".yaml"):
        pytest.importorskip("yaml", reason="PyYAML is not installed")
    path = folder / FILES[tool][0]
    path.write_text(FILES[tool][1], encoding="utf-8")
    return path


def job_of(folder: Path, tool: str, **given: Any) -> Job:
    """Return the job that the example of a *tool* describes."""
    found = read_files([written(folder, tool)], {"cluster": "dgx-h100", **BESIDE.get(tool, {}), **given})
    return job_from(found.settings)
