"""The verb ``foretrace simulate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from foretrace.door import json_text
from foretrace.simulator.configs.flags import job_of, settings_file_options, settings_files, show_read
from foretrace.simulator.flags import JobCommand, energy_options, job_settings_options
from foretrace.traces.console import stdout, telling

if TYPE_CHECKING:
    from foretrace.simulator.job import Job
    from foretrace.simulator.recorded.calibrate import Error
    from foretrace.simulator.simulate import Simulation
    from foretrace.simulator.validate.runs import Nearest


@click.command(cls=JobCommand)
@job_settings_options
@settings_file_options
@click.option(
    "--like",
    "like_run",
    type=click.Path(),
    help="Run whose model, layout, batch and machine are taken; flags change single settings.",
)
@click.option(
    "--rehearsal",
    type=click.Path(),
    help="Run directory that foretrace rehearse, or ingest of a graph, wrote; it is timed on --cluster.",
)
@click.option(
    "--tokens-per-step",
    type=click.IntRange(min=1),
    help="Tokens of a step over all ranks, where --rehearsal does not tell them.",
)
@click.option(
    "--calibration",
    type=click.Path(dir_okay=False),
    help="File of factors for the machine that foretrace calibrate wrote.",
)
@click.option(
    "--ranks",
    type=click.Choice(["folded", "all"]),
    default="folded",
    help="Ranks to keep: all, or folded: one of each pipeline stage, for all that do the same. "
    "[default: folded]",
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "event", "compiled", "contended", "contended-compiled"]),
    default="auto",
    help="What runs the step: event (SimPy) and compiled (numba) give the same timeline, auto takes the "
    "faster one. contended, on either: transfers on the same links slow each other down. [default: auto]",
)
@click.option("-o", "--output", type=click.Path(), help="Run directory to write. [default: none]")
@click.option("--report", type=click.Path(dir_okay=False), help="HTML page to write.")
@click.option("--price", help="Price of a GPU, e.g. '2.5 USD/h'. [default: that of the machine, if known]")
@energy_options
@click.option(
    "--measured",
    type=click.Path(dir_okay=False),
    help="Table of measured runs, as validate steps takes it: the nearest one is shown beside.",
)
@click.option(
    "--picture/--no-picture", default=None, help="Draw the schedule as text. [default: in a terminal]"
)
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
    tokens_per_step: int | None,
    calibration: str | None,
    price: str | None,
    pue: float | None,
    grid: str | None,
    measured: str | None,
    picture: bool | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Predict one training step of a layout: time, memory, timeline.

    Settings are given by flags, or by a CONFIG that flags override: a run.toml, or a file of another tool
    (DeepSpeed, Accelerate, Megatron-LM, torchtitan, nanotron; foretrace config shows how it is read).

        foretrace simulate --model llama3-70b --cluster dgx-h100 --gpus 512 --tp 8 --pp 4
        --global-batch 1024 --seq-len 8192 -o runs/llama

        foretrace simulate run.toml --tp 4

        foretrace simulate ds_config.json --model llama2-7b --cluster dgx-a100 --gpus 8

        foretrace simulate --like runs/recorded --cluster dgx-h100 --gpus 512

        foretrace simulate --rehearsal runs/script --cluster dgx-h100
    """
    from foretrace.simulator.energy import supply
    from foretrace.simulator.price import usd_per_gpu_hour
    from foretrace.simulator.recorded.cli import errors_table
    from foretrace.simulator.recorded.operators import forward_only
    from foretrace.simulator.rehearsed.cli import page_of, timed
    from foretrace.simulator.render import document, show
    from foretrace.simulator.simulate import simulate as run_simulation
    from foretrace.traces.replacing import check_can_write
    from foretrace.traces.writer import writing

    usd_per_gpu_hour(price, None)  # a price that is none is refused before anything is simulated
    power = supply(pue, grid)
    configs = settings_files(file, config, files)
    _check_sources(configs, like_run, rehearsal)
    # Before the work: a page that cannot be written is said at once, not after minutes.
    check_can_write(Path(report) if report else None, folder=Path(output) if output else None)
    given = {name: value for name, value in flags.items() if value is not None}
    read: list[dict[str, Any]] = []
    beside = None
    with telling("simulating", quiet=as_json) as tell:
        # A trace of which only the machine changes is timed operator by operator, as a rehearsal is.
        script = rehearsal if rehearsal is not None else _as_traced(like_run, given)
        if tokens_per_step is not None and script is None:
            raise click.UsageError(
                "--tokens-per-step is of a rehearsal: give --rehearsal DIR, or a batch instead"
            )
        if script is not None:
            if measured is not None:
                raise click.UsageError("--measured is for jobs that settings describe, not for scripts")
            simulation = timed(
                script,
                given,
                tell,
                calibration=calibration,
                engine=engine,
                tokens_per_step=tokens_per_step,
            )
        else:
            job, read = _job(configs, like_run, given, calibration)
            beside = _nearest(job, measured)
            simulation = run_simulation(job, tell, expanded=ranks == "all", engine=engine)
            if like_run is not None and (said := forward_only(like_run)):
                info = replace(simulation.info, warnings=(*simulation.info.warnings, said))
                simulation = replace(simulation, info=info)
    with writing(page_of(simulation, report), output):
        if output is not None:
            simulation.write(output)
    errors = _against(like_run, given, calibration, simulation) if like_run and script else ()
    if as_json:
        found = document(simulation, output, report, price=price, power=power) | {"configs": read}
        found |= {"nearest": asdict(beside)} if beside else {}
        click.echo(json_text(found | ({"against": [one.to_dict() for one in errors]} if errors else {})))
    else:
        show_read(read)
        show(simulation, output, report, picture=picture, price=price, power=power)
        if beside:
            click.echo(beside.words)
        if errors:
            stdout().print(errors_table("against the trace", errors, only_after=True))


def _nearest(job: Job, table: str | None) -> Nearest | None:
    """Return the measured run of *table* that is nearest to *job*, if there is a table."""
    if table is None:
        return None
    from foretrace.simulator.validate.runs import nearest

    return nearest(job, table)


def _as_traced(like_run: str | None, given: Mapping[str, Any]) -> str | None:
    """Return the trace that is simulated operator by operator: one of which only the machine is changed."""
    from foretrace.simulator.recorded.operators import is_traced
    from foretrace.simulator.rehearsed.cli import TAKEN
    from foretrace.traces.store import open_run

    if not like_run or set(given) - set(TAKEN) or not is_traced(like_run):
        return None
    # more replicas of one rank reduce gradients, which its trace has nothing of: those of a model do
    return None if "dp" in given and open_run(like_run).info.world_size == 1 else like_run


def _against(
    like_run: str, given: Mapping[str, Any], calibration: str | None, simulation: Simulation
) -> tuple[Error, ...]:
    """Return how far off a simulated trace is, if the machine is that of the trace; else nothing."""
    from foretrace.simulator.recorded.operators import errors_of, is_same_device
    from foretrace.simulator.rehearsed.cli import machine_of
    from foretrace.traces.store import open_run

    # Other replicas than those that ran: the trace measured no such step.
    if "dp" in given:
        return ()
    name, n_gpus = open_run(like_run).info.name, given.get("gpus", simulation.info.world_size)
    machine = machine_of(given["cluster"], calibration, n_gpus, like=name)
    if calibration is None and not is_same_device(open_run(like_run), machine):
        return ()
    return errors_of(like_run, machine, simulation)


def _check_sources(configs: Sequence[str], like_run: str | None, rehearsal: str | None) -> None:
    """Raise click.UsageError if more than one of files, a run and a rehearsal says what to simulate."""
    flags = {"--rehearsal": rehearsal, "--like": like_run}
    given = [*(f"{flag} {path}" for flag, path in flags.items() if path is not None), *configs[:1]]
    if len(given) > 1:
        raise click.UsageError(f"{given[0]} and {given[1]}: give one of them")


def _job(
    configs: Sequence[str], like_run: str | None, given: Mapping[str, Any], calibration: str | None
) -> tuple[Job, list[dict[str, Any]]]:
    """Return the job that a run or files describe, changed by flags, and how files of other tools were read.

    *calibration*: file of what was calibrated of the machine, if any.
    """
    from foretrace.simulator.recorded.calibration import read_calibration
    from foretrace.simulator.recorded.like import job_like
    from foretrace.traces.store import open_run

    job, read = job_of(configs, given) if like_run is None else (job_like(open_run(like_run), given), [])
    return (job if calibration is None else read_calibration(calibration).calibrated(job)), read
