"""The verb ``foretrace config``: configurations of other tools, read and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from foretrace.door import json_text
from foretrace.simulator.flags import JobCommand, job_settings_options, tool

if TYPE_CHECKING:
    from rich.console import Console

    from foretrace.simulator.configs.write import Written
    from foretrace.simulator.job import Job

WIDEST_VALUE: Final = 40
"""Most letters that a value may take in a table."""


@click.command(cls=JobCommand)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True))
@job_settings_options
@click.option("--to", "target", type=tool, help="Write for this tool instead: megatron, fsdp2, ...")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File to write.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def config(
    files: tuple[str, ...], *, target: str | None, output: str | None, as_json: bool, **flags: Any
) -> None:
    """Read the configuration of another tool: what each setting means here, and which have no effect.

    FILES: of DeepSpeed, Accelerate, Megatron-LM (script or arguments), torchtitan, nanotron, Primus, SimuMax,
    Calculon, ASTRA-sim; a model's config.json, a run.toml. Several complete each other; a flag overrides
    what a file says.

        foretrace config ds_config.json --model llama2-7b --cluster dgx-a100 --gpus 8 -o run.toml

        foretrace config run.toml --to megatron
    """
    from foretrace.simulator.config import job_from, job_settings, write_config
    from foretrace.simulator.configs.read import read_files
    from foretrace.simulator.configs.write import written
    from foretrace.traces.replacing import check_can_write
    from foretrace.traces.writer import write_atomically

    check_can_write(Path(output) if output is not None else None)
    found = read_files(files, flags)
    job = job_from(found.settings)
    made = written(job, target) if target else None
    text = made.text if made else write_config(job_settings(job))
    if output is not None:
        write_atomically(Path(output), text)
    if as_json:
        said = {"job": job_settings(job), "files": found.describe(), "file": output}
        click.echo(json_text(said | ({"written": made.describe()} if made else {})))
        return
    _show(job, found.describe())
    if output:
        click.echo(f"written: {output}")
    else:
        click.echo(f"\n{text.rstrip()}")
    if made:
        show_differences(made)


def show_differences(made: Written) -> None:
    """Print what a tool cannot be told."""
    from foretrace.traces.console import stdout

    console = stdout()
    if made.asks:
        asks = ", ".join(f"{name} = {value}" for name, value in made.asks.items())
        console.print(f"its file does not say: {asks}", markup=False)
    for one in made.differences:
        console.print(f"! {one.setting}: asked for {one.asked}, it gives {one.gives}", markup=False)


def _show(job: Job, files: Sequence[Mapping[str, Any]]) -> None:
    """Print what became of the settings of each file."""
    from foretrace.simulator.summary import job_name
    from foretrace.traces.console import stdout

    console = stdout()
    console.print(job_name(job), style="bold", markup=False)
    for one in files:
        console.print(f"\n{one['file']}: {one['tool']}", markup=False)
        _table(console, "used", [(u["key"], u["value"], _gave(u)) for u in one["used"]])
        _table(console, "taken as", [(a["fact"], a["value"], a["reason"]) for a in one["assumed"]])
        _table(console, "not used", [(i["key"], i["value"], i["reason"]) for i in one["ignored"]])


def _gave(used: Mapping[str, Any]) -> str:
    """Return what a setting gives; a whole table of them is the shape of the model."""
    return "the model" if isinstance(used["gave"], Mapping) else f"{used['fact']} = {used['gave']}"


def _table(console: Console, title: str, rows: Sequence[tuple[str, Any, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(box=None, show_header=True, header_style="dim", pad_edge=True)
    whole = max(len(key) for key, _, _ in rows) <= console.width // 2
    table.add_column(title, overflow="fold", no_wrap=whole)
    for _ in range(2):
        table.add_column("", overflow="fold")
    for key, value, what in rows:
        shown = str(value)
        table.add_row(
            key, Text(shown if len(shown) <= WIDEST_VALUE else shown[: WIDEST_VALUE - 1] + "…"), Text(what)
        )
    console.print(table)
