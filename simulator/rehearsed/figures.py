"""The figures of a rehearsed run, in the keys of docs/simulation.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from foretrace.simulator.rehearsed.rank import OP
from foretrace.simulator.simulate import Simulation
from foretrace.topologies.cluster import Cluster
from foretrace.traces.analysis.metrics import summarize
from foretrace.traces.batch import batch_in, told
from foretrace.traces.rehearsal import RankTables, Rehearsal

UNCOUNTED: Final = frozenset({"recompute", "optimizer"})
"""Kinds of places whose FLOPs are not the model's: what is computed again, and products of an optimizer."""


PASSES: Final = frozenset({"forward", "backward", "backward_input", "backward_weight", "recompute"})
"""Kinds of places of a pass of a micro-batch."""


def steps_of(rehearsal: Rehearsal) -> range:
    """Return the steps that were kept."""
    first = int(rehearsal.job.get("first_step", 0))
    return range(first, first + int(rehearsal.job.get("steps", 1)))


def figures(
    simulation: Simulation,
    rehearsal: Rehearsal,
    machine: Cluster,
    precision: str,
    tables: Mapping[int, RankTables],
) -> dict[str, Any]:
    """Return the summary, in the keys of docs/simulation.md."""
    found = summarize(simulation.run)
    step_s, n_ranks, limit = found["step_time_s"], rehearsal.world_size, machine.device.memory_bytes
    batch = batch_in(rehearsal.job)
    flops = model_flops(rehearsal, tables)
    stages = [stage_of(rehearsal, rank, machine, tables[rank]) for rank in rehearsal.ranks]
    peak = max(stage["peak_bytes"] for stage in stages)
    return {
        "step_time_s": step_s,
        **told(batch.job),
        "tokens_per_s": _per(batch.tokens, step_s),
        "tokens_per_s_per_gpu": _per(batch.tokens, step_s * n_ranks),
        "rows_per_s_per_gpu": _per(batch.rows, step_s * n_ranks),
        "mfu": None if batch.unknown else flops / step_s / (n_ranks * machine.device.peak(precision)),
        "peak_memory_bytes": peak,
        "memory_limit_bytes": limit,
        "fits": peak <= limit,
        **_reserved(stages),
        **{key: found[key] for key in ("bubble_fraction", "exposed_comm_fraction", "exposed_by_axis")},
        **{key: found[key] for key in ("hidden_by_axis", "waiting_fraction", "shares")},
        **{key: found[key] for key in ("world_size", "n_ranks_stored", "n_spans")},
        "intervals": {},
        "stages": stages,
    }


def _per(amount: int | None, seconds: float) -> float | None:
    return None if amount is None else amount / seconds


def layers_of(tables: RankTables) -> int:
    """Return the layers that a rank works on."""
    return len({place["layer"] for place in tables.places.to_pylist() if place["layer"] >= 0})


def in_flight(tables: RankTables, *, is_pipelined: bool = False) -> int | None:
    """Return the most micro-batches that wait for the end of their backward at once on a rank, at least one.

    As in every simulation: over all its stages, from the first operation of a forward to the last of the
    backward; those of a step are gone when it ends. Forwards outside of a pipeline have no number, and count
    as one; of a pipeline that numbers none, as one by hand or DeepSpeed's, nobody knows: None.
    """
    places, numbers = tables.places.to_pylist(), tables.events["place"].to_numpy()
    found, firsts = np.unique(numbers, return_index=True)
    lasts = len(numbers) - np.unique(numbers[::-1], return_index=True)[1]
    begins: dict[tuple[int, ...], int] = {}
    ends: dict[tuple[int, ...], int] = {}
    for number, first, last in zip(found.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
        place = places[number]
        if place["microbatch"] >= 0 and place["kind"] in PASSES:
            key = tuple(place[name] for name in ("step", "stage", "virtual_stage", "microbatch"))
            begins[key] = min(first, begins.get(key, first))
            ends[key] = max(last, ends.get(key, last))
    if is_pipelined and not begins:
        return None
    changes = sorted([(at, 1) for at in begins.values()] + [(at, -1) for at in ends.values()])
    return int(max(np.cumsum([change for _, change in changes]), default=1))


def stage_of(rehearsal: Rehearsal, rank: int, machine: Cluster, tables: RankTables) -> dict[str, Any]:
    """Return the memory of *rank*; what the device reserves for itself is included."""
    memory = rehearsal.memory.get(str(rank), {})
    layout, pipeline = rehearsal.layout, pipeline_of(rehearsal, rank)
    own = machine.device.reserved_bytes
    items = {**memory.get("bytes", {}), "reserved": own}
    reserved = {"reserved_bytes": memory["reserved_bytes"] + own} if "reserved_bytes" in memory else {}
    return {
        "stage": layout.coord(rank).pp if layout else pipeline.index(rank),
        "holds": memory.get("stages", []),
        "layers": layers_of(tables),
        "in_flight": in_flight(tables, is_pipelined=len(pipeline) > 1),
        "peak_bytes": sum(items.values()),
        **reserved,
        "bytes": items,
        "rank": rank,
    }


def _reserved(stages: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the most that a rank holds with what PyTorch's allocator keeps; nothing of older rehearsals."""
    found = [stage["reserved_bytes"] for stage in stages if "reserved_bytes" in stage]
    return {"reserved_memory_bytes": max(found)} if found else {}


def pipeline_of(rehearsal: Rehearsal, rank: int) -> tuple[int, ...]:
    """Return the ranks of the longest pipeline of *rank*, itself alone if it is in none."""
    own = [tuple(group.ranks) for group in rehearsal.groups if group.axis == "pp" and rank in group.ranks]
    return max(own, key=len, default=(rank,))


def model_flops(rehearsal: Rehearsal, tables: Mapping[int, RankTables]) -> float:
    """Return the FLOPs of a step over all ranks as MFU counts them (PaLM, arXiv:2204.02311, appendix B).

    Attention in full and its backward twice its forward; nothing that is computed again or by an optimizer,
    and no pass without gradients, as of an evaluation or of a teacher.
    """
    members = Counter(rehearsal.representatives)
    total = 0.0
    for rank, one in tables.items():
        works = one.works.select(["kind", "flops", "causal"]).to_pylist()
        weight = np.array([_counted(row) for row in works])
        counts = np.array([_counts(place, steps_of(rehearsal)) for place in one.places.to_pylist()], np.bool_)
        rows = (one.events["what"].to_numpy() == OP) & counts[one.events["place"].to_numpy()]
        total += members[rank] * float(weight[one.events["item"].to_numpy()[rows]].sum())
    return total / len(steps_of(rehearsal))


def _counts(place: Mapping[str, Any], steps: range) -> bool:
    """Return whether work at *place* is that of training the model in one of *steps*."""
    return place["kind"] not in UNCOUNTED and place["step"] in steps and bool(place["trains"])


def _counted(row: Mapping[str, Any]) -> float:
    whole = 2.0 if row["causal"] else 1.0
    backward = 4 / 5 if row["kind"] == "attention_backward" else 1.0
    return float(row["flops"]) * (whole * backward if row["kind"].startswith("attention") else 1.0)
