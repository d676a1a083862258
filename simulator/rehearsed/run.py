"""A rehearsal in, one simulated run out, as from any other job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from simulator.compute.timing import ComputeModel
from simulator.engine import choose
from simulator.errors import JobError
from simulator.network.cost import Network
from simulator.network.nccl import choice
from simulator.program import Program
from simulator.rehearsed.figures import figures, stage_of, steps_of
from simulator.rehearsed.kernels import described, separate_parts
from simulator.rehearsed.program import Joiner, RankTasks, assembled
from simulator.rehearsed.rank import OP, RankTask, RankWriter
from simulator.rehearsed.streams import on_device, rules
from simulator.rehearsed.windows import closed
from simulator.rehearsed.works import Priced, counts_of, precision_of, priced
from simulator.simulate import Progress, Simulation
from topologies.cluster import Cluster
from topologies.placement import place
from topologies.units import format_bytes
from traces.info import RunInfo
from traces.rehearsal import (
    ON_HOST,
    OUTSIDE,
    RankTables,
    Rehearsal,
    read_rank,
    read_rehearsal,
    rehearsal_folder,
)
from traces.report.format import format_share
from traces.timeline import MEMORY

OPERATIONS_PER_KERNEL: Final = 0.65
"""Operations of a model, which ``launch`` of a device is the host's time of, per kernel of eager PyTorch: the
forward of a Llama layer has 17 of them (docs/compute.md) and launches 26 kernels when it is rehearsed."""

BARE_PER_OPERATION: Final = 8 / 65
"""Time of the host for an operator that stands alone, over that of an operation of a model with the framework
around it, 65 us: 5 us for a call from Python without a gradient (pytorch/pytorch issue 41383), 3 us for the
launch (meta-pytorch/tritonbench pull request 1017). What a script does between the parts of a step is of the
kind: a copy per rank, a norm, a mean of losses."""

SHOWN: Final = 5
"""Most unknown operators that a note lists."""

SHOWN_TOLD: Final = 8
"""Numbers told to the script that a warning names."""

SHOWN_PARTS: Final = 3
"""Parts of a memory that is too full that are named."""


Floats = npt.NDArray[np.float64]

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
    tables = {rank: on_device(read_rank(folder, rank), machine.device) for rank in rehearsal.ranks}
    if not tables:
        raise JobError(f"{path} holds no rehearsed rank")
    precision = precision_of([one.works for one in tables.values()], machine.device)
    compute = ComputeModel(machine.device, precision)
    network = Network(machine, place(rehearsal.world_size, machine, placement), choice(nccl_algo, nccl_proto))
    tell("building the program")
    sharing = min(machine.gpus_per_node, rehearsal.world_size)
    costs = {rank: priced(one.works, compute, sharing) for rank, one in tables.items()}
    ranks, host_bound = _rank_tasks(rehearsal, tables, costs, compute)
    joiner = Joiner(network, {group.id: group for group in rehearsal.groups}, rehearsal.representatives)
    parts = [RankTasks(rank, *one) for rank, one in ranks.items()]
    program = assembled(parts, joiner, steps_of(rehearsal).start)
    if not program.n_tasks:
        raise JobError(f"{path}: the steps that were kept hold no work; rehearse with --warmup 0")
    tell(f"running {program.n_tasks:,} tasks")
    runner = choose(engine, program.n_tasks, tell)
    spans = closed(runner.run(program, ()), rehearsal)
    tell("adding up")
    notes = [
        *_too_full(rehearsal, machine),
        *_missing(joiner),
        *rehearsal.notes,
        *_told(rehearsal.stated),
        *_unknown(tables, costs),
    ]
    simulation = Simulation(
        info=_info(rehearsal, machine, precision, notes, list(tables.values())),
        spans=spans,
        memory=_memory(ranks, program, spans, machine.device.reserved_bytes),
    )
    rests_on = [*compute.notes, *rules(machine.device), *joiner.assumed(), *rehearsal.checked]
    if host_bound:
        rests_on.append(f"launching takes longer than computing on rank {', '.join(map(str, host_bound))}")
    simulation.info.summary.update(  # type: ignore[attr-defined]
        {**figures(simulation, rehearsal, machine, precision, tables), "rests_on": rests_on}
        | {"engine": runner.NAME}
    )
    return simulation


def _rank_tasks(
    rehearsal: Rehearsal, tables: Mapping[int, RankTables], costs: Mapping[int, Priced], compute: ComputeModel
) -> tuple[dict[int, Issued], list[int]]:
    """Return tasks and places by rank, and the ranks whose host is slower than their device."""
    groups = {group.id: group for group in rehearsal.groups}
    found: dict[int, Issued] = {}
    bound: list[int] = []
    for rank, one in tables.items():
        launch_s = _launch_s(one, compute.device.launch_s)
        what, item, place = (one.events[name].to_numpy() for name in ("what", "item", "place"))
        items, places = item[what == OP], place[what == OP]
        on_device = np.array([kind != ON_HOST for kind in costs[rank].kinds])
        busy_s = float((np.array(costs[rank].seconds) * on_device)[items].sum())
        is_bound = float((np.array(costs[rank].kernels)[items] * launch_s[places]).sum()) > busy_s
        bound += [rank] if is_bound else []
        writer = RankWriter(
            one, costs[rank], groups, steps_of(rehearsal), launch_s=launch_s.tolist() if is_bound else None
        )
        found[rank] = (writer.tasks, writer.places)
    return found, bound


def _launch_s(tables: RankTables, operation_s: float) -> Floats:
    """Return the time of the host per kernel at each place; shape ``(n_places,)``."""
    operations = [
        BARE_PER_OPERATION if row["name"] in OUTSIDE and row["kind"] != "backward" else OPERATIONS_PER_KERNEL
        for row in tables.places.to_pylist()
    ]
    return operation_s * np.array(operations)


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


def _too_full(rehearsal: Rehearsal, machine: Cluster) -> list[str]:
    """Return a sentence about rehearsed ranks that do not fit into a device, if there are any."""
    limit = machine.device.memory_bytes
    stages = [stage_of(rehearsal, rank, machine) for rank in rehearsal.ranks]
    full = sorted((one for one in stages if one["peak_bytes"] > limit), key=lambda one: -one["peak_bytes"])
    if not full:
        return []
    parts = sorted(full[0]["bytes"].items(), key=lambda item: -item[1])[:SHOWN_PARTS]
    words = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    which = f"rank {full[0]['rank']} does not fit"
    if len(full) > 1:
        which = f"{len(full)} of {len(stages)} rehearsed ranks do not fit, rank {full[0]['rank']} least"
    return [f"{which}: {format_bytes(full[0]['peak_bytes'])} of {format_bytes(limit)}; largest: {words}"]


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
    listed = ", ".join(f"{name} {format_share(s / total)}" for name, s in seconds.most_common(SHOWN))
    how = "priced by the bytes of their operands or as a product of as many FLOPs"
    return [f"kernels whose time nobody has measured, {how}, with their share of compute: {listed}"]


def _info(
    rehearsal: Rehearsal,
    machine: Cluster,
    precision: str,
    notes: Sequence[str],
    tables: Sequence[RankTables],
) -> RunInfo:
    """Return the description of the run, without its figures."""
    return RunInfo(
        origin="simulated",
        world_size=rehearsal.world_size,
        name=f"{rehearsal.name} on {rehearsal.world_size} {machine.name}",
        layout=rehearsal.layout,
        model=described(rehearsal.model, tables),
        cluster=machine.describe(),
        job={
            **rehearsal.job,
            "rehearsed": list(rehearsal.command),
            "rehearsed_ranks": list(rehearsal.ranks),
            "cluster": machine.name,
            "gpus": machine.n_gpus,
            "precision": precision,
            "eager": separate_parts(tables),
        },
        groups=rehearsal.groups,
        representatives=rehearsal.representatives,
        warnings=tuple(notes),
        versions=rehearsal.versions,
        summary={},
    )


def _memory(
    ranks: Mapping[int, Issued],
    program: Program,
    spans: pa.Table,
    reserved_bytes: int,
) -> pa.Table:
    """Return memory over time: what was in use when a task was issued is in use when it starts.

    Beside it the device holds *reserved_bytes* throughout, as the peak of the summary does.
    """
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
                    "bytes": most + reserved_bytes,
                }
            ).cast(MEMORY)
        )
    return pa.concat_tables(parts)
