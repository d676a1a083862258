"""What ``--help`` says of every setting of a job."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

SETTINGS: Final[Mapping[str, tuple[tuple[str, type, str], ...]]] = MappingProxyType(
    {
        "Model and machine": (
            (
                "--model",
                str,
                "Model: a preset (llama3-70b, gpt3-175b, ...), a Hugging Face config.json, or a TOML file.",
            ),
            (
                "--cluster",
                str,
                "Machine: a name (dgx-h100, gb200-nvl72, ...; see foretrace topology list) or a TOML file.",
            ),
            (
                "--gpus",
                int,
                "GPUs to use; without --dp, the data-parallel degree is the one that fills them.",
            ),
            (
                "--ranks-per-node",
                int,
                "Ranks on each node; fewer than it has GPUs leave the others idle. [default: one per GPU]",
            ),
            (
                "--placement",
                str,
                "Which GPU runs which rank: packed, spread, rail, or a file. [default: packed]",
            ),
        ),
        "Batch": (
            ("--global-batch", int, "Sequences per optimizer step, over all ranks."),
            ("--micro-batch", int, "Sequences per micro-batch and data-parallel rank. [default: 1]"),
            ("--seq-len", int, "Tokens per sequence. [default: 2048]"),
            (
                "--document-len",
                int,
                "Tokens per document where sequences are packed with several. [default: 0, one document]",
            ),
            ("--steps", int, "Optimizer steps to simulate. [default: 1]"),
        ),
        "Layout": (
            ("--tp", int, "Tensor-parallel degree. [default: 1]"),
            ("--pp", int, "Pipeline-parallel degree. [default: 1]"),
            ("--dp", int, "Data-parallel degree. [default: 1, or what fills --gpus]"),
            ("--cp", int, "Context-parallel degree. [default: 1]"),
            ("--ep", int, "Expert-parallel degree, a divisor of dp * cp * tp / expert_tp. [default: 1]"),
            (
                "--expert-tp",
                int,
                "Tensor-parallel degree of experts. [default: the only one possible, or as usual]",
            ),
            (
                "--sequence-parallel/--no-sequence-parallel",
                bool,
                "With --tp, shard the sequence outside matrix products. [default: yes]",
            ),
            (
                "--sharding",
                str,
                (
                    "What data-parallel ranks shard: ddp nothing, zero1 optimizer states, zero2 gradients "
                    "too, zero3 or fsdp parameters too. [default: zero1]"
                ),
            ),
            (
                "--shard-ranks",
                int,
                "Ranks that share one copy of what is sharded; fewer than all is HSDP. [default: all]",
            ),
        ),
        "Pipeline": (
            ("--schedule", str, "Pipeline schedule (1f1b, zb-v, ...) or a .csv of actions. [default: 1f1b]"),
            (
                "--virtual-stages",
                int,
                "Stages per pipeline rank, for schedules that take any number. [default: the schedule's own]",
            ),
            ("--layers-per-stage", str, "Layers of each stage, e.g. 15,16,16,15. [default: equal shares]"),
            (
                "--counted-ends",
                str,
                (
                    "What counts as a layer when layers are divided among stages: none, embedding, head or "
                    "both. [default: none]"
                ),
            ),
            (
                "--overlap-pairs/--no-overlap-pairs",
                bool,
                "Overlap the two passes of a pair, in DualPipe and combined-1f1b. [default: yes]",
            ),
            (
                "--overlap-p2p/--no-overlap-p2p",
                bool,
                "Receive for the next action while this one computes. [default: as the schedule needs]",
            ),
            (
                "--deallocate-outputs/--no-deallocate-outputs",
                bool,
                "Free the outputs of a stage once they are sent. [default: yes]",
            ),
        ),
        "Memory": (
            (
                "--recompute",
                str,
                "Activations to recompute in the backward: none, selective or full. [default: none]",
            ),
            (
                "--recompute-modules",
                str,
                "Parts that selective recomputes: layernorm,moe_act,... [default: the framework's]",
            ),
            ("--recompute-layers", int, "Layers of each stage that are recomputed. [default: all]"),
            ("--recompute-every", int, "Recompute only every n-th of these layers. [default: 1]"),
            (
                "--offload",
                str,
                "What is kept in host memory: none, optimizer, states, activations or all. [default: none]",
            ),
            ("--offload-to", str, "Where --offload keeps it: in host memory or on nvme. [default: host]"),
            (
                "--offload-layers",
                int,
                "Layers whose activations are offloaded, from the first. [default: 0, all]",
            ),
        ),
        "Numbers and kernels": (
            ("--precision", str, "Number format of compute: bf16, fp16 or fp32. [default: bf16]"),
            ("--fp8/--no-fp8", bool, "Run the matrix products of layers in 8 bits or fewer. [default: no]"),
            (
                "--recipe",
                str,
                "How --fp8 quantises: delayed, mxfp8, nvfp4, rowwise, ... [default: the framework's]",
            ),
            (
                "--fp32-gradients/--no-fp32-gradients",
                bool,
                "Keep and reduce gradients in fp32. [default: yes]",
            ),
            (
                "--kernels",
                str,
                "Run element-wise work in fused or in eager kernels. [default: the framework's]",
            ),
            (
                "--flash-attention/--no-flash-attention",
                bool,
                "Use fused attention, which keeps no scores in memory. [default: yes]",
            ),
        ),
        "Experts and adapters": (
            (
                "--capacity-factor",
                float,
                "Tokens that an expert takes at most, as a multiple of an even share. [default: 0, no limit]",
            ),
            (
                "--expert-imbalance",
                float,
                "Standard deviation of the tokens per expert, divided by their mean. [default: 0]",
            ),
            (
                "--lora-rank",
                int,
                "Freeze the model and train LoRA adapters of this rank. [default: 0, train the model]",
            ),
            (
                "--quantized-base/--no-quantized-base",
                bool,
                "Keep frozen weights in 4 bits (QLoRA). [default: no]",
            ),
        ),
        "Framework and network": (
            (
                "--framework",
                str,
                "Framework whose conventions hold: megatron, torchtitan, transformers... [default: megatron]",
            ),
            (
                "--nccl-algo",
                str,
                "Algorithms that NCCL may use, as in NCCL_ALGO: ring,tree or ^tree. [default: all]",
            ),
            (
                "--nccl-proto",
                str,
                "Protocols that NCCL may use, as in NCCL_PROTO: simple or ^ll128. [default: all]",
            ),
            (
                "--overlap-slowdown",
                float,
                (
                    "How much communication slows the compute beside it: 0 not at all, 1 as NCCL does. "
                    "[default: 0]"
                ),
            ),
        ),
        "Slow ranks, links and jitter": (
            (
                "--stragglers",
                str,
                "Ranks whose compute takes longer, as rank:factor[@time], e.g. 3:1.25,17:1.5.",
            ),
            (
                "--link-changes",
                str,
                "Links that slow down or fail, as rank:near|far:capacity[@time], e.g. 3:far:0.25@2ms.",
            ),
            (
                "--compute-jitter",
                float,
                "Relative spread of the time of each compute task, e.g. 0.02. [default: 0]",
            ),
            (
                "--network-jitter",
                float,
                "Relative spread of the time of each communication, e.g. 0.05. [default: 0]",
            ),
            (
                "--rank-jitter",
                float,
                "Relative spread of the speed of ranks, drawn once per step. [default: 0]",
            ),
            ("--samples", int, "Steps to draw where there is jitter. [default: 100]"),
            ("--seed", int, "Seed of the random numbers. [default: 0]"),
        ),
        "Checkpoints": (
            (
                "--checkpoint-every",
                int,
                "Steps between checkpoints, which the run waits for. [default: 0, none]",
            ),
            (
                "--checkpoint-bytes-per-s",
                float,
                "Bytes per second at which a rank saves its states, e.g. 1e9.",
            ),
        ),
    }
)
"""The flag of each setting of a job, the type of its value and its line of ``--help``, by heading there."""
