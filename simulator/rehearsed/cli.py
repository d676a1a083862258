"""What ``simulate --rehearsal``, ``rehearse --cluster`` and ``search --rehearsal`` do with a rehearsal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from foretrace.door import json_text
from foretrace.traces.console import telling

if TYPE_CHECKING:
    from foretrace.simulator.simulate import Progress, Simulation
    from foretrace.topologies.cluster import Cluster

TAKEN: Final = ("cluster", "gpus", "placement", "nccl_algo", "nccl_proto", "dp")
"""Settings of a job that a rehearsal leaves open; all others are those of the script."""


def timed(
    path: str,
    settings: Mapping[str, Any],
    tell: Progress | None = None,
    *,
    calibration: str | None = None,
    engine: str = "auto",
    tokens_per_step: int | None = None,
) -> Simulation:
    """Return the simulated run of the rehearsal at *path* on the machine of *settings*.

    Raises click.UsageError if no machine is named, or a setting is the script's to make.
    """
    from foretrace.simulator.rehearsed.run import simulate_rehearsal
    from foretrace.traces.rehearsal import read_rehearsal

    if "cluster" not in settings:
        raise click.UsageError(f"--rehearsal {path}: name a machine, as --cluster dgx-h100")
    if others := [name for name in settings if name not in TAKEN]:
        raise click.UsageError(
            f"--{others[0].replace('_', '-')}: a rehearsal has the layout, model and batch of its script; "
            "rehearse the script again with other arguments"
        )
    # First: what is wrong with the machine is said before the rehearsal is read.
    machine_of(settings["cluster"], calibration)
    like = read_rehearsal(path).name
    return simulate_rehearsal(
        path,
        lambda n_gpus: machine_of(settings["cluster"], calibration, settings.get("gpus", n_gpus), like=like),
        tell,
        placement=settings.get("placement", "packed"),
        nccl_algo=settings.get("nccl_algo", ""),
        nccl_proto=settings.get("nccl_proto", ""),
        engine=engine,
        tokens_per_step=tokens_per_step,
        dp=settings.get("dp"),
    )


def machine_of(name: str, calibration: str | None, n_gpus: int | None = None, *, like: str = "") -> Cluster:
    """Return the machine of that *name*, or file, with the factors of the file *calibration* on it.

    *like*: name of the run whose operators are simulated; factors may hold for those of their own run alone.

    Raises:
        click.UsageError: the calibration is of one model, not of a machine.
        CalibrationError: it cannot be read, or is of another machine.
        TopologyError: there is no such machine.
    """
    from foretrace.simulator.recorded.calibration import read_calibration
    from foretrace.topologies.catalog import load_cluster

    found = load_cluster(name, n_gpus)
    if calibration is None:
        return found
    read = read_calibration(calibration)
    if read.only:
        raise click.UsageError(f"--calibration {calibration}: it is of {read.only}, not of a script")
    return read.applied(found, like=like)


def time_and_show(
    path: str,
    settings: Mapping[str, Any],
    *,
    output: str | None,
    report: str | None,
    calibration: str | None,
    as_json: bool,
) -> dict[str, Any]:
    """Time the rehearsal at *path*, write the run, print it unless *as_json*; return the figures."""
    from foretrace.simulator.render import document, show
    from foretrace.traces.writer import writing

    with telling("simulating", quiet=as_json) as tell:
        simulation = timed(path, settings, tell, calibration=calibration)
    with writing(page_of(simulation, report), output):
        if output is not None:
            simulation.write(output)
    if not as_json:
        show(simulation, output, report)
    # Through JSON: plain types, as the caller prints them beside its own.
    found: dict[str, Any] = json.loads(json.dumps(document(simulation, output, report)))
    return found


def page_of(simulation: Simulation, report: str | None) -> list[tuple[str, str]]:
    """Return the page of *simulation* and where it is to be written, if it is asked for."""
    from foretrace.traces.report.html import report_html

    return [] if report is None else [(report, report_html(simulation.run))]


FOR_MACHINES: Final = ("rehearsal", "cluster", "price", "tokens", "by", "top", "what_if")
"""Flags of ``search`` that choose among machines; all others choose among layouts."""


def search_machines(ctx: click.Context, flags: Mapping[str, Any], *, as_json: bool) -> None:
    """Time a rehearsal on each machine of *flags*, and print which is best.

    Raises click.UsageError if a flag is given that chooses among layouts, which are the script's.
    """
    from foretrace.simulator.rehearsed.machines import AS_IS, LINKS, compared_machines
    from foretrace.simulator.rehearsed.render import show_machines

    given = [
        name for name in flags if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if others := [name for name in given if name not in FOR_MACHINES]:
        raise click.UsageError(
            f"--{others[0].replace('_', '-')}: a rehearsal has the layout, model and batch of its script; "
            "rehearse the script again with other arguments"
        )
    with telling("simulating", quiet=as_json) as tell:
        said = compared_machines(
            flags["rehearsal"],
            flags["cluster"],
            tell,
            links=tuple(LINKS) if flags["what_if"] else (AS_IS,),
            **{name: flags[name] for name in ("price", "tokens", "by")},
        )
    said["machines"] = said["machines"][: flags["top"]]
    if as_json:
        click.echo(json_text(said))
    else:
        show_machines(said)
