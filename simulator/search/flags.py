"""The flags of ``foretrace search``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import click

from foretrace.simulator.flags import dollars, energy_options, tool
from foretrace.simulator.job import OFFLOADS, RECOMPUTES
from foretrace.simulator.optimizers import OPTIMIZERS
from foretrace.simulator.schedules import SCHEDULES
from foretrace.simulator.settings import LISTED, MOST, OUTER
from foretrace.simulator.sharding import SHARDINGS

Command = TypeVar("Command", bound=Callable[..., None])


def several(kind: Callable[[str], Any], allowed: Sequence[Any] = ()) -> Callable[[Any], tuple[Any, ...]]:
    """Return what reads values of *kind* in one word, separated by commas; none means every possible one.

    *kind*: ``int`` or ``str``. *allowed*: the values there are; empty: any, of numbers those from 1 on.
    """

    def read(value: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):  # the default
            return value
        try:
            found = tuple(kind(part.strip()) for part in value.split(","))
        except ValueError:
            raise click.BadParameter(
                f"{value!r}: give whole numbers with commas between them, e.g. 1,2,4"
            ) from None
        for one in found:
            if (allowed and one not in allowed) or (kind is int and not 1 <= one <= MOST):
                known = ", ".join(map(str, allowed)) or f"whole numbers from 1 to {MOST:,}"
                where = f" in {value!r}" if len(found) > 1 else ""
                raise click.BadParameter(f"{one!r}{where}: give {known}")
        return found

    read.__name__ = "list"  # what --help calls the value
    return read


CHOICES: Final[Mapping[str, tuple[type, tuple[str, ...], str]]] = {
    "tp": (int, (), "Tensor-parallel degrees to try. [default: all]"),
    "pp": (int, (), "Pipeline degrees to try. [default: all]"),
    "cp": (
        int,
        (),
        "Context-parallel degrees to try. [default: 1, 2, 4, ... that leave 8,192 tokens per rank]",
    ),
    "ep": (int, (), "Expert-parallel degrees to try. [default: all]"),
    "expert_tp": (int, (), "Ranks to split each expert over. [default: 1, and as many as the layers]"),
    "micro_batch": (int, (), "Micro-batches to try. [default: powers of 2]"),
    "schedule": (str, tuple(SCHEDULES), "Pipeline schedules to try."),
    "virtual_stages": (int, (), "Stages per rank to try. [default: powers of 2]"),
    "sharding": (
        *(str, tuple(SHARDINGS)),
        "Shardings to try. [default: zero1,fsdp; with data parallelism alone ddp,zero2 too]",
    ),
    "recompute": (str, RECOMPUTES, "Recomputations to try. [default: all]"),
    "offload": (str, OFFLOADS, "Offloadings to try. [default: none]"),
    "offload_layers": (int, (), "Numbers of layers with offloaded activations to try. [default: all]"),
}
"""Settings that a search chooses: what values are, which there are (empty: numbers), and the line of help."""

GLOBAL_BATCH: Final = click.option(
    "--global-batch",
    type=click.IntRange(1, MOST),
    help="Sequences per optimizer step. [default: 4 Mi tokens]",
)
SEQ_LEN: Final = click.option(
    "--seq-len",
    default=4096,
    show_default=True,
    type=click.IntRange(1, MOST),
    help="Tokens per sequence.",
)
PRECISION: Final = click.option(
    "--precision",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Number format of compute.",
)
OPTIMIZER: Final = click.option(
    "--optimizer",
    type=click.Choice(list(OPTIMIZERS)),
    default="adamw",
    show_default=True,
    help="What updates weights.",
)
MASTER_WEIGHTS: Final = click.option(
    "--master-weights/--no-master-weights",
    default=True,
    show_default=True,
    help="Keep an fp32 copy of 16-bit parameters.",
)
FRAMEWORK: Final = click.option("--framework", help="Framework whose conventions hold. [default: megatron]")
TOKENS: Final = click.option("--tokens", help="Tokens to train on, e.g. 2T: shows days and dollars.")
PRICE: Final = click.option(
    "--price", help="Price of a GPU, e.g. '2.5 USD/h'. [default: that of the machine, if known]"
)
"""Flags of the question, which `advise` asks as well."""

OF_THE_JOB: Final = ("precision", "optimizer", "master_weights", "framework")
"""Those that are settings of every job."""

AS_SIMULATED: Final = ("images", "image_tokens", "shard_ranks", *OUTER)
"""Settings of every job, too, whose flags are those of ``simulate``."""

OPTIONS: Final = (
    click.option(
        "--rehearsal",
        type=click.Path(),
        help="Rehearsal of a script: find the best machine for it instead of a layout.",
    ),
    click.option("--model", help="Model: a preset such as llama3-70b, or a config.json."),
    click.option(
        "--cluster",
        required=True,
        multiple=True,
        help="Machine: a name or a TOML file. Repeatable: several compete.",
    ),
    click.option("--gpus", type=several(int), help="GPUs to use; several numbers compete, e.g. 256,512."),
    GLOBAL_BATCH,
    SEQ_LEN,
    *(
        click.option(f"--{name.replace('_', '-')}", type=several(kind, known), default=(), help=text)
        for name, (kind, known, text) in CHOICES.items()
    ),
    PRECISION,
    OPTIMIZER,
    MASTER_WEIGHTS,
    FRAMEWORK,
    *(
        click.option(f"--{name.replace('_', '-')}", type=click.IntRange(0, MOST), help=text)
        for rows in LISTED.values()
        for name, (_, text) in rows.items()
        if name in AS_SIMULATED
    ),
    TOKENS,
    PRICE,
    energy_options,
    click.option(
        "--by",
        type=click.Choice(["time", "cost"]),
        default="time",
        show_default=True,
        help="What to rank layouts by.",
    ),
    click.option(
        "--budget",
        type=dollars,
        help="Dollars that --tokens may cost, e.g. 1.5M: only layouts within it are kept.",
    ),
    click.option(
        "--top",
        type=click.IntRange(1, 1000),
        default=10,
        show_default=True,
        help="Layouts to list.",
    ),
    click.option(
        "--why",
        type=click.IntRange(2),
        default=2,
        show_default=True,
        help="Rank of the layout to compare with the best.",
    ),
    click.option(
        "--what-if", is_flag=True, help="Search again with links half as fast, and with twice the batch."
    ),
    click.option(
        "--processes",
        type=click.IntRange(1, 1024),
        help="Processes that search. [default: one for each core, if it pays]",
    ),
    click.option(
        "--to",
        "targets",
        multiple=True,
        type=tool,
        help="Also write the best layout as settings of this tool. Repeatable.",
    ),
    click.option(
        "--report", type=click.Path(dir_okay=False), help="HTML page to write, with all listed layouts."
    ),
    click.option(
        "-o",
        "--output",
        type=click.Path(dir_okay=False),
        help="TOML file to write, with the settings of the best layout.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
)
"""In the order of ``--help``."""


def search_options(command: Command) -> Command:
    """Add the flags to a command."""
    # From the last one on: decorators work from the bottom up.
    for option in reversed(OPTIONS):
        command = option(command)
    return command
