"""A rehearsal in, one simulated run out, as from any other job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from simulator.compute.timing import ComputeModel
from simulator.engine import choose
from simulator.errors import JobError
from simulator.network.cost import Network
from simulator.network.nccl import choice
from simulator.program import Program
from simulator.rehearsed.program import Joiner, RankTasks, assembled
from simulator.rehearsed.rank import OP, RankTask, RankWriter
from simulator.rehearsed.works import Priced, counts_of, precision_of, priced
from simulator.simulate import Progress, Simulation
from topologies.cluster import Cluster
from topologies.placement import place
from topologies.units import format_bytes
from traces.info import RunInfo
from traces.metrics import summarize
from traces.rehearsal import RankTables, Rehearsal, read_rank, read_rehearsal, rehearsal_folder
from traces.timeline import MEMORY

OPERATIONS_PER_KERNEL: Final = 0.65
"""Operations of a model, which ``launch`` of a device is the host's time of, per kernel of eager PyTorch: the
forward of a Llama layer has 17 of them (docs/compute.md) and launches 26 kernels when it is rehearsed."""

SHOWN: Final = 5
"""Most unknown operators that a note lists."""

SHOWN_PARTS: Final = 3
"""Parts of a memory that is too full that are named."""

RULES: Final = (
    "streams: those that the script and FSDP ask for; collectives of a group follow one another (NCCL)",
    "what is asynchronous runs beside the stream that issued it until it is waited for",
)
"""What is supplied to a rehearsal beside what it shows."""


Issued = tuple[Sequence[RankTask], Sequence[Mapping[str, Any]]]
"""Tasks of a rank, and the places that they refer to."""


def simulate_rehearsal(
    path: str | Path,
    cluster: Callable[[int], Cluster],
    progress: Progress | None = None,
    *,
    placement: str = "packed",
    nccl_algo: str = "",
    nccl_proto: str = "",
    engine: str = "auto",
) -> Simulation:
    """Predict the steps that were rehearsed, on a machine.

    Args:
        path: run directory with the rehearsal.
        cluster: returns the machine, given the number of its GPUs that are needed.
        progress: told about each phase.
        placement: which rank runs on which GPU, as ``topologies.placement.place`` takes it.
        nccl_algo: algorithms that NCCL may use.
        nccl_proto: protocols that it may use.
        engine: one of ``simulator.engine.ENGINES``.

    Raises:
        RunError: there is no rehearsal at *path*.
        SimulationError, TopologyError: the machine does not fit it.
    """
    tell = progress or (lambda _: None)
    tell("reading the rehearsal")
    folder, rehearsal = rehearsal_folder(path), read_rehearsal(path)
    machine = cluster(rehearsal.world_size)
    tables = {rank: read_rank(folder, rank) for rank in rehearsal.ranks}
    if not tables:
        raise JobError(f"{path} holds no rehearsed rank")
    precision = precision_of([one.works for one in tables.values()], machine.device)
    compute = ComputeModel(machine.device, precision)
    network = Network(machine, place(rehearsal.world_size, machine, placement), choice(nccl_algo, nccl_proto))
    tell("building the program")
    costs = {rank: priced(one.works, compute) for rank, one in tables.items()}
    ranks, host_bound = _rank_tasks(rehearsal, tables, costs, compute)
    groups = {group.id: group for group in rehearsal.groups}
    joiner = Joiner(network, groups, rehearsal.representatives)
    parts = [RankTasks(rank, *one) for rank, one in ranks.items()]
    program = assembled(parts, joiner, steps_of(rehearsal).start)
    tell(f"running {program.n_tasks:,} tasks")
    runner = choose(engine, program.n_tasks, tell)
    spans = runner.run(program, ())
    tell("adding up")
    notes = [
        *_too_full(rehearsal, machine),
        *_missing(joiner),
        *rehearsal.notes,
        *rehearsal.stated,
        *_unknown(tables, costs),
    ]
    simulation = Simulation(
        info=_info(rehearsal, machine, precision, notes),
        spans=spans,
        memory=_memory(ranks, program, spans, rehearsal),
    )
    rests_on = [*compute.notes, *RULES, *rehearsal.checked]
    if host_bound:
        rests_on.append(f"launching takes longer than computing on rank {', '.join(map(str, host_bound))}")
    simulation.info.summary.update(  # type: ignore[attr-defined]
        {**_figures(simulation, rehearsal, machine, precision, tables), "rests_on": rests_on}
        | {"engine": runner.NAME}
    )
    return simulation


def steps_of(rehearsal: Rehearsal) -> range:
    """Return the steps that were kept."""
    first = int(rehearsal.job.get("first_step", 0))
    return range(first, first + int(rehearsal.job.get("steps", 1)))


def _rank_tasks(
    rehearsal: Rehearsal, tables: Mapping[int, RankTables], costs: Mapping[int, Priced], compute: ComputeModel
) -> tuple[dict[int, Issued], list[int]]:
    """Return tasks and places by rank, and the ranks whose host is slower than their device."""
    groups = {group.id: group for group in rehearsal.groups}
    found: dict[int, Issued] = {}
    bound: list[int] = []
    launch_s = compute.device.launch_s * OPERATIONS_PER_KERNEL
    for rank, one in tables.items():
        counts = counts_of(one.events, one.works.num_rows, OP)
        busy_s = float(np.dot(counts, np.array(costs[rank].seconds)))
        is_bound = float(np.dot(counts, np.array(costs[rank].kernels))) * launch_s > busy_s
        bound += [rank] if is_bound else []
        writer = RankWriter(
            one, costs[rank], groups, steps_of(rehearsal), launch_s=launch_s if is_bound else 0.0
        )
        found[rank] = (writer.tasks, writer.places)
    return found, bound


def _too_full(rehearsal: Rehearsal, machine: Cluster) -> list[str]:
    """Return a sentence for each rehearsed rank that does not fit into the memory of a device."""
    limit, found = machine.device.memory_bytes, []
    for rank in rehearsal.ranks:
        stage = _stage(rehearsal, rank, machine)
        if stage["peak_bytes"] > limit:
            largest = sorted(stage["bytes"].items(), key=lambda item: -item[1])[:SHOWN_PARTS]
            words = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
            found.append(
                f"rank {rank} does not fit: {format_bytes(stage['peak_bytes'])} of {format_bytes(limit)}; "
                f"largest: {words}"
            )
    return found


def _missing(joiner: Joiner) -> list[str]:
    """Return a sentence about transfers whose other side was not rehearsed."""
    alone = joiner.alone()
    if not alone:
        return []
    peers = sorted({meeting.peer for _, meeting in alone})
    shown = ", ".join(map(str, peers[:SHOWN])) + (", ..." if len(peers) > SHOWN else "")
    words = (
        f"{len(alone)} transfers go to or come from ranks that were not rehearsed ({shown}), so that waiting"
    )
    return [f"{words} for them is not in the times: rehearse with --ranks auto"]


def _unknown(tables: Mapping[int, RankTables], costs: Mapping[int, Priced]) -> list[str]:
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
    listed = ", ".join(f"{name} {s / total:.1%}" for name, s in seconds.most_common(SHOWN))
    return [
        f"kernels that are priced by the bytes of their operands alone, with their share of compute: {listed}"
    ]


def _info(rehearsal: Rehearsal, machine: Cluster, precision: str, notes: Sequence[str]) -> RunInfo:
    """Return the description of the run, without its figures."""
    return RunInfo(
        origin="simulated",
        world_size=rehearsal.world_size,
        name=f"{rehearsal.name} on {rehearsal.world_size} {machine.name}",
        layout=rehearsal.layout,
        model=rehearsal.model,
        cluster=machine.describe(),
        job={
            **rehearsal.job,
            "rehearsed": list(rehearsal.command),
            "rehearsed_ranks": list(rehearsal.ranks),
            "cluster": machine.name,
            "gpus": machine.n_gpus,
            "precision": precision,
        },
        groups=rehearsal.groups,
        representatives=rehearsal.representatives,
        warnings=tuple(notes),
        versions=rehearsal.versions,
        summary={},
    )


def _figures(
    simulation: Simulation,
    rehearsal: Rehearsal,
    machine: Cluster,
    precision: str,
    tables: Mapping[int, RankTables],
) -> dict[str, Any]:
    """Return the summary, in the keys of docs/simulation.md."""
    found = summarize(simulation.run)
    step_s, n_ranks, limit = found["step_time_s"], rehearsal.world_size, machine.device.memory_bytes
    tokens_per_s = tokens_per_step(rehearsal) / step_s
    flops = model_flops(rehearsal, tables)
    stages = [_stage(rehearsal, rank, machine) for rank in rehearsal.ranks]
    peak = max(stage["peak_bytes"] for stage in stages)
    return {
        "step_time_s": step_s,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": tokens_per_s / n_ranks,
        "mfu": flops / step_s / (n_ranks * machine.device.peak(precision)),
        "peak_memory_bytes": peak,
        "memory_limit_bytes": limit,
        "fits": peak <= limit,
        **{key: found[key] for key in ("bubble_fraction", "exposed_comm_fraction", "exposed_by_axis")},
        **{key: found[key] for key in ("hidden_by_axis", "waiting_fraction", "shares")},
        **{key: found[key] for key in ("world_size", "n_ranks_stored", "n_spans")},
        "intervals": {},
        "stages": stages,
    }


def _stage(rehearsal: Rehearsal, rank: int, machine: Cluster) -> dict[str, Any]:
    """Return the memory of *rank*, what the device reserves for itself included."""
    memory = rehearsal.memory.get(str(rank), {})
    layout = rehearsal.layout
    items = {**memory.get("bytes", {}), "reserved": machine.device.reserved_bytes}
    return {
        "stage": layout.coord(rank).pp if layout else 0,
        "holds": memory.get("stages", []),
        "layers": memory.get("layers", 0),
        "in_flight": memory.get("in_flight", 1),
        "peak_bytes": sum(items.values()),
        "bytes": items,
        "rank": rank,
    }


def tokens_per_step(rehearsal: Rehearsal) -> int:
    """Return the tokens of a step over all ranks: those of the model's input, if that has two dimensions.

    Ranks along ``dp`` and ``cp`` have a share each, others work on the same.
    """
    shape = rehearsal.job.get("input_shape") or [0]
    per_forward = int(np.prod(shape[:2])) if len(shape) > 1 else 0
    forwards = rehearsal.job.get("n_microbatches") or rehearsal.job.get("forwards_per_step", 1)
    layout = rehearsal.layout
    shares = layout.dp * layout.cp if layout else rehearsal.world_size
    return per_forward * int(forwards) * shares


def model_flops(rehearsal: Rehearsal, tables: Mapping[int, RankTables]) -> float:
    """Return the FLOPs of a step over all ranks as MFU counts them (PaLM, arXiv:2204.02311, appendix B).

    Attention in full and its backward twice its forward, nothing that is computed again.
    """
    members = Counter(rehearsal.representatives)
    total = 0.0
    for rank, one in tables.items():
        works = one.works.select(["kind", "flops", "causal"]).to_pylist()
        weight = np.array([_counted(row) for row in works])
        again = np.array([place["kind"] == "recompute" for place in one.places.to_pylist()], np.bool_)
        kept = np.array([p["step"] in steps_of(rehearsal) for p in one.places.to_pylist()], np.bool_)
        at = one.events["place"].to_numpy()
        rows = (one.events["what"].to_numpy() == OP) & kept[at] & ~again[at]
        total += members[rank] * float(weight[one.events["item"].to_numpy()[rows]].sum())
    return total / len(steps_of(rehearsal))


def _counted(row: Mapping[str, Any]) -> float:
    whole = 2.0 if row["causal"] else 1.0
    backward = 4 / 5 if row["kind"] == "attention_backward" else 1.0
    return float(row["flops"]) * (whole * backward if row["kind"].startswith("attention") else 1.0)


def _memory(
    ranks: Mapping[int, Issued],
    program: Program,
    spans: pa.Table,
    rehearsal: Rehearsal,
) -> pa.Table:
    """Return memory over time: what was in use when a task was issued is in use when it starts."""
    del rehearsal
    starts = spans["start_ns"].to_numpy()[: program.n_tasks]
    parts, at = [], 0
    for rank, (tasks, _) in ranks.items():
        held = np.array([task.allocated_bytes for task in tasks], np.int64)
        own = starts[at : at + len(tasks)]
        at += len(tasks)
        rows = np.flatnonzero(held)
        order = rows[np.argsort(own[rows], kind="stable")]
        times, first = np.unique(own[order], return_index=True)
        most = np.maximum.reduceat(held[order], first) if len(first) else held[:0]
        parts.append(
            pa.table(
                {
                    "rank": np.full(len(times), rank, np.int32),
                    "t_ns": times.astype(np.int64),
                    "category": pa.array(["total"] * len(times)).dictionary_encode(),
                    "bytes": most,
                }
            ).cast(MEMORY)
        )
    return pa.concat_tables(parts)
