"""``foretrace bench``: measure the parts of this machine, and hold them against what describes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from foretrace.tracer.bench.world_cli import clock, collectives
from foretrace.tracer.errors import RecordError
from foretrace.traces.flags import Number
from foretrace.traces.report.format import format_share

if TYPE_CHECKING:
    from foretrace.tracer.bench.kernels import Bench, Kernel


WIDTH: Final = 140
"""Columns of the table of kernels, wherever it goes."""

TWO_DIGITS: Final = 10
"""Percent from which whole ones have two digits."""

DIRECTIONS: Final = {
    "fwd": "forward",
    "bwd": "backward",
    "bwd_grad_act": "input gradient",
    "bwd_grad_w": "weight gradient",
}
"""What tables call a direction, and what a person does."""


@click.group()
def bench() -> None:
    """Measure this machine's parts, and hold them against what its description promises."""


bench.add_command(collectives)
bench.add_command(clock)


@bench.command("kernels")
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    help="Device to measure. [default: cuda if there is a GPU]",
)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    help="Number format. [default: bf16, on a CPU fp32]",
)
@click.option(
    "--against",
    metavar="NAME",
    help="Device or machine to compare with: a name of the catalogue or a TOML file; by default what the GPU "
    "calls itself.",
)
@click.option(
    "--lasting",
    "lasting_s",
    type=Number(min=0),
    help="Seconds of sustained load per large product, 0 for bursts only.  [default: 1 on a GPU, 0 on a CPU]",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Compute threads, on a CPU.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="CSV table of the times to write.")
@click.option(
    "--device-file", type=click.Path(path_type=Path), help="TOML file to write, which describes this device."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
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
    """Time the kernels of a training step on this machine.

    They are products in three layouts, attention, norm, optimizer, memory and launches.

    For example: foretrace bench kernels --against h100-sxm -o kernels.csv

    The table can be read by `foretrace validate kernels`. On a GPU some 60 seconds, on a CPU 20.
    """
    from foretrace.tracer.bench.kernels import bench as measure
    from foretrace.traces.replacing import check_can_write

    check_can_write(output)
    check_can_write(device_file)
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
    _write(measured, output, device_file)
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


def _write(measured: Bench, output: Path | None, device_file: Path | None) -> None:
    """Write what was *measured* to the table *output* and the *device_file*, if they are given."""
    from foretrace.tracer.bench.device import to_toml
    from foretrace.tracer.bench.kernels import write_table
    from foretrace.traces.writer import write_atomically

    if output:
        write_table(measured, output)
    if device_file:
        write_atomically(device_file, to_toml(measured))


def _tell(what: str) -> None:
    """Show in one line of a terminal what is being timed."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{what}", nl=False, err=True)


def _default_device() -> str:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise RecordError("timing kernels needs torch: pip install torch")
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

    dtypes = sorted({one.dtype for one in measured.kernels})
    plural = "" if measured.threads == 1 else "s"
    threads = f", {measured.threads} thread{plural}" if measured.device == "cpu" else ""
    click.echo(f"{measured.hardware}, torch {measured.torch}{threads}, {' and '.join(dtypes)}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("kernel", "direction", "shape", "how"):
        table.add_column(name, no_wrap=True)
    for name in ("µs", "rate", *(("promised µs", "reached") if promised else ())):
        table.add_column(name, justify="right", no_wrap=True)
    times: Sequence[float | None] = promised.times_us if promised else [None] * len(measured.kernels)
    for one, time_us in zip(measured.kernels, times, strict=True):
        cells = [one.kernel, DIRECTIONS.get(one.direction, one.direction), _shape(one), _how(one)]
        cells += [f"{one.time_us:,.1f}", _rate(one)]
        if promised:
            cells += ["-", "-"] if time_us is None else [f"{time_us:,.1f}", _percent(time_us / one.time_us)]
        table.add_row(*cells)
    Console(width=WIDTH, emoji=False).print(table)
    if promised:
        _verdict(measured, promised)
    else:
        click.echo("promised: nothing to compare with; --against names a device, a machine or its file")


def _verdict(measured: Bench, promised: Any) -> None:
    """Print, by kernel, the median share of the promised speed that was reached, and the least."""
    from statistics import median

    shares: dict[str, list[tuple[float, str]]] = {}
    for one, time_us in zip(measured.kernels, promised.times_us, strict=True):
        if time_us is not None:
            shares.setdefault(one.kernel, []).append((time_us / one.time_us, _shape(one)))
    if not shares:
        click.echo(f"{promised.device} promises no figure to compare with")
        return
    click.echo(f"of the speed that {promised.device} promises:")
    for kernel, found in shares.items():
        least, shape = min(found)
        rest = f", least {_percent(least)} at {shape}" if len(found) > 1 else ""
        click.echo(f"  {kernel:10} {_percent(median(share for share, _ in found)):>7}{rest}")


def _how(one: Kernel) -> str:
    """Return what there is to say beyond a short burst, which is how everything is timed unless said."""
    return "; ".join(filter(None, [one.load.removeprefix("burst"), one.notes]))


def _percent(share: float) -> str:
    """Return *share* with two digits where there are fewer.

    >>> _percent(0.874), _percent(0.0031)
    ('87 %', '0.31 %')
    """
    return format_share(share, ".0f" if 100 * share >= TWO_DIGITS else ".2g")


def _shape(one: Kernel) -> str:
    if one.kernel == "attention":
        return f"{one.seq:,} tokens, {one.heads}/{one.kv_heads} heads of {one.head_dim}"
    sides = [side for side in (one.m, one.n, one.k) if side > 1]
    return " x ".join(f"{side:,}" for side in sides)


def _rate(one: Kernel) -> str:
    if one.tflops:
        return f"{one.tflops:.1f} TFLOP/s" if one.tflops >= 1 else f"{one.tflops * 1e3:.1f} GFLOP/s"
    return f"{one.gb_per_s:.1f} GB/s"
