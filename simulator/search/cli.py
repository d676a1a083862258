"""The verb ``foretrace search``: the best layouts of a model on a machine, each simulated exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from foretrace.door import json_text
from foretrace.interrupts import INTERRUPTED
from foretrace.simulator.errors import ConfigError, JobError
from foretrace.simulator.garbage import few_collections
from foretrace.simulator.search.flags import AS_SIMULATED, CHOICES, OF_THE_JOB, search_options

if TYPE_CHECKING:
    from foretrace.simulator.job import Job
    from foretrace.simulator.search.found import Found, Ranked, SearchAll
    from foretrace.simulator.search.space import Space


NEEDED = ("model", "gpus")
"""Flags without which there is nothing to search, unless a rehearsal says them."""


@click.command()
@search_options
@click.pass_context
@few_collections()
def search(ctx: click.Context, /, *, as_json: bool, **flags: Any) -> None:
    """Find the fastest layouts that fit: all are considered, and none that could be the best is skipped.

    foretrace search --model llama3-70b --cluster dgx-h100 --gpus 512 --global-batch 1024 --seq-len 8192

    foretrace search --rehearsal runs/x --cluster dgx-h100 --cluster dgx-b200
    """
    if flags["rehearsal"] is not None:
        from foretrace.simulator.rehearsed.cli import search_machines

        search_machines(ctx, flags, as_json=as_json)
        return
    _check_needed(ctx, flags)
    from foretrace.simulator.config import job_settings, write_config
    from foretrace.simulator.configs.cli import show_differences
    from foretrace.simulator.configs.write import written
    from foretrace.simulator.search.render import page, show
    from foretrace.traces.writer import writing

    _check_before(flags)
    spaces = _spaces(flags)
    best, said = _searched(spaces, flags, quiet=as_json)
    made = [written(best, target) for target in flags["targets"]]
    said["written"] = {one.target: one.describe() for one in made}
    files = [(flags["output"], write_config(job_settings(best)))] if flags["output"] else []
    files += [(flags["report"], page(said, spaces))] if flags["report"] else []
    with writing(files):
        pass
    if as_json:
        click.echo(json_text(said))
    else:
        show(said)
        for one in made:
            click.echo(f"\n{one.target}:\n{one.text.rstrip()}")
            show_differences(one)
    if said["interrupted"]:
        ctx.exit(INTERRUPTED)


def _check_before(flags: Mapping[str, Any]) -> None:
    """Raise, before a search that takes long, what its answer would end in: no number, or no file."""
    from foretrace.simulator.energy import supply
    from foretrace.simulator.goodput.training import parse_count
    from foretrace.traces.replacing import check_can_write

    supply(flags["pue"], flags["grid"])
    if flags["tokens"] is not None:
        parse_count(flags["tokens"])
    check_can_write(*(Path(path) if path else None for path in (flags["output"], flags["report"])))


def _check_needed(ctx: click.Context, flags: Mapping[str, Any]) -> None:
    """Raise click.MissingParameter if a flag is missing without which there is nothing to search."""
    for name in NEEDED:
        if flags[name] is None:
            option = next(one for one in ctx.command.params if one.name == name)
            raise click.MissingParameter(ctx=ctx, param=option)


def _searched(
    spaces: Sequence[Space], flags: Mapping[str, Any], *, quiet: bool
) -> tuple[Job, dict[str, Any]]:
    """Return the best job of *spaces*, and everything that was found as plain JSON types."""
    from foretrace.simulator.energy import supply
    from foretrace.simulator.price import usd_per_gpu_hour
    from foretrace.simulator.search.best import front
    from foretrace.simulator.search.describe import (
        conventions,
        counts_of,
        covering,
        described,
        difference,
        mark_tied,
        waterfall,
    )
    from foretrace.simulator.search.what_if import answers

    prices = {
        (s.cluster.name, s.cluster.n_gpus): usd_per_gpu_hour(
            flags["price"], s.cluster.mean_price_usd_per_gpu_hour
        )
        for s in spaces
    }

    def say(one: Ranked) -> dict[str, Any]:
        return described(one, prices, flags["tokens"], supply(flags["pue"], flags["grid"]))

    what_if: list[dict[str, Any]] = []
    with _searching(flags, _weights(flags, prices), quiet=quiet) as search_all:
        found, machines = _found(search_all, spaces, prices, flags)
        is_whole = found.counts.is_whole
        if flags["what_if"] and is_whole:
            what_if = answers(spaces, found.best[0], lambda others: search_all(others, 1), say)
        # The front takes a search of its own, and only a page draws it.
        fronts = [front(space.families()) for space in spaces] if flags["report"] and is_whole else []
    best, summary = found.best[0].job, found.best[0].summary
    told, readings = conventions(best.of_one_site, given=flags["framework"] is not None, wanted=is_whole)
    meets = summary["average_step_time_s"] / summary["step_time_s"]
    # Sites that meet make an average step longer, by whosever conventions.
    told["step_time_s"] = {name: meets * step_s for name, step_s in told["step_time_s"].items()}
    layouts = [say(one) for one in found.best]
    on_front = [say(one) for points in fronts for one in points]
    mark_tied([*layouts, *on_front], flags["by"])  # by intervals of one framework: all layouts share it
    layouts, on_front = (
        [covering(one, readings, best.framework) for one in some] for some in (layouts, on_front)
    )
    # No further than the last layout that there is.
    at = min(flags["why"], len(layouts))
    return best, counts_of(found.counts) | {
        "layouts": layouts,
        "conventions": told,
        "machines": machines,
        "prices": _prices(prices, given=flags["price"] is not None),
        "tied": difference()._asdict(),
        "why_not_the_second": waterfall(layouts[0], layouts[min(2, len(layouts)) - 1]),
        "why_not": {"layout": at, "parts": waterfall(layouts[0], layouts[at - 1])},
        "what_if": what_if,
        "front": on_front,
        "file": flags["output"],
        "report": flags["report"],
    }


def _found(
    search_all: SearchAll,
    spaces: Sequence[Space],
    prices: Mapping[tuple[str, int], float | None],
    flags: Mapping[str, Any],
) -> tuple[Found, list[dict[str, Any]]]:
    """Return the best layouts, and the best of each machine if several compete.

    Raises ConfigError if there is a budget, but no number of tokens, or no price. Raises JobError if nothing
    is cheap enough, or nothing fits.
    """
    from foretrace.simulator.config import check_sites
    from foretrace.simulator.energy import supply
    from foretrace.simulator.search.describe import described, nothing
    from foretrace.simulator.search.found import affordable, best_of_each, machines

    def say(one: Ranked) -> dict[str, Any]:
        return described(one, prices, flags["tokens"], supply(flags["pue"], flags["grid"]))

    if flags["budget"] is None:
        found = search_all(spaces, flags["top"])
        best = best_of_each(spaces, found.best, search_all) if len(spaces) > 1 and found.best else []
    else:
        if flags["tokens"] is None:
            raise ConfigError("--budget needs --tokens: what the dollars are to pay for, e.g. --tokens 2T")
        _weights({"by": "cost"}, prices)
        each = [search_all([space], flags["top"]) for space in spaces]
        found = affordable(each, flags["top"], flags["budget"], lambda one: say(one)["usd"])
        # Of a single machine the list of layouts says all.
        best = [one.best[0] for one in each if one.best] if len(spaces) > 1 else []
    if not found.best:
        raise JobError(nothing(found.counts, spaces))
    check_sites(found.best[0].job)
    by = "usd_per_1b_tokens" if flags["by"] == "cost" else "step_time_s"
    return found, machines(spaces, [say(one) for one in best], flags["budget"], by) if best else []


@contextmanager
def _searching(flags: Mapping[str, Any], weights: Mapping[Any, float], *, quiet: bool) -> Iterator[SearchAll]:
    """Give a search with progress on stderr."""
    from foretrace.simulator.search.parts import search_parts
    from foretrace.traces.console import telling

    processes = flags["processes"]
    with telling("searching", quiet=quiet) as tell:
        yield lambda some, top: search_parts(
            some, top, weights=weights, processes=processes, partial=True, progress=tell
        )


def _weights(flags: Mapping[str, Any], prices: Mapping[tuple[str, int], float | None]) -> dict[Any, float]:
    """Return what a nanosecond costs, by machine; by time, all cost the same.

    Raises ConfigError if costs are asked for, and a machine has no price.
    """
    if flags["by"] == "time":
        return {}
    for (name, _), price in prices.items():
        if price is None:
            raise ConfigError(f"dollars need a price: {name} has none, give --price '2.5 USD/h'")
    return {key: (price or 0.0) * key[1] for key, price in prices.items()}


def _spaces(flags: Mapping[str, Any]) -> list[Space]:
    """Return the space of each machine and size."""
    from foretrace.simulator.models.sources import load_model
    from foretrace.simulator.search.space import Space, usual_batch
    from foretrace.topologies.catalog import load_cluster

    others = {name: flags[name] for name in (*OF_THE_JOB, *AS_SIMULATED) if flags[name] is not None}
    chosen = {name: flags[name] for name in CHOICES if flags[name]}
    model = load_model(flags["model"])
    return [
        Space(
            model=model,
            cluster=load_cluster(cluster, gpus),
            global_batch=flags["global_batch"] or usual_batch(flags["seq_len"]),
            seq_len=flags["seq_len"],
            others=others,
            **chosen,
        )
        for cluster in flags["cluster"]
        for gpus in flags["gpus"]
    ]


def _prices(prices: Mapping[tuple[str, int], float | None], *, given: bool) -> list[str]:
    """Return a line for each machine that says what its GPU-hour costs, or that nobody knows."""
    from foretrace.simulator.price import unknown, whose

    named = {name: price for (name, _), price in prices.items()}
    return [
        unknown(name) if price is None else f"$ {whose(name, price, given=given)}"
        for name, price in named.items()
    ]
