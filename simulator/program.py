"""A training step as data: tasks on in-order streams, with dependencies and collective instances.

A ``Program`` is a struct of NumPy arrays, so that an engine, folded or not, never handles a Python object
per task. Streams behave like CUDA's: the tasks of one ``(rank, stream)`` run in the order of their index,
one at a time. A task starts when its stream is free and its dependencies have ended. A task that takes part
in a communication (``instance >= 0``) *arrives* at that moment; the transfer starts when every participant
has arrived and ends for all of them at the same time. Its span runs from arrival to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]


class Label(NamedTuple):
    """Properties shared by many tasks; stored once and referred to by index."""

    category: str
    kind: str
    name: str
    axis: str = ""
    dtype: str = ""


class Transfer(NamedTuple):
    """Cost of a communication, as computed by the network model.

    Attributes:
        latency_ns: time that does not depend on other traffic.
        wire_ns: time of the busiest link when nothing else uses it.
        algorithm: algorithm and protocol, e.g. ``"ring/simple"``; shown in reports.
        near, far: share of a rank's link inside its node, and of its link out of it, that the transfer uses.
        processors: share of each GPU's processors held by its kernels from launch to end, parts per million.
        memory: share of their memory bandwidth used while bytes move, parts per million.
    """

    latency_ns: int
    wire_ns: int
    algorithm: str = ""
    near: float = 0.0
    far: float = 0.0
    processors: int = 0
    memory: int = 0


AXES: Final = ("tp", "cp", "ep")
"""Axes along which the main line of an action communicates, innermost first: what else communicates meanwhile
does not change the state of a rank."""

STATES: Final = tuple((axis, behind) for axis in AXES for behind in ("", "compute", *AXES))
"""An axis that communicates inside of a task, and behind what it does so: "compute", an axis that takes
precedence, or "" if it is exposed."""


class Inside(NamedTuple):
    """What a task that stands for several in a row is made of; see ``simulator.builder.merged``.

    Attributes:
        n_tasks: how many it stands for.
        start_ns, end_ns: when something communicates in it, from its start on; shape ``(n,)``.
        state: of each, index into ``STATES``.
        computes_ns: time of its compute.
        bound: that time by its share that is bound by memory bandwidth, ns times parts per million.
    """

    n_tasks: int
    start_ns: Int64Array
    end_ns: Int64Array
    state: Int64Array
    computes_ns: int
    bound: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Tasks, dependencies and communications of the simulated ranks.

    Arrays over tasks have shape ``(n_tasks,)``, arrays over instances ``(n_instances,)``.

    Attributes:
        stream: index into ``streams``.
        label: index into ``labels``.
        duration_ns: compute time; 0 for communications.
        instance: index of the communication it takes part in, or -1.
        microbatch, layer, stage, virtual_stage, step: as in the timeline; -1 if none.
        peer: the other rank of a p2p transfer, or -1.
        flops, bytes_moved: work of a compute task, 0 if none.
        dep_start, deps: dependencies as CSR: task *i* waits for ``deps[dep_start[i]:dep_start[i + 1]]``.
        instance_size_bytes, instance_group, instance_sequence: as in the timeline.
        instance_participants: number of tasks in the program that take part.
        instance_transfer: index into ``transfers``.
        uneven: scopes in which a folded rank represents groups of different speed, and has the slowest. If
            there are none, every rank behaves exactly like its representative.
        memory_bound: share of the time of each compute task that is bound by memory bandwidth, parts per
            million; None: no task is.
        merged: index into ``insides`` of each task that stands for several, or -1; None: no task does.
    """

    rank: Int32Array
    stream: Int32Array
    label: Int32Array
    duration_ns: Int64Array
    instance: Int64Array
    microbatch: Int32Array
    layer: Int32Array
    stage: Int32Array
    virtual_stage: Int32Array
    step: Int32Array
    peer: Int32Array
    flops: Int64Array
    bytes_moved: Int64Array
    dep_start: Int64Array
    deps: Int64Array
    streams: tuple[str, ...]
    labels: tuple[Label, ...]
    instance_size_bytes: Int64Array
    instance_group: Int32Array
    instance_sequence: Int64Array
    instance_participants: Int32Array
    transfers: tuple[Transfer, ...]
    instance_transfer: Int32Array
    uneven: tuple[str, ...] = ()
    memory_bound: Int32Array | None = None
    merged: Int32Array | None = None
    insides: tuple[Inside, ...] = ()

    @property
    def n_tasks(self) -> int:
        """Number of tasks."""
        return len(self.rank)

    @property
    def n_instances(self) -> int:
        """Number of communications."""
        return len(self.instance_size_bytes)

    @property
    def shares_gpus(self) -> bool:
        """Whether a communication occupies part of the GPUs that it runs on, so that compute slows down."""
        return any(transfer.processors or transfer.memory for transfer in self.transfers)

    @property
    def memory_bound_share(self) -> float:
        """Share of the time of all compute tasks that is bound by memory."""
        millionths = self.slowed
        if self.merged is not None:
            millionths = np.where(self.merged < 0, millionths, -1)
        computes_ns = np.where(millionths < 0, 0, self.duration_ns)
        total_ns, bound = int(computes_ns.sum()), int(computes_ns @ np.maximum(millionths, 0))
        for which, n in self.n_merged.items():
            total_ns += n * self.insides[which].computes_ns
            bound += n * self.insides[which].bound
        return float(bound) / 1e6 / total_ns if total_ns else 0.0

    @property
    def n_merged(self) -> dict[int, int]:
        """How many tasks are made of each of ``insides``."""
        if self.merged is None:
            return {}
        return dict(enumerate(np.bincount(self.merged + 1, minlength=len(self.insides) + 1)[1:].tolist()))

    @property
    def slowed(self) -> Int32Array:
        """Share of the time of each task that is bound by memory, parts per million; -1: none of it slows.

        Host tasks, tasks without duration and communications do not slow down.
        """
        computes = np.array([label.category == "compute" for label in self.labels], np.bool_)[self.label]
        bound = np.zeros(self.n_tasks, np.int32) if self.memory_bound is None else self.memory_bound
        return np.where(computes & (self.instance < 0), bound, -1).astype(np.int32)


def transfer_ns(program: Program) -> Int64Array:
    """Return how long each communication takes alone once all have arrived; shape ``(n_instances,)``."""
    cost = np.array([transfer.latency_ns + transfer.wire_ns for transfer in program.transfers], np.int64)
    return cost[program.instance_transfer] if program.n_instances else np.empty(0, np.int64)


# Where seconds become ticks.


def to_ns(seconds: float) -> int:
    """Return the engine's ticks for a modelled duration. The only rounding in the simulator.

    Cost models speak float seconds, the engine counts whole nanoseconds, so that equal sums are equal.

    >>> to_ns(0.7) + to_ns(0.1) == to_ns(0.8)  # 0.7 + 0.1 == 0.8 is False
    True
    """
    return round(seconds * 1e9)
