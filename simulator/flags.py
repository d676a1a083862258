"""The settings of a job as flags of a command line: the same for every verb that makes one."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from foretrace.simulator.settings import LISTED

Command = TypeVar("Command", bound=Callable[..., None])


def tool(value: str) -> str:
    """Return *value*, the name of a tool that jobs are written for; the list is only loaded for that.

    Raises click.BadParameter if no tool has that name.
    """
    from foretrace.simulator.configs.write import TARGETS

    if value not in TARGETS:
        raise click.BadParameter(f"{value!r}: one of {', '.join(TARGETS)}")
    return value


def dollars(value: str) -> float:
    """Return an amount of US dollars that a person writes: ``200000``, ``250k``, ``1.5M USD``.

    Raises click.BadParameter if *value* is no amount.
    """
    from foretrace.topologies.errors import UnitError
    from foretrace.topologies.units import parse_usd

    try:
        return parse_usd(value)
    except UnitError as error:
        raise click.BadParameter(str(error)) from None


def energy_options(command: Command) -> Command:
    """Add the flags that say where the power comes from; None where they are not given."""
    grid = "CO2 of a kWh, e.g. '400 gCO2/kWh'. [default: the world's average]"
    command = click.option("--grid", help=grid)(command)
    pue = "Power of the building over that of its machines, e.g. 1.2. [default: 1, machines alone]"
    return click.option("--pue", type=float, help=pue)(command)


_CONVENTIONS: Final = "Framework and network"
"""Heading of ``--set``, the flag of what is not a setting of its own."""


class JobCommand(click.Command):
    """A command with a flag for every setting of a job: its own options first, those below headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options below the headings of ``simulator.settings.LISTED``."""
        headings = {flag_of(name): heading for heading, rows in LISTED.items() for name in rows}
        headings["--set"] = _CONVENTIONS
        # Its own options first, then headings in their order.
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], **{heading: [] for heading in LISTED}}
        for option in self.get_params(ctx):
            if isinstance(option, click.Option) and (record := option.get_help_record(ctx)) is not None:
                sections[headings.get(option.opts[0], "Options")].append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def job_settings_options(command: Command) -> Command:
    """Add a flag for every setting of a job; None where it is not given."""
    command = click.option(
        "--set",
        "conventions",
        multiple=True,
        metavar="KEY=VALUE",
        callback=_conventions,
        help="Set one convention of the framework, e.g. overlap_grad_reduce=false. Repeatable.",
    )(command)
    # Decorators work from the bottom up: the last option is added first, for --help to list it last.
    for name, (kind, text) in reversed([row for rows in LISTED.values() for row in rows.items()]):
        flag = flag_of(name)
        if kind == "bool":
            option = click.option(f"{flag}/--no-{flag[2:]}", default=None, help=text)
        else:  # a list is one word, which simulator.settings.checked takes apart
            option = click.option(flag, type={"int": int, "float": float}.get(kind, str), help=text)
        command = option(command)
    return command


def flag_of(name: str) -> str:
    """Return a setting as it is typed: ``--global-batch``."""
    return f"--{name.replace('_', '-')}"


def _conventions(
    context: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> dict[str, Any] | None:
    """Return conventions by name: values as TOML writes them, without quotes for words."""
    del context
    found: dict[str, Any] = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not equals or not key:
            raise click.BadParameter(
                f"{one!r}: write KEY=VALUE, e.g. overlap_grad_reduce=false", param=parameter
            )
        try:
            # As a value of TOML, whose types are those of a profile; a bare word is none, and stays text.
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        found[key.strip()] = tuple(parsed) if isinstance(parsed, list) else parsed
    return found or None
