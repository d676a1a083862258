"""Which machine runs a rehearsed script best: the same tasks, timed on each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from foretrace.simulator.errors import ConfigError, JobError, SimulationError
from foretrace.simulator.goodput.training import parse_count
from foretrace.simulator.price import usd_per_1b_tokens, usd_per_gpu_hour
from foretrace.simulator.rehearsed.notes import elsewhere
from foretrace.simulator.rehearsed.run import simulate_rehearsal
from foretrace.simulator.search.what_if import half_as_fast
from foretrace.simulator.simulate import Progress
from foretrace.topologies.catalog import load_cluster
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.errors import TopologyError
from foretrace.traces.batch import batch_in
from foretrace.traces.rehearsal import read_rehearsal

AS_IS: Final = "as they are"
LINKS: Final[Mapping[str, Callable[[Cluster], Cluster]]] = {AS_IS: replace, "half as fast": half_as_fast}
"""Links of a machine that are tried, and what makes a cluster have them."""

SHOWN: Final = ("step_time_s", "tokens_per_s_per_gpu", "mfu", "peak_memory_bytes", "memory_limit_bytes")
"""Figures of a run that are listed."""


def compared_machines(
    path: str | Path,
    clusters: Sequence[str],
    progress: Progress | None = None,
    *,
    links: Sequence[str] = (AS_IS,),
    price: str | None = None,
    tokens: str | None = None,
    by: str = "time",
) -> dict[str, Any]:
    """Return what ``foretrace search --rehearsal`` says: one row per machine, best first.

    A machine that the script does not fit into comes after all that it fits into; one that cannot be timed is
    in ``left_out``, with the reason. ``warnings`` are sentences about the times of all.

    Args:
        path: run directory with the rehearsal.
        clusters: names of the catalogue, or TOML files.
        progress: told which machine is being timed.
        links: the table of ``LINKS``.
        price: dollars per GPU and hour, as a person writes it, instead of that of each machine.
        tokens: budget to give days and dollars for.
        by: ``"time"`` or ``"cost"``.

    Raises:
        RunError: there is no rehearsal at *path*.
        ConfigError: costs are asked for, and a machine has no price, or the tokens of a step are unknown.
        JobError: no machine can run it.
    """
    tell = progress or (lambda _: None)
    rehearsal = read_rehearsal(path)
    n_ranks, timed, batch = rehearsal.world_size, list[Cluster](), batch_in(rehearsal.job)
    if by == "cost" and not batch.tokens:
        raise ConfigError(f"dollars per token need tokens: {batch.words}; rehearse with --tokens-per-step")
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for name in dict.fromkeys(clusters):
        for kind in links:
            tell(f"{name}, links {kind}")
            try:
                cluster = LINKS[kind](load_cluster(name, n_ranks))
                # The machine has its size already, whatever number is asked for.
                summary = simulate_rehearsal(path, partial(_given, cluster)).info.summary
            except (SimulationError, TopologyError) as error:
                left_out.append(f"{name}: {error}")
                continue
            timed.append(cluster)
            rows.append({"cluster": cluster.name, "gpus": n_ranks, "links": kind} | _row(summary or {}))
            rows[-1] |= _cost(rows[-1], cluster, price, tokens)
    if not rows:
        raise JobError(f"{path} runs on none of these machines: {'; '.join(left_out)}")
    if by == "cost" and (unpriced := [row["cluster"] for row in rows if row["usd_per_1b_tokens"] is None]):
        raise ConfigError(f"dollars need a price: {unpriced[0]} has none, give --price '2.5 USD/h'")
    key = "usd_per_1b_tokens" if by == "cost" else "step_time_s"
    # ``None`` is not ``False``: where memory is unknown nothing says that it does not fit.
    rows.sort(key=lambda row: (row["fits"] is False, row[key], row["cluster"]))
    found: dict[str, Any] = json.loads(json.dumps({"rehearsal": str(path), "machines": rows}))
    said = [*elsewhere(rehearsal, timed), *([batch.words] if batch.unknown else [])]
    return {**found, "left_out": left_out, "warnings": said}


def _given(cluster: Cluster, n_gpus: int) -> Cluster:
    del n_gpus
    return cluster


def _row(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {name: summary[name] for name in (*SHOWN, "fits", "exposed_comm_fraction", "tokens_per_s")}


def _cost(
    row: Mapping[str, Any], cluster: Cluster, price: str | None, tokens: str | None
) -> dict[str, float | None]:
    """Return dollars per billion tokens, and days and dollars of the budget, None for what is not known."""
    usd_per_hour = usd_per_gpu_hour(price, cluster.mean_price_usd_per_gpu_hour)
    per_s, budget = row["tokens_per_s"], None if tokens is None else parse_count(tokens)
    usd = None
    if usd_per_hour is not None and per_s:
        usd = usd_per_1b_tokens(usd_per_hour, per_s / row["gpus"])
    return {
        "usd_per_1b_tokens": usd,
        "days": budget / per_s / 86_400 if budget is not None and per_s else None,
        "usd": usd * budget / 1e9 if budget is not None and usd is not None else None,
    }
