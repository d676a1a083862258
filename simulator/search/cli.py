"""The verb ``foretrace search``: the best layouts of a model on a machine, each simulated exactly."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from foretrace.simulator.errors import ConfigError, JobError
from foretrace.simulator.search.flags import search_options
from foretrace.simulator.search.garbage import few_collections

if TYPE_CHECKING:
    from foretrace.simulator.job import Job
    from foretrace.simulator.search.found import Found, Ranked
    from foretrace.simulator.search.machines import SearchAll
    from foretrace.simulator.search.space import Space


TOKENS_PER_STEP = 4 << 20
"""Tokens of a step where no batch is given: the 4 M of Llama 2 (arXiv:2307.09288, section 2.2)."""

DEGREES = ("tp", "pp", "cp", "ep", "expert_tp")
"""Flags of parallel degrees."""

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
    from foretrace.simulator.search.page import write_page
    from foretrace.simulator.search.render import show
    from foretrace.traces.writer import write_atomically

    _check_before(flags)
    spaces = _spaces(flags)
    best, said = _searched(spaces, flags, quiet=as_json)
    made = [written(best, target) for target in flags["targets"]]
    said["written"] = {one.target: one.describe() for one in made}
    if flags["output"]:
        write_atomically(Path(flags["output"]), write_config(job_settings(best)))
    if flags["report"]:
        write_page(flags["report"], said, spaces)
    if as_json:
        click.echo(json.dumps(said))
        return
    show(said)
    for one in made:
        click.echo(f"\n{one.target}:\n{one.text.rstrip()}")
        show_differences(one)


def _check_before(flags: Mapping[str, Any]) -> None:
    """Raise, before a search that takes long, what its answer would end in: no number, or no file."""
    from foretrace.simulator.goodput.training import parse_count
    from foretrace.traces.replacing import check_can_write

    if flags["tokens"] is not None:
        parse_count(flags["tokens"])
    for path in (flags["output"], flags["report"]):
        check_can_write(Path(path) if path else None)


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
    from foretrace.simulator.price import usd_per_gpu_hour
    from foretrace.simulator.search.describe import counts_of, described, waterfall
    from foretrace.simulator.search.front import front
    from foretrace.simulator.search.ties import difference, mark_tied
    from foretrace.simulator.search.what_if import answers

    prices = {
        (s.cluster.name, s.cluster.n_gpus): usd_per_gpu_hour(
            flags["price"], s.cluster.mean_price_usd_per_gpu_hour
        )
        for s in spaces
    }

    def say(one: Ranked) -> dict[str, Any]:
        return described(one, prices, flags["tokens"])

    what_if: list[dict[str, Any]] = []
    with _searching(flags, spaces, _weights(flags, prices), quiet=quiet) as search_all:
        found, machines = _found(search_all, spaces, prices, flags)
        if flags["what_if"]:
            what_if = answers(spaces, found.best[0], lambda others: search_all(others, 1), say)
        fronts = [front(space.families()) for space in spaces] if flags["report"] else []
    layouts = [say(one) for one in found.best]
    on_front = [say(one) for points in fronts for one in points]
    mark_tied([*layouts, *on_front], flags["by"])
    at = min(flags["why"], len(layouts))
    return found.best[0].job, counts_of(found.counts) | {
        "layouts": layouts,
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

    Raises:
        ConfigError: there is a budget, but no number of tokens, or no price.
        JobError: nothing is cheap enough, or nothing fits.
    """
    from foretrace.simulator.search.describe import described, nothing
    from foretrace.simulator.search.machines import affordable, best_of_each, machines

    def say(one: Ranked) -> dict[str, Any]:
        return described(one, prices, flags["tokens"])

    if flags["budget"] is None:
        found = search_all(spaces, flags["top"])
        best = best_of_each(spaces, found.best, search_all) if len(spaces) > 1 and found.best else []
    else:
        if flags["tokens"] is None:
            raise ConfigError("--budget needs --tokens: what the dollars are to pay for, e.g. --tokens 2T")
        _weights({"by": "cost"}, prices)
        each = [search_all([space], flags["top"]) for space in spaces]
        found = affordable(each, flags["top"], flags["budget"], lambda one: say(one)["usd"])
        best = [one.best[0] for one in each if one.best] if len(spaces) > 1 else []
    if not found.best:
        raise JobError(nothing(found.counts, spaces))
    by = "usd_per_1b_tokens" if flags["by"] == "cost" else "step_time_s"
    return found, machines(spaces, [say(one) for one in best], flags["budget"], by) if best else []


@contextmanager
def _searching(
    flags: Mapping[str, Any], spaces: Sequence[Any], weights: Mapping[Any, float], *, quiet: bool
) -> Iterator[SearchAll]:
    """Give a search with processes of its own, or of a cluster, and progress on stderr.

    Ray prints on stdout that a worker was lost, which is none of what a search says: it goes to stderr.
    """
    from foretrace.simulator.search.executors import Here, open_executor
    from foretrace.simulator.search.parts import FEW, n_layouts, search_parts
    from foretrace.traces.console import telling

    named = flags["executor"]
    if named is None:
        executor = open_executor("local") if n_layouts(spaces) >= FEW else Here()
    else:
        executor = open_executor(named)
    try:
        with redirect_stdout(sys.stderr), telling("searching", quiet=quiet) as tell:
            yield lambda some, top: search_parts(
                some,
                top,
                weights=weights,
                executor=executor,
                progress=tell,
            )
    finally:
        executor.close()


def _weights(flags: Mapping[str, Any], prices: Mapping[tuple[str, int], float | None]) -> dict[Any, float]:
    """Return what a nanosecond costs, by machine; by time, all cost the same.

    Raises:
        ConfigError: costs are asked for, and a machine has no price.
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
    from foretrace.simulator.search.space import Space
    from foretrace.topologies.catalog import load_cluster

    others = {"precision": flags["precision"]}
    if flags["framework"]:
        others["framework"] = flags["framework"]
    chosen = {name: flags[name] for name in (*DEGREES, "micro_batch", "virtual_stages", "offload_layers")}
    chosen |= {name: flags[name] for name in ("schedule", "sharding", "recompute", "offload") if flags[name]}
    model = load_model(flags["model"])
    return [
        Space(
            model=model,
            cluster=load_cluster(cluster, gpus),
            global_batch=flags["global_batch"] or max(1, TOKENS_PER_STEP // flags["seq_len"]),
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
