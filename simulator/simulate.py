"""From one job to one simulated run: timeline, memory over time, and summary figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foretrace.simulator.builder.groups import Groups
from foretrace.simulator.builder.step import build, job_groups
from foretrace.simulator.builder.templates import checkpoint_s
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.config import job_settings
from foretrace.simulator.engine import choose
from foretrace.simulator.engine.changes import SWITCHES, Above, Change, Throttle, of_links
from foretrace.simulator.errors import JobError, SimulationError
from foretrace.simulator.folding import representatives
from foretrace.simulator.idle import idle
from foretrace.simulator.job import Job
from foretrace.simulator.memory.over_time import memory_over_time
from foretrace.simulator.memory.ranks import RankMemory, rank_memories
from foretrace.simulator.network.advice import slow_axes
from foretrace.simulator.network.cost import Network, job_network
from foretrace.simulator.network.link_changes import link_changes, links_table
from foretrace.simulator.network.uplinks import uplinks
from foretrace.simulator.program import Program
from foretrace.simulator.sampling import distribution, sample_steps, straggling
from foretrace.simulator.summary import (
    empty_stages,
    expert_tp_note,
    figures,
    job_name,
    memory_warnings,
    placement_note,
)
from foretrace.topologies.units import format_time
from foretrace.topologies.wiring import fabric
from foretrace.traces.info import RunInfo
from foretrace.traces.run import Part, Run
from foretrace.traces.store import write_run
from foretrace.traces.timeline import MEMORY

Progress = Callable[[str], None]
"""Told what is being done, in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulated run.

    Attributes:
        info: its description; ``info.summary`` holds the figures.
        spans: timeline of the simulated ranks.
        memory: memory of these ranks over time.
        links: utilisation of links, in the columns of ``simulator.network.link_changes.LINKS``; None if not
            shared.
        expands: whether ``write`` stores every rank, although some represent others here.
        kept: cache of values derived from the spans, for every ``run`` made of them.
    """

    info: RunInfo
    spans: pa.Table
    memory: pa.Table
    links: pa.Table | None = None
    expands: bool = False
    kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def summary(self) -> Mapping[str, Any]:
        """The figures that docs/simulation.md lists."""
        return self.info.summary

    @property
    def run(self) -> Run:
        """The run in memory, as ``traces.store.open_run`` returns it for one on disk."""
        parts = [Part(None, lambda: self.spans)]
        return Run(self.info.name, self.info, parts, self.memory, (), kept=self.kept, links=self.links)

    def _repr_html_(self) -> str:
        """Return the figures as a notebook shows them."""
        return self.run._repr_html_()

    def write(self, path: str | Path) -> Path:
        """Write the run to the directory *path*, all of it or nothing, and return it.

        Raises:
            RunError: *path* is something else than a run, or cannot be written.
        """
        if not self.expands:
            return write_run(path, self.info, self.spans, self.memory, links=self.links)
        run, ranks = self.run, range(self.info.world_size)
        info = replace(self.info, representatives=None)
        memory = _expanded_memory(self.memory, [run.source(rank) for rank in ranks])
        return write_run(path, info, (run.spans([rank]) for rank in ranks), memory, links=self.links)


def simulate(
    job: Job,
    progress: Progress | None = None,
    *,
    folded: bool = True,
    expanded: bool = False,
    engine: str = "auto",
    program: Program | None = None,
    only_figures: bool = False,
) -> Simulation:
    """Predict ``job.n_steps`` training steps of *job*.

    Args:
        job: the job to run, and its machine.
        progress: notified of each phase.
        folded: simulate one rank per pipeline rank as the representative of those that behave alike.
        expanded: keep every rank: exact copies of folded ones where all groups are alike, otherwise each is
            simulated.
        engine: one of ``simulator.engine.ENGINES``; they give the same timeline.
        program: folded program of the job, if ``build`` has already built it.
        only_figures: omit memory over time, which no figure of the summary needs.

    Raises:
        SimulationError, TopologyError, TraceError: the job cannot run as described.
    """
    tell = progress or (lambda _: None)
    tell("building the program")
    groups = job_groups(job)
    computes = [ComputeModel(kind.device, job.precision) for kind in job.cluster.kinds]
    network, changes, factors = job_network(job), changes_of(job), job.variation.factors
    unlike = range(job.layout.world_size) if job.cluster.others else ()
    apart = {rank for rank in unlike if network.kind(rank) != network.kind(0)}
    special = sorted({*factors, *apart, *ranks_of(changes)})
    building = partial(
        build, job, network, computes[0], groups=groups, others=computes[1:], kind_of=network.kind
    )
    program, folded = _program(building, program, special, tell, folded=folded, expanded=expanded)
    program = replace(program, duration_ns=straggling(program, factors))
    stands_for = representatives(job.layout, special) if folded else None
    needs = {"queue": bool(changes) or program.shares_gpus, "links": bool(job.variation.link_changes)}
    runner = choose(engine, program.n_tasks, tell, **needs)
    above = uplinks(program, network, groups, stands_for) if hasattr(runner, "watched") else None
    tell(f"running {program.n_tasks:,} tasks")
    spans, links = _run(runner, program, changes, above)
    tell("adding up")
    memories = rank_memories(job)
    warnings = [*memory_warnings(job, memories), *idle(job), *empty_stages(job), *_slow(job, network)]
    simulation = Simulation(
        info=_info(job, groups, stands_for, warnings),
        spans=spans,
        memory=MEMORY.empty_table() if only_figures else _memory(job, spans, memories, stands_for),
        links=links,
        expands=expanded and folded,
    )
    notes = [*expert_tp_note(job), *placement_note(job)]
    notes += dict.fromkeys(note for compute in computes for note in compute.notes)
    saving_s = checkpoint_s(job, groups)
    summary = figures(job, simulation.run, memories, rests_on=notes, saving_s=saving_s)
    if job.expert_tp_from == "open":
        tell("again with whole experts")
        summary = _covering(summary, job)
    if job.variation.is_random:
        tell(f"drawing {job.variation.samples} steps")
        sampler = choose(engine, program.n_tasks * job.variation.samples, tell, **needs)
        clock = sampler.Clock(program, changes, **({} if above is None else {"above": above}))
        summary["step_time_distribution"] = _distribution(job, program, stands_for, clock)
    if simulation.expands:
        summary["n_ranks_stored"] = job.layout.world_size
    return replace(simulation, info=replace(simulation.info, summary={**summary, "engine": runner.NAME}))


def _covering(summary: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Return *summary* with intervals that also cover *job* with whole experts, where nobody said which."""
    try:
        whole = replace(job, layout=replace(job.layout, expert_tp=1), expert_tp_from="", n_steps=1)
        other = simulate(whole, only_figures=True).summary
    except SimulationError:  # another convention needs experts cut as layers are
        return dict(summary)
    ranges = {
        name: [min(own[0], theirs[0]), max(own[1], theirs[1])] if isinstance(own, list) else own
        for name, own in summary["intervals"].items()
        for theirs in [other["intervals"][name]]
    }
    step = format_time(other["step_time_s"])
    note = f"the ranges cover whole experts too (--expert-tp 1), with which a step takes {step}"
    return {**summary, "intervals": ranges, "rests_on": [note, *summary["rests_on"]]}


def _program(
    building: Callable[..., Program],
    built: Program | None,
    special: Sequence[int],
    tell: Progress,
    *,
    folded: bool,
    expanded: bool,
) -> tuple[Program, bool]:
    """Return the program to run, and whether ranks in it represent others.

    If every rank is stored (*expanded*) and groups differ in speed, ranks are no copies: all are built.

    Args:
        building: builds the program of the job.
        built: its folded program, if there is one already.
        special: ranks that are simulated themselves.
        tell: notified of what is built.
        folded: let ranks represent those that behave alike.
        expanded: every rank will be stored.
    """
    if built is None:
        built = building(special=special) if folded else building(folded=False)
    if expanded and built.uneven:
        tell(f"building every rank, because groups of {', '.join(built.uneven)} differ in speed")
        return building(folded=False), False
    return built, folded


def _run(
    runner: ModuleType,
    program: Program,
    changes: Sequence[Change | Throttle],
    above: Above | None,
) -> tuple[pa.Table, pa.Table | None]:
    """Return the timeline, and how full links were if the engine keeps that.

    Raises:
        ProgramError: the program cannot run to its end.
        EngineError: links change, but the engine does not share them.
    """
    if above is None:
        return runner.run(program, changes), None
    spans, filled = runner.watched(program, changes, above)
    return spans, links_table(filled, of_links(changes))


def _memory(
    job: Job, spans: pa.Table, memories: Sequence[RankMemory], stands_for: tuple[int, ...] | None
) -> pa.Table:
    """Return the memory over time of every rank that has spans; *memories* are by pipeline rank."""
    stored = sorted(set(stands_for)) if stands_for else range(job.layout.world_size)
    return memory_over_time(spans, {rank: memories[job.layout.coord(rank).pp] for rank in stored})


def _distribution(
    job: Job, program: Program, stands_for: tuple[int, ...] | None, clock: Any
) -> dict[str, Any]:
    """Return how the time of a step is distributed."""
    alike = np.bincount(np.array(stands_for or range(job.layout.world_size)))
    in_step = job.layout.tp * job.layout.cp if stands_for else 1
    step_s = sample_steps(program, job.variation, clock=clock, alike=alike, in_step=in_step)
    return distribution(step_s, job.variation.seed)


def _expanded_memory(memory: pa.Table, sources: Sequence[int]) -> pa.Table:
    """Return the memory of every rank, given that of the rank that stands for it, ``sources[rank]``."""
    stored = {rank: memory.filter(pc.equal(memory["rank"], rank)) for rank in set(sources)}
    place, field = memory.schema.get_field_index("rank"), memory.schema.field("rank")
    return pa.concat_tables(
        stored[source].set_column(place, field, pa.array(np.full(stored[source].num_rows, rank, np.int32)))
        for rank, source in enumerate(sources)
    )


def _info(job: Job, groups: Groups, stands_for: tuple[int, ...] | None, warnings: Sequence[str]) -> RunInfo:
    """Return the description of the run, without its figures."""
    return RunInfo(
        origin="simulated",
        world_size=job.layout.world_size,
        name=job_name(job),
        layout=job.layout,
        model=job.model.describe(),
        cluster=job.cluster.describe(),
        job={**job_settings(job), "n_microbatches": job.n_microbatches},
        groups=tuple(groups.all),
        representatives=stands_for,
        warnings=tuple(warnings),
        versions={"foretrace": _version()},
    )


def _slow(job: Job, network: Network) -> list[str]:
    """Return a sentence for each axis that sends the activations of every layer over slow links."""
    size_bytes = 2 * job.micro_batch * job.seq_len * job.model.hidden
    return [found.sentence(size_bytes) for found in slow_axes(job.layout, network, size_bytes)]


def _version() -> str:
    try:
        return version("foretrace")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+unknown"


def changes_of(job: Job) -> list[Change | Throttle]:
    """Return what happens to links and GPUs while *job* runs.

    Raises:
        JobError: it happens to a rank that is not in the world, or to a switch that is not in the machine.
    """
    links, gpus = link_changes(job.variation.link_changes), job.variation.throttles
    ranks = {
        "link_changes": [change.way.rank for change in links if change.way.tier not in SWITCHES],
        "stragglers": [*job.variation.factors, *(throttle.rank for throttle in gpus)],
    }
    for name, found in ranks.items():
        if found and max(found) >= job.layout.world_size:
            raise JobError(f"{name}: rank {max(found)} is outside a world of {job.layout.world_size}")
    for change in links:
        if change.way.tier in SWITCHES:
            _check_switch(job, change)
    return [*links, *gpus]


def _check_switch(job: Job, change: Change) -> None:
    """Raise JobError unless the machine has that switch, with a way upward."""
    above = SWITCHES[SWITCHES.index(change.way.tier) :]
    graph, name = fabric(job.cluster), f"{change.way.tier}:{change.way.rank}"
    ups = graph.successors(name) if name in graph else iter(())
    if not any(up.partition(":")[0] in {*above[1:], "core"} for up in ups):
        raise JobError(
            f"link_changes: {job.cluster.name} has no {change.way.tier} {change.way.rank} with a way upward; "
            "foretrace topology draw shows its switches"
        )


def ranks_of(changes: list[Change | Throttle]) -> set[int]:
    """Return the ranks to which something happens."""
    ways = [change.way for change in changes if isinstance(change, Change)]
    gpus = {change.rank for change in changes if isinstance(change, Throttle)}
    return gpus | {way.rank for way in ways if way.tier not in SWITCHES}
