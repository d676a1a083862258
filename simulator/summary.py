"""The figures of a simulated run: time, efficiency, memory, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import median
from typing import Any, Final

from foretrace.simulator.builder.stages import job_plan, n_stages, stage_layers
from foretrace.simulator.intervals import intervals
from foretrace.simulator.job import EXPERT_TP_FROM, Job
from foretrace.simulator.memory.ranks import RankMemory, host_bytes, host_holds
from foretrace.simulator.memory.remedies import as_flags, changes
from foretrace.simulator.models.kinds import KINDS
from foretrace.simulator.network.cost import job_network
from foretrace.topologies.units import format_bytes, format_capacity
from foretrace.traces.analysis import metrics
from foretrace.traces.info import rank_list
from foretrace.traces.layout import Coord
from foretrace.traces.run import Run


def job_name(job: Job) -> str:
    """Return what a person calls the job, e.g. ``"llama3-70b on 512 dgx-h100, tp8 pp4 dp16"``."""
    degrees = {axis: degree for axis, degree in job.layout.degrees.items() if degree > 1}
    order = [f"{axis}{degrees[axis]}" for axis in ("tp", "cp", "ep", "pp", "dp") if axis in degrees]
    if job.model.n_experts:
        order.append(f"expert tp{job.layout.etp}")
    layout = " ".join(order) or "one rank"
    return f"{job.model.name} on {job.layout.world_size} {job.cluster.name}, {layout}"


def published_note(job: Job) -> list[str]:
    """Return where settings are from if they are those of a published run."""
    return [f"layout, batch and precision as published: {job.published}"] if job.published else []


def model_note(job: Job) -> list[str]:
    """Return what of the published model is left out, and what its layers rest on without evidence."""
    model = job.model
    found = [f"{model.name} without its {model.left_out}"] if model.left_out and not model.n_mtp else []
    if job.images:
        found.append(
            "the tower runs with the embedding, gathered with it and cut over tp: assumed, and no run "
            "with images is behind the ranges"
        )
    for kind in dict.fromkeys(kind for layer in range(model.n_layers) for kind in model.kinds(layer)):
        if assumed := KINDS[kind].assumed:
            found.append(f"{kind} layers: {assumed} ({KINDS[kind].source})")
        if KINDS[kind].scan and job.layout.cp > 1:
            found.append(
                f"{kind} layers: context-parallel ranks exchange heads, as Megatron-LM does; assumed"
            )
    return found


def expert_tp_note(job: Job) -> list[str]:
    """Return over how many ranks an expert is cut if nobody said so, and where that is from."""
    if not job.expert_tp_from:
        return []
    why = EXPERT_TP_FROM[job.expert_tp_from].format(model=job.model.name, framework=job.framework)
    return [f"expert tp {job.layout.etp}: {why}; --expert-tp says otherwise"]


def processor_note(job: Job) -> list[str]:
    """Return what a processor in the place of a GPU makes of collectives, if the job has such."""
    if job.cluster.device.kind != "cpu" or not (job.shards.parameters or job.layout.tp > 1):
        return []
    return ["a processor has no streams: full sharding and tensor parallelism wait where they communicate"]


def empty_stages(job: Job) -> list[str]:
    """Return which stages have no layer because the framework shares out cost, as a sentence if any."""
    n = n_stages(job_plan(job))
    empty = [stage for stage, layers in enumerate(stage_layers(job, n)) if not layers and 0 < stage < n - 1]
    if not empty:
        return []
    hold = "holds" if len(empty) == 1 else "hold"
    return [f"{_stages(empty)} {hold} no layer: {job.framework} deals layers out by their cost"]


def placement_note(job: Job) -> list[str]:
    """Return how many GPUs of a node have ranks if launchers leave some idle."""
    if not (filled := job.filled_per_node):
        return []
    where = f"ranks on {filled} of the {job.cluster.gpus_per_node} GPUs of a node"
    return [f"{where}, as launchers place them; --ranks-per-node says otherwise"]


def figures(
    job: Job, run: Run, stages: Sequence[RankMemory], *, rests_on: Sequence[str], saving_s: float = 0.0
) -> dict[str, Any]:
    """Return the summary of a simulated run; docs/simulation.md says what each key means.

    Throughput and MFU, and so what tokens cost, are those of an average step: with its share of a checkpoint.

    *rests_on*: what the prediction rests on, as sentences.
    """
    found = metrics.headline(run)
    step_s, n_ranks, limit = found["step_time_s"], job.layout.world_size, job.cluster.device.memory_bytes
    times_s = [step["step_time_s"] for step in found["steps"]]
    average_s = _average_s(job, times_s, saving_s) if job.checkpoint_every else step_s
    tokens_per_s = job.tokens_per_step / average_s
    peak_flops = _peak_flops_per_s(job)
    headline = {
        "step_time_s": step_s,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": tokens_per_s / n_ranks,
        "mfu": job.flops_per_token * tokens_per_s / peak_flops,
        "peak_memory_bytes": max(stage.peak_bytes for stage in stages),
    }
    return {
        **headline,
        "intervals": intervals(job, headline),
        "memory_limit_bytes": limit,
        "fits": headline["peak_memory_bytes"] <= limit and host_holds(job, stages),
        "host_memory_bytes": host_bytes(job, stages),
        **{key: found[key] for key in ("bubble_fraction", "exposed_comm_fraction", "exposed_by_axis")},
        **{key: found[key] for key in ("hidden_by_axis", "waiting_fraction", "shares")},
        "step_times_s": times_s,
        "average_step_time_s": average_s,
        "checkpoint_s": saving_s,
        "checkpoint_every": job.checkpoint_every,
        **{key: found[key] for key in ("world_size", "n_ranks_stored", "n_spans")},
        "ranks_per_node": min(job.most_ranks_per_node, n_ranks),
        "stages": [
            {
                "stage": stage.pp,
                "holds": list(stage.stages),
                "layers": stage.n_layers,
                "in_flight": stage.in_flight,
                "peak_bytes": stage.peak_bytes,
                "bytes": dict(stage.items),
            }
            for stage in stages
        ],
        "rests_on": list(rests_on),
    }


def _peak_flops_per_s(job: Job) -> float:
    """Return what the GPUs of all ranks would do per second at their peaks."""
    peaks = [kind.device.peak(job.precision) for kind in job.cluster.kinds]
    if len(peaks) == 1:
        return job.layout.world_size * peaks[0]
    network = job_network(job)
    return sum(peaks[network.kind(rank)] for rank in range(job.layout.world_size))


def _average_s(job: Job, times_s: Sequence[float], saving_s: float) -> float:
    """Return the time of a step with its share of a checkpoint, however many steps were simulated."""
    saves = (number % job.checkpoint_every == 0 for number in range(1, len(times_s) + 1))
    without = [time - saving_s if saved else time for time, saved in zip(times_s, saves, strict=True)]
    return median(without) + saving_s / job.checkpoint_every


MOST_REMEDIES: Final = 6
"""Changes that a simulation names; ``foretrace memory`` names all."""


def memory_warnings(job: Job, stages: Sequence[RankMemory]) -> list[str]:
    """Return what would fit and one sentence on all pipeline ranks that do not; nothing where all do.

    Of the fullest it says by how much, and what it holds most of; of the others, only from what to what.
    """
    limit = job.cluster.device.memory_bytes
    over = sorted((one for one in stages if one.peak_bytes > limit), key=lambda one: -one.peak_bytes)
    said = [] if host_holds(job, stages) else [host_words(job, host_bytes(job, stages))]
    if over:
        said.append(_too_full(job, over, every=len(over) == len(stages)))
    if not said:
        return []
    fitting = (as_flags(one.change) for one in changes(job) if one.peak_bytes <= limit)
    some = list(islice(fitting, MOST_REMEDIES))
    return ["would fit: " + "; ".join(some) if some else "no single setting makes it fit", *said]


def host_words(job: Job, needed_bytes: int) -> str:
    """Return that the hosts of *job* do not hold what it offloads, in words."""
    have = format_capacity(job.cluster.node_memory_bytes or 0)
    return f"what is offloaded does not fit: {format_bytes(needed_bytes)} in the memory of a node, of {have}"


def _too_full(job: Job, over: Sequence[RankMemory], *, every: bool) -> str:
    """Return a sentence on the pipeline ranks that hold too much, the fullest of them, *over*[0], in full."""
    limit, fullest = job.cluster.device.memory_bytes, over[0]
    excess = f"{format_bytes(fullest.peak_bytes - limit)} too much; largest: " + ", ".join(
        f"{name} {format_bytes(size)}" for name, size in fullest.largest()
    )
    needed, have = format_bytes(fullest.peak_bytes), format_capacity(limit)
    if len(over) == 1:
        plural = "do" if len(fullest.stages) > 1 else "does"
        return f"{_ranks(job, fullest)} {plural} not fit: {needed} of {have}, {excess}"
    names = "all stages" if every else _stages(stage for one in over for stage in one.stages)
    return (
        f"{names} do not fit: {format_bytes(over[-1].peak_bytes)} to {needed} of {have}; "
        f"fullest {_ranks(job, fullest)}, {excess}"
    )


def _stages(names: Iterable[int]) -> str:
    """Return pipeline stages in words, neighbours as a range.

    >>> _stages([3]), _stages([0, 1, 2, 7])
    ('stage 3', 'stages 0-2, 7')
    """
    numbers = tuple(names)
    return f"stage{'s' if len(numbers) > 1 else ''} {rank_list(numbers)}"


def _ranks(job: Job, stage: RankMemory) -> str:
    """Return which ranks hold *stage*, in words."""
    layout = job.layout
    first = layout.rank(Coord(stage.pp, 0, 0, 0))
    last = layout.rank(Coord(stage.pp, layout.dp - 1, layout.cp - 1, layout.tp - 1))
    ranks = f"rank {first}" if first == last else f"rank {first} to {last}"
    return f"{_stages(stage.stages)} ({ranks})"
