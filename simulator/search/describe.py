"""What is said of the layouts that a search has found: plain figures, for JSON and for tables."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, Final, NamedTuple

from foretrace.simulator.config import inferred_dp
from foretrace.simulator.energy import Supply, of_step, over_times
from foretrace.simulator.errors import JobError
from foretrace.simulator.goodput.training import parse_count
from foretrace.simulator.intervals import Reading
from foretrace.simulator.job import Job, check_chunks, check_heads
from foretrace.simulator.memory.ranks import peak_bytes
from foretrace.simulator.memory.remedies import NOT_POSSIBLE
from foretrace.simulator.network.advice import across
from foretrace.simulator.network.cost import job_network
from foretrace.simulator.price import usd_per_1b_tokens
from foretrace.simulator.schedules import plan
from foretrace.simulator.search.found import Counts, Ranked
from foretrace.simulator.search.space import ONE_STAGE, SHARED, Space
from foretrace.simulator.simulate import by_framework
from foretrace.simulator.summary import job_name
from foretrace.topologies.units import format_bytes, format_capacity, format_time
from foretrace.traces.layout import Layout
from foretrace.traces.report.format import format_share

# Which layouts nobody can tell apart: what measured groups of layouts say about differences.
#
# What a prediction is off by in every layout of a model and machine cancels when two of them are compared.
# What is left was measured: ties.toml is written by benchmarks/ties.py, nothing in it is typed by
# hand.


class Difference(NamedTuple):
    """From which predicted difference of two layouts on measurements agree which is faster.

    Attributes:
        level: share of the pairs that are predicted to differ so much whose measured order is the predicted.
        between: where ``ratio`` would be in 8 of 10 cases if other groups had been measured.
        pairs, groups, sources: pairs of layouts that it is from, in so many groups of so many sources.
    """

    ratio: float
    level: float
    between: tuple[float, float]
    pairs: int
    groups: int
    sources: int

    @property
    def words(self) -> str:
        """What it says, as a person reads it.

        >>> Difference(1.06, 0.8, (1.05, 1.08), 900, 100, 6).words
        'measured layouts less than 6.0 % apart came in the predicted order less than 8 times in 10'
        """
        return (
            f"measured layouts less than {format_share(self.ratio - 1)} apart came in the predicted order "
            f"less than {10 * self.level:.0f} times in 10"
        )


@cache
def difference() -> Difference:
    """Return what was measured."""
    text = (resources.files("foretrace.simulator.search") / "ties.toml").read_text(encoding="utf-8")
    found = tomllib.loads(text)
    return Difference(**found | {"between": tuple(found["between"])})


def mark_tied(layouts: Sequence[dict[str, Any]], by: str) -> None:
    """Note in each layout whether it is tied with the best, so that measurements may well turn them round.

    On the machine of the best that is a difference below ``difference().ratio``. On another machine errors do
    not cancel: there they are tied if the likely intervals of both meet.

    *by*: ``"time"`` or ``"cost"``: what they compete by.
    """
    name = {"time": "step_time_s", "cost": "usd_per_1b_tokens"}[by]
    best = layouts[0]
    for one in layouts:
        if (one["cluster"], one["gpus"]) == (best["cluster"], best["gpus"]):
            one["tied"] = one[name] < best[name] * difference().ratio
        else:
            one["tied"] = one[name] * _share(one, 0) <= best[name] * _share(best, 1)


def _share(one: Mapping[str, Any], end: int) -> float:
    """Return an end of the interval of a step time, as a share of it; 1 without one."""
    interval = one["step_time_interval_s"]
    return 1.0 if interval is None else float(interval[end] / one["step_time_s"])


_DAY_S: Final = 86_400


def counts_of(counts: Counts) -> dict[str, Any]:
    """Return what was looked at."""
    return {
        "n_candidates": counts.n_candidates,
        "n_pipelines_run": counts.n_run,
        "n_simulated": counts.n_simulated,
        "n_too_large": counts.n_too_large,
        "interrupted": not counts.is_whole,
    }


def described(
    one: Ranked,
    prices: Mapping[tuple[str, int], float | None],
    tokens: str | None,
    power: Supply | None = None,
) -> dict[str, Any]:
    """Return what is said of one layout.

    *prices*: dollars per GPU and hour, by machine and its GPUs. *tokens*: the budget, as a person writes it;
    None: there is none. *power*: where the power comes from; None: nobody said.
    """
    job, summary = one.job, one.summary
    n_gpus, step_s = job.cluster.n_gpus, summary["average_step_time_s"]
    price = prices[job.cluster.name, n_gpus]
    usd = None if price is None else usd_per_1b_tokens(price, job.tokens_per_step / step_s / n_gpus)
    budget = None if tokens is None else parse_count(tokens)
    likely = summary.get("intervals", {})
    return {
        "name": job_name(job),
        "cluster": job.cluster.name,
        "gpus": n_gpus,
        **job.layout.degrees,
        "expert_tp": job.layout.etp if job.model.n_experts else None,
        "across_nodes": across(job.layout, job_network(job)),
        "ranks_per_node": min(job.most_ranks_per_node, job.layout.world_size),
        "micro_batch": job.micro_batch,
        "n_microbatches": job.n_microbatches,
        "schedule": job.schedule,
        "virtual_stages": job.virtual_stages,
        "sharding": job.sharding,
        "recompute": job.recompute,
        "offload": job.offload,
        "offload_layers": job.offload_layers,
        "step_time_s": step_s,
        **{name: summary[name] for name in ("tokens_per_s_per_gpu", "mfu", "shares")},
        **{name: summary[name] for name in ("peak_memory_bytes", "memory_limit_bytes", "fits")},
        "step_time_interval_s": [end * (step_s / summary["step_time_s"]) for end in likely["step_time_s"]]
        if "step_time_s" in likely
        else None,
        "peak_memory_interval_bytes": likely.get("peak_memory_bytes"),
        "usd_per_1b_tokens": usd,
        "days": None if budget is None else budget / summary["tokens_per_s"] / _DAY_S,
        "usd": None if budget is None or usd is None else usd * budget / 1e9,
        "energy": of_step(
            {
                "name": job.cluster.name,
                "gpus_per_node": job.cluster.gpus_per_node,
                "gpus_per_tray": job.cluster.gpus_per_tray,
                **job.cluster.powers(),
            },
            summary,
            power or Supply(),
            # The energy is asked of a site, and counts all of them itself.
            n_gpus=n_gpus // job.n_sites,
        ),
    }


def covering(layout: Mapping[str, Any], readings: Sequence[Reading], framework: str) -> dict[str, Any]:
    """Return *layout* with intervals that cover what frameworks make of the best one, in proportion.

    *layout*: as ``described``. *readings*: the best layout by the conventions of each framework; empty if one
    was named.
    """
    own = next((one for one in readings if one.name == framework), None)
    if own is None:
        return dict(layout)
    found = dict(layout)
    for name, figure in (
        ("step_time_interval_s", "step_time_s"),
        ("peak_memory_interval_bytes", "peak_memory_bytes"),
    ):
        if layout[name] is not None:
            # Some frameworks cannot run it, and have no time.
            known = [value for one in readings if (value := getattr(one, figure)) is not None]
            shares = [value / getattr(own, figure) for value in known]
            # In proportion: the layouts of one search differ less among frameworks than frameworks do
            # among themselves.
            low, high = layout[name]
            found[name] = [low * min(shares), high * max(shares)]
    if found["energy"] is not None:
        found["energy"] = over_times(found["energy"], found["step_time_interval_s"], found["step_time_s"])
    return found


NOTICED: Final = 1.02
"""Ratio of step times from which it matters whose conventions hold: our choice."""


def conventions(job: Job, *, given: bool, wanted: bool = True) -> tuple[dict[str, Any], list[Reading]]:
    """Return whose conventions hold for *job*, and unless they were *given*, what others make of it.

    Where that is not *wanted*, nobody is asked.
    """
    readings = [] if given or not wanted else by_framework(job)
    times_s = {one.name: one.step_time_s for one in readings if one.step_time_s is not None}
    return {"framework": job.framework, "given": given, "step_time_s": times_s}, readings


def conventions_line(framework: str, step_time_s: Mapping[str, float]) -> str:
    """Return whose conventions hold and, if it matters, what the step would take under those of others.

    >>> conventions_line("a", {"a": 1.0, "b": 1.5, "c": 1.1})
    'conventions: a; by those of 3 frameworks, if they can run it, 1 s (a) to 1.5 s (b): --framework'
    >>> conventions_line("a", {"a": 1.0, "b": 1.01})
    'conventions: a'
    """
    if len(step_time_s) < 2:
        return f"conventions: {framework}"
    low, *_, high = sorted(step_time_s, key=step_time_s.__getitem__)
    if step_time_s[high] < step_time_s[low] * NOTICED:
        return f"conventions: {framework}"
    return (
        f"conventions: {framework}; by those of {len(step_time_s)} frameworks, if they can run it, "
        f"{format_time(step_time_s[low])} ({low}) to {format_time(step_time_s[high])} ({high}): --framework"
    )


def waterfall(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return where *second* loses its time to *first*, the largest first; the parts add up to the difference.

    Empty where both are one layout, or do not use the same number of GPUs: their seconds do not compare.
    """
    if first is second or first["gpus"] != second["gpus"]:
        return []
    parts = [{"cause": cause, "seconds": s} for cause, s in seconds_by_cause(first, second).items()]
    return sorted(parts, key=lambda part: -abs(part["seconds"]))


def seconds_by_cause(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, float]:
    """Return where *second* loses its time to *first*, in seconds a step; adds up to the difference."""
    return {
        cause: second["shares"].get(cause, 0.0) * second["step_time_s"]
        - first["shares"].get(cause, 0.0) * first["step_time_s"]
        for cause in dict.fromkeys([*first["shares"], *second["shares"]])
    }


def nothing(counts: Counts, spaces: Sequence[Space]) -> str:
    """Say why no layout of *spaces* was found."""
    if counts.smallest is None:
        return f"no layout is possible: {why_impossible(spaces[0])}"
    job, _ = counts.smallest
    limit = job.cluster.device.memory_bytes
    host = (
        "; --offload optimizer,states,all also tries the memory of the host" if job.offload == "none" else ""
    )
    return (
        f"none of {counts.n_candidates:,} layouts fits: the smallest, {job_name(job)} with recompute "
        f"{job.recompute} and {job.sharding}, needs {format_bytes(peak_bytes(job))} of "
        f"{format_capacity(limit)}"
        f"{host}"
    )


NOWHERE = "the batch, the layers or the heads divide over none of these degrees"


def why_impossible(space: Space) -> str:
    """Return what the first layout that *space* asks for runs against, with values that would work.

    Degrees that are left open are 1 there.
    """
    axes = {name: getattr(space, name) for name in ("tp", "pp", "cp", "ep", "expert_tp")}
    degrees = {axis: values[0] for axis, values in axes.items() if values}
    try:
        _first(space, degrees)
    except NOT_POSSIBLE as error:
        return str(error)
    return NOWHERE


def _first(space: Space, degrees: dict[str, int]) -> None:
    """Check the first layout with *degrees*.

    Raises SimulationError, TopologyError, TraceError if it is not possible.
    """
    n_layers = space.model.n_layers
    check_heads(degrees.get("tp", 1), space.model)
    if degrees.get("pp", 1) > n_layers:
        raise JobError(
            f"pp={degrees['pp']} stages for {n_layers} layers of {space.model.name}: at most {n_layers}"
        )
    layout = Layout(**degrees, dp=inferred_dp(space.cluster.n_gpus, degrees))
    is_cut = layout.pp > 1
    job = Job(
        model=space.model,
        cluster=space.cluster,
        layout=layout,
        global_batch=space.global_batch,
        micro_batch=(space.micro_batch or (1,))[0],
        seq_len=space.seq_len,
        schedule=space.schedule[0] if is_cut else ONE_STAGE,
        virtual_stages=space.virtual_stages[0] if is_cut and space.virtual_stages else None,
        sharding=(space.sharding or SHARED)[0],
        recompute=space.recompute[0],
        offload=space.offload[0],
        offload_layers=space.offload_layers[0] if space.offload_layers else 0,
        **space.others,
    )
    check_chunks(job)
    plan(job.schedule, layout.pp, job.n_microbatches, job.virtual_stages)
