"""The verb ``foretrace memory``: does a job fit, which rank is fullest, when, of what, what would help."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from simulator.flags import job_settings_options

if TYPE_CHECKING:
    from rich.table import Table

    from simulator.job import Job
    from simulator.memory.ranks import RankMemory

Command = TypeVar("Command", bound=Callable[..., Any])

SHOWN_RANKS: Final = 8
"""Most pipeline ranks that the table lists."""


@click.command()
@job_settings_options
@click.option("--config", type=click.Path(dir_okay=False), help="A run.toml; flags go before it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def memory(config: str | None, *, as_json: bool, **flags: Any) -> None:
    """Say whether a job fits into memory, and if not, what would.

    Settings are those of foretrace simulate. For example: foretrace memory --model llama2-13b
    --cluster dgx-a100 --gpus 8 --sharding zero3 --recompute full --seq-len 4096 --global-batch 8
    """
    from simulator.config import job_from, read_config

    given = {name: value for name, value in flags.items() if value is not None}
    if {"dp", "gpus"} & set(given) and config is not None:
        given = {"dp": None, "gpus": None, **given}  # the one given replaces both in the file
    job = job_from({**(read_config(config) if config else {}), **given})
    found = describe(job)
    if as_json:
        click.echo(json.dumps(found))
    else:
        _show(found)


def describe(job: Job) -> dict[str, Any]:
    """Return what ``--json`` prints: the verdict, every pipeline rank, and what would fit or need less.

    Args:
        job: what to run, and on what.
    """
    from simulator.memory.ranks import rank_memories
    from simulator.memory.remedies import changes
    from simulator.summary import job_name

    ranks, limit = rank_memories(job), job.cluster.device.memory_bytes
    fullest = max(ranks, key=lambda rank: rank.peak_bytes)
    tried = list(changes(job))
    return {
        "name": job_name(job),
        "fits": fullest.peak_bytes <= limit,
        "memory_limit_bytes": limit,
        "peak_memory_bytes": fullest.peak_bytes,
        "spare_bytes": limit - fullest.peak_bytes,
        "slack_bytes": _slack_bytes(job, fullest),
        "fullest_pipeline_rank": fullest.pp,
        "when": _moment(fullest),
        "largest": [{"item": name, "bytes": size} for name, size in fullest.largest(4)],
        "stages": [_rank(job, rank) for rank in ranks],
        "would_fit": [
            {"change": one.change, "peak_memory_bytes": one.peak_bytes}
            for one in tried
            if one.peak_bytes <= limit
        ],
        "would_need_less": [
            {"change": one.change, "peak_memory_bytes": one.peak_bytes}
            for one in tried
            if one.peak_bytes > limit
        ],
    }


def _slack_bytes(job: Job, rank: RankMemory) -> int:
    """Return what the caching allocator keeps beside tensors if it can; it frees that before it fails."""
    return round((rank.peak_bytes - rank.items["reserved"]) * job.profile.allocator_slack)


def _rank(job: Job, rank: RankMemory) -> dict[str, Any]:
    from traces.layout import Coord

    layout = job.layout
    return {
        "pipeline_rank": rank.pp,
        "ranks": [
            layout.rank(Coord(rank.pp, 0, 0, 0)),
            layout.rank(Coord(rank.pp, layout.dp - 1, layout.cp - 1, layout.tp - 1)),
        ],
        "stages": list(rank.stages),
        "layers": rank.n_layers,
        "in_flight": rank.in_flight,
        "peak_bytes": rank.peak_bytes,
        "bytes": dict(rank.items),
    }


def _moment(rank: RankMemory) -> str:
    """When a rank holds its most."""
    plural = " is" if rank.in_flight == 1 else "es are"
    return f"{rank.when}, while {rank.in_flight} micro-batch{plural} in flight"


def _show(found: dict[str, Any]) -> None:
    """Print the verdict, the ranks and the changes."""
    from rich.console import Console
    from rich.markup import escape

    from topologies.units import format_bytes

    console = Console()
    limit, peak = found["memory_limit_bytes"], found["peak_memory_bytes"]
    verdict = "[green]fits[/]" if found["fits"] else "[red]does not fit[/]"
    spare = f"{format_bytes(abs(found['spare_bytes']))} {'spare' if found['fits'] else 'too much'}"
    console.print(f"[bold]{escape(found['name'])}[/]", highlight=False)
    console.print(f"{verdict}: {format_bytes(peak)} of {format_bytes(limit)}, {spare}", highlight=False)
    console.print(
        f"fullest: pipeline rank {found['fullest_pipeline_rank']}, {found['when']}", highlight=False
    )
    console.print(_stages(found))
    if found["fits"]:
        if found["slack_bytes"] > found["spare_bytes"]:
            slack = format_bytes(found["slack_bytes"])
            console.print(f"[yellow]tight[/]: the allocator usually keeps {slack} beside", highlight=False)
        return
    for one in found["would_fit"]:
        console.print(
            f"would fit: {escape(one['change'])}  {format_bytes(one['peak_memory_bytes'])}", highlight=False
        )
    if not found["would_fit"]:
        console.print("no single change makes it fit; the closest:", highlight=False)
        for one in sorted(found["would_need_less"], key=lambda one: one["peak_memory_bytes"])[:3]:
            console.print(
                f"  {escape(one['change'])}  {format_bytes(one['peak_memory_bytes'])}", highlight=False
            )


def _stages(found: dict[str, Any]) -> Table:
    """Return the fullest pipeline ranks and what most of each is."""
    from rich.table import Table

    from topologies.units import format_bytes

    table = Table(box=None, header_style="dim")
    for name in ("stage", "ranks", "layers", "in flight", "peak", "most of it"):
        table.add_column(name, justify="left" if name == "most of it" else "right")
    for rank in sorted(found["stages"], key=lambda one: -one["peak_bytes"])[:SHOWN_RANKS]:
        items = sorted(rank["bytes"].items(), key=lambda item: -item[1])[:4]
        table.add_row(
            ", ".join(map(str, rank["stages"])),
            "-".join(map(str, rank["ranks"])),
            str(rank["layers"]),
            str(rank["in_flight"]),
            format_bytes(rank["peak_bytes"]),
            ", ".join(f"{name} {format_bytes(size)}" for name, size in items),
        )
    return table
