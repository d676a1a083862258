"""The verb ``foretrace calibrate``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foretrace.door import json_text
from foretrace.simulator.flags import JobCommand, job_settings_options
from foretrace.traces.console import stdout, telling
from foretrace.traces.report.format import format_share

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from foretrace.simulator.recorded.calibrate import Calibrated, Error
    from foretrace.simulator.recorded.one_time import OneTime
    from foretrace.topologies.cluster import Cluster


OF_ALL: Final = "near.others.wire"
"""Factor that all communication has, where one was fitted on all of it."""

ALIKE: Final = 0.001
"""Difference of two errors of a step that is printed as none."""


@click.command(cls=JobCommand)
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=click.Path())
@job_settings_options
@click.option(
    "--step-time",
    "step_times",
    metavar="TIME",
    multiple=True,
    help="Time of a measured step, e.g. 3.21s. RUN is then a file of settings, or omitted for flags. "
    "Repeatable, once for each of several files.",
)
@click.option(
    "--undisturbed",
    is_flag=True,
    help="Use only the faster half of the steps: others used the machine too.",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="TOML file to write.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def calibrate(
    runs: tuple[str, ...],
    step_times: tuple[str, ...],
    output: str | None,
    *,
    undisturbed: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Fit a machine's constants to one recorded run; simulate --calibration takes the file.

    What the job was is taken from RUN; flags say what it does not tell.

        foretrace calibrate runs/real --cluster dgx-h100 -o cal.toml

        foretrace simulate --like runs/real --gpus 512 --calibration cal.toml

    Where there is no recording, the time of a step out of a log will do for layouts of the same model:

        foretrace calibrate run.toml --step-time 3.21s -o cal.toml

        foretrace simulate run.toml --tp 4 --calibration cal.toml

    Two or three runs that differ in layout or micro-batch tell computing from communicating:

        foretrace calibrate a.toml b.toml --step-time 3.21s --step-time 2.9s -o cal.toml
    """
    from foretrace.traces.replacing import check_can_write
    from foretrace.traces.writer import write_atomically

    check_can_write(Path(output) if output is not None else None)
    given = {name: value for name, value in flags.items() if value is not None}
    found: Calibrated | OneTime
    if step_times:
        if undisturbed:
            raise click.UsageError("--undisturbed chooses steps of a recording; --step-time is one number")
        found = _on_times(runs, step_times, given)
    elif not runs:
        raise click.UsageError("RUN or --step-time: a recording, or the time of a step that was measured")
    elif len(runs) > 1:
        raise click.UsageError(f"{len(runs)} runs: one recording, or files with a --step-time for each")
    else:
        found = _on_run(runs[0], given, undisturbed=undisturbed, quiet=as_json)
    if output is not None:
        write_atomically(Path(output), found.calibration.to_toml())
    if as_json:
        click.echo(json_text(found.to_dict() | {"file": output}))
        return
    from foretrace.simulator.recorded.calibrate import Calibrated

    console = stdout()
    if isinstance(found, Calibrated):
        _show(found, console)
    else:
        _show_on_time(found, console)
    if output is not None:
        console.print(f"{output}  (foretrace simulate --calibration {output})", markup=False, soft_wrap=True)
    else:
        console.print("nothing saved; -o FILE keeps the factors", style="dim")


def _on_run(run: str, given: dict[str, Any], *, undisturbed: bool, quiet: bool) -> Calibrated:
    """Calibrate on a recording, or on a trace of another tool that says its operators."""
    from foretrace.simulator.recorded.calibrate import calibrate as calibrate_on
    from foretrace.simulator.recorded.like import job_like
    from foretrace.simulator.recorded.operators import calibrate_traced
    from foretrace.traces.store import open_run

    opened = open_run(run)
    if opened.info.origin == "ingested":
        with telling("calibrating", quiet=quiet):
            return calibrate_traced(opened, traced_machine(run, given))
    job = job_like(opened, given)
    with telling("calibrating", quiet=quiet):
        return calibrate_on(opened, job, undisturbed=undisturbed)


def traced_machine(run: str, given: Mapping[str, Any]) -> Callable[[int], Cluster]:
    """Return the machine of the trace *run* by the number of its GPUs.

    Raises click.UsageError if *given* names none, or a setting that a trace has already.
    """
    from foretrace.simulator.rehearsed.cli import machine_of

    if "cluster" not in given:
        raise click.UsageError(f"{run}: a trace does not say its machine, name it, as --cluster dgx-h100")
    if others := sorted(set(given) - {"cluster", "gpus"}):
        flag = others[0].replace("_", "-")
        raise click.UsageError(f"--{flag}: the operators of a trace say what ran; only --cluster is open")
    return lambda n_gpus: machine_of(given["cluster"], None, given.get("gpus", n_gpus))


def _on_times(files: Sequence[str], texts: Sequence[str], given: dict[str, Any]) -> OneTime:
    """Calibrate the job of each of *files* and flags on a measured time of its step."""
    from foretrace.simulator.config import job_from
    from foretrace.simulator.configs.read import read_files
    from foretrace.simulator.recorded.one_time import calibrate_on_times

    settings = [read_files([file], given).settings for file in files] or [given]
    return calibrate_on_times([job_from(one) for one in settings], [_seconds(text) for text in texts])


def _seconds(text: str) -> float:
    from foretrace.simulator.errors import CalibrationError
    from foretrace.topologies.errors import TopologyError
    from foretrace.topologies.units import parse_time

    try:
        return float(text)
    except ValueError:
        try:
            return parse_time(text)
        except TopologyError:
            raise CalibrationError(f"--step-time {text!r}: seconds, or with a unit: 3.21s, 870ms") from None


def _show_on_time(found: OneTime, console: Console) -> None:
    """Print the two factors, what they do to the step that was measured, and what they hold for."""
    from foretrace.topologies.units import format_time

    one = found.calibration
    console.print(
        f"[bold]{escape(one.only)}[/] on {escape(one.device)} of {escape(one.cluster)}: {one.run}",
        soft_wrap=True,
    )
    factors = _factors()
    for name, factor in (("computing", one.compute["products"]), ("communicating", one.network[OF_ALL])):
        factors.add_row(name, f"{factor.value:.3f}", f"{factor.error:.3f}")
    console.print(factors)
    for run in found.runs:
        of = f"{format_time(run.measured_s)}, " if len(found.runs) > 1 else ""
        for when, predicted_s in (("before", run.before_s), ("after", run.after_s)):
            off = format_share(predicted_s / run.measured_s - 1, "+.1f")
            console.print(f"{of}{when}: {format_time(predicted_s)} predicted, {off}")
    for said in one.not_identified:
        console.print(f"not told apart: {said}", style="dim", soft_wrap=True)
    console.print(
        "part of any one time is its run's own: only what runs of a model share is taken over",
        style="dim",
        soft_wrap=True,
    )
    if found.is_unusual:
        console.print(
            "[yellow]![/] more than twice as far off as usual: no more than that is taken over. Are these "
            "the settings of the run, and is the time a mean of steps after warm-up?",
            soft_wrap=True,
        )


def _factors() -> Table:
    """Return a table of factors without rows."""
    factors = Table(box=None, pad_edge=False, header_style="dim")
    for name, justify in (
        ("times as long as the catalogue says", "left"),
        ("factor", "right"),
        ("+-", "right"),
    ):
        factors.add_column(name, justify=justify)  # type: ignore[arg-type]
    return factors


def _show(found: Calibrated, console: Console) -> None:
    """Print the factors with their errors, what they do to held-back steps, and what the run cannot say."""
    one = found.calibration
    how = (
        f"the operators of {len(found.fitted)} step{'s' if len(found.fitted) != 1 else ''}"
        if found.operators
        else f"{len(found.fitted)} steps fitted, {len(found.held_back)} held back"
    )
    console.print(
        f"[bold]{escape(one.device)}[/] of {escape(one.cluster)}, {one.precision}, on {escape(one.run)}: "
        f"{how}",
        soft_wrap=True,
    )
    factors = _factors()
    for name, factor in one.named():
        factors.add_row(name.replace(".", " "), f"{factor.value:.3f}", f"{factor.error:.3f}")
    console.print(factors)
    if found.operators:
        console.print(errors_table("operators held back, the worse half", found.operators))
    console.print(errors_table("the run" if found.operators else "held-back steps", found.errors))
    if not found.operators:
        console.print(f"steps vary by {format_share(found.spread)} (standard deviation)", style="dim")
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


def errors_table(title: str, rows: Sequence[Error], *, only_after: bool = False) -> Table:
    """Return a table of what was measured and predicted, before and after calibration, or only after it."""
    from foretrace.topologies.units import format_time

    errors = Table(box=None, pad_edge=False, header_style="dim")
    errors.add_column(title, no_wrap=True)
    names = (
        ("measured", "predicted", "error")
        if only_after
        else ("measured", "before", "error", "after", "error")
    )
    for name in names:
        errors.add_column(name, justify="right")
    for row in rows:
        cells = [format_time(row.measured_s)]
        for predicted_s in (row.after_s,) if only_after else (row.before_s, row.after_s):
            off = format_share(predicted_s / row.measured_s - 1, "+.1f") if row.measured_s else ""
            cells += [format_time(predicted_s), off]
        errors.add_row(row.name, *cells, style="bold" if row.name == "step" else "")
    return errors


def _why_not(found: Calibrated) -> str:
    """Return what to make of a calibration that does not help."""
    if not found.calibration.compute and not found.calibration.network:
        return ": no factor is left, and simulate --calibration changes nothing"
    step = found.errors[0]
    if abs(step.off_after - step.off_before) < ALIKE:
        return f": {format_share(step.off_after, '+.1f')} with it and without"
    after, before = (format_share(off, "+.1f") for off in (step.off_after, step.off_before))
    return f": {after} instead of {before}; without it errors of parts cancel"
