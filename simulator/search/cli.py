"""The verb ``foretrace search``: the best layouts of a model on a machine, each simulated exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from simulator.errors import ConfigError, JobError

if TYPE_CHECKING:
    from simulator.job import Job
    from simulator.search.best import Found, Ranked
    from topologies.cluster import Cluster

TIED: Final = 0.02
"""Relative difference of step times that says nothing: repeated measurements of one layout differ by more."""

_DAY_S: Final = 86_400


class Choices(click.ParamType[tuple[Any, ...]]):
    """Values in one word, separated by commas; none means every possible one."""

    name = "list"

    def __init__(self, kind: Callable[[str], Any], allowed: Sequence[Any] = ()) -> None:
        self._kind, self._allowed = kind, allowed

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Any, ...]:
        """Return the values as a tuple."""
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(self._kind(part.strip()) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r}: whole numbers with commas between them, e.g. 1,2,4", param, ctx)
        for one in found:
            if (self._allowed and one not in self._allowed) or (self._kind is int and one < 1):
                allowed = ", ".join(map(str, self._allowed)) or "whole numbers from 1 on"
                self.fail(f"{one!r} in {value!r}: {allowed}", param, ctx)
        return found


def _names(which: str) -> Choices:
    from simulator.job import RECOMPUTES, SHARDINGS
    from simulator.schedules import SCHEDULES

    return Choices(str, {"schedule": tuple(SCHEDULES), "sharding": SHARDINGS, "recompute": RECOMPUTES}[which])


@click.command()
@click.option("--model", required=True, help="A preset such as llama3-70b, or a config.json.")
@click.option("--cluster", required=True, multiple=True, help="A machine or its TOML file; several compete.")
@click.option("--gpus", required=True, type=Choices(int), help="How many; several compete, e.g. 256,512.")
@click.option("--global-batch", required=True, type=click.IntRange(1), help="Sequences per optimizer step.")
@click.option(
    "--seq-len", default=4096, show_default=True, type=click.IntRange(1), help="Tokens per sequence."
)
@click.option("--tp", type=Choices(int), default=(), help="Tensor-parallel degrees to try. [default: all]")
@click.option("--pp", type=Choices(int), default=(), help="Pipeline degrees to try. [default: all]")
@click.option("--cp", type=Choices(int), default=(1,), help="Context-parallel degrees to try. [default: 1]")
@click.option("--ep", type=Choices(int), default=(), help="Expert-parallel degrees to try. [default: all]")
@click.option("--micro-batch", type=Choices(int), default=(), help="Sizes to try. [default: powers of 2]")
@click.option("--schedule", type=_names("schedule"), default=None, help="Schedules to try.")
@click.option("--virtual-stages", type=Choices(int), default=(), help="To try. [default: powers of 2]")
@click.option("--sharding", type=_names("sharding"), default=None, help="To try. [default: zero1,fsdp]")
@click.option("--recompute", type=_names("recompute"), default=None, help="To try. [default: all]")
@click.option("--precision", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16", show_default=True)
@click.option("--framework", help="Whose conventions. [default: megatron]")
@click.option("--tokens", help="Budget to give the days for, e.g. 2T.")
@click.option("--price", help="Of a GPU, e.g. '2.5 USD/h'. [default: of the machine, if known]")
@click.option(
    "--by", type=click.Choice(["time", "cost"]), default="time", show_default=True, help="What is best."
)
@click.option("--top", type=click.IntRange(1, 1000), default=10, show_default=True, help="Layouts to list.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="run.toml of the best one to write.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def search(*, as_json: bool, **flags: Any) -> None:
    """Find the fastest layouts that fit: every one is considered, none that could be the best is skipped.

    foretrace search --model llama3-70b --cluster dgx-h100 --gpus 512 --global-batch 1024 --seq-len 8192
    """
    from rich.console import Console

    from simulator.config import job_settings, write_config
    from simulator.search.best import cheapest
    from traces.writer import write_atomically

    spaces = _spaces(flags)
    prices = {(s.cluster.name, s.cluster.n_gpus): _price(flags["price"], s.cluster) for s in spaces}
    if flags["by"] == "cost" and None in prices.values():
        nameless = next(name for (name, _), price in prices.items() if price is None)
        raise ConfigError(f"--by cost needs a price: {nameless} has none, give --price '2.5 USD/h'")

    def weight(job: Job) -> float:
        if flags["by"] == "time":
            return 1.0
        return (prices[job.cluster.name, job.cluster.n_gpus] or 0.0) * job.cluster.n_gpus

    console = Console(stderr=True, quiet=as_json)
    with console.status("searching") as status:
        jobs = [job for space in spaces for job in space.jobs()]
        found = cheapest(jobs, flags["top"], weight=weight, progress=status.update)
    if not found.best:
        raise JobError(_nothing(found))
    layouts = [_described(one, prices, flags["tokens"]) for one in found.best]
    if flags["output"]:
        write_atomically(Path(flags["output"]), write_config(job_settings(found.best[0].job)))
    said = _counts(found) | {"layouts": layouts, "why_not_the_second": _why(layouts), "file": flags["output"]}
    if as_json:
        click.echo(json.dumps(said))
    else:
        _show(said, flags)


def _spaces(flags: Mapping[str, Any]) -> list[Any]:
    """Return the space of each machine and size."""
    from simulator.models.sources import load_model
    from simulator.search.space import Space
    from topologies.catalog import load_cluster

    others = {"precision": flags["precision"]}
    if flags["framework"]:
        others["framework"] = flags["framework"]
    chosen = {name: flags[name] for name in ("tp", "pp", "cp", "ep", "micro_batch", "virtual_stages")}
    chosen |= {name: flags[name] for name in ("schedule", "sharding", "recompute") if flags[name]}
    model = load_model(flags["model"])
    return [
        Space(
            model=model,
            cluster=load_cluster(cluster, gpus),
            global_batch=flags["global_batch"],
            seq_len=flags["seq_len"],
            others=others,
            **chosen,
        )
        for cluster in flags["cluster"]
        for gpus in flags["gpus"]
    ]


def _price(given: str | None, cluster: Cluster) -> float | None:
    from topologies.units import parse_price

    return cluster.price_usd_per_gpu_hour if given is None else parse_price(given)


def _counts(found: Found) -> dict[str, Any]:
    return {
        "n_candidates": found.n_candidates,
        "n_pipelines_run": found.n_run,
        "n_simulated": found.n_simulated,
        "n_too_large": found.n_too_large,
    }


def _described(
    one: Ranked, prices: Mapping[tuple[str, int], float | None], tokens: str | None
) -> dict[str, Any]:
    """Return what is said of one layout."""
    from simulator.goodput.plan import parse_count
    from simulator.summary import job_name

    job, summary = one.job, one.summary
    n_gpus, step_s = job.cluster.n_gpus, summary["step_time_s"]
    price = prices[job.cluster.name, n_gpus]
    usd = None if price is None else step_s / 3600 * n_gpus * price / job.tokens_per_step * 1e9
    return {
        "name": job_name(job),
        "cluster": job.cluster.name,
        "gpus": n_gpus,
        **job.layout.degrees,
        "micro_batch": job.micro_batch,
        "n_microbatches": job.n_microbatches,
        "schedule": job.schedule,
        "virtual_stages": job.virtual_stages,
        "sharding": job.sharding,
        "recompute": job.recompute,
        **{name: summary[name] for name in ("step_time_s", "tokens_per_s_per_gpu", "mfu", "shares")},
        **{name: summary[name] for name in ("peak_memory_bytes", "memory_limit_bytes", "fits")},
        "usd_per_1b_tokens": usd,
        "days": None if tokens is None else parse_count(tokens) / summary["tokens_per_s"] / _DAY_S,
    }


def _why(layouts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return where the second layout loses its time to the first; the parts add up to the difference.

    Empty where the two do not use the same number of GPUs: their seconds do not compare.
    """
    if len(layouts) < 2 or layouts[0]["gpus"] != layouts[1]["gpus"]:
        return []
    first, second = layouts[:2]
    causes = dict.fromkeys([*first["shares"], *second["shares"]])
    parts = [
        {
            "cause": cause,
            "seconds": second["shares"].get(cause, 0.0) * second["step_time_s"]
            - first["shares"].get(cause, 0.0) * first["step_time_s"],
        }
        for cause in causes
    ]
    return sorted(parts, key=lambda part: -abs(part["seconds"]))


def _nothing(found: Found) -> str:
    """Say why no layout was found."""
    from simulator.summary import job_name
    from topologies.units import format_bytes

    if found.smallest is None:
        return "no layout is possible: the batch, the layers or the heads divide over none of these degrees"
    job, peak_bytes = found.smallest
    limit = job.cluster.device.memory_bytes
    return (
        f"none of {found.n_candidates:,} layouts fits: the smallest, {job_name(job)} with recompute "
        f"{job.recompute} and {job.sharding}, needs {format_bytes(peak_bytes)} of {format_bytes(limit)}"
    )


def _schedule(one: Mapping[str, Any]) -> str:
    if one["pp"] == 1:
        return "-"
    return f"{one['schedule']} ×{one['virtual_stages']}" if one["virtual_stages"] else str(one["schedule"])


def _show(said: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Print the best layouts as a table."""
    from rich.console import Console
    from rich.table import Table

    from topologies.units import format_bytes, format_time

    console, layouts = Console(highlight=False), said["layouts"]
    several = len({(one["cluster"], one["gpus"]) for one in layouts}) > 1
    extra = [name for name in ("usd_per_1b_tokens", "days") if layouts[0][name] is not None]
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("", justify="right")
    for name in (*(["machine"] if several else []), "layout", "batch", "schedule", "data parallel"):
        table.add_column(name, overflow="fold")
    for name in (
        "step",
        "MFU",
        "memory",
        *({"usd_per_1b_tokens": "$/1B", "days": "days"}[one] for one in extra),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    best = layouts[0]["step_time_s"]
    for number, one in enumerate(layouts, 1):
        tied = "=" if flags["by"] == "time" and one["step_time_s"] <= best * (1 + TIED) else ""
        recompute = "" if one["recompute"] == "none" else f", {one['recompute']} recompute"
        table.add_row(
            f"{tied}{number}",
            *([f"{one['gpus']} {one['cluster']}"] if several else []),
            " ".join(f"{axis}{one[axis]}" for axis in ("tp", "cp", "pp", "dp", "ep") if one[axis] > 1) or "-",
            f"{one['micro_batch']}×{one['n_microbatches']}",
            _schedule(one),
            f"{one['sharding']}{recompute}",
            format_time(one["step_time_s"]),
            f"{one['mfu']:.1%}",
            format_bytes(one["peak_memory_bytes"]),
            *(f"{one[name]:,.3g}" if one[name] < 1000 else f"{one[name]:,.0f}" for name in extra),
        )
    console.print(table)
    console.print(
        f"{said['n_candidates']:,} layouts considered; {said['n_pipelines_run']:,} pipelines run, "
        f"{said['n_simulated']} simulated whole, {said['n_too_large']} of those looked at do not fit"
    )
    if flags["by"] == "time" and any(one["step_time_s"] <= best * (1 + TIED) for one in layouts[1:]):
        console.print(f"= within {TIED:.0%} of the best: no measurement tells them apart")
    if said["why_not_the_second"]:
        parts = [p for p in said["why_not_the_second"] if abs(p["seconds"]) >= 1e-3 * best][:3]
        told = ", ".join(f"{p['seconds']:+.3g} s {p['cause']}" for p in parts) or "nothing to speak of"
        console.print(f"the second loses by: {told}")
    if said["file"]:
        console.print(f"run: foretrace simulate {said['file']}")
