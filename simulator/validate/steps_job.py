"""Turns a row of a table of steps into a job on the machine that it ran on, and sorts it into classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from simulator.errors import TableError
from simulator.job import Job
from simulator.network.cost import Network
from simulator.validate.hardware import device_of
from simulator.validate.job import job_of
from simulator.validate.overlap import schedule_of
from simulator.validate.table import Row
from topologies.words import machine

NOT_STATED: Final = ("", "see notes")
"""What a table writes where a source does not say."""

ASSUMED: Final = {"recompute": "none", "virtual_pp": "1", "micro_batch": "1"}
"""What is taken for a setting that a row does not give."""

SIZES: Final = ((8, "1-8 GPUs"), (128, "9-128 GPUs"), (1024, "129-1,024 GPUs"))
LARGEST: Final = "over 1,024 GPUs"


@dataclass(frozen=True, slots=True, eq=False)
class StepJob:
    """What to simulate for a row.

    Attributes:
        job: on as many GPUs as took part.
        network: network of the machine, with ranks where they were; one per machine and number of ranks.
        share: measured batch over that of the job: not 1 where the last micro-batch is not full.
        assumed: settings that the row does not give, in words.
    """

    job: Job
    network: Network
    share: float
    assumed: tuple[str, ...]


def step_job(row: Row) -> StepJob:
    """Return what to simulate for *row*.

    Raises:
        TableError: the row does not say enough, or something the simulator does not have.
        SimulationError, TopologyError, TraceError: its layout, batch, model or machine is not possible.
    """
    missing = [name for name in ASSUMED if row.text(name) in NOT_STATED and _matters(row, name)]
    filled = Row({name: ASSUMED[name] for name in ASSUMED if row.text(name) in NOT_STATED}, row.number)
    row = filled.over(row)
    if not row.text("hardware"):
        raise TableError("hardware is not given")
    job = job_of(row)
    world_size = job.layout.world_size
    network = _network(row.text("hardware"), row.text("interconnect"), world_size, _n_nodes(row, world_size))
    virtual_stages = row.integer("virtual_pp") if job.layout.pp > 1 else 1
    job = replace(
        job,
        cluster=replace(network.cluster.sized(world_size), device=device_of(row.text("hardware"))),
        schedule=schedule_of(row.text("notes"), virtual_stages),
        virtual_stages=virtual_stages if virtual_stages > 1 else None,
    )
    share = row.number_in("global_batch", job.global_batch) / job.global_batch
    words = [f"{name} not stated: {ASSUMED[name]}" for name in missing]
    if share != 1:
        words.append("global batch not a multiple of dp*micro_batch: the nearest one, and time in proportion")
    return StepJob(job, network, share, tuple(words))


def parallel_class(row: Row) -> str:
    """Return the class of layouts that *row* belongs to: MoE, 3D, FSDP or DP/TP+DP; the first that fits."""
    if row.integer("experts", 0) > 1:
        return "MoE"
    if row.integer("pp", 1) > 1:
        return "3D"
    return "FSDP" if any(word in row.text("sharding") for word in ("fsdp", "zero3")) else "DP/TP+DP"


def size_names() -> tuple[str, ...]:
    """Return the classes of the number of GPUs, from small to large."""
    return (*(name for _, name in SIZES), LARGEST)


def size_class(row: Row) -> str:
    """Return how large the machine of *row* was, in words."""
    n_gpus = row.integer("world_size")
    return next((name for most, name in SIZES if n_gpus <= most), LARGEST)


def _matters(row: Row, name: str) -> bool:
    """Return whether setting *name* has a say in *row*: virtual stages need a pipeline."""
    return name != "virtual_pp" or row.integer("pp", 1) > 1


def _n_nodes(row: Row, world_size: int) -> int:
    return -(-world_size // row.integer("gpus_per_node", 8))


@cache
def _network(hardware: str, interconnect: str, n_gpus: int, n_nodes: int) -> Network:
    """Return the machine that the words name, with ranks spread evenly over its NVLink domains."""
    cluster = machine(f"{hardware}; {interconnect}", n_gpus, n_nodes)
    n_domains = -(-n_gpus // cluster.gpus_per_node)
    per_domain = -(-n_gpus // n_domains)
    gpus = [rank // per_domain * cluster.gpus_per_node + rank % per_domain for rank in range(n_gpus)]
    return Network(cluster, gpus)
