"""The verb ``foretrace simulate``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from foretrace.simulator.configs.flags import job_of, settings_file_options, settings_files, show_read
from foretrace.simulator.flags import JobCommand, job_settings_options
from foretrace.traces.console import telling

if TYPE_CHECKING:
    from foretrace.simulator.job import Job


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
    help="Run directory that foretrace rehearse wrote; its script is timed on --cluster.",
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
    from foretrace.simulator.price import usd_per_gpu_hour
    from foretrace.simulator.rehearsed.cli import timed
    from foretrace.simulator.render import document, show
    from foretrace.simulator.simulate import simulate as run_simulation
    from foretrace.traces.replacing import check_can_write

    usd_per_gpu_hour(price, None)  # a price that is none is refused before anything is simulated
    configs = settings_files(file, config, files)
    _check_sources(configs, like_run, rehearsal)
    if tokens_per_step is not None and rehearsal is None:
        raise click.UsageError(
            "--tokens-per-step is of a rehearsal: give --rehearsal DIR, or a batch instead"
        )
    check_can_write(Path(report) if report else None)
    given = {name: value for name, value in flags.items() if value is not None}
    read: list[dict[str, Any]] = []
    with telling("simulating", quiet=as_json) as tell:
        if rehearsal is not None:
            simulation = timed(
                rehearsal,
                given,
                tell,
                calibration=calibration,
                engine=engine,
                tokens_per_step=tokens_per_step,
            )
        else:
            job, read = _job(configs, like_run, given, calibration)
            simulation = run_simulation(job, tell, expanded=ranks == "all", engine=engine)
    if output is not None:
        simulation.write(output)
    if report is not None:
        from foretrace.traces.report.html import write_report

        write_report(report, simulation.run)
    if as_json:
        click.echo(json.dumps(document(simulation, output, report, price=price) | {"configs": read}))
    else:
        show_read(read)
        show(simulation, output, report, picture=picture, price=price)


def _check_sources(configs: Sequence[str], like_run: str | None, rehearsal: str | None) -> None:
    """Raise click.UsageError if more than one of files, a run and a rehearsal says what to simulate."""
    if like_run is not None and configs:
        raise click.UsageError(f"--like {like_run} and {configs[0]}: give one of them")
    if rehearsal is not None and (configs or like_run):
        raise click.UsageError(f"--rehearsal {rehearsal} and {[*configs, like_run][0]}: give one of them")


def _job(
    configs: Sequence[str], like_run: str | None, given: Mapping[str, Any], calibration: str | None
) -> tuple[Job, list[dict[str, Any]]]:
    """Return the job that a run or files describe, changed by flags, and how files of other tools were read.

    Args:
        configs: files of settings.
        like_run: a run whose job it is, instead.
        given: flags by name.
        calibration: file of what was calibrated of the machine, if any.
    """
    from foretrace.simulator.recorded.calibration import read_calibration
    from foretrace.simulator.recorded.like import job_like
    from foretrace.traces.store import open_run

    job, read = job_of(configs, given) if like_run is None else (job_like(open_run(like_run), given), [])
    return (job if calibration is None else read_calibration(calibration).calibrated(job)), read
