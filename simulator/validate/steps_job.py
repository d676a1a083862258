"""Turns a row of a table of steps into a job on the machine that it ran on, and sorts it into classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from foretrace.simulator.errors import TableError
from foretrace.simulator.job import Job, why_not_combined
from foretrace.simulator.network.cost import Network
from foretrace.simulator.validate.hardware import device_of
from foretrace.simulator.validate.job import hardware_of, job_of
from foretrace.simulator.validate.overlap import schedule_of
from foretrace.simulator.validate.spelling import schedule_named, sharding_of
from foretrace.simulator.validate.table import Row
from foretrace.simulator.validate.unstated import filled
from foretrace.topologies.words import machine

BY_STAGES: Final = ("", "1f1b", "interleaved-1f1b")
"""Schedules of which the number of virtual stages tells which one is meant."""

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
    row, words = filled(row)
    hardware = hardware_of(row)
    job = job_of(row)
    world_size = job.layout.world_size
    if (n_gpus := row.integer("world_size", world_size)) != world_size:
        raise TableError(f"world_size={n_gpus}: tp*pp*dp*cp is {world_size}")
    network = _network(hardware, row.text("interconnect"), world_size, _n_nodes(row, world_size))
    virtual_stages = max(1, row.integer("virtual_pp", 1)) if job.layout.pp > 1 else 1
    named = schedule_named(row.text("schedule")) if job.layout.pp > 1 else ""
    schedule = named if named not in BY_STAGES else schedule_of(row.text("notes"), virtual_stages)
    unpaired = schedule == "combined-1f1b" and why_not_combined(job, virtual_stages) != ""
    job = replace(
        job,
        cluster=replace(network.cluster.sized(world_size), device=device_of(hardware)),
        schedule=schedule_of("", virtual_stages) if unpaired else schedule,
        virtual_stages=virtual_stages if virtual_stages > 1 else None,
        counted_ends=_counted_ends(job, job.layout.pp * virtual_stages),
    )
    share = row.number_in("global_batch", job.global_batch) / job.global_batch
    said = list(words)
    if unpaired:
        said.append("exchanges of experts beside another micro-batch, which this layout cannot have: without")
    if share != 1:
        said.append("global batch not a multiple of dp*micro_batch: the nearest one, and time in proportion")
    return StepJob(job, network, share, tuple(said))


def parallel_class(row: Row) -> str:
    """Return the class of layouts that *row* belongs to: MoE, 3D, FSDP or DP/TP+DP; the first that fits."""
    if row.integer("experts", 0) > 1:
        return "MoE"
    if row.integer("pp", 1) > 1:
        return "3D"
    return "FSDP" if sharding_of(row.text("sharding")) == "fsdp" else "DP/TP+DP"


def size_names() -> tuple[str, ...]:
    """Return the classes of the number of GPUs, from small to large."""
    return (*(name for _, name in SIZES), LARGEST)


def size_class(row: Row) -> str:
    """Return how large the machine of *row* was, in words."""
    n_gpus = row.integer("world_size")
    return next((name for most, name in SIZES if n_gpus <= most), LARGEST)


def _n_nodes(row: Row, world_size: int) -> int:
    return -(-world_size // row.count("gpus_per_node", 8))


def _counted_ends(job: Job, n_stages: int) -> str:
    """Return which ends of the model count as a layer: those without which there are more stages than layers.

    Llama 3.1 405B has 126 layers on 128 stages of which the first and the last hold embedding and head alone.
    """
    lacking = n_stages - job.model.n_layers
    return {1: "head", 2: "both"}.get(lacking, job.counted_ends)


@cache
def _network(hardware: str, interconnect: str, n_gpus: int, n_nodes: int) -> Network:
    """Return the machine that the words name, with ranks spread evenly over its NVLink domains."""
    cluster = machine(f"{hardware}; {interconnect}", n_gpus, n_nodes)
    n_domains = -(-n_gpus // cluster.gpus_per_node)
    per_domain = -(-n_gpus // n_domains)
    gpus = [rank // per_domain * cluster.gpus_per_node + rank % per_domain for rank in range(n_gpus)]
    return Network(cluster, gpus)
