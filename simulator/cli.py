"""The verb ``foretrace simulate``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from simulator.flags import job_settings_options

if TYPE_CHECKING:
    from simulator.job import Job
    from simulator.simulate import Simulation

NAME_LETTERS: Final = 14
"""Letters for the name of a row beside its picture."""

RANGES: Final = (("times", "step_time_from"), ("memory", "peak_memory_from"))
"""What stands in brackets behind a figure, and where ``intervals`` says what it comes from."""

SHOWN_STAGES: Final = 8
"""Most pipeline stages that the table of memory lists."""


@click.command()
@click.argument("file", metavar="[CONFIG]", required=False, type=click.Path())
@job_settings_options
@click.option(
    "--config", type=click.Path(dir_okay=False), help="The same as RUN.TOML; flags override what it says."
)
@click.option(
    "--from",
    "files",
    multiple=True,
    type=click.Path(),
    help="Another file of settings beside CONFIG, of any tool; several complete each other.",
)
@click.option(
    "--like",
    "like_run",
    type=click.Path(),
    help="Run whose model, layout, batch and machine are taken; flags change them.",
)
@click.option(
    "--rehearsal", type=click.Path(), help="Run directory of foretrace rehearse; timed on --cluster."
)
@click.option(
    "--calibration",
    type=click.Path(dir_okay=False),
    help="Factors of this machine, from foretrace calibrate.",
)
@click.option(
    "--ranks",
    type=click.Choice(["folded", "all"]),
    default="folded",
    help="Keep one rank per pipeline rank, which stands for all that do the same, or every one. "
    "[default: folded]",
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "event", "compiled", "contended", "contended-compiled"]),
    default="auto",
    help="On SimPy, on numba, or whichever is sooner done: the timeline is the same. contended: transfers "
    "on the same links slow each other down. [default: auto]",
)
@click.option("-o", "--output", type=click.Path(), help="Directory to keep the run in.")
@click.option("--report", type=click.Path(dir_okay=False), help="HTML page to write.")
@click.option("--picture/--no-picture", default=None, help="Draw the schedule. [default: in a terminal]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(
    config: str | None,
    ranks: str,
    engine: str,
    output: str | None,
    report: str | None,
    *,
    file: str | None,
    files: tuple[str, ...],
    like_run: str | None,
    rehearsal: str | None,
    calibration: str | None,
    picture: bool | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Predict one training step of a layout: time, memory, timeline.

    Settings are flags, or those of a CONFIG that flags override: a run.toml, or what another tool has
    (DeepSpeed, Accelerate, Megatron-LM, torchtitan, nanotron; foretrace config shows how it is read).

        foretrace simulate --model llama3-70b --cluster dgx-h100 --gpus 512 --tp 8 --pp 4
        --global-batch 1024 --seq-len 8192 -o runs/llama

        foretrace simulate run.toml --tp 4

        foretrace simulate ds_config.json --model llama2-7b --cluster dgx-a100 --gpus 8

        foretrace simulate --like runs/recorded --cluster dgx-h100 --gpus 512

        foretrace simulate --rehearsal runs/script --cluster dgx-h100
    """
    from simulator.simulate import simulate as run_simulation

    if file is not None and config is not None:
        raise click.UsageError(f"{file} and --config {config}: give one file of settings")
    configs = [one for one in (file if file is not None else config, *files) if one is not None]
    if report is not None:
        _check_folder(report)
    given = {name: value for name, value in flags.items() if value is not None}
    if like_run is not None and configs:
        raise click.UsageError(f"--like {like_run} and {configs[0]}: give one of them")
    if rehearsal is not None and (configs or like_run):
        raise click.UsageError(f"--rehearsal {rehearsal} and {[*configs, like_run][0]}: give one of them")
    console = Console(stderr=True, quiet=as_json)
    read: list[dict[str, Any]] = []
    with console.status("simulating") if console.is_terminal else nullcontext() as status:
        tell = None if status is None else status.update
        if rehearsal is not None:
            from simulator.rehearsed.cli import timed

            simulation = timed(rehearsal, given, tell, calibration=calibration, engine=engine)
        else:
            job, read = (_job_like(like_run, given), read) if like_run is not None else _job(configs, given)
            if calibration is not None:
                job = _calibrated(job, calibration)
            simulation = run_simulation(job, tell, expanded=ranks == "all", engine=engine)
    if output is not None:
        simulation.write(output)
    if report is not None:
        from traces.report.html import write_report

        write_report(report, simulation.run)
    if as_json:
        click.echo(json.dumps(document(simulation, output, report) | {"configs": read}))
    else:
        _show_read(read)
        show(simulation, output, report, picture=picture)


def _job(configs: Sequence[str], given: dict[str, Any]) -> tuple[Job, list[dict[str, Any]]]:
    """Return the job that flags and files of settings describe, and how files of other tools were read."""
    from simulator.config import job_from

    if not configs:
        return job_from(given), []
    from simulator.configs.read import read_files

    found = read_files(configs, given)
    return job_from(found.settings), found.describe()


def _show_read(read: Sequence[Mapping[str, Any]]) -> None:
    """Print how many settings of another tool's files count."""
    for one in read:
        click.echo(
            f"{one['file']} ({one['tool']}): {len(one['used'])} settings used, {len(one['ignored'])} not, "
            f"{len(one['assumed'])} taken as the tool does (foretrace config {one['file']} lists them)"
        )


def _job_like(path: str, given: Mapping[str, Any]) -> Job:
    """Return the job that the run at *path* was, changed by flags."""
    from simulator.recorded.like import job_like
    from traces.store import open_run

    return job_like(open_run(path), given)


def _calibrated(job: Job, path: str) -> Job:
    """Return *job* on its machine as the calibration in the file *path* found it."""
    from simulator.recorded.calibration import read_calibration

    return replace(job, cluster=read_calibration(path).applied(job.cluster))


def _check_folder(report: str) -> None:
    """Raise click.BadParameter if there is no folder to write *report* to, before any work is done."""
    folder = Path(report).absolute().parent
    if not folder.is_dir():
        raise click.BadParameter(f"{report}: there is no folder {folder}", param_hint="--report")
    if not os.access(folder, os.W_OK):
        raise click.BadParameter(f"{report}: the folder {folder} cannot be written", param_hint="--report")


def document(simulation: Simulation, output: str | None, report: str | None) -> dict[str, Any]:
    """Return everything that ``--json`` prints."""
    return {
        "name": simulation.info.name,
        **simulation.summary,
        "warnings": list(simulation.info.warnings),
        "job": simulation.info.job,
        "run": output,
        "report": report,
    }


def show(
    simulation: Simulation, output: str | None, report: str | None, *, picture: bool | None = None
) -> None:
    """Print the figures, the memory of the stages, what they rest on and where the run is."""
    console, summary = Console(), simulation.summary
    console.print(f"[bold]{escape(simulation.info.name)}[/]", highlight=False)
    console.print(_headline(summary))
    if picture or (picture is None and console.is_terminal):
        _draw(console, simulation)
    console.print(_memory(summary))
    for warning in simulation.info.warnings:
        console.print(f"[yellow]![/] {escape(warning)}", highlight=False)
    console.print("rests on", style="dim")
    ranges = [
        f"({name} in brackets) {summary['intervals'][key]}"
        for name, key in RANGES
        if key in summary["intervals"]
    ]
    for line in [*ranges, *summary["rests_on"]]:
        console.print(Padding(escape(line), (0, 0, 0, 2)), style="dim", highlight=False)
    if output is not None:
        console.print(
            f"run: {output}  (foretrace report {output})", highlight=False, soft_wrap=True, markup=False
        )
    if report is not None:
        console.print(f"report: {report}", highlight=False, soft_wrap=True, markup=False)
    if output is None and report is None:
        console.print("nothing saved; -o DIR keeps the timeline", style="dim")


def _draw(console: Console, simulation: Simulation) -> None:
    """Print the schedule as letters, one row per rank that is drawn, as wide as the terminal."""
    from traces.text_picture import Piece, picture

    def style(piece: Piece) -> str:
        return f"{'white on ' if piece.works else 'bold '}{piece.colour}" if piece.colour else ""

    found = picture(simulation.run, min(console.width, 160) - NAME_LETTERS - 2)
    if found is None:
        return
    for line in found.lines:
        name = (f"{line.name[: NAME_LETTERS - 1]:<{NAME_LETTERS}}", "dim")
        pieces = [(piece.text, style(piece)) for piece in line.pieces]
        console.print(Text.assemble(name, *pieces), no_wrap=True, overflow="crop")
    legend = [part for piece, label in found.legend for part in ((piece.text, style(piece)), f" {label}  ")]
    console.print(Text.assemble(f"{'':<{NAME_LETTERS}}", f"{found.length}: ", *legend))


def _headline(summary: Mapping[str, Any]) -> Table:
    """Return the figures that a person looks at first."""
    from topologies.units import format_bytes, format_time

    exposed = summary["exposed_by_axis"]
    by_axis = ", ".join(f"{axis} {_percent(share)}" for axis, share in exposed.items() if share > 5e-4)
    likely = summary.get("intervals", {})

    def with_interval(name: str, value: str, shown: Callable[[float], str]) -> str:
        return f"{value}  [dim]({' to '.join(map(shown, likely[name]))})[/]" if name in likely else value

    per_gpu = "tokens_per_s_per_gpu"
    rows = {
        "step time": with_interval("step_time_s", format_time(summary["step_time_s"]), format_time),
        "throughput": with_interval(
            per_gpu, f"{summary[per_gpu]:,.0f} tokens/s per GPU", lambda rate: f"{rate:,.0f}"
        )
        + f", {summary['tokens_per_s']:,.0f} in all",
        "MFU": with_interval("mfu", _percent(summary["mfu"]), _percent),
        "peak memory": with_interval(
            "peak_memory_bytes", format_bytes(summary["peak_memory_bytes"]), format_bytes
        ),
        "bubble": _percent(summary["bubble_fraction"]),
        "exposed communication": f"{_percent(summary['exposed_comm_fraction'])}"
        + (f"  ({by_axis})" if by_axis else ""),
        "waiting for other ranks": _percent(summary["waiting_fraction"]),
        "spans": f"{summary['n_spans']:,} of {summary['world_size']:,} ranks, "
        f"{summary['n_ranks_stored']:,} stored ({summary['engine']} engine)",
    }
    if drawn := summary.get("step_time_distribution"):
        low, middle, high = (format_time(drawn["quantiles_s"][q]) for q in ("0.05", "0.5", "0.95"))
        rows["with jitter"] = (
            f"{middle}, 5 to 95 %: {low} to {high} ({drawn['samples']} steps, seed {drawn['seed']})"
        )
    table = Table(box=None, show_header=False, pad_edge=True)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _memory(summary: Mapping[str, Any]) -> Table:
    """Return the memory of the stages, the fullest ones if there are many."""
    from topologies.units import format_bytes

    limit, stages = summary["memory_limit_bytes"], summary["stages"]
    fullest = sorted(stages, key=lambda stage: -stage["peak_bytes"])[:SHOWN_STAGES]
    table = Table(box=None, pad_edge=True, header_style="dim")
    for name in ("stage", "layers", "in flight", "peak memory", f"of {format_bytes(limit)}"):
        table.add_column(name, justify="right")
    table.add_column("most of it")
    for stage in stages:
        if stage not in fullest:
            continue
        items = sorted(stage["bytes"].items(), key=lambda item: -item[1])[:3]
        colour = "red" if stage["peak_bytes"] > limit else "default"
        table.add_row(
            str(stage["stage"]),
            str(stage["layers"]),
            str(stage["in_flight"]),
            f"[{colour}]{format_bytes(stage['peak_bytes'])}[/]",
            f"[{colour}]{_percent(stage['peak_bytes'] / limit)}[/]",
            ", ".join(f"{name} {format_bytes(size)}" for name, size in items),
        )
    if len(stages) > len(fullest):
        table.caption = f"the fullest {len(fullest)} of {len(stages)} stages"
    return table


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")
