"""``foretrace bench``: measure the parts of this machine, and hold them against what describes it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import click

from foretrace.door import json_text
from foretrace.tracer.errors import RecordError, need_torch
from foretrace.traces.console import telling
from foretrace.traces.report.format import format_share

if TYPE_CHECKING:
    from foretrace.tracer.bench.kernels import Bench, Kernel

TWO_DIGITS: Final = 10  # percent from which whole ones have two digits

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
    type=click.FloatRange(min=0),
    help="Seconds of sustained load per large product, 0 for bursts only.  [default: 1 on a GPU, 0 on a CPU]",
)
@click.option(
    "--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Compute threads, on a CPU."
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

    check_can_write(output, device_file)
    device = device or _default_device()
    if against:
        _promised(ctx, against, ())  # an unknown device is refused before anything is measured
    with telling("timing", quiet=as_json) as tell:
        measured = measure(
            device,
            dtype or ("bf16" if device == "cuda" else "fp32"),
            lasting_s=(1.0 if device == "cuda" else 0.0) if lasting_s is None else lasting_s,
            threads=threads,
            tell=tell or (lambda _: None),
        )
    _write(measured, output, device_file)
    promised = _promised(ctx, against or measured.hardware, measured.kernels, is_asked=bool(against))
    if as_json:
        click.echo(json_text(_document(measured, promised, output, device_file)))
        return
    _show(measured, promised)
    on = "" if device == "cuda" else f" --device {device_file or 'DEVICE'}"
    if output:
        click.echo(f"written to {output}; next: foretrace validate kernels {output}{on}")
    if device_file:
        click.echo(f'written to {device_file}; in a machine file: device = "{device_file}"')


def _write(measured: Bench, output: Path | None, device_file: Path | None) -> None:
    from foretrace.tracer.bench.device import to_toml
    from foretrace.tracer.bench.kernels import table_text
    from foretrace.traces.writer import writing

    files = [(output, table_text(measured))] if output else []
    files += [(device_file, to_toml(measured))] if device_file else []
    with writing(files):
        pass


def _default_device() -> str:
    need_torch("timing kernels")
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
    document = asdict(measured)
    if promised is not None:
        document["against"] = promised.device
        for one, time_us in zip(document["kernels"], promised.times_us, strict=True):
            one["promised_us"] = time_us
    paths = {"table": output, "device_file": device_file}
    return {**document, **{name: str(path) for name, path in paths.items() if path}}


def _show(measured: Bench, promised: Any) -> None:
    dtypes = sorted({one.dtype for one in measured.kernels})
    plural = "" if measured.threads == 1 else "s"
    threads = f", {measured.threads} thread{plural}" if measured.device == "cpu" else ""
    click.echo(f"{measured.hardware}, torch {measured.torch}{threads}, {' and '.join(dtypes)}")
    head = [
        "kernel",
        "direction",
        "shape",
        "how",
        "µs",
        "rate",
        *(("promised µs", "reached") if promised else ()),
    ]
    rows = []
    times: Sequence[float | None] = promised.times_us if promised else [None] * len(measured.kernels)
    for one, time_us in zip(measured.kernels, times, strict=True):
        cells = [one.kernel, DIRECTIONS.get(one.direction, one.direction), _shape(one), _how(one)]
        cells += [f"{one.time_us:,.1f}", _rate(one)]
        if promised:
            cells += ["-", "-"] if time_us is None else [f"{time_us:,.1f}", _percent(time_us / one.time_us)]
        rows.append(cells)
    _table(head, rows, n_words=4)
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


SIZES: Final = "64 KiB,1 MiB,16 MiB"  # where latency rules, where bandwidth does, and in between

FAR_BELOW: Final = 0.5
"""Share of the promised speed below which a collective is counted: more than any model of it is off."""

MOST_PROCESSES: Final = 512
"""Processes that are started to measure one machine: more than any has cores, and each takes 0.2 GB."""

PROCESSES: Final = click.option(
    "--processes",
    type=click.IntRange(min=2, max=MOST_PROCESSES),
    default=2,
    show_default=True,
    help="Processes to start, if not under torchrun.",
)


@bench.command("collectives")
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
        click.echo(json_text(found))
    else:
        _show_network(found)
    ctx.exit(1 if is_slow else 0)


@bench.command("clock")
@PROCESSES
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
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
        click.echo(json_text(found))
    else:
        _show_clock(found)
    ctx.exit(1 if any(row["is_coarse"] for row in found["ranks"]) else 0)


def _show_network(found: Mapping[str, Any]) -> None:
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


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], n_words: int = 2) -> None:
    """Print *rows* under *head*: words to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for cells in (head, *rows):
        line = [
            cell.ljust(width) if i < n_words else cell.rjust(width)
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
