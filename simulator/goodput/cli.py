"""The verb ``foretrace goodput``: days, dollars and the chance of a date, with failures counted."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime
from typing import Any

import click

from foretrace.door import json_text
from foretrace.simulator.flags import dollars, energy_options
from foretrace.traces.report.format import format_share


@click.command()
@click.argument("run", type=click.Path())
@click.option("--tokens", required=True, help="Tokens to train on, e.g. 300B or 15T.")
@click.option("--step-time", help="Step time to use instead of the run's, e.g. '16.3 s'.")
@click.option("--tokens-per-step", type=click.IntRange(1), help="Tokens per step, if the run does not say.")
@click.option("--price", help="Price of a GPU, e.g. '2.5 USD/h'. [default: that of the machine, if known]")
@energy_options
@click.option("--mtbf-gpu", help="Mean time between interruptions caused by one GPU. [default: 50700 h]")
@click.option(
    "--mtbf-node", help="Mean time between failures of a node, not counting its GPUs. [default: never]"
)
@click.option("--preempted-after", help="Mean time until a spot node is taken away. [default: never]")
@click.option("--checkpoint-time", help="Time that a checkpoint stops the training. [default: from its size]")
@click.option("--storage", help="Rate at which a node writes its part of a checkpoint. [default: 2 GB/s]")
@click.option("--interval", help="Training time between checkpoints. [default: the best]")
@click.option("--restart-time", help="Time from a failure to the first new step. [default: 10 min]")
@click.option(
    "--step-error",
    type=click.FloatRange(0, 2),
    help="Spread of true step times around the prediction, 0.1 is 10 %. [default: as measured]",
)
@click.option("--slow-gpus", help="Quantiles of the slowdown of GPUs, e.g. '99%:1.02, 99.9%:1.15'.")
@click.option(
    "--start", type=click.DateTime(["%Y-%m-%d"]), help="First day of the training. [default: today]"
)
@click.option("--by", type=click.DateTime(["%Y-%m-%d"]), help="Day by which the training has to be finished.")
@click.option("--budget", type=dollars, help="Dollars that may be spent, e.g. 250k or 1.5M.")
@click.option(
    "--samples",
    type=click.IntRange(1, 1_000_000),
    default=2000,
    show_default=True,
    help="Trainings to sample.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the random numbers."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def goodput(run: str, tokens: str, *, as_json: bool, **flags: Any) -> None:
    """Estimate how long a training takes, and what it costs, if its steps are those of RUN and machines fail.

    foretrace goodput runs/rehearsal --tokens 15T --price '2.5 USD/h' --by 2027-03-01
    """
    from foretrace.simulator.energy import supply
    from foretrace.simulator.goodput.plan import plan
    from foretrace.simulator.goodput.training import parse_count, training_of, with_overrides
    from foretrace.topologies.units import parse_price, parse_time
    from foretrace.traces.store import open_run

    power = supply(flags["pue"], flags["grid"])
    # a time that is given is no prediction, and has no error of one
    certain = {} if flags["step_time"] is None else {"step_error": 0.0, "step_range": (1.0, 1.0)}
    training = with_overrides(
        training_of(open_run(run), tokens_per_step=flags["tokens_per_step"]),
        step_time_s=_read(parse_time, flags["step_time"]),
        usd_per_gpu_hour=_read(parse_price, flags["price"]),
        **certain,
    )
    found = plan(
        training,
        parse_count(tokens),
        _risks(flags),
        start=_day(flags["start"]) or date.today(),
        by=_day(flags["by"]),
        budget_usd=flags["budget"],
        supply=power,
        n_samples=flags["samples"],
        seed=flags["seed"],
    )
    if as_json:
        click.echo(json_text(found))
    else:
        _show(found)


def _risks(flags: Mapping[str, Any]) -> Any:
    from foretrace.simulator.goodput.failures import parse_stragglers
    from foretrace.simulator.goodput.plan import Risks
    from foretrace.topologies.units import parse_bandwidth, parse_time

    times = {
        "mtbf_gpu_s": "mtbf_gpu",
        "mtbf_node_s": "mtbf_node",
        "preempted_s": "preempted_after",
        "checkpoint_s": "checkpoint_time",
        "restart_s": "restart_time",
        "interval_s": "interval",
    }
    return Risks(
        **{field: _read(parse_time, flags[flag]) for field, flag in times.items()},
        storage_bytes_per_s=_read(parse_bandwidth, flags["storage"]),
        step_error=flags["step_error"],
        stragglers=_read(parse_stragglers, flags["slow_gpus"]),
    )


def _read(parse: Any, text: str | None) -> Any:
    return None if text is None else parse(text)


def _day(moment: datetime | None) -> date | None:
    return None if moment is None else moment.date()


def _show(found: Mapping[str, Any]) -> None:
    """Print the plan as a table, what it rests on below."""
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table

    from foretrace.traces.console import stdout

    console = stdout()
    console.print(f"[bold]{escape(found['name'])}[/]: {_count(found['tokens'])} tokens")
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _lines(found):
        table.add_row(f" {name}", value)
    console.print(table)
    notes = [*found["rests_on"], *(found["energy"]["rests_on"] if found["energy"] else ())]
    if notes:
        console.print("rests on")
        for note in notes:
            console.print(Padding(escape(note), (0, 0, 0, 2)))


def _cost(found: Mapping[str, Any]) -> str:
    from foretrace.simulator.price import whose, without

    price = whose(found["price_from"], found["usd_per_gpu_hour"], given=not found["price_from"])
    each = f"{found['usd_per_1b_tokens']:,.0f} USD per billion tokens"
    return f"{found['expected_usd']:,.0f} USD; {each}, {price}{without(found['gpus_without_rank'])}"


def _energy(found: Mapping[str, Any]) -> str:
    from foretrace.topologies.units import format_energy, format_mass, format_power

    if (energy := found["energy"]) is None:
        return str(found["power_unknown"])
    low, high = map(format_energy, energy["kwh_interval"])
    working, waiting = (format_power(energy[name]) for name in ("w_per_gpu", "w_per_waiting_gpu"))
    return (
        f"{format_energy(energy['kwh'])} ({low} to {high}), {format_mass(energy['kg_co2e'])} of CO2; "
        f"{working} per GPU, {waiting} of one that waits"
    )


def _lines(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    days, ends = found["days"], found["ends"]
    lines = [
        ("if nothing fails", _days(found["work_days"])),
        ("expected", f"[bold]{_days(found['expected_days'])}[/], in half of all cases by {ends['50%']}"),
        (
            "nine times in ten",
            f"{_days(days['5%'])} to {_days(days['95%'])}, the last of them on {ends['95%']}",
        ),
        ("goodput", f"{format_share(found['goodput'])}  ({_shares(found['shares'])})"),
    ]
    if found["hours_between_failures"] is not None:
        lines.append(
            (
                "interruptions",
                f"{found['failures']:,.0f}, one every {_span(found['hours_between_failures'] * 3600)}",
            )
        )
    if found["checkpoint_interval_s"] is not None:
        best = ", which is best" if found["interval_is_optimal"] else ""
        lines.append(
            (
                "checkpoint",
                f"every {_span(found['checkpoint_interval_s'])}{best}; {_span(found['checkpoint_s'])} each",
            )
        )
    if "expected_usd" in found:
        lines.append(("cost", _cost(found)))
    lines.append(("energy", _energy(found)))
    if "chance_by" in found:
        lines.append((f"done by {found['by']}", f"{format_share(found['chance_by'])} likely"))
    if "chance_in_budget" in found:
        lines.append(
            (f"within {found['budget_usd']:,.0f} USD", f"{format_share(found['chance_in_budget'])} likely")
        )
    return lines


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {format_share(share)}" for name, share in shares.items() if share and name != "training"
    )


def _days(days: float) -> str:
    return f"{days:,.1f} days" if days >= 1 else f"{days * 24:,.1f} h"


def _span(seconds: float) -> str:
    """Return a time as people say it.

    >>> _span(42), _span(600), _span(11138)
    ('42 s', '10 min', '3.09 h')
    """
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}" if seconds < 100 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.3g} s"


def _count(tokens: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if tokens >= size:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:,.0f}"
