"""From one job to one simulated run: timeline, memory over time, and summary figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from foretrace.simulator.builder.groups import Groups
from foretrace.simulator.builder.step import RecentGroups, build, job_groups, representatives
from foretrace.simulator.builder.templates import checkpoint_s
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.config import job_settings, of_framework
from foretrace.simulator.engine import ONE_BY_ONE, choose, why_not_compiled
from foretrace.simulator.engine.changes import SWITCHES, Above, Change, Throttle, of_links
from foretrace.simulator.engine.spans import insides
from foretrace.simulator.errors import JobError, SimulationError
from foretrace.simulator.framework import framework_names
from foretrace.simulator.garbage import few_collections
from foretrace.simulator.idle import idle
from foretrace.simulator.intervals import Reading, covers
from foretrace.simulator.job import Job
from foretrace.simulator.memory.over_time import memory_over_time
from foretrace.simulator.memory.ranks import RankMemory, fits, peak_bytes, rank_memories
from foretrace.simulator.network.advice import slow_axes
from foretrace.simulator.network.cost import Network, job_network, placed
from foretrace.simulator.network.uplinks import link_changes, links_table, uplinks
from foretrace.simulator.outer import across, across_words, apart
from foretrace.simulator.program import Int64Array, Program
from foretrace.simulator.summary import (
    empty_stages,
    expert_tp_note,
    figures,
    job_name,
    memory_warnings,
    model_note,
    placement_note,
    processor_note,
    published_note,
)
from foretrace.simulator.variation import Variation
from foretrace.topologies.cluster import Cluster
from foretrace.topologies.errors import TopologyError
from foretrace.topologies.wiring import fabric
from foretrace.traces.columns import int64
from foretrace.traces.info import RunInfo
from foretrace.traces.notebook import run_html
from foretrace.traces.run import Inside, Part, Run
from foretrace.traces.store import write_run
from foretrace.traces.timeline import MEMORY

Progress = Callable[[str], None]
"""Told what is being done, in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Simulation:
    """A simulated run.

    Attributes:
        info: its description; ``info.summary`` holds the figures.
        memory: memory of these ranks over time.
        links: utilisation of links, in the columns of ``simulator.network.uplinks.LINKS``; None if not
            shared.
        expands: whether ``write`` stores every rank, although some represent others here.
        kept: cache of values derived from the spans, for every ``run`` made of them.
        inside: by rank, what spans consist of where some stand for several in a row.
    """

    info: RunInfo
    spans: pa.Table
    memory: pa.Table
    links: pa.Table | None = None
    expands: bool = False
    kept: dict[Any, Any] = field(default_factory=dict, compare=False)
    inside: Mapping[int, Inside] | None = field(default=None, compare=False)

    @property
    def summary(self) -> Mapping[str, Any]:
        """The figures that docs/simulation.md lists."""
        return self.info.summary

    @property
    def run(self) -> Run:
        """The run in memory, as ``traces.store.open_run`` returns it for one on disk."""
        parts = [Part(None, lambda: self.spans)]
        return Run(
            self.info.name,
            self.info,
            parts,
            self.memory,
            (),
            kept=self.kept,
            links=self.links,
            shown=run_html,
            inside=self.inside,
        )

    def __repr__(self) -> str:
        """Return what was simulated and how long a step takes, in one line."""
        return repr(self.run)

    def _repr_html_(self) -> str:
        """Return the figures as a notebook shows them."""
        return run_html(self.run)

    def write(self, path: str | Path) -> Path:
        """Write the run to the directory *path*, all of it or nothing, and return it.

        Raises RunError if *path* is something else than a run, or cannot be written.
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
    network: Network | None = None,
    groups: Groups | None = None,
    covers_unsaid: bool = True,
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
        only_figures: omit what no figure of the summary needs: memory over time, warnings, descriptions of
            model and machine, and spans one by one where one can stand for several in a row.
        network: that of the job, if ``job_network`` has already been asked for it.
        groups: those of the job, if ``job_groups`` has already been asked for them.
        covers_unsaid: widen ranges to what else the job may be as far as anybody said.

    Raises SimulationError, TopologyError, TraceError if the job cannot run as described.
    """
    tell = progress or (lambda _: None)
    if job.n_sites > 1:
        return _apart(
            job,
            simulate(
                job.of_one_site,
                progress,
                folded=folded,
                expanded=expanded,
                engine=engine,
                program=program,
                only_figures=only_figures,
                covers_unsaid=covers_unsaid,
            ),
        )
    tell("building the program")
    groups = groups or job_groups(job)
    computes = [ComputeModel(kind.device, job.precision) for kind in job.cluster.kinds]
    network, changes, factors = network or job_network(job), changes_of(job), job.variation.factors
    unlike = range(job.layout.world_size) if job.cluster.others else ()
    apart = {rank for rank in unlike if network.kind(rank) != network.kind(0)}
    # These ranks behave unlike those that a folded rank would stand for.
    special = sorted({*factors, *apart, *ranks_of(changes)})
    building = partial(
        build,
        job,
        network,
        computes[0],
        groups=groups,
        others=computes[1:],
        kind_of=network.kind,
        merges=only_figures and not changes and job.variation == Variation() and engine in ONE_BY_ONE,
    )
    program, folded = _program(building, program, special, tell, folded=folded, expanded=expanded)
    # After building: the program of a search, or of a folded job, knows nothing of stragglers.
    program = replace(program, duration_ns=straggling(program, factors))
    stands_for = representatives(job.layout, special) if folded else None
    needs = {"queue": bool(changes) or program.shares_gpus, "links": bool(job.variation.link_changes)}
    runner = choose(engine, program.n_tasks, tell, **needs)
    above = uplinks(program, network, groups, stands_for) if hasattr(runner, "watched") else None
    tell(f"running {program.n_tasks:,} tasks")
    spans, links = _run(runner, program, changes, above)
    tell("adding up")
    memories = rank_memories(job)
    warnings = [] if only_figures else _warnings(job, memories, network)
    simulation = Simulation(
        info=_info(job, groups, stands_for, warnings, described=not only_figures),
        spans=spans,
        memory=MEMORY.empty_table() if only_figures else _memory(job, spans, memories, stands_for),
        links=links,
        expands=expanded and folded,
        inside=insides(program, int64(spans, "start_ns")),
    )
    notes = [*published_note(job), *model_note(job), *expert_tp_note(job), *placement_note(job)]
    notes += processor_note(job)
    notes += dict.fromkeys(note for compute in computes for note in compute.notes)
    notes += job.cluster.calibrated
    saving_s = checkpoint_s(job, groups)
    summary = figures(job, simulation.run, memories, rests_on=notes, saving_s=saving_s)
    if found := across(job, groups, network, summary):
        summary |= {"across_sites": found, "rests_on": [*across_words(found), *summary["rests_on"]]}
    summary["memory_bound_share"] = program.memory_bound_share
    if covers_unsaid:
        own = Reading(job.framework, summary["step_time_s"], summary["peak_memory_bytes"])
        summary["intervals"] = covers(summary["intervals"], own, readings(job, tell, network))
    if job.variation.is_random:
        tell(f"drawing {job.variation.samples} steps")
        # Many runs of one program: loading the compiled engine pays off sooner than for a single one.
        sampler = choose(engine, program.n_tasks * job.variation.samples, tell, **needs)
        clock = sampler.Clock(program, changes, **({} if above is None else {"above": above}))
        summary["step_time_distribution"] = _distribution(job, program, stands_for, clock)
    if simulation.expands:
        summary["n_ranks_stored"] = job.layout.world_size
    return replace(simulation, info=replace(simulation.info, summary={**summary, "engine": runner.NAME}))


def _apart(job: Job, site: Simulation) -> Simulation:
    """Return the run of one *site* with the settings and the figures of all of *job*."""
    settings = {**job_settings(job), "n_microbatches": job.n_microbatches}
    info = replace(site.info, name=job_name(job), job=settings, summary=apart(job, site.summary))
    return replace(site, info=info)


@few_collections()
def simulate_many(jobs: Iterable[Job], progress: Progress | None = None) -> list[Mapping[str, Any]]:
    """Predict many jobs: the summary of each, in their order, equal to that of ``simulate`` but for ranges.

    Code is compiled once, and what the fabric of a machine gives to groups is worked out once for all. What
    nobody said is not looked into: ``intervals`` are those of each job by the conventions it has, named or by
    default, as ``simulate`` gives them with ``covers_unsaid=False``.

    Returns:
        One mapping per job; of one that cannot run as described ``{"error": what is wrong}`` alone.
    """
    engine = "auto" if why_not_compiled() else "compiled"  # its loading pays off over many
    machines: list[Cluster] = []
    networks: dict[tuple[Any, ...], Network] = {}
    groups = RecentGroups()
    found: list[Mapping[str, Any]] = []
    for job in jobs:
        if job.cluster not in machines:
            machines.append(job.cluster)
        key = (machines.index(job.cluster), job.layout.world_size, *placed(job).values())
        try:
            if key not in networks:
                networks[key] = job_network(job)
            one = simulate(
                job,
                engine=engine,
                only_figures=True,
                network=networks[key],
                groups=groups.of(job),
                covers_unsaid=False,
            )
            found.append(one.summary)
        except (SimulationError, TopologyError) as error:
            found.append({"error": str(error)})
        if progress is not None:
            progress(f"{len(found):,} jobs simulated")
    return found


UNNAMED: Final = ("no framework is named", "--framework")
"""What is not said where a framework is missing, and the flag that says it."""

EXPERT_TP: Final = ("over how many ranks an expert is cut is not said", "--expert-tp")
"""As ``UNNAMED``, of experts."""


def readings(
    job: Job, tell: Progress = lambda _: None, network: Network | None = None
) -> dict[tuple[str, str], list[Reading]]:
    """Return what else *job* may be as far as anybody said, by what was not said and the flag that says it.

    What cannot run like this is left out.

    *network*: that of the job, if ``job_network`` has already been asked for it.
    """
    is_cut, is_open = job.expert_tp_from == "open", "framework" in job.unsaid
    whole = replace(job, layout=replace(job.layout, expert_tp=1), expert_tp_from="") if is_cut else job
    found: dict[tuple[str, str], list[Reading]] = {}
    if is_open:
        tell("again by the conventions of every framework")
        found[UNNAMED] = by_framework(job, tell, network)
    if is_cut:
        tell("again with whole experts")
        again = by_framework(whole, tell, beside=job) if is_open else _read(job, {job.framework: whole}, tell)
        found[EXPERT_TP] = [one._replace(name="1") for one in again if one.name == job.framework]
        if is_open:
            found[UNNAMED] += again
    return found


def by_framework(
    job: Job,
    tell: Progress = lambda _: None,
    network: Network | None = None,
    *,
    beside: Job | None = None,
    engine: str = "auto",
) -> list[Reading]:
    """Return what becomes of *job* by the conventions of each framework that can run it, its own included.

    *network*: that of the job, if ``job_network`` has already been asked for it. *beside*: the job that is
    predicted; by default *job*. *engine*: what runs them.
    """
    possible = {}
    for name in framework_names():
        given: dict[str, Any] = {"framework": name, "precision": job.precision}
        if "fp32_gradients" not in job.unsaid:
            given["fp32_gradients"] = job.fp32_gradients
        try:
            possible[name] = replace(
                job, **{"expert_tp_from": "", "unsaid": (), **of_framework(given), "framework": name}
            )
        except SimulationError:  # it has no such schedule or sharding
            continue
    return _read(beside or job, possible, tell, network, engine)


def _read(
    job: Job,
    others: Mapping[str, Job],
    tell: Progress = lambda _: None,
    network: Network | None = None,
    engine: str = "auto",
) -> list[Reading]:
    """Return memory and time of a step of each of *others*; those that cannot run are left out.

    Memory comes first: where *job* fits its device, one that does not has no time.
    """
    peaks = {}
    for name, one in others.items():
        try:
            peaks[name] = peak_bytes(one)
        except SimulationError:
            continue
    limit = job.cluster.device.memory_bytes
    run = [name for name in peaks if peaks[name] <= limit] if fits(job) else [*peaks]
    found = []
    for name, peak in peaks.items():
        try:
            network = network or job_network(others[name])
            step_s = _step_s(others[name], network, len(run), tell, engine) if name in run else None
            found.append(Reading(name, step_s, peak))
        except SimulationError:
            continue
    return found


def _step_s(job: Job, network: Network, n_alike: int, tell: Progress, engine: str) -> float:
    """Return the time of one step of *job*, without its timeline where nothing happens on the way.

    *job*: the job; its jitter is left out, which moves no step of the timeline. *n_alike*: how many programs
    of about this size will run, for which loading an engine has to pay off. *engine*: what runs them.
    """
    variation = Variation(stragglers=job.variation.stragglers, link_changes=job.variation.link_changes)
    job = replace(job, n_steps=1, variation=variation)
    slowed = job.overlap_slowdown or job.profile.dispatch_processors
    if job.cluster.others or slowed or job.checkpoint_every or variation != Variation():
        again = simulate(job, engine=engine, only_figures=True, network=network, covers_unsaid=False)
        return float(again.summary["step_time_s"])
    compute = ComputeModel(job.cluster.device, job.precision)
    program = build(job, network, compute, groups=job_groups(job), merges=True)
    _, end_ns = choose(engine, program.n_tasks * n_alike, tell).times(program)
    return float(end_ns.max()) / 1e9


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

    *built*: its folded program, if there is one already.
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

    Raises ProgramError if the program cannot run to its end. Raises EngineError if links change, but the
    engine does not share them.
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


def _info(
    job: Job,
    groups: Groups,
    stands_for: tuple[int, ...] | None,
    warnings: Sequence[str],
    *,
    described: bool,
) -> RunInfo:
    """Return the description of the run, without its figures; if *described* of model, machine and groups."""
    return RunInfo(
        origin="simulated",
        world_size=job.layout.world_size,
        name=job_name(job),
        layout=job.layout,
        model=job.model.describe() if described else None,
        cluster=job.cluster.describe() if described else None,
        job={**job_settings(job), "n_microbatches": job.n_microbatches},
        groups=tuple(groups.all) if described else (),
        representatives=stands_for,
        warnings=tuple(warnings),
        versions={"foretrace": _version()},
    )


def _warnings(job: Job, memories: Sequence[RankMemory], network: Network) -> list[str]:
    return [*memory_warnings(job, memories), *idle(job), *empty_stages(job), *_slow(job, network)]


def _slow(job: Job, network: Network) -> list[str]:
    """Return a sentence for each axis that sends the activations of every layer over slow links."""
    size_bytes = 2 * job.micro_batch * job.seq_len * job.model.hidden
    return [found.sentence(size_bytes) for found in slow_axes(job.layout, network, size_bytes)]


@cache
def _version() -> str:
    try:
        return version("foretrace")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+unknown"


def changes_of(job: Job) -> list[Change | Throttle]:
    """Return what happens to links and GPUs while *job* runs.

    Raises JobError if it happens to a rank that is not in the world, or to a switch that is not in the
    machine.
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


# How long steps take when tasks and links do not always take the same time.

QUANTILES: Final = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""Quantiles of the step time that a summary lists."""


def straggling(program: Program, factors: Mapping[int, float]) -> Int64Array:
    """Return the duration of each task of *program* when the compute of some ranks takes longer."""
    duration_ns, computes = program.duration_ns.copy(), _computes(program)
    for rank, factor in factors.items():
        own = computes & (program.rank == rank)
        duration_ns[own] = np.rint(duration_ns[own] * factor).astype(np.int64)
    return duration_ns


def sample_steps(
    program: Program,
    variation: Variation,
    *,
    clock: Any = None,
    alike: NDArray[np.int64] | None = None,
    in_step: int = 1,
) -> NDArray[np.float64]:
    """Return the time of a step, in s, for each sample of the jitter; shape ``(variation.samples,)``.

    A folded rank has the slowest of the ranks that it stands for. Those in step with it all the time (tensor
    and context parallel) draw for every task, all of them once per step.

    Args:
        program: what runs; of several steps, the mean is taken.
        variation: what to draw.
        clock: an engine's ``Clock`` of *program*; None: that of the engine sooner done.
        alike: by rank, how many ranks it stands for; None: for itself.
        in_step: how many of them are in step with it all the time.
    """
    clock = clock or choose("auto", program.n_tasks * variation.samples).Clock(program)
    draw = np.random.default_rng(variation.seed)
    n_ranks = int(program.rank.max()) + 1
    counts = np.ones(n_ranks, np.int64) if alike is None else alike[:n_ranks]
    computes = np.flatnonzero(_computes(program))
    n_steps = max(int(program.step.max()) + 1, 1)
    found = np.empty(variation.samples)
    for at in range(variation.samples):
        of_rank = np.array([_slowest(draw, variation.rank_jitter, 1, n)[0] for n in counts])
        duration_ns = program.duration_ns.astype(np.float64)
        duration_ns[computes] *= of_rank[program.rank[computes]]
        duration_ns[computes] *= _slowest(draw, variation.compute_jitter, len(computes), in_step)
        transfer_ns = clock.transfer_ns * _slowest(draw, variation.network_jitter, program.n_instances, 1)
        _, end_ns = clock.times(np.rint(duration_ns).astype(np.int64), np.rint(transfer_ns).astype(np.int64))
        found[at] = end_ns.max() / n_steps / 1e9
    return found


def _computes(program: Program) -> NDArray[np.bool_]:
    """Return for each task whether it is compute."""
    return np.array([label.category == "compute" for label in program.labels], np.bool_)[program.label]


def _slowest(draw: np.random.Generator, spread: float, n: int, among: int) -> NDArray[np.float64]:
    """Return *n* factors of mean 1, each the largest *among* so many."""
    if not spread or not among:
        return np.ones(n)
    normal = draw.standard_normal(n)
    for _ in range(among - 1):
        np.maximum(normal, draw.standard_normal(n), out=normal)
    return np.exp(spread * normal - spread**2 / 2)


def distribution(step_s: NDArray[np.float64], seed: int) -> dict[str, Any]:
    """Return the mean, the spread and the quantiles of sampled step times."""
    return {
        "samples": len(step_s),
        "seed": seed,
        "mean_s": float(step_s.mean()),
        "std_s": float(step_s.std()),
        "quantiles_s": {f"{q:g}": float(np.quantile(step_s, q)) for q in QUANTILES},
    }
