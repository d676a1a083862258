"""The verb ``foretrace memory``: does a job fit, which rank is fullest, when, of what, what would help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from foretrace.door import json_text
from foretrace.simulator.configs.flags import job_of, settings_file_options, settings_files, show_read
from foretrace.simulator.flags import JobCommand, job_settings_options

if TYPE_CHECKING:
    from rich.table import Table

    from foretrace.simulator.job import Job
    from foretrace.simulator.memory.ranks import RankMemory
    from foretrace.simulator.memory.remedies import Remedy

SHOWN_RANKS: Final = 8
"""Most pipeline ranks that the table lists."""

SHOWN_CLOSEST: Final = 3
"""Changes that are listed where none makes a job fit."""


@click.command(cls=JobCommand)
@job_settings_options
@settings_file_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def memory(
    file: str | None, config: str | None, *, files: tuple[str, ...], as_json: bool, **flags: Any
) -> None:
    """Check whether a job fits in memory, and if not, what would make it fit.

    Settings are those of foretrace simulate: flags, a run.toml, or files of another tool.

        foretrace memory --model llama2-13b --cluster dgx-a100 --gpus 8 --sharding zero3 --recompute full
        --seq-len 4096 --global-batch 8
    """
    given = {name: value for name, value in flags.items() if value is not None}
    job, read = job_of(settings_files(file, config, files), given)
    found = describe(job)
    if as_json:
        click.echo(json_text(found | {"configs": read}))
    else:
        show_read(read)
        _show(found)


def describe(job: Job) -> dict[str, Any]:
    """Return what ``--json`` prints: the verdict, every pipeline rank, and what would fit or need less."""
    from foretrace.simulator.memory.ranks import host_bytes, host_holds, rank_memories
    from foretrace.simulator.memory.remedies import changes
    from foretrace.simulator.summary import expert_tp_note, job_name

    ranks, limit = rank_memories(job), job.cluster.device.memory_bytes
    fullest = max(ranks, key=lambda rank: rank.peak_bytes)
    tried = list(changes(job))
    return {
        "name": job_name(job),
        "fits": fullest.peak_bytes <= limit and host_holds(job, ranks),
        "memory_limit_bytes": limit,
        "peak_memory_bytes": fullest.peak_bytes,
        "spare_bytes": limit - fullest.peak_bytes,
        "host_memory_bytes": host_bytes(job, ranks),
        "host_memory_limit_bytes": job.cluster.node_memory_bytes,
        "slack_bytes": _slack_bytes(job, fullest.peak_bytes),
        "fullest_pipeline_rank": fullest.pp,
        "when": _moment(fullest),
        "largest": [{"item": name, "bytes": size} for name, size in fullest.largest(4)],
        "stages": [_rank(job, rank) for rank in ranks],
        "notes": expert_tp_note(job),
        "would_fit": [_change(one) for one in tried if one.peak_bytes <= limit],
        "would_need_less": [_change(one) for one in tried if one.peak_bytes > limit],
    }


def _change(one: Remedy) -> dict[str, Any]:
    spare = one.job.cluster.device.memory_bytes - one.peak_bytes
    return {
        "change": one.change,
        "peak_memory_bytes": one.peak_bytes,
        "tight": 0 <= spare < _slack_bytes(one.job, one.peak_bytes),
    }


def _slack_bytes(job: Job, peak_bytes: int) -> int:
    """Return what the caching allocator keeps beside tensors if it can; it frees that before it fails."""
    from foretrace.simulator.memory.states import reserved_bytes

    return round((peak_bytes - reserved_bytes(job)) * job.profile.allocator_slack)


def _rank(job: Job, rank: RankMemory) -> dict[str, Any]:
    from foretrace.traces.layout import Coord

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
    """Print the verdict, what the fullest rank holds, the other ranks, and the changes that would help."""
    from rich.markup import escape

    from foretrace.topologies.units import format_bytes, format_capacity
    from foretrace.traces.console import stdout

    console = stdout(highlight=True)
    limit, peak = found["memory_limit_bytes"], found["peak_memory_bytes"]
    verdicts = {True: "[green]fits[/]", False: "[red]does not fit[/]"}
    spare = f"{format_bytes(abs(found['spare_bytes']))} {'spare' if peak <= limit else 'too much'}"
    console.print(f"[bold]{escape(found['name'])}[/]", highlight=False)
    for note in found["notes"]:
        console.print(note, style="dim", highlight=False, markup=False)
    on_device = f"{format_bytes(peak)} of {format_capacity(limit)}, {spare}"
    console.print(f"{verdicts[peak <= limit]}: {on_device}", highlight=False)
    if needed := found["host_memory_bytes"]:
        have = found["host_memory_limit_bytes"]
        of = f" of {format_capacity(have)}" if have else ""
        holds = f"{verdicts[needed <= have]}: " if have else ""
        console.print(f"{holds}{format_bytes(needed)}{of} in the memory of a node", highlight=False)
    if found["fits"] and found["slack_bytes"] > found["spare_bytes"]:
        slack = format_bytes(found["slack_bytes"])
        console.print(f"[yellow]tight[/]: the allocator usually keeps {slack} beside", highlight=False)
    console.print(
        f"fullest: pipeline rank {found['fullest_pipeline_rank']}, {found['when']}", highlight=False
    )
    console.print(_items(found))
    if len(found["stages"]) > 1:
        console.print(_stages(found))
    if not found["fits"]:
        console.print(f"[bold]{_title(found)}[/]", highlight=False)
        console.print(_changes(found))


def _title(found: dict[str, Any]) -> str:
    if found["would_fit"]:
        return "any one of these would fit:"
    return (
        "no single change fits; the closest:" if found["would_need_less"] else "no single change needs less"
    )


def _items(found: dict[str, Any]) -> Table:
    """Return what the fullest rank holds at its worst moment, largest first."""
    from rich.table import Table

    from foretrace.topologies.units import format_bytes

    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
    table.add_column(justify="right")
    table.add_column()
    (fullest,) = (one for one in found["stages"] if one["pipeline_rank"] == found["fullest_pipeline_rank"])
    for name, size in sorted(fullest["bytes"].items(), key=lambda item: -item[1]):
        if size:
            table.add_row(format_bytes(size), name)
    return table


def _stages(found: dict[str, Any]) -> Table:
    """Return the fullest pipeline ranks, fullest first."""
    from rich.table import Table

    from foretrace.topologies.units import format_bytes

    table = Table(box=None, header_style="dim")
    for name in ("stage", "ranks", "layers", "in flight", "peak", "largest"):
        table.add_column(name, justify="left" if name == "largest" else "right")
    stages = sorted(found["stages"], key=lambda one: -one["peak_bytes"])
    for rank in stages[:SHOWN_RANKS]:
        name, size = max(rank["bytes"].items(), key=lambda item: item[1])
        table.add_row(
            ", ".join(map(str, rank["stages"])),
            "-".join(map(str, rank["ranks"])),
            str(rank["layers"]),
            str(rank["in_flight"]),
            format_bytes(rank["peak_bytes"]),
            f"{name} {format_bytes(size)}",
        )
    if len(stages) > SHOWN_RANKS:
        table.caption = f"the fullest {SHOWN_RANKS} of {len(stages)} pipeline ranks"
        table.caption_justify = "left"
    return table


def _changes(found: dict[str, Any]) -> Table:
    """Return the single changes that would make it fit, or those that come closest."""
    from rich.markup import escape
    from rich.table import Table

    from foretrace.simulator.memory.remedies import as_flags
    from foretrace.topologies.units import format_bytes

    closest = sorted(found["would_need_less"], key=lambda one: one["peak_memory_bytes"])[:SHOWN_CLOSEST]
    table = Table(box=None, show_header=False)
    for _ in range(2):
        table.add_column(justify="right" if table.columns else "left")
    table.add_column()
    for one in found["would_fit"] or closest:
        note = "[yellow]tight[/]" if one["tight"] else ""
        table.add_row(escape(as_flags(one["change"])), format_bytes(one["peak_memory_bytes"]), note)
    return table
