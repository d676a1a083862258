"""Simulates what guides to training teach, and writes the tables of docs/rules-of-thumb.md.

    python benchmarks/rules_of_thumb.py

Every line of a table is one ``foretrace simulate``; the page shows the command of the first one. The words
around the tables are written by people.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from accuracy import replaced

from foretrace.simulator.config import job_from
from foretrace.simulator.errors import SimulationError
from foretrace.simulator.simulate import simulate
from foretrace.traces.report.format import format_share

PAGE: Final = Path(__file__).parents[1] / "docs" / "rules-of-thumb.md"

Settings = dict[str, Any]
Cell = Callable[[Mapping[str, Any], Mapping[str, Any]], str]
"""Writes a cell from the summary of a line and that of the line it is held against."""

LLAMA_70B: Final[Settings] = {
    "model": "llama3-70b",
    "cluster": "dgx-h100",
    "gpus": 64,
    "tp": 8,
    "pp": 8,
    "seq_len": 8192,
    "sharding": "ddp",
}
LLAMA_8B: Final[Settings] = {
    "model": "llama3-8b",
    "cluster": "dgx-h100",
    "gpus": 8,
    "global_batch": 32,
    "seq_len": 8192,
    "sharding": "fsdp",
    "framework": "torchtitan",
    "kernels": "fused",
}
SMALL: Final[Settings] = {**LLAMA_8B, "model": "llama3.2-1b"}


def main() -> None:
    """Replace the tables of the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    text = args.page.read_text(encoding="utf-8")
    for name, make in TABLES.items():
        text = replaced(text, name, make())
    args.page.write_text(text, encoding="utf-8")


def command(settings: Mapping[str, Any]) -> str:
    """Return the command line that simulates *settings*."""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if name == "conventions":
            flags += [f"--set {key}={str(one).lower()}" for key, one in value.items()]
        elif isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags.append(f"--{flag} {value}")
    return " ".join(("foretrace simulate", *flags))


def table(
    head: Sequence[str], lines: Iterable[tuple[str, Settings]], cells: Sequence[Cell], *, against: int = 0
) -> list[str]:
    """Return a table with a line per simulation, and the command of its first line.

    Args:
        head: of the columns.
        lines: what each is called, and its settings.
        cells: of each line after its name.
        against: line that the others are held against.
    """
    listed = list(lines)
    found = [summary(settings) for _, settings in listed]
    base = next(one for one in found[against:] if one)
    rows = [
        (name, *(cell(one, base) for cell in cells))
        if one
        else (name, *("does not fit or run" for _ in cells))
        for (name, _), one in zip(listed, found, strict=True)
    ]
    shown = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    shown.insert(1, "|" + "---|" * len(head))
    return ["```", command(listed[0][1]), "```", "", *shown]


def summary(settings: Settings) -> dict[str, Any]:
    """Return the figures of *settings*; nothing if such a job cannot be."""
    try:
        return dict(simulate(job_from(settings)).summary)
    except SimulationError:
        return {}


def seconds(one: Mapping[str, Any], _: Mapping[str, Any]) -> str:
    """Return the time of a step."""
    value = one["step_time_s"]
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def rate(one: Mapping[str, Any], _: Mapping[str, Any]) -> str:
    """Return tokens per second and GPU."""
    return f"{one['tokens_per_s_per_gpu']:,.0f}"


def relative(one: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """Return tokens per second and GPU over those of *base*."""
    return format_share(one["tokens_per_s_per_gpu"] / base["tokens_per_s_per_gpu"], ".0f")


def slower(one: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """Return how much more time a token takes than in *base*."""
    return format_share(base["tokens_per_s_per_gpu"] / one["tokens_per_s_per_gpu"] - 1, "+.0f")


def bubble(one: Mapping[str, Any], _: Mapping[str, Any]) -> str:
    """Return the share of the step in which stages wait for each other."""
    return format_share(one["bubble_fraction"], ".0f")


def exposed(one: Mapping[str, Any], _: Mapping[str, Any]) -> str:
    """Return the share of the step in which data moves and nothing computes."""
    return format_share(one["exposed_comm_fraction"], ".0f")


def memory(one: Mapping[str, Any], _: Mapping[str, Any]) -> str:
    """Return the peak memory, and whether that is too much."""
    return f"{one['peak_memory_bytes'] / 1e9:.0f} GB{'' if one['fits'] else ', too much'}"


def _microbatches() -> list[str]:
    def line(factor: int, schedule: str, stages: int | None = None) -> tuple[str, Settings]:
        more = {} if stages is None else {"virtual_stages": stages}
        name = f"{8 * factor} = {factor} x 8" + ("" if schedule == "1f1b" else f", {schedule}")
        name += "" if stages is None else f" --virtual-stages {stages}"
        return name, {**LLAMA_70B, "global_batch": 8 * factor, "schedule": schedule, **more}

    plain = [line(factor, "1f1b") for factor in (1, 2, 4, 8, 16)]
    others = [
        line(1, "interleaved-1f1b", 5),
        line(2, "interleaved-1f1b", 5),
        line(1, "zb-v"),
        line(2, "zb-v"),
    ]
    head = ("micro-batches", "bubble", "tokens/s per GPU", "of the best")
    return table(head, [*plain, *others], (bubble, rate, relative), against=4)


def _tensor() -> list[str]:
    def line(name: str, cluster: str, tp: int) -> tuple[str, Settings]:
        layout = {"tp": tp, "pp": 1, "cluster": cluster, "global_batch": 64, "recompute": "full"}
        return f"tp {tp}, {name}", {**LLAMA_70B, **layout, "sharding": "zero1"}

    lines = [line("8 GPUs a node", "dgx-h100", tp) for tp in (4, 8, 16, 32)]
    lines += [line("72 GPUs in one NVLink domain", "gb200-nvl72", tp) for tp in (4, 8, 16, 32)]
    return table(
        ("layout", "step", "exposed communication", "of tp 8"), lines, (seconds, exposed, relative), against=1
    )


def _micro_batches(n: int) -> str:
    return "1 micro-batch" if n == 1 else f"{n} micro-batches"


def _sharding() -> list[str]:
    def line(gpus: int, micro: int, times: int, sharding: str) -> tuple[str, Settings]:
        batch = {"gpus": gpus, "micro_batch": micro, "global_batch": gpus * micro * times}
        name = f"{gpus} GPUs, {_micro_batches(times)} of {micro}, {sharding}"
        return name, {**SMALL, "seq_len": 2048, **batch, "sharding": sharding}

    found: list[str] = []
    for gpus, micro, times in ((8, 1, 1), (64, 1, 1), (64, 8, 1), (64, 1, 16), (64, 8, 16)):
        rows = table(
            ("run", "step", "exposed communication", "time over DDP", "memory"),
            [line(gpus, micro, times, sharding) for sharding in ("ddp", "fsdp")],
            (seconds, exposed, slower, memory),
        )
        found += rows if not found else rows[6:]
    return found


def _recompute() -> list[str]:
    models = {"llama3-8b": LLAMA_8B, "llama3.2-1b": SMALL}
    found: list[str] = []
    for model, settings in models.items():
        rows = table(
            ("run", "step", "time over none", "memory"),
            [
                (f"{model}, {kind}", {**settings, "global_batch": 8, "recompute": kind})
                for kind in ("none", "selective", "full")
            ],
            (seconds, slower, memory),
        )
        found += rows if not found else rows[6:]
    return found


def _offload() -> list[str]:
    lines = [
        (
            f"{name}, {_micro_batches(batch // 8)}",
            {**LLAMA_8B, "global_batch": batch, "recompute": "full", "offload": name},
        )
        for batch in (8, 64)
        for name in ("none", "optimizer", "states", "activations")
    ]
    first = table(
        ("in host memory", "step", "time over none", "memory"), lines[:4], (seconds, slower, memory)
    )
    return [*first, *table((), lines[4:], (seconds, slower, memory))[6:]]


def _scaling() -> list[str]:
    found: list[str] = []
    for name, settings, batch in (
        ("llama3.2-1b, ddp, 8 sequences a GPU", {**SMALL, "sharding": "ddp", "seq_len": 2048}, 8),
        ("llama3.2-1b, ddp, 1 sequence a GPU", {**SMALL, "sharding": "ddp", "seq_len": 2048}, 1),
        ("llama3-8b, fsdp, 1 sequence a GPU", LLAMA_8B, 1),
        ("the same on 100 Gb/s Ethernet, A100", {**LLAMA_8B, "cluster": "a100-ethernet"}, 1),
    ):
        lines = [
            (
                f"{name}: {gpus}",
                {**settings, "gpus": gpus, "micro_batch": batch, "global_batch": batch * gpus},
            )
            for gpus in (8, 64, 512)
        ]
        rows = table(
            ("run: GPUs", "tokens/s per GPU", "of 8 GPUs", "exposed"), lines, (rate, relative, exposed)
        )
        found += rows if not found else rows[6:]
    return found


TABLES: Final[Mapping[str, Callable[[], list[str]]]] = {
    "micro-batches": _microbatches,
    "tensor": _tensor,
    "sharding": _sharding,
    "recompute": _recompute,
    "offload": _offload,
    "scaling": _scaling,
}
"""Tables by the name of their mark."""


if __name__ == "__main__":
    main()
