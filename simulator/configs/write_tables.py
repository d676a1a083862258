"""Writes a job as DeepSpeed's JSON, torchtitan's TOML, Accelerate's YAML, and code for FSDP 2."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import gcd
from typing import Any, Final

from foretrace.simulator.configs.rules import words_for
from foretrace.simulator.configs.torchtitan import presets
from foretrace.simulator.job import Job

_DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_DEVICES: Final = {"host": "cpu", "nvme": "nvme"}

Table = dict[str, Any]


def deepspeed(job: Job) -> str:
    """Return the JSON that DeepSpeed takes. Model parallelism but AutoTP is the script's, not the file's."""
    zero: Table = {"stage": job.shards.stage, "overlap_comm": job.profile.overlap_grad_reduce}
    if job.profile.bucket_mib:
        # DeepSpeed counts elements, of 16 bits.
        zero["reduce_bucket_size"] = round(job.profile.bucket_mib * 2**20 / 2)
    if job.offload in ("optimizer", "states", "all"):
        zero["offload_optimizer"] = {"device": _DEVICES[job.offload_to]}
    if job.offload in ("states", "all"):
        zero["offload_param"] = {"device": _DEVICES[job.offload_to]}
    document: Table = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.n_microbatches,
        "bf16": {"enabled": job.precision == "bf16"},
        "fp16": {"enabled": job.precision == "fp16"},
        "gradient_clipping": 1.0 if job.profile.grad_norm else 0.0,
        "zero_optimization": zero,
    }
    if job.precision != "fp32":
        document["data_types"] = {"grad_accum_dtype": "fp32" if job.fp32_gradients else job.precision}
    if job.layout.tp > 1:
        document["tensor_parallel"] = {"autotp_size": job.layout.tp}
    if job.layout.cp > 1:
        document["sequence_parallel_size"] = job.layout.cp
    if job.offload in ("activations", "all"):
        document["activation_checkpointing"] = {"cpu_checkpointing": True}
    return json.dumps(document, indent=2) + "\n"


def torchtitan(job: Job) -> str:
    """Return the TOML that torchtitan takes."""
    layout, is_pipeline = job.layout, job.layout.pp > 1
    shard, replicate = _degrees(job)
    training: Table = {
        # With a pipeline the local batch is that of all micro-batches; without, of one.
        "local_batch_size": job.micro_batch * (job.n_microbatches if is_pipeline else 1),
        "global_batch_size": job.global_batch,
        "seq_len": job.seq_len,
        "mixed_precision_param": _DTYPES[job.precision],
        "mixed_precision_reduce": "bfloat16" if job.profile.reduces_in_16_bit else "float32",
        "enable_cpu_offload": job.offload in ("states", "all"),
        "max_norm": 1.0 if job.profile.grad_norm else 0.0,
    }
    parallelism: Table = {
        "data_parallel_shard_degree": shard,
        "data_parallel_replicate_degree": replicate,
        "fsdp_reshard_after_forward": "always" if job.profile.reshard_after_forward else "never",
        "tensor_parallel_degree": layout.tp,
        "enable_async_tensor_parallel": job.profile.async_tp,
        "pipeline_parallel_degree": layout.pp,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": layout.ep,
        "expert_tensor_parallel_degree": layout.etp if layout.ep > 1 else 1,
    }
    if is_pipeline:
        parallelism |= _pipeline(job)
    document = {
        "model": _model(job),
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": _checkpoints(job),
        "compile": {"enable": job.kernels == "fused"},
    }
    if job.fp8:
        document["float8"] = {"recipe_name": job.recipe or job.profile.fp8_recipe}
    return _toml(document)


def _model(job: Job) -> Table:
    """Return the model by the names that torchtitan has for it, if any, and what is converted in it."""
    model: Table = {}
    for (family, flavor), preset in presets().items():
        if preset == job.model.name:
            model |= {"name": family, "flavor": flavor}
    return model | ({"converters": ["float8"]} if job.fp8 else {})


def _degrees(job: Job) -> tuple[int, int]:
    """Return ranks that share one copy of the states, and copies."""
    if not job.shards.optimizer:
        return 1, job.layout.dp
    # Context-parallel ranks belong to the shards: a copy over a part of them cannot be said.
    wanted = (job.shard_ranks or job.layout.dp * job.layout.cp) // job.layout.cp
    shard = gcd(job.layout.dp, max(wanted, 1))
    return shard, job.layout.dp // shard


def _pipeline(job: Job) -> Table:
    names = words_for("torchtitan", "parallelism.pipeline_parallel_schedule")
    table: Table = {"pipeline_parallel_microbatch_size": job.micro_batch}
    if job.schedule in names:
        table["pipeline_parallel_schedule"] = names[job.schedule]
    # Layers per stage are one number: uneven stages cannot be said.
    if (virtual := job.virtual_stages or 1) > 1 and job.model.n_layers % (job.layout.pp * virtual) == 0:
        table["pipeline_parallel_layers_per_stage"] = job.model.n_layers // (job.layout.pp * virtual)
    return table


def _checkpoints(job: Job) -> Table:
    if job.recompute == "full" and job.recompute_every > 1:
        return {"mode": "selective", "selective_ac_option": str(job.recompute_every)}
    if job.recompute == "selective":
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": job.recompute}


def accelerate(job: Job) -> str:
    """Return the YAML that Accelerate takes: FSDP, or DDP. The batch is the training script's."""
    is_sharded = job.shards.parameters
    per_node = min(job.most_ranks_per_node, job.cluster.n_gpus)
    lines = [
        f"distributed_type: {'FSDP' if is_sharded else 'MULTI_GPU'}",
        f"mixed_precision: '{'no' if job.precision == 'fp32' else job.precision}'",
        f"num_processes: {job.cluster.n_gpus}",
        f"num_machines: {-(-job.cluster.n_gpus // per_node)}",
    ]
    if job.n_microbatches > 1:
        lines.append(f"gradient_accumulation_steps: {job.n_microbatches}")
    if is_sharded:
        settings = {
            "fsdp_version": 2 if job.profile.copies_gathered else 1,
            "fsdp_auto_wrap_policy": {"block": "TRANSFORMER_BASED_WRAP", "model": "NO_WRAP"}[
                job.profile.wrap
            ],
            "fsdp_reshard_after_forward": str(job.profile.reshard_after_forward).lower(),
            "fsdp_activation_checkpointing": str(job.recompute == "full").lower(),
            "fsdp_offload_params": str(job.offload in ("states", "all")).lower(),
        }
        lines += ["fsdp_config:", *(f"  {name}: {value}" for name, value in settings.items())]
    shard, replicate = _degrees(job)
    sizes = {"dp_replicate": replicate, "dp_shard": shard, "tp": job.layout.tp, "cp": job.layout.cp}
    if is_sharded and (replicate > 1 or job.layout.tp > 1 or job.layout.cp > 1):
        lines += ["parallelism_config:", *(f"  parallelism_config_{n}_size: {v}" for n, v in sizes.items())]
    return "\n".join(lines) + "\n"


def fsdp2(job: Job) -> str:
    """Return the launch command and the lines of a training script that shard *job* as FSDP 2 does."""
    shard, replicate = _degrees(job)
    per_node = min(job.most_ranks_per_node, job.cluster.n_gpus)
    sizes = {"pp": job.layout.pp, "dp_replicate": replicate, "dp_shard": shard, "cp": job.layout.cp}
    axes = {name: size for name, size in (sizes | {"tp": job.layout.tp}).items() if size > 1}
    if not {"dp_shard", "cp"} & {*axes}:
        axes["dp_shard"] = 1  # states are shared out over one rank, if need be
    axes = {name: axes[name] for name in (*sizes, "tp") if name in axes}
    reduce = "bfloat16" if job.profile.reduces_in_16_bit else "float32"
    sharing = [name for name in ("dp_shard", "cp") if name in axes]
    names = ", ".join(map(repr, [*(["dp_replicate"] if replicate > 1 else []), "_".join(sharing)]))
    lines = [
        f"# torchrun --nnodes {-(-job.cluster.n_gpus // per_node)} --nproc-per-node {per_node} train.py",
        f"# micro-batch {job.micro_batch}, {job.n_microbatches} per step, sequences of {job.seq_len}",
        "import torch",
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy",
        "from torch.distributed.fsdp import fully_shard",
        "",
        f'mesh = init_device_mesh("cuda", {tuple(axes.values())}, mesh_dim_names={tuple(axes)})',
        # Context-parallel ranks share out the states, too.
        *(['mesh["dp_shard", "cp"]._flatten("dp_shard_cp")'] if len(sharing) > 1 else []),
        f"param, reduce = torch.{_DTYPES[job.precision]}, torch.{reduce}",
        "policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)",
        f"offload = {'CPUOffloadPolicy' if job.offload in ('states', 'all') else 'OffloadPolicy'}()",
        f'options = {{"mesh": mesh[{names}], "mp_policy": policy, "offload_policy": offload,',
        f'           "reshard_after_forward": {job.profile.reshard_after_forward}}}',
        "for block in model.layers:",
        *(["    # parallelize_module(block, mesh['tp'], ...) first"] if job.layout.tp > 1 else []),
        *(["    # checkpoint_wrapper around each block"] if job.recompute == "full" else []),
        "    fully_shard(block, **options)",
        "fully_shard(model, **options)",
    ]
    return "\n".join(lines) + "\n"


def _toml(document: Mapping[str, Mapping[str, Any]]) -> str:
    """Return tables as TOML; JSON's spelling of text, numbers, flags and lists is TOML's too."""
    lines: list[str] = []
    for table, values in document.items():
        lines += [f"[{table}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items()), ""]
    return "\n".join(lines)
