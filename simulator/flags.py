"""The settings of a job as flags of a command line: the same for every verb that makes one."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., None])


def job_settings_options(command: Command) -> Command:
    """Add a flag for every setting of a job; None where it is not given."""
    for flag, kind, text in reversed(
        (
            ("--model", str, "A preset (llama3-70b, gpt3-175b, ...) or a config.json."),
            ("--cluster", str, "A machine (dgx-h100, gb200-nvl72, ...) or its TOML file."),
            ("--gpus", int, "GPUs to use; --dp is what fills them."),
            ("--tp", int, "Tensor parallel degree."),
            ("--pp", int, "Pipeline parallel degree."),
            ("--dp", int, "Data parallel degree."),
            ("--cp", int, "Context parallel degree."),
            ("--ep", int, "Expert parallel degree; divides dp*cp*tp/expert_tp."),
            ("--expert-tp", int, "Ranks that every expert is cut over. [default: as --tp]"),
            ("--global-batch", int, "Sequences per optimizer step, over all ranks."),
            ("--micro-batch", int, "Sequences per micro-batch. [default: 1]"),
            ("--seq-len", int, "Tokens per sequence. [default: 2048]"),
            ("--steps", int, "Optimizer steps to simulate. [default: 1]"),
            ("--schedule", str, "Pipeline schedule (1f1b, zb-v, ...) or a .csv of actions. [default: 1f1b]"),
            ("--virtual-stages", int, "Stages per pipeline rank, where the schedule leaves a choice."),
            ("--layers-per-stage", str, "Layers of every stage, e.g. 15,16,16,15. [default: evenly]"),
            ("--counted-ends", str, "Count embedding, head or both as a layer each. [default: none]"),
            ("--overlap-pairs/--no-overlap-pairs", bool, "DualPipe: forward and backward of a pair at once."),
            ("--overlap-p2p/--no-overlap-p2p", bool, "Receive for the next action while this one computes."),
            ("--deallocate-outputs/--no-deallocate-outputs", bool, "Free what a stage has sent on."),
            ("--stragglers", str, "Ranks whose compute takes longer, e.g. 3:1.25,17:1.5."),
            ("--link-changes", str, "Slow or failing links, rank:near|far:left[@time], e.g. 3:far:0.25@2ms."),
            ("--compute-jitter", float, "Relative spread of every compute task. [default: 0]"),
            ("--network-jitter", float, "Relative spread of every communication. [default: 0]"),
            ("--rank-jitter", float, "Relative spread of ranks, drawn once per step. [default: 0]"),
            ("--samples", int, "Steps to draw where there is jitter. [default: 100]"),
            ("--seed", int, "Seed of the jitter. [default: 0]"),
            ("--sharding", str, "ddp, zero1, zero2, zero3 or fsdp. [default: zero1]"),
            ("--shard-ranks", int, "HSDP: ranks that one copy of the shared states is spread over."),
            ("--recompute", str, "none, selective or full. [default: none]"),
            (
                "--recompute-modules",
                str,
                "What selective does again: layernorm,moe_act,... [as framework]",
            ),
            ("--recompute-layers", int, "Layers of each stage that are computed again. [default: all]"),
            ("--recompute-every", int, "Of those, every n-th one. [default: 1]"),
            ("--framework", str, "Whose conventions: megatron, nemo, torchtitan, ... [default: megatron]"),
            ("--fp8/--no-fp8", bool, "Products of layers in 8 bits or fewer."),
            ("--recipe", str, "How they are quantised: delayed, mxfp8, nvfp4, rowwise, ..."),
            ("--kernels", str, "Element-wise work: fused or eager. [default: as the framework]"),
            ("--offload", str, "In host memory: none, optimizer, states, activations or all."),
            ("--offload-to", str, "Where that is: host or nvme. [default: host]"),
            ("--lora-rank", int, "Train adapters of this rank, and nothing else."),
            ("--quantized-base/--no-quantized-base", bool, "Frozen weights in 4 bits (QLoRA)."),
            ("--capacity-factor", float, "Tokens of an expert over its even share. [default: as come]"),
            ("--expert-imbalance", float, "Spread of tokens over experts, over their mean. [default: 0]"),
            ("--overlap-slowdown", float, "Products beside communication: 1 as with NCCL. [default: 0]"),
            ("--checkpoint-every", int, "Steps between checkpoints, which the run waits for."),
            ("--checkpoint-bytes-per-s", float, "Rate at which a rank saves its states, e.g. 1e9."),
            ("--precision", str, "bf16, fp16 or fp32. [default: bf16]"),
            ("--sequence-parallel/--no-sequence-parallel", bool, "With tp, shard along the sequence."),
            ("--fp32-gradients/--no-fp32-gradients", bool, "Keep and reduce gradients in fp32."),
            ("--placement", str, "Ranks on GPUs: packed, spread, rail, or a file. [default: packed]"),
            ("--nccl-algo", str, "Algorithms to choose from, as NCCL_ALGO: ring,tree or ^tree."),
            ("--nccl-proto", str, "Protocols to choose from, as NCCL_PROTO: simple or ^ll128."),
            ("--flash-attention/--no-flash-attention", bool, "Fused attention, without scores in memory."),
        )
    ):
        command = click.option(flag, type=None if "/" in flag else kind, default=None, help=text)(command)
    return click.option(
        "--set",
        "conventions",
        multiple=True,
        metavar="KEY=VALUE",
        callback=_conventions,
        help="A convention of the framework, e.g. overlap_grad_reduce=false; several may be set.",
    )(command)


def _conventions(
    context: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> dict[str, Any] | None:
    """Return conventions by name: values as TOML writes them, without quotes for words."""
    del context
    found: dict[str, Any] = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{one!r}: KEY=VALUE", param=parameter)
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        found[key.strip()] = tuple(parsed) if isinstance(parsed, list) else parsed
    return found or None
