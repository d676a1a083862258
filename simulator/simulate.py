"""One job in, one simulated run out: timeline, memory over time, and the figures that people ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyarrow as pa

from simulator.build import build, job_groups, representatives
from simulator.compute import ComputeModel
from simulator.config import job_settings
from simulator.engine import choose
from simulator.job import Job
from simulator.memory_over_time import memory_over_time
from simulator.network import Network
from simulator.rank_memory import rank_memories
from simulator.summary import figures, job_name, memory_warnings
from topologies.placement import place
from traces.info import RunInfo
from traces.run import Part, Run
from traces.store import write_run

Progress = Callable[[str], None]
"""Told what is being done, in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulated run.

    Attributes:
        info: its description; ``info.summary`` holds the figures.
        spans: timeline of the simulated ranks.
        memory: memory of these ranks over time.
    """

    info: RunInfo
    spans: pa.Table
    memory: pa.Table

    @property
    def summary(self) -> Mapping[str, Any]:
        """The figures that docs/simulation.md lists."""
        return self.info.summary

    @property
    def run(self) -> Run:
        """The run in memory, as ``traces.store.open_run`` returns it for one on disk."""
        return Run(self.info.name, self.info, [Part(None, lambda: self.spans)], self.memory, ())

    def write(self, path: str | Path) -> Path:
        """Write the run to the directory *path*, all of it or nothing, and return it.

        Raises:
            RunError: *path* is something else than a run, or cannot be written.
        """
        return write_run(path, self.info, self.spans, self.memory)


def simulate(
    job: Job, progress: Progress | None = None, *, folded: bool = True, engine: str = "auto"
) -> Simulation:
    """Predict ``job.n_steps`` training steps of *job*.

    Args:
        job: what to run, and on what.
        progress: told about each phase.
        folded: simulate one rank per pipeline rank and let it stand for those that do the same.
        engine: one of ``simulator.engine.ENGINES``; they give the same timeline.

    Raises:
        SimulationError, TopologyError, TraceError: the job cannot run as described.
    """
    tell = progress or (lambda _: None)
    tell("building the program")
    groups = job_groups(job)
    compute = ComputeModel(job.cluster.device, job.precision)
    network = Network(job.cluster, place(job.layout.world_size, job.cluster))
    program = build(job, network, compute, folded=folded, groups=groups)
    runner = choose(engine, program.n_tasks, tell)
    tell(f"running {program.n_tasks:,} tasks")
    spans = runner.run(program)
    tell("adding up")
    stages = rank_memories(job)
    stands_for = representatives(job.layout) if folded else None
    stored = sorted(set(stands_for)) if stands_for else range(job.layout.world_size)
    memory = memory_over_time(spans, {rank: stages[job.layout.coord(rank).pp] for rank in stored})
    info = RunInfo(
        origin="simulated",
        world_size=job.layout.world_size,
        name=job_name(job),
        layout=job.layout,
        model=job.model.describe(),
        cluster=job.cluster.describe(),
        job={**job_settings(job), "n_microbatches": job.n_microbatches},
        groups=tuple(groups.all),
        representatives=stands_for,
        warnings=tuple(memory_warnings(job, stages)),
        versions={"foretrace": _version()},
    )
    simulation = Simulation(info=info, spans=spans, memory=memory)
    summary = figures(job, simulation.run, stages, rests_on=compute.notes)
    return replace(simulation, info=replace(info, summary={**summary, "engine": runner.NAME}))


def _version() -> str:
    try:
        return version("foretrace")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+unknown"
