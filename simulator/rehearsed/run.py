"""A rehearsal in, one simulated run out, as from any other job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from foretrace.simulator.compute.timing import BARE_PER_OPERATION, COPY_START_S, LAUNCHING, ComputeModel
from foretrace.simulator.engine import choose
from foretrace.simulator.engine.spans import STEP
from foretrace.simulator.errors import JobError
from foretrace.simulator.framework import load_framework
from foretrace.simulator.network.cost import Network
from foretrace.simulator.network.nccl import choice
from foretrace.simulator.program import Int64Array, Program
from foretrace.simulator.rehearsed.notes import figures, notes, pipeline_of, steps_of
from foretrace.simulator.rehearsed.program import Joiner, RankTasks, assembled
from foretrace.simulator.rehearsed.rank import RankTask, RankWriter
from foretrace.simulator.rehearsed.works import Priced, precision_of, priced
from foretrace.simulator.simulate import Progress, Simulation
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.device import Device
from foretrace.topologies.placement import place
from foretrace.topologies.units import format_bandwidth, format_time
from foretrace.traces.batch import batch_in, stated
from foretrace.traces.info import RunInfo
from foretrace.traces.layout import Layout
from foretrace.traces.rehearsal import (
    COMMUNICATION,
    ON_HOST,
    OP,
    OUTSIDE,
    TO_DEVICE,
    TO_HOST,
    RankTables,
    Rehearsal,
    read_measured,
    read_rank,
    read_rehearsal,
    rehearsal_folder,
)
from foretrace.traces.timeline import MEMORY

OPERATIONS_PER_KERNEL: Final = 0.65
"""Operations of a model, which ``launch`` of a device is the host's time of, per kernel of eager PyTorch: the
forward of a Llama layer has 17 of them (docs/compute.md) and launches 26 kernels when it is rehearsed."""

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
    tokens_per_step: int | None = None,
    dp: int | None = None,
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
        tokens_per_step: tokens of a step over all ranks, in place of those that the rehearsal tells.
        dp: replicas, in place of those that were rehearsed; where there are only replicas.

    Raises RunError if there is no rehearsal at *path*. Raises SimulationError, TopologyError if the machine
    does not fit it.
    """
    tell = progress or (lambda _: None)
    tell("reading the rehearsal")
    folder, rehearsal = rehearsal_folder(path), read_rehearsal(path)
    if dp is not None:
        rehearsal = widened(rehearsal, dp)
    if tokens_per_step is not None:
        rehearsal = replace(rehearsal, job={**rehearsal.job, **stated(tokens_per_step).job})
    machine = cluster(rehearsal.world_size)
    tables = {rank: on_device(read_rank(folder, rank), machine.device) for rank in rehearsal.ranks}
    if not tables:
        raise JobError(f"{path} holds no rehearsed rank")
    precision = precision_of([one.works for one in tables.values()], machine.device)
    compute = ComputeModel(machine.device, precision)
    network = Network(machine, place(rehearsal.world_size, machine, placement), choice(nccl_algo, nccl_proto))
    tell("building the program")
    measured = {rank: read_measured(folder, rank) for rank in rehearsal.ranks}
    traced = {rank: one for rank, one in measured.items() if one is not None}
    groups = {group.id: group for group in rehearsal.groups}
    # Other replicas than those that ran were waited for by nobody.
    took_ns = {} if dp is not None else untold(rehearsal, tables, traced)
    joiner = Joiner(network, groups, rehearsal.representatives, took_ns)
    built = _built(rehearsal, tables, compute, joiner, traced)
    if not built.program.n_tasks:
        raise JobError(f"{path}: the steps that were kept hold no work; rehearse with --warmup 0")
    tell(f"running {built.program.n_tasks:,} tasks")
    runner = choose(engine, built.program.n_tasks, tell)
    spans = closed(runner.run(built.program, ()), rehearsal)
    tell("adding up")
    said = notes(rehearsal, machine, built.joiner, tables, built.costs)
    simulation = Simulation(
        info=_info(rehearsal, machine, precision, said, list(tables.values())),
        spans=spans,
        memory=_memory(built.ranks, built.program, spans, machine.device.reserved_bytes),
    )
    summary = figures(simulation, rehearsal, machine, precision, tables)
    summary |= {"rests_on": _rests_on(built, rehearsal, machine, compute), "engine": runner.NAME}
    summary["memory_bound_share"] = built.program.memory_bound_share
    # The figures need the run, and the run its description: that is filled in last.
    simulation.info.summary.update(summary)  # type: ignore[attr-defined]
    return simulation


def widened(rehearsal: Rehearsal, dp: int) -> Rehearsal:
    """Return *rehearsal* with another number of replicas, each of which does as the first one does.

    Raises JobError if its ranks are not all replicas of one another, or it has one, which reduces no
    gradients.
    """
    n = rehearsal.world_size
    # Groups of fewer than all ranks mean some other axis than replicas.
    if rehearsal.layout != Layout(dp=n) or n == 1 or any(len(group.ranks) < n for group in rehearsal.groups):
        raise JobError(
            f"--dp {dp}: only where all ranks are replicas, and at least two, can there be more of them; "
            f"{rehearsal.name} has {n} rank{'s' if n > 1 else ''}"
            + ("" if rehearsal.layout is None else f", {rehearsal.layout}")
        )
    first = rehearsal.ranks[0]
    groups = tuple(replace(group, ranks=tuple(range(dp))) for group in rehearsal.groups)
    job = dict(rehearsal.job)
    if "batch" in job:
        job |= batch_in(job).widened(dp, n).job
    return replace(
        rehearsal, job=job, world_size=dp, ranks=(first,), representatives=(first,) * dp, groups=groups,
        layout=Layout(dp=dp), notes=(f"{dp} replicas do as rank {first} does, of {n} that ran",),
    )  # fmt: skip


def as_measured(costs: Priced, tables: RankTables, measured: pa.Table) -> Priced:
    """Return *costs* in which works that nobody knows take as long as they were measured to, on the mean."""
    event, took = (measured[name].to_numpy() for name in ("event", "device_ns"))
    what, item = (tables.events[name].to_numpy()[event] for name in ("what", "item"))
    n = tables.works.num_rows
    total = np.bincount(item[what == OP], took[what == OP], minlength=n) / 1e9
    mean = total / np.maximum(np.bincount(item[what == OP], minlength=n), 1)
    # What is known keeps the price of the machine; the trace's own device may be another.
    known = zip(costs.seconds, costs.is_known, mean.tolist(), strict=True)
    return replace(costs, seconds=[s if is_known else seen for s, is_known, seen in known])


Untold = tuple[str, int, int, int]
"""Kind, group, size in bytes and peer of a communication."""


def untold(
    rehearsal: Rehearsal, tables: Mapping[int, RankTables], traced: Mapping[int, pa.Table]
) -> dict[Untold, int]:
    """Return how long communication took on the mean, in ns, that ranks without a trace took part in.

    How much of it was waiting for them nobody knows.
    """
    members = {group.id: group.ranks for group in rehearsal.groups}
    took: dict[Untold, list[int]] = defaultdict(list)
    for rank, measured in traced.items():
        messages = tables[rank].messages.to_pylist()
        event, device_ns = (measured[name].to_numpy() for name in ("event", "device_ns"))
        what, item = (tables[rank].events[name].to_numpy()[event] for name in ("what", "item"))
        own = what == COMMUNICATION
        for number, ns in zip(item[own].tolist(), device_ns[own].tolist(), strict=True):
            said = messages[number]
            others = members.get(said["group"]) if said["peer"] < 0 else (said["peer"],)
            if others is None or not set(others) <= traced.keys():
                took[said["kind"], said["group"], said["size_bytes"], said["peer"]].append(ns)
    return {key: round(sum(ns) / len(ns)) for key, ns in took.items()}


def _pauses(measured: pa.Table) -> dict[int, int]:
    """Return before which events the host of a trace did something else than to launch, and for how long."""
    columns = (measured[name].to_pylist() for name in ("event", "pause_ns"))
    return {event: ns for event, ns in zip(*columns, strict=True) if ns}


class _Built(NamedTuple):
    """A rehearsal as a program.

    *host_bound*: ranks whose host is slower than their device. *launch_s*: of ranks of a trace, what the host
    takes per kernel.
    """

    program: Program
    ranks: Mapping[int, Issued]
    costs: Mapping[int, Priced]
    joiner: Joiner
    host_bound: Sequence[int]
    launch_s: Mapping[int, float]


def _built(
    rehearsal: Rehearsal,
    tables: Mapping[int, RankTables],
    compute: ComputeModel,
    joiner: Joiner,
    traced: Mapping[int, pa.Table],
) -> _Built:
    """Return the program of a rehearsal on a machine; of ranks of a trace, what was measured of them, too."""
    # Ranks of a node share its processors; a small job does not fill the node.
    sharing = min(joiner.network.cluster.gpus_per_node, rehearsal.world_size)
    costs = {rank: priced(one.works, compute, sharing) for rank, one in tables.items()}
    costs |= {rank: as_measured(costs[rank], tables[rank], one) for rank, one in traced.items()}
    ranks, host_bound, launch_s = _rank_tasks(rehearsal, tables, costs, compute, traced)
    parts = [RankTasks(rank, *one) for rank, one in ranks.items()]
    program = assembled(parts, joiner, steps_of(rehearsal).start)
    return _Built(program, ranks, costs, joiner, host_bound, launch_s)


def _rests_on(built: _Built, rehearsal: Rehearsal, machine: Cluster, compute: ComputeModel) -> list[str]:
    catalogue = compute.notes
    if built.launch_s:
        catalogue = [note for note in catalogue if not note.startswith((LAUNCHING, "calibrated: launch "))]
        mean_s = sum(built.launch_s.values()) / len(built.launch_s)
        catalogue.append(f"{LAUNCHING}{format_time(mean_s)} per kernel, as in the trace, on any machine")
    found = [
        *catalogue,
        *machine.calibrated,
        *rules(compute.device),
        *built.joiner.assumed(),
        *rehearsal.checked,
    ]
    if any(kind in {TO_HOST, TO_DEVICE} for costs in built.costs.values() for kind in costs.kinds):
        link = format_bandwidth(machine.device.host_bytes_per_s)
        found.append(f"copies to and from the host: {format_time(COPY_START_S)} each, and {link}")
    if built.host_bound:
        ranks = ", ".join(map(str, built.host_bound))
        found.append(f"launching takes longer than computing on rank {ranks}")
    return found


def _rank_tasks(
    rehearsal: Rehearsal,
    tables: Mapping[int, RankTables],
    costs: Mapping[int, Priced],
    compute: ComputeModel,
    traced: Mapping[int, pa.Table],
) -> tuple[dict[int, Issued], list[int], dict[int, float]]:
    """Return tasks and places by rank, the ranks whose host is slower than their device, and ``launched_s``.

    The host of a trace launches as fast as it did there, whatever the device.
    """
    groups = {group.id: group for group in rehearsal.groups}
    found: dict[int, Issued] = {}
    bound: list[int] = []
    seen: dict[int, float] = {}
    for rank, one in tables.items():
        launch_s = _launch_s(one, compute.device.launch_s)
        # A graph says how long its work took, and nothing of the host.
        if rank in traced and (seconds := launched_s(one, traced[rank], costs[rank].kernels)):
            seen[rank] = seconds
            launch_s = np.full(len(launch_s), seconds)
        what, item, place = (one.events[name].to_numpy() for name in ("what", "item", "place"))
        items, places = item[what == OP], place[what == OP]
        # What the host computes does not keep the device busy.
        on_device = np.array([kind != ON_HOST for kind in costs[rank].kinds])
        busy_s = float((np.array(costs[rank].seconds) * on_device)[items].sum())
        is_bound = float((np.array(costs[rank].kernels)[items] * launch_s[places]).sum()) > busy_s
        bound += [rank] if is_bound else []
        # Launches are tasks only where they decide, or where a trace has measured them.
        writer = RankWriter(
            one,
            costs[rank],
            groups,
            steps_of(rehearsal),
            launch_s=launch_s.tolist() if is_bound or rank in seen else None,
            pauses=_pauses(traced[rank]) if rank in traced else None,
            pipeline=pipeline_of(rehearsal, rank),
        )
        found[rank] = (writer.tasks, writer.places)
    return found, bound, seen


def launched(tables: RankTables, measured: pa.Table, kernels: npt.ArrayLike) -> Int64Array:
    """Return how many kernels the host launched for each row of *measured*.

    *kernels*: of each of the rank's works.
    """
    event = measured["event"].to_numpy()
    what, item = (tables.events[name].to_numpy()[event] for name in ("what", "item"))
    found: Int64Array = np.ones(len(event), np.int64)
    found[what == OP] = np.asarray(kernels, np.int64)[item[what == OP]]
    return found


def launched_s(tables: RankTables, measured: pa.Table, kernels: Sequence[int]) -> float | None:
    """Return how long the host of a trace took per kernel, on the mean; None if it says nothing of it."""
    host_ns = measured["host_ns"].to_numpy().sum()
    n = launched(tables, measured, kernels).sum()
    return float(host_ns / n / 1e9) if host_ns and n else None


def _launch_s(tables: RankTables, operation_s: float) -> Floats:
    """Return the time of the host per kernel at each place; shape ``(n_places,)``."""
    # What a script does between the parts of a step stands alone: a copy per rank, a norm, a mean of losses.
    operations = [
        BARE_PER_OPERATION if row["name"] in OUTSIDE and row["kind"] != "backward" else OPERATIONS_PER_KERNEL
        for row in tables.places.to_pylist()
    ]
    return operation_s * np.array(operations)


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
    # Windows of steps stand behind the tasks.
    starts = spans["start_ns"].to_numpy()[: program.n_tasks]
    parts, at = [], 0
    for rank, (tasks, _) in ranks.items():
        held = np.array([task.allocated_bytes for task in tasks], np.int64)
        own = starts[at : at + len(tasks)]
        at += len(tasks)
        rows = np.flatnonzero(held)
        order = rows[np.argsort(own[rows], kind="stable")]
        # Of several tasks that start at once the most that was in use counts.
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


PYTORCH: Final = "torchtitan"
"""Profile of PyTorch itself, whose separate kernels a rehearsed script has but for those below."""

ONE_NORM: Final = frozenset({"aten._fused_rms_norm", "aten.native_layer_norm"})
"""Norms that are one kernel; others are written out, as transformers' ``LlamaRMSNorm``."""


def separate_parts(tables: Iterable[RankTables]) -> list[str]:
    """Return what runs as several kernels, of ``simulator.framework.EAGER_PARTS``.

    What PyTorch runs as it is written runs so here: what a script compiles is not told apart. A norm is one
    kernel or several, as its module is written.
    """
    names = {name for one in tables for name in one.works["name"].to_pylist()}
    norm = [] if names & ONE_NORM else ["norm"]
    return norm + [part for part in load_framework(PYTORCH).eager if part != "norm"]


def head_dim(tables: Iterable[RankTables]) -> int:
    """Return how wide the heads of attention are, 0 if no attention was seen."""
    works = [row for one in tables for row in one.works.select(["kind", "k"]).to_pylist()]
    return next((int(row["k"]) for row in works if row["kind"] == "attention"), 0)


def described(model: Mapping[str, Any] | None, tables: Iterable[RankTables]) -> Mapping[str, Any] | None:
    """Return the description *model* with the width of its heads, which no parameter tells."""
    width = head_dim(tables)
    return {**model, "head_dim": width} if model and width else model


ASYNCHRONOUS: Final = "what is asynchronous runs beside the stream that issued it until it is waited for"

ON_DEVICE: Final = (
    "streams: those that the script and FSDP ask for; collectives of a group follow one another (NCCL)",
    ASYNCHRONOUS,
)
ON_PROCESSOR: Final = (
    "streams: a processor has none; what is not asynchronous is waited for",
    ASYNCHRONOUS,
)


def rules(device: Device) -> tuple[str, ...]:
    """Return what is supplied to a rehearsal on *device* beside what it shows, as sentences."""
    return ON_PROCESSOR if device.kind == "cpu" else ON_DEVICE


def on_device(tables: RankTables, device: Device) -> RankTables:
    """Return what a rank issues as *device* takes it: on a processor all of it in one order.

    A rehearsal asks for streams, as on a GPU. On a processor PyTorch runs what is put on any of them at once,
    and a collective without ``async_op`` returns when it is done (gloo).
    """
    if device.kind != "cpu":
        return tables
    events = tables.events
    at = events.schema.get_field_index("stream")
    field = events.schema.field(at)
    one = pa.array(np.zeros(events.num_rows, np.int64), field.type)
    return tables._replace(events=events.set_column(at, field, one))


TIMES: Final = ("start_ns", "duration_ns")


def closed(spans: pa.Table, rehearsal: Rehearsal) -> pa.Table:
    """Return *spans* with windows that hold what a stage idles between its own work of two steps.

    A stage that is done before others has nothing to do until they are: the next step begins on all of them
    when it does on the first. As in a recording, a step ends on each rank with its own work, and the next one
    begins there, with the idle time behind it. Nothing was simulated before the first step: what comes behind
    it is taken to have come before it, too, by which all times are later. The only step ends when its last
    rank does instead.
    """
    if rehearsal.layout is None or rehearsal.layout.pp < 2:
        return spans
    is_window = np.array([kind == STEP for kind in spans["category"].to_pylist()])
    # A copy: what arrow hands out may be read-only.
    start, duration = (spans[name].to_numpy().copy() for name in TIMES)
    if len(steps_of(rehearsal)) == 1:
        duration[is_window] = (start + duration).max() - start[is_window]
        return _timed(spans, start, duration)
    # The first window of each rank begins at 0.
    first = np.flatnonzero(is_window & (start == 0))
    idle = duration[first].max() - duration[first]
    # All times move on by the longest idle time; then each first window is stretched back by its own.
    start += idle.max()
    start[first] -= idle
    duration[first] += idle
    return _timed(spans, start, duration)


def _timed(spans: pa.Table, *times: Int64Array) -> pa.Table:
    """Return *spans* with other starts and durations."""
    for name, values in zip(TIMES, times, strict=True):
        at = spans.schema.get_field_index(name)
        field = spans.schema.field(at)
        spans = spans.set_column(at, field, pa.array(values, field.type))
    return spans
