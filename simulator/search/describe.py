"""What is said of the layouts that a search has found: plain figures, for JSON and for tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from foretrace.simulator.config import inferred_dp
from foretrace.simulator.errors import JobError, SimulationError
from foretrace.simulator.goodput.training import parse_count
from foretrace.simulator.job import Job, check_chunks, check_heads
from foretrace.simulator.memory.ranks import rank_memories
from foretrace.simulator.network.advice import across
from foretrace.simulator.network.cost import job_network
from foretrace.simulator.schedules import plan
from foretrace.simulator.search.found import Counts, Ranked
from foretrace.simulator.search.space import ONE_STAGE, Space
from foretrace.simulator.summary import job_name
from foretrace.topologies.errors import TopologyError
from foretrace.topologies.units import format_bytes, format_capacity
from foretrace.traces.errors import TraceError
from foretrace.traces.layout import Layout

_DAY_S: Final = 86_400


def counts_of(counts: Counts) -> dict[str, Any]:
    """Return what was looked at."""
    return {
        "n_candidates": counts.n_candidates,
        "n_pipelines_run": counts.n_run,
        "n_simulated": counts.n_simulated,
        "n_too_large": counts.n_too_large,
    }


def described(
    one: Ranked, prices: Mapping[tuple[str, int], float | None], tokens: str | None
) -> dict[str, Any]:
    """Return what is said of one layout.

    Args:
        one: the layout.
        prices: dollars per GPU and hour, by machine and its GPUs.
        tokens: the budget, as a person writes it; None: there is none.
    """
    job, summary = one.job, one.summary
    n_gpus, step_s = job.cluster.n_gpus, summary["step_time_s"]
    price = prices[job.cluster.name, n_gpus]
    usd = None if price is None else step_s / 3600 * n_gpus * price / job.tokens_per_step * 1e9
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
        **{name: summary[name] for name in ("step_time_s", "tokens_per_s_per_gpu", "mfu", "shares")},
        **{name: summary[name] for name in ("peak_memory_bytes", "memory_limit_bytes", "fits")},
        "step_time_interval_s": likely.get("step_time_s"),
        "peak_memory_interval_bytes": likely.get("peak_memory_bytes"),
        "usd_per_1b_tokens": usd,
        "days": None if budget is None else budget / summary["tokens_per_s"] / _DAY_S,
        "usd": None if budget is None or usd is None else usd * budget / 1e9,
    }


def waterfall(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return where *second* loses its time to *first*, the largest first; the parts add up to the difference.

    Empty where both are one layout, or do not use the same number of GPUs: their seconds do not compare.
    """
    if first is second or first["gpus"] != second["gpus"]:
        return []
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


def nothing(counts: Counts, spaces: Sequence[Space]) -> str:
    """Say why no layout of *spaces* was found."""
    if counts.smallest is None:
        return f"no layout is possible: {why_impossible(spaces[0])}"
    job, _ = counts.smallest
    peak_bytes = max(rank.peak_bytes for rank in rank_memories(job))
    limit = job.cluster.device.memory_bytes
    host = (
        "; --offload optimizer,states,all also tries the memory of the host" if job.offload == "none" else ""
    )
    return (
        f"none of {counts.n_candidates:,} layouts fits: the smallest, {job_name(job)} with recompute "
        f"{job.recompute} and {job.sharding}, needs {format_bytes(peak_bytes)} of {format_capacity(limit)}"
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
    except (SimulationError, TopologyError, TraceError) as error:
        return str(error)
    return NOWHERE


def _first(space: Space, degrees: dict[str, int]) -> None:
    """Check the first layout with *degrees*.

    Raises:
        SimulationError, TopologyError, TraceError: it is not possible.
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
        sharding=space.sharding[0],
        recompute=space.recompute[0],
        offload=space.offload[0],
        offload_layers=space.offload_layers[0] if space.offload_layers else 0,
        **space.others,
    )
    check_chunks(job)
    plan(job.schedule, layout.pp, job.n_microbatches, job.virtual_stages)
