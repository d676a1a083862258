"""The verb ``foretrace calibrate``."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from simulator.flags import job_settings_options

if TYPE_CHECKING:
    from simulator.recorded.calibrate import Calibrated


ALIKE: Final = 0.001
"""Difference of two errors of a step that is printed as none."""


@click.command()
@click.argument("run", type=click.Path())
@job_settings_options
@click.option(
    "--undisturbed", is_flag=True, help="Use the faster half of the steps: others used the machine, too."
)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="TOML file to write.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def calibrate(run: str, output: str | None, *, undisturbed: bool, as_json: bool, **flags: Any) -> None:
    """Fit a machine's constants on one recorded run; simulate --calibration takes the file.

    What the job was is taken from RUN; flags say what it does not tell.

        foretrace calibrate runs/real --cluster dgx-h100 -o cal.toml

        foretrace simulate --like runs/real --gpus 512 --calibration cal.toml
    """
    from simulator.recorded.calibrate import calibrate as calibrate_on
    from simulator.recorded.like import job_like
    from traces.store import open_run
    from traces.writer import write_atomically

    opened = open_run(run)
    job = job_like(opened, {name: value for name, value in flags.items() if value is not None})
    console = Console(stderr=True, quiet=as_json)
    with console.status("calibrating") if console.is_terminal else nullcontext():
        found = calibrate_on(opened, job, undisturbed=undisturbed)
    if output is not None:
        write_atomically(Path(output), found.calibration.to_toml())
    if as_json:
        click.echo(json.dumps(found.to_dict() | {"file": output}))
    else:
        _show(found, output)


def _show(found: Calibrated, output: str | None) -> None:
    """Print the factors with their errors, what they do to held-back steps, and what the run cannot say."""
    from topologies.units import format_time

    console, one = Console(highlight=False), found.calibration
    console.print(
        f"[bold]{escape(one.device)}[/] of {escape(one.cluster)}, {one.precision}, on {escape(one.run)}: "
        f"{len(found.fitted)} steps fitted, {len(found.held_back)} held back",
        soft_wrap=True,
    )
    factors = Table(box=None, pad_edge=False, header_style="dim")
    for name, justify in (
        ("times as long as the catalogue says", "left"),
        ("factor", "right"),
        ("+-", "right"),
    ):
        factors.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, factor in one.named():
        factors.add_row(name.replace(".", " "), f"{factor.value:.3f}", f"{factor.error:.3f}")
    console.print(factors)
    errors = Table(box=None, pad_edge=False, header_style="dim")
    errors.add_column("held-back steps", no_wrap=True)
    for name in ("measured", "before", "error", "after", "error"):
        errors.add_column(name, justify="right")
    for row in found.errors:
        cells = [format_time(row.measured_s)]
        for predicted_s in (row.before_s, row.after_s):
            off = f"{predicted_s / row.measured_s - 1:+.1%}" if row.measured_s else ""
            cells += [format_time(predicted_s), off]
        errors.add_row(row.name, *cells, style="bold" if row.name == "step" else "")
    console.print(errors)
    console.print(f"steps vary by {found.spread:.1%} (standard deviation)", style="dim")
    for said in found.left_out:
        console.print(f"[yellow]left out[/] {escape(said)}", soft_wrap=True)
    if not found.is_better:
        console.print(
            f"[yellow]not better than the catalogue[/] on held-back steps{_why_not(found)}", soft_wrap=True
        )
    for said in one.not_identified:
        console.print(f"not identified: {escape(said)}", style="dim", soft_wrap=True)
    for warning in found.warnings:
        console.print(f"[yellow]![/] {escape(warning)}", soft_wrap=True)
    if output is not None:
        console.print(f"{output}  (foretrace simulate --calibration {output})", markup=False, soft_wrap=True)
    else:
        console.print("nothing saved; -o FILE keeps the factors", style="dim")


def _why_not(found: Calibrated) -> str:
    """Return what to make of a calibration that does not help."""
    if not found.calibration.compute and not found.calibration.network:
        return ": no factor is left, and simulate --calibration changes nothing"
    step = found.errors[0]
    if abs(step.off_after - step.off_before) < ALIKE:
        return f": {step.off_after:+.1%} with it and without"
    return f": {step.off_after:+.1%} instead of {step.off_before:+.1%}; without it errors of parts cancel"
