"""The settings of a job as flags of a command line: the same for every verb that makes one."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., None])


class TargetName(click.ParamType[str]):
    """A tool that jobs are written for; the list is only loaded when one is named."""

    name = "tool"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        """Return the name, if a tool has it."""
        from simulator.configs.write import TARGETS

        if value not in TARGETS:
            self.fail(f"{value!r}: one of {', '.join(TARGETS)}", param, ctx)
        return str(value)


class Dollars(click.ParamType[float]):
    """An amount of US dollars as a person writes it: ``200000``, ``250k``, ``1.5M USD``."""

    name = "dollars"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return the amount in US dollars."""
        from topologies.errors import UnitError
        from topologies.units import parse_usd

        try:
            return parse_usd(value)
        except UnitError as error:
            self.fail(str(error), param, ctx)


SETTINGS: Final[tuple[tuple[str, type, str], ...]] = (
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
    ("--tp", int, "Tensor-parallel degree. [default: 1]"),
    ("--pp", int, "Pipeline-parallel degree. [default: 1]"),
    ("--dp", int, "Data-parallel degree. [default: 1, or what fills --gpus]"),
    ("--cp", int, "Context-parallel degree. [default: 1]"),
    ("--ep", int, "Expert-parallel degree, a divisor of dp * cp * tp / expert_tp. [default: 1]"),
    ("--expert-tp", int, "Tensor-parallel degree of experts. [default: that of --tp]"),
    ("--global-batch", int, "Sequences per optimizer step, over all ranks."),
    ("--micro-batch", int, "Sequences per micro-batch and data-parallel rank. [default: 1]"),
    ("--seq-len", int, "Tokens per sequence. [default: 2048]"),
    ("--steps", int, "Optimizer steps to simulate. [default: 1]"),
    ("--schedule", str, "Pipeline schedule (1f1b, zb-v, ...) or a .csv of actions. [default: 1f1b]"),
    (
        "--virtual-stages",
        int,
        "Stages per pipeline rank, for schedules that leave a choice. [default: the schedule's own]",
    ),
    ("--layers-per-stage", str, "Layers of every stage, e.g. 15,16,16,15. [default: equal shares]"),
    (
        "--counted-ends",
        str,
        "Count embedding, head or both as a layer when layers are shared out. [default: none]",
    ),
    (
        "--overlap-pairs/--no-overlap-pairs",
        bool,
        "Run the forward and the backward of a DualPipe pair at once. [default: yes]",
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
    ("--compute-jitter", float, "Relative spread of the time of each compute task. [default: 0]"),
    ("--network-jitter", float, "Relative spread of the time of each communication. [default: 0]"),
    (
        "--rank-jitter",
        float,
        "Relative spread of the speed of ranks, drawn once per step. [default: 0]",
    ),
    ("--samples", int, "Steps to draw if there is jitter. [default: 100]"),
    ("--seed", int, "Seed that makes jitter repeatable. [default: 0]"),
    (
        "--sharding",
        str,
        "What data-parallel ranks share out: ddp, zero1, zero2, zero3 or fsdp. [default: zero1]",
    ),
    (
        "--shard-ranks",
        int,
        "Ranks that one copy of sharded states is spread over (HSDP). [default: all replicas]",
    ),
    ("--recompute", str, "Activations to compute again: none, selective or full. [default: none]"),
    (
        "--recompute-modules",
        str,
        "Parts that selective computes again: layernorm,moe_act,... [default: the framework's]",
    ),
    ("--recompute-layers", int, "Number of layers of each stage to compute again. [default: all]"),
    ("--recompute-every", int, "Compute only every n-th of these layers again. [default: 1]"),
    (
        "--framework",
        str,
        "Framework whose conventions hold: megatron, nemo, torchtitan, ... [default: megatron]",
    ),
    ("--fp8/--no-fp8", bool, "Run the matrix products of layers in 8 bits or fewer. [default: no]"),
    (
        "--recipe",
        str,
        "How --fp8 quantises: delayed, mxfp8, nvfp4, rowwise, ... [default: the framework's]",
    ),
    ("--kernels", str, "Element-wise work as fused or eager kernels. [default: the framework's]"),
    (
        "--offload",
        str,
        "Keep in host memory: none, optimizer, states, activations or all. [default: none]",
    ),
    ("--offload-to", str, "Where --offload keeps it: host or nvme. [default: host]"),
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
    (
        "--capacity-factor",
        float,
        "Most tokens of an expert, over its even share. [default: 0, no limit]",
    ),
    (
        "--expert-imbalance",
        float,
        "Standard deviation of the tokens of experts, over their mean. [default: 0]",
    ),
    (
        "--overlap-slowdown",
        float,
        "How much communication slows compute beside it: 0 not at all, 1 as NCCL. [default: 0]",
    ),
    (
        "--checkpoint-every",
        int,
        "Steps between checkpoints, which the run waits for. [default: 0, no checkpoints]",
    ),
    ("--checkpoint-bytes-per-s", float, "Rate at which a rank saves its states, e.g. 1e9."),
    (
        "--precision",
        str,
        "Type of the elements that are computed with: bf16, fp16 or fp32. [default: bf16]",
    ),
    (
        "--sequence-parallel/--no-sequence-parallel",
        bool,
        "With --tp, shard along the sequence outside matrix products. [default: yes]",
    ),
    (
        "--fp32-gradients/--no-fp32-gradients",
        bool,
        "Keep and reduce gradients in fp32. [default: yes]",
    ),
    (
        "--placement",
        str,
        "Which GPU runs which rank: packed, spread, rail, or a file. [default: packed]",
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
        "--flash-attention/--no-flash-attention",
        bool,
        "Fuse attention, which keeps no scores in memory. [default: yes]",
    ),
)
"""The flag of each setting of a job, the type of its value, and its line of ``--help``."""


def job_settings_options(command: Command) -> Command:
    """Add a flag for every setting of a job; None where it is not given."""
    for flag, kind, text in reversed(SETTINGS):
        command = click.option(flag, type=None if "/" in flag else kind, default=None, help=text)(command)
    return click.option(
        "--set",
        "conventions",
        multiple=True,
        metavar="KEY=VALUE",
        callback=_conventions,
        help="Set one convention of the framework, e.g. overlap_grad_reduce=false. Repeatable.",
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
