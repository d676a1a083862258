"""One configuration of each tool, as people have them, and what they describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretrace.simulator.config import job_from
from foretrace.simulator.configs.read import read_files
from foretrace.simulator.job import Job

MEGATRON = """
#!/bin/bash
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-64}
TP=8
ARGS=(
    --nproc_per_node $GPUS_PER_NODE   # GPUs
    --nnodes $NNODES
)
MODEL=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm
    --position-embedding-type rope --max-position-embeddings 8192
    --untie-embeddings-and-output-weights --disable-bias-linear --hidden-dropout 0.0
    --vocab-size 128256 --make-vocab-size-divisible-by 16
    # --num-experts 8
)
BATCH="--micro-batch-size 1 --global-batch-size $((GPUS_PER_NODE*128)) --seq-length 8192 --bf16"
if [ "$TP" -gt 1 ]; then
    BATCH="$BATCH --sequence-parallel"
fi
if [[ "$TP" == "1" ]]; then
    MODEL+=(--fp8-format hybrid)
else
    MODEL+=(--recompute-activations)
fi
torchrun ${ARGS[@]} pretrain_gpt.py ${MODEL[@]} $BATCH \\
    --tensor-model-parallel-size=$TP --pipeline_model_parallel_size 4 \\
    --num-layers-per-virtual-pipeline-stage 5 --use-distributed-optimizer --overlap-grad-reduce \\
    --lr 1e-4 --not-an-argument 3
"""

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

FILES = {
    "megatron": ("train.sh", MEGATRON),
    "deepspeed": ("ds.json", json.dumps(DEEPSPEED)),
    "torchtitan": ("llama.toml", TORCHTITAN),
    "accelerate": ("fsdp.yaml", ACCELERATE),
    "nanotron": ("tiny.yaml", NANOTRON),
}
BESIDE: dict[str, dict[str, Any]] = {
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
