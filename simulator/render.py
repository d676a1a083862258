"""Shows a simulated run to a person, or as one JSON object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from foretrace.simulator import energy
from foretrace.simulator.price import unknown, usd_per_1b_tokens, usd_per_gpu_hour, whose, without
from foretrace.topologies.units import format_bytes, format_capacity, format_time
from foretrace.traces.console import stdout
from foretrace.traces.report.format import format_share

if TYPE_CHECKING:
    from foretrace.simulator.simulate import Simulation

NAME_LETTERS: Final = 14
"""Letters for the name of a row beside its picture."""

RANGES: Final = (("times", "step_time_from"), ("memory", "peak_memory_from"))
"""What stands in brackets behind a figure, and where ``intervals`` says what it comes from."""

LEAST_SHARE: Final = 5e-4
"""Least share of a step that is listed: less would be shown as 0.0 %."""

UNKNOWN: Final = "unknown"
"""What stands for a figure of a step whose batch is unknown."""

LOCAL: Final = energy.Supply()
"""Power of which nobody said where it comes from."""

SHOWN_STAGES: Final = 8
"""Most pipeline stages that the table of memory lists."""


def document(
    simulation: Simulation,
    output: str | None,
    report: str | None,
    *,
    price: str | None = None,
    power: energy.Supply = LOCAL,
) -> dict[str, Any]:
    """Return everything that ``--json`` prints.

    *output*: its run directory, if it is kept. *report*: its page, if there is one. *power*: where the power
    comes from.
    """
    usd = usd_per_gpu_hour(price, (simulation.info.cluster or {}).get("price_usd_per_gpu_hour"))
    rate = simulation.summary["tokens_per_s_per_gpu"]
    return {
        "name": simulation.info.name,
        **simulation.summary,
        "usd_per_gpu_hour": usd,
        "usd_per_1b_tokens": usd_per_1b_tokens(usd, rate) if usd is not None and rate else None,
        "energy": _energy(simulation, power),
        "warnings": list(simulation.info.warnings),
        "job": simulation.info.job,
        "run": output,
        "report": report,
    }


def show(
    simulation: Simulation,
    output: str | None,
    report: str | None,
    *,
    picture: bool | None = None,
    price: str | None = None,
    power: energy.Supply = LOCAL,
) -> None:
    """Print the figures, the memory of the stages, what they rest on and where the run is."""
    console, summary = stdout(highlight=True), simulation.summary
    console.print(f"[bold]{escape(simulation.info.name)}[/]", highlight=False)
    drawn = _energy(simulation, power)
    console.print(_headline(summary, _cost(simulation, price), _energy_line(simulation, drawn)))
    if picture or (picture is None and console.is_terminal):
        _draw(console, simulation)
    if summary["stages"]:
        console.print(_memory(summary))
    for warning in simulation.info.warnings:
        console.print(f"[yellow]![/] {escape(warning)}", highlight=False)
    console.print("rests on", style="dim")
    ranges = [
        f"{name} in brackets: {summary['intervals'][key]}"
        for name, key in RANGES
        if key in summary["intervals"]
    ]
    console.print(
        _listed([*ranges, *summary["rests_on"], *(drawn["rests_on"] if drawn else ())]), style="dim"
    )
    if output is not None:
        console.print(
            f"run: {output}  (foretrace report {output})", highlight=False, soft_wrap=True, markup=False
        )
    if report is not None:
        console.print(f"report: {report}", highlight=False, soft_wrap=True, markup=False)
    if output is None and report is None:
        console.print("nothing saved; -o DIR keeps the timeline", style="dim")


def _listed(lines: Sequence[str]) -> Table:
    """Return *lines* as a list; a line that goes on is indented, so that the next point stands out."""
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(width=3)
    table.add_column()
    for line in lines:
        table.add_row("  -", escape(line))
    return table


def _draw(console: Console, simulation: Simulation) -> None:
    """Print the schedule as letters, one row per rank that is drawn, as wide as the terminal."""
    from foretrace.traces.text_picture import Piece, picture

    def style(piece: Piece) -> str:
        return f"{'white on ' if piece.works else 'bold '}{piece.colour}" if piece.colour else ""

    found = picture(simulation.run, min(console.width, 160) - NAME_LETTERS - 2)
    if found is None:
        return
    for line in found.lines:
        name = (f"{line.name[: NAME_LETTERS - 1]:<{NAME_LETTERS}}", "dim")
        pieces = [(piece.text, style(piece)) for piece in line.pieces]
        console.print(Text.assemble(name, *pieces), no_wrap=True, overflow="crop")
    legend = [part for piece, label in found.legend for part in ((piece.text, style(piece)), f" {label}  ")]
    console.print(Text.assemble(f"{'':<{NAME_LETTERS}}", f"{found.length}: ", *legend))


def _cost(simulation: Simulation, given: str | None) -> str:
    """Return what tokens cost, or that no price is known; nothing where a machine is of processes."""
    machine = simulation.info.cluster or {}
    name, usd = (
        machine.get("name", "this machine"),
        usd_per_gpu_hour(given, machine.get("price_usd_per_gpu_hour")),
    )
    if not simulation.summary["tokens_per_s_per_gpu"]:  # of a script whose input is not of tokens
        return ""
    if usd is None:
        return "" if machine.get("cores") else unknown(name)
    cost = usd_per_1b_tokens(usd, simulation.summary["tokens_per_s_per_gpu"])
    amount = f"{cost:,.3g}" if cost < 1000 else f"{cost:,.0f}"  # :.3g would write 1.95e+03
    nodes = energy.nodes_of(machine, simulation.info.world_size, simulation.summary.get("ranks_per_node"))
    price = whose(name, usd, given=given is not None)
    return f"{amount} USD per 1B tokens, {price}{without(nodes.n_idle)}"


def _sites(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return how sites that train apart get along, if there are several."""
    if (outer := summary.get("outer")) is None:
        return {}
    left = format_share(outer["utilisation"])
    return {"sites": f"{outer['sites']}, which meet every {outer['every']} steps: {left} of the rate is left"}


def _energy(simulation: Simulation, power: energy.Supply) -> dict[str, Any] | None:
    """Return the energy of a step and of tokens; None if it is not known."""
    info = simulation.info
    return energy.of_step(info.cluster, simulation.summary, power, n_gpus=info.world_size)


def _energy_line(simulation: Simulation, found: Mapping[str, Any] | None) -> str:
    """Return what the energy is, or that it is not known; nothing where a machine is of processes."""
    machine = simulation.info.cluster or {}
    if found is None:
        return "" if machine.get("cores") else energy.unknown(machine.get("name", "this machine"))
    return energy.line(found)


def _headline(summary: Mapping[str, Any], cost: str, drawn: str) -> Table:
    """Return the figures that a person looks at first."""
    exposed = summary["exposed_by_axis"]
    by_axis = ", ".join(
        f"{axis} {format_share(share)}" for axis, share in exposed.items() if share > LEAST_SHARE
    )
    cached = summary.get("reserved_memory_bytes")
    saves = _saves(summary)
    rows = {
        "step time": _with_interval(summary, "step_time_s", format_time),
        **({"batch": escape(summary["batch"])} if "batch" in summary else {}),
        "throughput": _throughput(summary) + saves,
        "MFU": UNKNOWN if summary["mfu"] is None else _with_interval(summary, "mfu", format_share) + saves,
        "peak memory": (
            UNKNOWN
            if summary["peak_memory_bytes"] is None
            else _with_interval(summary, "peak_memory_bytes", format_bytes)
        )
        + f", of {format_capacity(summary['memory_limit_bytes'])}",
        **({"with PyTorch's cache": format_bytes(cached)} if cached else {}),
        "bubble": format_share(summary["bubble_fraction"]),
        "exposed communication": f"{format_share(summary['exposed_comm_fraction'])}"
        + (f"  ({by_axis})" if by_axis else ""),
        "waiting for other ranks": format_share(summary["waiting_fraction"]),
        **_rare(summary),
        **_sites(summary),
        "spans": f"{summary['n_spans']:,} of {summary['world_size']:,} ranks, "
        f"{summary['n_ranks_stored']:,} stored ({summary['engine']} engine)",
    }
    if cost:
        rows["cost"] = escape(cost) + saves
    if drawn:
        rows["energy"] = escape(drawn)
    if jitter := summary.get("step_time_distribution"):
        low, middle, high = (format_time(jitter["quantiles_s"][q]) for q in ("0.05", "0.5", "0.95"))
        rows["with jitter"] = (
            f"{middle}, 5 to 95 %: {low} to {high} ({jitter['samples']} steps, seed {jitter['seed']})"
        )
    table = Table(box=None, show_header=False, pad_edge=True)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _with_interval(
    summary: Mapping[str, Any], name: str, shown: Callable[[float], str], unit: str = ""
) -> str:
    """Return a figure with its unit, and the range that it is likely to lie in where one is known."""
    value = shown(summary[name]) + unit
    likely = summary.get("intervals", {}).get(name)
    return value if likely is None else f"{value}  [dim]({' to '.join(map(shown, likely))})[/]"


def _throughput(summary: Mapping[str, Any]) -> str:
    """Return tokens per second; rows of the input instead where the model has no tokens."""
    if not (summary["tokens_per_s_per_gpu"] or summary.get("rows_per_s_per_gpu")):
        return UNKNOWN
    if not summary["tokens_per_s_per_gpu"]:
        return f"{summary['rows_per_s_per_gpu']:,.0f} rows of the model's input/s per GPU"
    per_gpu = _with_interval(summary, "tokens_per_s_per_gpu", "{:,.0f}".format, " tokens/s per GPU")
    return f"{per_gpu}, {summary['tokens_per_s']:,.0f} in all"


def _saves(summary: Mapping[str, Any]) -> str:
    """Return that a figure counts checkpoints, if there are any; a step time is that of most steps."""
    every = summary.get("checkpoint_every")
    if not every:
        return ""
    often = "every step" if every == 1 else f"every {every} steps"
    return f", with {format_time(summary['checkpoint_s'])} for a checkpoint {often}"


def _rare(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return figures that most runs have nothing of: what the host does, and steps that differ."""
    rows, shares = {}, summary["shares"]
    if (share := shares.get("host:optimizer", 0)) > LEAST_SHARE:
        rows["optimizer on the host"] = format_share(share)
    if (share := shares.get("other", 0)) > LEAST_SHARE:
        rows["other"] = f"{format_share(share)}  (host, data, checkpoints, gaps between kernels)"
    times = summary.get("step_times_s", ())
    if len(times) > 1 and max(times) > min(times) * (1 + LEAST_SHARE):
        mean = format_time(sum(times) / len(times))
        rows["all steps"] = f"{len(times)}, {mean} each on average, the longest {format_time(max(times))}"
    return rows


def _memory(summary: Mapping[str, Any]) -> Table:
    """Return the memory of the stages, the fullest ones if there are many."""
    limit, stages = summary["memory_limit_bytes"], summary["stages"]
    # Chosen by size, listed in the order of the pipeline.
    fullest = sorted(stages, key=lambda stage: -stage["peak_bytes"])[:SHOWN_STAGES]
    table = Table(box=None, pad_edge=True, header_style="dim")
    for name in ("stage", "layers", "in flight", "peak memory", "share"):
        table.add_column(name, justify="right")
    table.add_column("most of it")
    names = [stage["stage"] for stage in stages]
    for stage in stages:
        if stage not in fullest:
            continue
        # A stage is listed once for each of its ranks where they differ.
        of_rank = f", rank {stage['rank']}" if names.count(stage["stage"]) > 1 else ""
        items = sorted(stage["bytes"].items(), key=lambda item: -item[1])[:3]
        colour = "red" if stage["peak_bytes"] > limit else "default"
        table.add_row(
            f"{stage['stage']}{of_rank}",
            str(stage["layers"]),
            "-" if stage["in_flight"] is None else str(stage["in_flight"]),
            f"[{colour}]{format_bytes(stage['peak_bytes'])}[/]",
            f"[{colour}]{format_share(stage['peak_bytes'] / limit)}[/]",
            ", ".join(f"{name} {format_bytes(size)}" for name, size in items),
        )
    if len(stages) > len(fullest):
        table.caption = f"the fullest {len(fullest)} of {len(stages)} stages"
    return table
