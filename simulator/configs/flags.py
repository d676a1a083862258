"""Files of settings on a command line, of ours or other tools: the same for every verb that takes a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from foretrace.simulator.flags import Command

if TYPE_CHECKING:
    from foretrace.simulator.job import Job


def settings_file_options(command: Command) -> Command:
    """Add the argument CONFIG as ``file``, ``--config``, which says the same, and ``--from`` as ``files``."""
    for add in (
        click.option(
            "--from",
            "files",
            multiple=True,
            type=click.Path(),
            help="Another file of settings beside CONFIG, of any tool. Repeatable: files add to each other.",
        ),
        click.option("--config", type=click.Path(dir_okay=False), help="The same as the argument CONFIG."),
        click.argument("file", metavar="[CONFIG]", required=False, type=click.Path()),
    ):
        command = add(command)
    return command


def settings_files(file: str | None, config: str | None, files: Sequence[str]) -> list[str]:
    """Return the files of settings in their order. Raises click.UsageError if CONFIG is given twice."""
    if file is not None and config is not None:
        raise click.UsageError(f"{file} and --config {config}: give one file of settings")
    return [one for one in (file if file is not None else config, *files) if one is not None]


def job_of(paths: Sequence[str], given: Mapping[str, Any]) -> tuple[Job, list[dict[str, Any]]]:
    """Return the job that flags and files of settings describe, and how files of other tools were read."""
    from foretrace.simulator.config import job_from

    if not paths:
        return job_from(given), []
    from foretrace.simulator.configs.read import read_files

    found = read_files(paths, given)
    return job_from(found.settings), found.describe()


def show_read(read: Sequence[Mapping[str, Any]]) -> None:
    """Print how many settings of another tool's files count."""
    for one in read:
        click.echo(
            f"{one['file']} ({one['tool']}): {len(one['used'])} settings used, {len(one['ignored'])} not, "
            f"{len(one['assumed'])} taken as the tool does (foretrace config {one['file']} lists them)"
        )
