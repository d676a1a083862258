"""What is said of a rehearsed run beside its figures: what does not fit, is missing, or is not known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from foretrace.door import MOST_VALUES
from foretrace.simulator.errors import JobError
from foretrace.simulator.rehearsed.program import Joiner
from foretrace.simulator.rehearsed.works import Priced, counts_of
from foretrace.simulator.simulate import Simulation
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.units import format_bytes, format_time
from foretrace.traces.analysis.metrics import summarize
from foretrace.traces.batch import batch_in, told
from foretrace.traces.rehearsal import OP, RankTables, Rehearsal
from foretrace.traces.report.format import format_share

# The figures of a rehearsed run, in the keys of docs/simulation.md.

UNCOUNTED: Final = frozenset({"recompute", "optimizer"})
"""Kinds of places whose FLOPs are not the model's: what is computed again, and products of an optimizer."""


PASSES: Final = frozenset({"forward", "backward", "backward_input", "backward_weight", "recompute"})
"""Kinds of places of a pass of a micro-batch."""


def steps_of(rehearsal: Rehearsal) -> range:
    """Return the steps that were kept. Raises JobError if there are more than a rehearsal can hold."""
    first, n_steps = int(rehearsal.job.get("first_step", 0)), int(rehearsal.job.get("steps", 1))
    if n_steps > MOST_VALUES:
        raise JobError(f"job.steps is {n_steps}, more than the {MOST_VALUES:,} that are read")
    return range(first, first + n_steps)


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
    # a trace does not say what its ranks hold
    peak = max(stage["peak_bytes"] for stage in stages) if rehearsal.memory else None
    return {
        "step_time_s": step_s,
        **told(batch.job),
        "tokens_per_s": _per(batch.tokens, step_s),
        "tokens_per_s_per_gpu": _per(batch.tokens, step_s * n_ranks),
        "rows_per_s_per_gpu": _per(batch.rows, step_s * n_ranks),
        "mfu": None if batch.unknown else flops / step_s / (n_ranks * machine.device.peak(precision)),
        "peak_memory_bytes": peak,
        "memory_limit_bytes": limit,
        "fits": None if peak is None else peak <= limit,
        **_reserved(stages),
        **{key: found[key] for key in ("bubble_fraction", "exposed_comm_fraction", "exposed_by_axis")},
        **{key: found[key] for key in ("hidden_by_axis", "waiting_fraction", "shares")},
        **{key: found[key] for key in ("world_size", "n_ranks_stored", "n_spans")},
        "intervals": {},
        "stages": stages if rehearsal.memory else [],
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
    # Reversed, the first place of a number is its last one.
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
        # Without a layout the place in the pipeline says the stage.
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
    # One rank is rehearsed for all that do the same.
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
    # Causal attention counts as the whole matrix (see above), its work was noted as the half.
    whole = 2.0 if row["causal"] else 1.0
    # The backward of a fused kernel computes the scores again, five products; four are counted, twice the
    # forward's two.
    backward = 4 / 5 if row["kind"] == "attention_backward" else 1.0
    return float(row["flops"]) * (whole * backward if row["kind"].startswith("attention") else 1.0)


SHOWN: Final = 5
"""Most unknown operators that a note lists."""

SHOWN_TOLD: Final = 8
"""Numbers told to the script that a warning names."""

ON_CPU: Final = (
    "the script puts nothing on a GPU: a real run of it trains on CPUs, while these times are those of "
    "{device}; time it on a CPU machine, as foretrace topology detect describes one"
)
"""What is said of the times of such a script on a machine with GPUs."""

ALONE: Final = (
    "{n} transfers go to or come from ranks that were not rehearsed ({peers}), so that waiting for them is "
    "not in the times: rehearse them, too, those of a pipeline with --ranks auto, others by their numbers"
)
ONE_SIDE: Final = (
    "{n} transfers with ranks that were rehearsed ({peers}) have no other side in the steps that are kept, "
    "so that waiting for them is not in the times: it is in another step, or before the first forward"
)
"""What is said of transfers of which one side is nobody's."""

SHORT: Final = (
    "{n} collectives lack ranks of their group in the steps that are kept: a real run waits for these for "
    "ever, or they come in another step"
)
"""What is said of collectives that not all take part in."""

SHOWN_PARTS: Final = 3
"""Parts of a memory that is too full that are named."""

BUILDING: Final = (
    "before its first step, rank {rank} allocates {most} on the GPU, of {limit}, such as for a model that is "
    "cut only then: a real run ends out of memory; build it on the meta device, cut it, then call to_empty"
)
"""What is said of a script that does not come to its first step."""

TIGHT: Final = (
    "rank {rank} fits, but with what PyTorch's allocator keeps for later it would hold {held} of {limit}: "
    "once the GPU is full, that is freed and asked for again, which stalls the step, or ends out of memory"
)
GROWING: Final = "; less may do with PYTORCH_ALLOC_CONF=expandable_segments:True (-- env THAT COMMAND)"
"""What is said of memory that is full only by what the allocator keeps, and what may help."""


def notes(
    rehearsal: Rehearsal,
    machine: Cluster,
    joiner: Joiner,
    tables: Mapping[int, RankTables],
    costs: Mapping[int, Priced],
) -> list[str]:
    """Return all of it, a sentence each; among them what the rehearsal itself has noted.

    *machine*: on which.
    """
    return [
        *_too_full(rehearsal, machine, tables),
        *elsewhere(rehearsal, [machine]),
        *_missing(joiner, rehearsal.ranks),
        *rehearsal.notes,
        *_told(rehearsal.stated),
        *_unknown(rehearsal, tables, costs),
        *_paused(rehearsal),
    ]


def _paused(rehearsal: Rehearsal) -> list[str]:
    """Return a sentence about what hosts of a trace did beside launching, if they did."""
    facts = list(rehearsal.job.get("traced", {}).values())
    paused_s = sum(one.get("paused_s", 0.0) / one["steps"] for one in facts) / max(len(facts), 1)
    late_s = max((one.get("late_s", 0.0) for one in facts), default=0.0)
    said = [f"the host pauses for {format_time(paused_s)} a step"] if paused_s else []
    said += [f"ranks begin up to {format_time(late_s)} apart"] if late_s else []
    return [f"{' and '.join(said)}, as in the trace, on any machine"] if said else []


def _too_full(rehearsal: Rehearsal, machine: Cluster, tables: Mapping[int, RankTables]) -> list[str]:
    """Return a sentence about rehearsed ranks that do not fit into a device, if there are any."""
    limit = machine.device.memory_bytes
    return [*_building(rehearsal, machine), *_full(rehearsal, machine, tables, limit)]


def _building(rehearsal: Rehearsal, machine: Cluster) -> list[str]:
    """Return a sentence about a rank that needs too much before its first step, if there is one."""
    limit, own = machine.device.memory_bytes, machine.device.reserved_bytes
    # Ranks are keys of JSON, and so text.
    sizes = {rank: one.get("building_bytes", 0) + own for rank, one in rehearsal.memory.items()}
    rank = max(sizes, key=lambda one: sizes[one], default="0")
    if sizes.get(rank, 0) <= limit:
        return []
    return [BUILDING.format(rank=rank, most=format_bytes(sizes[rank]), limit=format_bytes(limit))]


def _full(rehearsal: Rehearsal, machine: Cluster, tables: Mapping[int, RankTables], limit: int) -> list[str]:
    stages = [stage_of(rehearsal, rank, machine, tables[rank]) for rank in rehearsal.ranks]
    full = sorted((one for one in stages if one["peak_bytes"] > limit), key=lambda one: -one["peak_bytes"])
    if not full:
        return _tight(rehearsal, limit, stages)
    parts = sorted(full[0]["bytes"].items(), key=lambda item: -item[1])[:SHOWN_PARTS]
    words = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    which = f"rank {full[0]['rank']} does not fit"
    if len(full) > 1:
        which = f"{len(full)} of {len(stages)} rehearsed ranks do not fit, rank {full[0]['rank']} least"
    return [f"{which}: {format_bytes(full[0]['peak_bytes'])} of {format_bytes(limit)}; largest: {words}"]


def _tight(rehearsal: Rehearsal, limit: int, stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence about a rank of which only the memory in use fits, if there is one."""
    found = max(stages, key=lambda stage: int(stage.get("reserved_bytes", 0)))
    held = found.get("reserved_bytes", 0)
    if held <= limit:
        return []
    grows = rehearsal.memory[str(found["rank"])].get("expandable_segments", False)
    said = TIGHT.format(rank=found["rank"], held=format_bytes(held), limit=format_bytes(limit))
    return [said if grows else said + GROWING]


def elsewhere(rehearsal: Rehearsal, machines: Sequence[Cluster]) -> list[str]:
    """Return a sentence about a script for CPUs that is timed on *machines* with other devices."""
    others = [machine.device.name for machine in machines if machine.device.kind != "cpu"]
    is_for_cpus = rehearsal.job.get("device") == "cpu"
    return [ON_CPU.format(device=", ".join(dict.fromkeys(others)))] if others and is_for_cpus else []


def _missing(joiner: Joiner, rehearsed: Sequence[int]) -> list[str]:
    """Return a sentence about transfers whose other side was not *rehearsed*, and one about others."""
    alone = [meeting.peer for _, meeting in joiner.alone()]
    strangers = [peer for peer in alone if peer not in rehearsed]
    found = []
    if strangers:
        found.append(ALONE.format(n=len(strangers), peers=_ranks(strangers)))
    if n := len(alone) - len(strangers):
        known = _ranks([peer for peer in alone if peer in rehearsed])
        found.append(ONE_SIDE.format(n=n, peers=known))
    if n := joiner.short(rehearsed):
        found.append(SHORT.format(n=n))
    return found


def _ranks(ranks: Sequence[int]) -> str:
    listed = sorted({*ranks})
    return ", ".join(map(str, listed[:SHOWN])) + (", ..." if len(listed) > SHOWN else "")


def _told(stated: Sequence[str]) -> list[str]:
    """Return one sentence about all numbers that the script was told, if there are any."""
    if not stated:
        return []
    shown = [
        told.replace(" reads a number: told", ":").replace(" (nothing is known of it)", "")
        for told in stated[:SHOWN_TOLD]
    ]
    rest = f"; and {len(stated) - SHOWN_TOLD} more" if len(stated) > SHOWN_TOLD else ""
    return [
        f"the script read numbers that a rehearsal does not compute, and was told: {'; '.join(shown)}{rest}"
    ]


def _unknown(
    rehearsal: Rehearsal, tables: Mapping[int, RankTables], costs: Mapping[int, Priced]
) -> list[str]:
    """Return a sentence about operators whose kernels nobody knows, with the share of time they stand for."""
    seconds: Counter[str] = Counter()
    total = 0.0
    for rank, one in tables.items():
        counts = counts_of(one.events, one.works.num_rows, OP)
        for name, known, n, s in zip(
            costs[rank].names, costs[rank].is_known, counts.tolist(), costs[rank].seconds, strict=True
        ):
            total += n * s
            if not known:
                seconds[name] += n * s
    if not seconds:
        return []
    listed = ", ".join(f"{name} {format_share(s / total)}" for name, s in seconds.most_common(SHOWN))
    if "traced" in rehearsal.job:
        return [f"operators of unknown work take what they took in the trace, on any machine: {listed}"]
    how = "priced by the bytes of their operands or as a product of as many FLOPs"
    return [f"kernels whose time nobody has measured, {how}, with their share of compute: {listed}"]
