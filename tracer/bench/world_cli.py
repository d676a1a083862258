"""``foretrace bench collectives`` and ``bench clock``: the health check of a world before a long run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import click

from foretrace.tracer.errors import RecordError
from foretrace.traces.flags import Number
from foretrace.traces.report.format import format_share

SIZES: Final = "64 KiB,1 MiB,16 MiB"
"""Where latency rules, where bandwidth does, and in between."""

FAR_BELOW: Final = 0.5
"""Share of the promised speed below which a collective is counted: more than any model of it is off."""


PROCESSES: Final = click.option(
    "--processes",
    type=click.IntRange(min=2),
    default=2,
    show_default=True,
    help="Processes to start, if not under torchrun.",
)


@click.command("collectives")
@PROCESSES
@click.option(
    "--backend",
    type=click.Choice(["gloo", "nccl"]),
    help="Backend of the collectives. [default: nccl if each process has a GPU, else gloo]",
)
@click.option(
    "--sizes", default=SIZES, show_default=True, help="Sizes of whole arrays, as nccl-tests counts them."
)
@click.option(
    "--repeats",
    type=click.IntRange(min=3),
    default=7,
    show_default=True,
    help="Timed calls of each collective.",
)
@click.option(
    "--against", metavar="NAME", help="Machine to compare with: a name of the catalogue or a TOML file."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def collectives(
    ctx: click.Context,
    *,
    processes: int,
    backend: str | None,
    sizes: str,
    repeats: int,
    against: str | None,
    as_json: bool,
) -> None:
    """Time collectives, links and ranks of this machine.

    Each is compared with what the machine promises.

    By itself it starts some processes on this machine. Under torchrun it measures its world:

        torchrun --nproc-per-node 8 -m foretrace bench collectives --against dgx-h100

    Exit status 1 if a link or a rank is slow: 1.5 times the median.
    """
    from foretrace.tracer.bench.world import measured
    from foretrace.tracer.bench.world_cli import parse_sizes

    options = {"sizes": parse_sizes(sizes), "repeats": repeats}
    ask = (ctx.obj or {}).get("collectives")
    if against and ask is not None:
        ask(against, processes, ())  # an unknown machine is refused before anything is measured
    found = measured("collectives", processes=processes, backend=backend or "", options=options)
    if found is None:  # another rank tells
        return
    if against and ask is not None:
        for row, time_s in zip(
            found["collectives"], ask(against, found["n_ranks"], found["collectives"]), strict=True
        ):
            row["promised_s"] = time_s
        found["against"] = against
    is_slow = any(row["is_slow"] for row in (*found["links"], *found["ranks"]))
    if as_json:
        click.echo(json.dumps(found))
    else:
        _show(found)
    ctx.exit(1 if is_slow else 0)


@click.command("clock")
@PROCESSES
@click.option(
    "--seconds",
    type=Number(min=0),
    default=2.0,
    show_default=True,
    help="Seconds over which drift is measured.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def clock(ctx: click.Context, *, processes: int, seconds: float, as_json: bool) -> None:
    """Show how well a recording would align the clocks of all ranks.

    By itself it starts some processes on this machine, which share a clock: what it finds is its own error.
    Under torchrun it measures its world. Exit status 1 if an uncertainty is too large to order spans by.
    """
    from foretrace.tracer.bench.world import measured

    found = measured("clock", processes=processes, backend="gloo", options={"pause_s": seconds})
    if found is None:
        return
    if as_json:
        click.echo(json.dumps(found))
    else:
        _show_clock(found)
    ctx.exit(1 if any(row["is_coarse"] for row in found["ranks"]) else 0)


def _show(found: Mapping[str, Any]) -> None:
    """Print a row per collective, then what is slow."""
    click.echo(f"{found['n_ranks']} ranks, {found['backend']}, torch {found['torch']}")
    promised = "against" in found
    head = ["collective", "size", "time µs", "busbw GB/s", *(["promised µs", "reached"] if promised else [])]
    rows = []
    for row in found["collectives"]:
        cells = [row["kind"], _size(row["size_bytes"]), f"{row['time_s'] * 1e6:,.0f}"]
        cells.append(f"{row['busbw_bytes_per_s'] / 1e9:.2f}")
        if promised:
            time_s = row["promised_s"]
            cells += (
                ["-", "-"]
                if time_s is None
                else [f"{time_s * 1e6:,.0f}", format_share(time_s / row["time_s"], ".0f")]
            )
        rows.append(cells)
    _table(head, rows)
    for distance in sorted({link["distance"] for link in found["links"]}):
        rates = sorted(link["bytes_per_s"] / 1e9 for link in found["links"] if link["distance"] == distance)
        click.echo(f"links {distance} apart: {rates[0]:.2f} to {rates[-1]:.2f} GB/s")
    slow = [
        f"slow link: rank {link['sender']} to {link['receiver']}, {link['bytes_per_s'] / 1e9:.2f} GB/s"
        for link in found["links"]
        if link["is_slow"]
    ]
    slow += [
        f"slow rank: {row['rank']} on {row['host']}, {row['probe_s'] * 1e3:.2f} ms for a product"
        for row in found["ranks"]
        if row["is_slow"]
    ]
    click.echo("\n".join(slow) if slow else "no link and no rank is slow")
    if promised:
        known = [row for row in found["collectives"] if row["promised_s"] is not None]
        short = sum(row["promised_s"] < FAR_BELOW * row["time_s"] for row in known)
        click.echo(
            f"{short} of {len(known)} collectives reach less than half of what {found['against']} promises"
        )


def _show_clock(found: Mapping[str, Any]) -> None:
    """Print a row per rank."""
    rows = []
    for row in found["ranks"]:
        verdict = "same clock: this is the error" if row["shares_clock"] else "ok"
        rows.append(
            [
                str(row["rank"]),
                row["host"],
                f"{row['offset_ns'] / 1e3:,.1f}",
                f"{row['uncertainty_ns'] / 1e3:,.1f}",
                f"{row['drift_ppb'] / 1e3:,.2f} +- {row['drift_uncertainty_ppb'] / 1e3:,.2f}",
                "too coarse to order spans" if row["is_coarse"] else verdict,
            ]
        )
    _table(["rank", "host", "offset µs", "uncertainty µs", "drift µs/s", ""], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print *rows* under *head*: words to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for cells in (head, *rows):
        line = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        click.echo("  ".join(line).rstrip())


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB" if size_bytes >= 1 << 20 else f"{size_bytes / 2**10:.1f} KiB"


_UNITS: Final = MappingProxyType(
    {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
)


def parse_sizes(text: str) -> list[int]:
    """Return the bytes of sizes between commas; a bare number is refused.

    Raises:
        RecordError: a size is not one.

    >>> parse_sizes("64 KiB,1MiB")
    [65536, 1048576]
    """
    return [_parsed(part.strip()) for part in text.split(",")]


def _parsed(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]+)", text)
    if found is None or found[2] not in _UNITS or not float(found[1]):
        raise RecordError(f"size {text!r}: a number and one of {', '.join(_UNITS)}, e.g. '16 MiB'")
    return int(float(found[1]) * _UNITS[found[2]])
