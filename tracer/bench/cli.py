"""``foretrace bench``: measure the parts of this machine, and hold them against what describes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tracer.bench.world_cli import clock, collectives
from tracer.errors import RecordError

if TYPE_CHECKING:
    from tracer.bench.cases import Kernel
    from tracer.bench.kernels import Bench


WIDTH: Final = 140
"""Columns of the table of kernels, wherever it goes."""


@click.group()
def bench() -> None:
    """Measure this machine's parts, and hold them against what its description promises."""


bench.add_command(collectives)
bench.add_command(clock)


@bench.command("kernels")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Default: a GPU if there is one.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="Default: bf16, on a CPU fp32.")
@click.option(
    "--against",
    metavar="NAME",
    help="Device or machine that promises: a name of the catalogue or a TOML file; by default what the GPU "
    "calls itself.",
)
@click.option(
    "--lasting",
    "lasting_s",
    type=click.FloatRange(min=0),
    help="Seconds of lasting load per large product, 0 for bursts only.  [default: 1 on a GPU, 0 on a CPU]",
)
@click.option(
    "--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of a CPU that compute."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a table, kernels.csv.")
@click.option("--device-file", type=click.Path(path_type=Path), help="Write the device as a TOML file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.pass_context
def kernels(
    ctx: click.Context,
    *,
    device: str | None,
    dtype: str | None,
    against: str | None,
    lasting_s: float | None,
    threads: int,
    output: Path | None,
    device_file: Path | None,
    as_json: bool,
) -> None:
    """Time products in three layouts, attention, norm, optimizer, memory and launches on this machine.

    For example: foretrace bench kernels --against h100-sxm -o kernels.csv

    The table can be read by `foretrace validate kernels`. On a GPU some 60 seconds, on a CPU 20.
    """
    from tracer.bench.device import to_toml
    from tracer.bench.kernels import bench as measure
    from tracer.bench.kernels import write_table

    device = device or _default_device()
    if against:
        _promised(ctx, against, ())  # an unknown device is refused before anything is measured
    measured = measure(
        device,
        dtype or ("bf16" if device == "cuda" else "fp32"),
        lasting_s=(1.0 if device == "cuda" else 0.0) if lasting_s is None else lasting_s,
        threads=threads,
        tell=_tell,
    )
    _tell("")
    if output:
        write_table(measured, output)
    if device_file:
        device_file.parent.mkdir(parents=True, exist_ok=True)
        device_file.write_text(to_toml(measured), encoding="utf-8")
    promised = _promised(ctx, against or measured.hardware, measured.kernels, is_asked=bool(against))
    if as_json:
        click.echo(json.dumps(_document(measured, promised, output, device_file)))
        return
    _show(measured, promised)
    on = "" if device == "cuda" else f" --device {device_file or 'DEVICE'}"
    if output:
        click.echo(f"written to {output}; next: foretrace validate kernels {output}{on}")
    if device_file:
        click.echo(f'written to {device_file}; in a machine file: device = "{device_file}"')


def _tell(what: str) -> None:
    """Show in one line of a terminal what is being timed."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{what}", nl=False, err=True)


def _default_device() -> str:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise RecordError("timing kernels needs torch: pip install 'foretrace[trace]'")
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _promised(ctx: click.Context, against: str, timed: Sequence[Kernel], *, is_asked: bool = True) -> Any:
    """Return what the device promises; the front door knows how to ask.

    None if there is no one to ask, or if the device that was found is not known and nobody asked for it.
    """
    ask = (ctx.obj or {}).get("kernels")
    if ask is None:
        return None
    try:
        return ask(against, [asdict(one) for one in timed])
    except ValueError:
        if is_asked:
            raise
        return None


def _document(
    measured: Bench, promised: Any, output: Path | None, device_file: Path | None
) -> dict[str, Any]:
    document = measured.describe()
    if promised is not None:
        document["against"] = promised.device
        for one, time_us in zip(document["kernels"], promised.times_us, strict=True):
            one["promised_us"] = time_us
    paths = {"table": output, "device_file": device_file}
    return {**document, **{name: str(path) for name, path in paths.items() if path}}


def _show(measured: Bench, promised: Any) -> None:
    """Print a row per kernel: what it was, its time and rate, and the share of what is promised."""
    from rich.console import Console
    from rich.table import Table

    threads = f", {measured.threads} threads" if measured.device == "cpu" else ""
    click.echo(f"{measured.hardware}, torch {measured.torch}{threads}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("kernel", "direction", "shape", "dtype", "how"):
        table.add_column(name, no_wrap=True)
    for name in ("us", "rate", *(("promised us", "reached") if promised else ())):
        table.add_column(name, justify="right", no_wrap=True)
    times: Sequence[float | None] = promised.times_us if promised else [None] * len(measured.kernels)
    for one, time_us in zip(measured.kernels, times, strict=True):
        cells = [one.kernel, one.direction, _shape(one), one.dtype, one.notes]
        cells += [f"{one.time_us:,.1f}", _rate(one)]
        if promised:
            cells += ["-", "-"] if time_us is None else [f"{time_us:,.1f}", f"{time_us / one.time_us:.0%}"]
        table.add_row(*cells)
    Console(width=WIDTH).print(table)
    if promised:
        _verdict(measured, promised)
    else:
        click.echo("promised: nothing to compare with; --against names a device, a machine or its file")


def _verdict(measured: Bench, promised: Any) -> None:
    """Print, by kernel, the median share of the promised speed that was reached."""
    from statistics import median

    shares: dict[str, list[float]] = {}
    for one, time_us in zip(measured.kernels, promised.times_us, strict=True):
        if time_us is not None:
            shares.setdefault(one.kernel, []).append(time_us / one.time_us)
    words = ", ".join(f"{kernel} {median(found):.0%}" for kernel, found in shares.items())
    click.echo(f"of the speed that {promised.device} promises: {words or 'no figure to compare with'}")


def _shape(one: Kernel) -> str:
    if one.kernel == "attention":
        return f"{one.seq} tokens, {one.heads}/{one.kv_heads} heads of {one.head_dim}"
    sides = [side for side in (one.m, one.n, one.k) if side > 1]
    return " x ".join(f"{side:,}" for side in sides)


def _rate(one: Kernel) -> str:
    if one.tflops:
        return f"{one.tflops:.1f} TFLOP/s" if one.tflops >= 1 else f"{one.tflops * 1e3:.1f} GFLOP/s"
    return f"{one.gb_per_s:.1f} GB/s"
