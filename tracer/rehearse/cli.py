"""The verb ``foretrace rehearse``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from foretrace.door import MOST_RANKS, json_text
from foretrace.traces.batch import batch_in, told
from foretrace.traces.console import telling
from foretrace.traces.rehearsal import Rehearsal
from foretrace.traces.replacing import check_can_write
from foretrace.traces.report.format import format_si

ON_CPU: Final = (
    "the script puts nothing on a GPU, so a real run of it trains on CPUs: time it on a CPU machine "
    "(foretrace topology detect -o here.toml, then --cluster here.toml); on any other the times are those of "
    "its GPUs"
)
"""What is said of such a script before it is timed."""

VERIFIED: Final = ("every_microbatch", "expert_load", "has_gpu", "stub")
"""Settings that --verify takes, too."""

HEADINGS: Final = ("", "recorded", "rehearsed", "")
"""Of the columns of what --verify compares."""

NOTABLE: Final = 0.01
"""Share of what is allocated from which what is kept on the host is said: a batch and a counter are not."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--world-size", type=click.IntRange(1, MOST_RANKS), help="World size of the job to rehearse.")
@click.option(
    "--verify",
    "n_verified",
    type=click.IntRange(min=1),
    metavar="N",
    help="Record the command, a small one, on N processes of this machine, rehearse the same, and compare "
    "calls, bytes, rows, parameters and steps. The exit status is 1 if something differs.",
)
@click.option(
    "--ranks",
    default="auto",
    show_default=True,
    help="Ranks to run, e.g. 0,7,64-71; auto: one of each class of ranks that behave alike.",
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=1, show_default=True, help="Optimizer steps to keep."
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Optimizer steps to run before those kept.",
)
@click.option(
    "--ranks-per-node",
    "local_world_size",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Ranks per node: LOCAL_WORLD_SIZE, as the script sees it.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=0, max=2),
    default=1,
    show_default=True,
    help="Represented ranks to run as well, to check them against the ranks that represent them.",
)
@click.option(
    "--every-microbatch",
    is_flag=True,
    help="Run every micro-batch of a pipeline, including those that repeat others.",
)
@click.option(
    "--expert-load",
    default="1.0",
    show_default=True,
    help="Tokens of experts: a rank's over an even share (1.5: the fullest), zipf:0.5, or a list or file of "
    "shares per expert.",
)
@click.option(
    "--tokens-per-step",
    type=click.IntRange(min=1),
    help="Tokens of a step over all ranks, where the script does not tell them.",
)
@click.option(
    "--without-gpu",
    "has_gpu",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Tell the script that there is no GPU, to compare with a recording on CPUs.",
)
@click.option(
    "--stub",
    type=click.Path(dir_okay=False),
    default="",
    help="Python file to run before the script, e.g. to stand in for a package.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Run directory to write. [default: runs/SCRIPT-1]"
)
@click.option("--cluster", help="Machine to time the rehearsal on, as simulate --rehearsal does.")
@click.option(
    "--calibration",
    type=click.Path(dir_okay=False),
    help="Factors that foretrace calibrate wrote for that machine; needs --cluster.",
)
@click.option("--report", type=click.Path(dir_okay=False), help="HTML page to write; needs --cluster.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def rehearse(
    context: click.Context,
    /,
    *,
    world_size: int | None,
    n_verified: int | None,
    ranks: str,
    output: Path | None,
    cluster: str | None,
    calibration: str | None,
    report: str | None,
    as_json: bool,
    command: tuple[str, ...],
    **settings: Any,
) -> None:
    """Run a training script as ranks of a cluster you do not have: no GPU, no network, no tensor memory.

    COMMAND is what you would run, after --; a launcher in it, such as torchrun, is not run:

        foretrace rehearse --world-size 512 -o runs/x -- train.py --lr 3e-4

        foretrace simulate --rehearsal runs/x --cluster dgx-h100

    --cluster does both in one go, and makes the directory a run like any other. To compare a rehearsal with a
    real run of the same small command:

        foretrace rehearse --verify 4 -- torchrun --nproc-per-node 4 train.py --layers 2
    """
    # The root command hands over what times a rehearsal: the tracer does not import the simulator.
    machines: Mapping[str, Callable[..., Any]] | None = context.obj
    if n_verified is not None:
        _check_alone(context)
        taken = {name: settings[name] for name in VERIFIED}
        context.exit(_verify(n_verified, command, output, as_json=as_json, **taken))
    if world_size is None:
        raise click.UsageError("--world-size N: how many ranks the job has; or --verify N for a small one")
    from foretrace.tracer.rehearse.rehearsing import Asked, free_directory, rehearse, wanted_ranks

    _check_time(cluster, calibration, report, output)
    if cluster is not None and machines is not None:
        # Before the script runs: the machine may be too small for its ranks.
        machines["check"](cluster, calibration, world_size)
    chosen = wanted_ranks(ranks, world_size)
    asked = Asked(command=command, world_size=world_size, ranks=chosen, **settings)
    path = free_directory(command) if output is None else output
    with telling("starting", quiet=as_json) as tell:
        found = rehearse(asked, path, tell)
    if not as_json:
        _show(found, path, is_timed=cluster is not None)
    figures: dict[str, Any] = {}
    if cluster is not None and machines is not None:
        wanted = {"output": str(path), "report": report, "calibration": calibration, "as_json": as_json}
        figures = machines["time"](str(path), {"cluster": cluster}, **wanted)
    if as_json:
        click.echo(json_text({**_document(found, path, is_timed=cluster is not None), **figures}))


def _check_alone(context: click.Context) -> None:
    """Raise UsageError if a flag is given that --verify does not take."""
    for parameter in context.command.params:
        name = parameter.name or ""
        is_given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if is_given and name not in {*VERIFIED, "n_verified", "output", "as_json", "command"}:
            raise click.UsageError(
                f"{parameter.opts[0]}: --verify compares all ranks and steps, without times"
            )


def _verify(n: int, command: tuple[str, ...], output: Path | None, *, as_json: bool, **settings: Any) -> int:
    """Verify *command* on *n* processes and say what agrees; return the exit status."""
    from foretrace.tracer.rehearse.rehearsing import Asked, free_directory
    from foretrace.tracer.rehearse.verify import verify

    path = free_directory(command) if output is None else output
    with telling("recording", quiet=as_json) as tell:
        found = verify(Asked(command=command, world_size=n, **settings), path, tell)
    if as_json:
        click.echo(json_text(found.to_dict()))
        return 0 if found.agrees else 1
    words = {True: "agrees", False: "DIFFERS", None: "not compared: unknown"}
    rows = [HEADINGS, *((*one[:3], words[one.agrees]) for one in found.rows)]
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(row[at].rjust(widths[at]) for at in (1, 2)), row[3]]
        click.echo("  ".join(cells).rstrip())
    click.echo(found.communicated.words("the recording", "the rehearsal"))
    click.echo(f"{path}: recorded, rehearsed")
    return 0 if found.agrees else 1


def _check_time(
    cluster: str | None, calibration: str | None, report: str | None, output: Path | None
) -> None:
    """Raise UsageError, before the script runs, if what is asked of its time cannot be had."""
    if report is not None and cluster is None:
        raise click.UsageError(
            f"--report {report}: a page shows times; name a machine, as --cluster dgx-h100"
        )
    check_can_write(Path(report) if report else None, folder=output)
    if calibration is not None and cluster is None:
        raise click.UsageError(
            f"--calibration {calibration}: it is of a machine; name that, as --cluster here.toml"
        )


def _document(found: Rehearsal, path: Path, *, is_timed: bool) -> dict[str, Any]:
    """Return what ``--json`` prints of a rehearsal."""
    return {
        "rehearsal": str(path),
        "world_size": found.world_size,
        "ranks": list(found.ranks),
        "layout": found.layout.degrees if found.layout else None,
        "job": dict(found.job),
        **told(found.job),
        "memory": dict(found.memory),
        "stated": list(found.stated),
        "notes": list(_noted(found, is_timed=is_timed)),
        "checked": list(found.checked),
        "findings": list(found.job.get("findings", [])),
    }


def layout_words(found: Rehearsal) -> str:
    """Return the degrees of a rehearsed layout, or its first rank's groups if its axes come otherwise."""
    if found.layout is not None:
        return " ".join(f"{axis}{n}" for axis, n in found.layout.degrees.items() if n > 1) or "layout unknown"
    own = [group for group in found.groups if found.ranks[0] in group.ranks and group.axis != "world"]
    sizes: dict[str, int] = {}
    for group in own:
        sizes[group.axis] = max(sizes.get(group.axis, 1), len(group.ranks))
    words = " ".join(f"{axis}{n}" for axis, n in sizes.items() if n > 1)
    return f"groups {words}, with axes in an order of its own" if words else "layout unknown"


def steps_words(found: Rehearsal) -> str:
    """Return which steps of the script were rehearsed, counted from 0, and the class of what they train."""
    first, n_steps = found.job["first_step"], found.job["steps"]
    steps = f"step {first}" if n_steps == 1 else f"steps {first} to {first + n_steps - 1}"
    return f"{steps} of the script" + (f", training {found.model['name']}" if found.model else "")


def _noted(found: Rehearsal, *, is_timed: bool) -> tuple[str, ...]:
    """Return what is noted of a rehearsal; who times it says for which machine the times are."""
    on_cpu = found.job.get("device") == "cpu" and not is_timed
    return (*found.notes, ON_CPU) if on_cpu else found.notes


def _show(found: Rehearsal, path: Path, *, is_timed: bool) -> None:
    """Print what was rehearsed, and everything in which it differs from the run that it stands for."""
    ranks = ", ".join(map(str, found.ranks[:8])) + (", ..." if len(found.ranks) > 8 else "")
    click.echo(f"{path}: rank {ranks} of {found.world_size}, {layout_words(found)}")
    click.echo(f"  {steps_words(found)}")
    click.echo(f"  {batch_in(found.job).words}")
    for rank, memory in list(found.memory.items())[:8]:
        largest = sorted(memory["bytes"].items(), key=lambda item: -item[1])[:3]
        words = ", ".join(f"{name} {format_si(size, 'B')}" for name, size in largest)
        kept = memory["host"]["peak_bytes"] if "host" in memory else 0
        host = f", and {format_si(kept, 'B')} on the host" if kept >= NOTABLE * memory["peak_bytes"] else ""
        reserved = memory.get("reserved_bytes")
        cached = f", {format_si(reserved, 'B')} reserved" if reserved else ""
        click.echo(
            f"  rank {rank}: {format_si(memory['peak_bytes'], 'B')} allocated at most{cached} ({words}){host}"
        )
    for finding in found.job.get("findings", []):
        click.echo(f"  advice: {finding['words']}")
    for line in (*found.checked, *_noted(found, is_timed=is_timed)):
        click.echo(f"  {line}")
    if found.stated:
        click.echo("  the script read numbers that a rehearsal does not compute, and was told:")
        for line in found.stated[:12]:
            click.echo(f"    {line}")
        if len(found.stated) > 12:
            click.echo(f"    and {len(found.stated) - 12} more in {path}/rehearsal/rehearsal.json")
    if not is_timed:
        click.echo(f"next: foretrace simulate --rehearsal {path} --cluster dgx-h100")
