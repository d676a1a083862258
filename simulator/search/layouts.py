"""Times many layouts of one machine: the schedule of each is run, what its parts take is remembered.

A layer takes the same time in every layout with the same tensor, context and expert parallelism, and a
schedule has the same program in every layout with the same pipeline. Both are worked out once; a layout then
costs one pass over the tasks of its schedule. Needs numba, as the compiled engine does.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, Final

import numpy as np

from simulator.builder.chain import Chains, Pass
from simulator.builder.gradients import DataParallel
from simulator.builder.groups import Groups
from simulator.builder.instances import Costs
from simulator.builder.pairs import write_both
from simulator.builder.program_builder import Task, Template
from simulator.builder.stages import Unit, job_pairs, layer_kind, scatters_p2p, stage_layers, units_by_stage
from simulator.builder.step import job_groups
from simulator.builder.templates import gather_received
from simulator.compute.timing import ComputeModel
from simulator.engine import choose
from simulator.job import FULLY_SHARDED, Job
from simulator.models.model import Model
from simulator.network.cost import Network
from simulator.program import Int64Array
from simulator.schedules import ACTION_KINDS, has_two_copies, held_stages, plan
from simulator.search.schedule_program import ScheduleProgram, schedule_program
from simulator.workload.linear import hidden_bytes, tokens_per_shard
from simulator.workload.micro_batch import embedding_block, head_blocks, layer_blocks
from simulator.workload.recompute import as_kept, recomputes
from topologies.cluster import Cluster
from topologies.placement import place

_ELSEWHERE: Final = {
    *("cluster", "layout", "global_batch", "schedule", "virtual_stages", "overlap_p2p", "deallocate_outputs"),
    *("n_steps", "variation", "sharding", "overlap_pairs"),
}
_OF_UNITS: Final = tuple(field.name for field in fields(Job) if field.name not in _ELSEWHERE)
"""Settings of a job on which the time of a layer depends; more of them only mean remembering more."""


class PipelineTimes:
    """Answers how long the forwards and backwards of a step take, in every layout of one machine.

    The answer is that of the whole program of the job up to its last backward, where all groups of an axis
    are alike, the device is slower than its host, and nothing of data parallelism is in the way.

    Args:
        cluster: the machine, used as a whole by every job.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._network = Network(cluster, place(cluster.n_gpus, cluster))
        self._units: dict[Any, Int64Array] = {}
        self._links: dict[tuple[int, int, int], Int64Array] = {}
        self._schedules: dict[Any, tuple[ScheduleProgram, Any]] = {}
        self._groups: dict[Any, Groups] = {}
        self._actions: dict[Hashable, Int64Array] = {}
        self._gradients: dict[Hashable, int] = {}

    def pipeline_ns(self, job: Job) -> int:
        """Return the time from the first forward to the last backward of a step of *job*, in ns.

        Raises:
            SimulationError: the job cannot run, or numba is not installed.
        """
        layout = job.layout
        together = job.overlap_pairs is not False
        key = (job.schedule, layout.pp, job.n_microbatches, job.virtual_stages, job.overlap_p2p, together)
        if key not in self._schedules:
            made = schedule_program(*key[:4], overlap_p2p=job.overlap_p2p, overlap_pairs=together)
            self._schedules[key] = (made, choose("compiled", 0).Makespan(made.program))
        found, clock = self._schedules[key]
        passed_bytes = hidden_bytes(job, tokens_per_shard(job))
        in_parts = scatters_p2p(job)
        size_bytes = passed_bytes // (layout.tp if in_parts else 1)
        links = self._link_ns(layout.pp, layout.world_size // layout.pp, size_bytes)
        actions = self._action_ns(job, found.n_stages)
        if in_parts:
            actions = actions + found.receives * self._gather_ns(job, passed_bytes)
        pairs = self._pair_ns(job, found) if found.pairs else None
        found_ns: int = clock.last_ns(found.durations(actions, pairs), found.transfers(links))
        return found_ns

    def floor_ns(self, job: Job) -> int:
        """Return a time that ``pipeline_ns`` is never below, without running the schedule.

        A rank works on its micro-batches one after the other. Before, one forward has come all the way to its
        first stage; after, where no weight gradients are left to fill the time, one backward has all the way
        to go from there.

        Raises:
            SimulationError: the job cannot run.
        """
        held, is_split, has_copies = _shape(job.schedule, job.layout.pp, job.virtual_stages)
        forward, backward, inputs, weights = self._action_ns(job, 1 + max(map(max, held)))
        back = np.minimum(backward, inputs + weights) if is_split else backward
        # A forward and a backward that run as a pair take as long as the longer of them, at least.
        together = max if job_pairs(job) else sum
        if has_copies:
            return together((int(forward.sum()), int(back.sum()))) * job.n_microbatches // job.layout.pp
        around = forward if is_split else forward + backward
        before = np.cumsum(around) - around
        return max(
            int(before[own].min())
            + job.n_microbatches * together((int(forward[own].sum()), int(back[own].sum())))
            for own in map(list, held)
        )

    def replicas_ns(self, job: Job) -> int:
        """Return a time that a step of *job* is never below for its gradients alone; 0 where they can hide.

        Where parameters are sharded every micro-batch reduces the gradients of every layer, one after the
        other in the stream of data parallelism. Those of rank 0 are counted, the embedding aside.

        Raises:
            SimulationError: the job cannot run.
        """
        if job.sharding not in FULLY_SHARDED or job.cluster.others:
            return 0
        held = _shape(job.schedule, job.layout.pp, job.virtual_stages)[0]
        layers = stage_layers(job, 1 + max(map(max, held)))
        shared = (job.layout, *(getattr(job, name) for name in (*_OF_UNITS, "sharding")))
        total = 0
        for stage in held[0]:
            for kind, same in _alike(job.model, tuple(layers[stage])).items():
                key = ("gradients", kind, shared)
                if key not in self._gradients:
                    self._gradients[key] = self._gradient_ns(job, same[0])
                total += len(same) * self._gradients[key]
        return total * job.n_microbatches

    def _gradient_ns(self, job: Job, layer: int) -> int:
        """Return how long the gradients of *layer* take to their shards."""
        groups, template = self._groups_of(job), Template()
        DataParallel(job, groups).scatter(template, Unit(layer, layer_blocks(job, layer)), ())
        template.tails = tuple(range(len(template.tasks)))
        return _template_ns(template, Costs(groups, self._network, folded=False))

    def _link_ns(self, n_ranks: int, stride: int, size_bytes: int) -> Int64Array:
        """Return the time of a message between any two pipeline ranks that may be neighbours."""
        key = (n_ranks, stride, size_bytes)
        if key not in self._links:
            found = np.zeros((n_ranks, n_ranks), np.int64)
            for a in range(n_ranks):
                for b in {(a + 1) % n_ranks, (a - 1) % n_ranks} - {a}:
                    transfer = self._network.p2p(size_bytes, a * stride, b * stride)
                    found[a, b] = transfer.latency_ns + transfer.wire_ns
            self._links[key] = found
        return self._links[key]

    def _action_ns(self, job: Job, n_stages: int) -> Int64Array:
        """Return how long each kind of action takes in each stage: ``(len(ACTION_KINDS), n_stages)``."""
        layout, model = job.layout, job.model
        shared = (layout.tp, layout.cp, layout.ep, *(getattr(job, name) for name in _OF_UNITS))
        if (n_stages, shared) in self._actions:
            return self._actions[n_stages, shared]
        layers = stage_layers(job, n_stages)
        found = np.zeros((len(ACTION_KINDS), n_stages), np.int64)
        for stage, held in enumerate(layers):
            for again, within in _by_recomputing(job, held):
                own = as_kept(job, within[0], held)
                for kind, same in _alike(model, within).items():
                    found[:, stage] += len(same) * self._unit_ns(own, same[0], (kind, again, *shared))
        found[:, 0] += self._unit_ns(job, -1, ("embedding", *shared))
        found[:, -1] += self._unit_ns(job, model.n_layers, ("head", *shared))
        self._actions[n_stages, shared] = found
        return found

    def _unit_ns(self, job: Job, layer: int, key: Hashable) -> Int64Array:
        """Return how long each kind of action takes in a layer; -1: the embedding, ``n_layers``: the head."""
        if key not in self._units:
            if layer in (-1, job.model.n_layers):
                unit = Unit(-1, (embedding_block(job),) if layer < 0 else head_blocks(job))
            else:
                unit = Unit(layer, layer_blocks(job, layer))
            costs = Costs(self._groups_of(job), self._network, folded=False)
            chains = Chains(ComputeModel(job.cluster.device, job.precision))
            self._units[key] = np.array(
                [_alone_ns(chains, unit, Pass(kind, job.recompute), costs) for kind in ACTION_KINDS], np.int64
            )
        return self._units[key]

    def _gather_ns(self, job: Job, size_bytes: int) -> int:
        """Return how long gathering a message that came in parts takes."""
        message = gather_received(size_bytes, job.precision).message
        if message is None:
            return 0
        transfer = Costs(self._groups_of(job), self._network, folded=False).transfer(0, message)
        return transfer.latency_ns + transfer.wire_ns

    def _pair_ns(self, job: Job, found: ScheduleProgram) -> Int64Array:
        """Return how long a forward of one stage takes together with a backward of another."""
        layout = job.layout
        shared = (layout.tp, layout.cp, layout.ep, *(getattr(job, name) for name in _OF_UNITS))
        key = ("pairs", found.n_stages, found.pairs, layout.pp, shared)
        if key not in self._actions:
            times = np.zeros((found.n_stages, found.n_stages), np.int64)
            units = units_by_stage(job, found.n_stages)
            costs = Costs(self._groups_of(job), self._network, folded=False)
            chains = Chains(ComputeModel(job.cluster.device, job.precision))
            gather = None
            if scatters_p2p(job):
                gather = gather_received(hidden_bytes(job, tokens_per_shard(job)), job.precision)
            known: dict[Hashable, int] = {}
            for pair in found.pairs:
                kinds = tuple(
                    (
                        *(
                            layer_kind(job.model, unit.layer) if unit.layer >= 0 else unit.blocks[0].name
                            for unit in units[stage]
                        ),
                        bool(found.receives[ACTION_KINDS.index(kind), stage]),
                    )
                    for kind, stage in zip("FB", pair, strict=True)
                )
                if kinds not in known:
                    known[kinds] = _pair_alone_ns(
                        job,
                        chains,
                        [units[stage] for stage in pair],
                        costs,
                        [gather if one[-1] else None for one in kinds],
                    )
                times[pair] = known[kinds]
            self._actions[key] = times
        return self._actions[key]

    def _groups_of(self, job: Job) -> Groups:
        """Return the groups of *job*; those that a layer communicates in are the same for equal layouts."""
        if job.layout not in self._groups:
            self._groups[job.layout] = job_groups(job)
        return self._groups[job.layout]


@lru_cache(maxsize=4096)
def _shape(
    schedule: str, n_ranks: int, virtual_stages: int | None
) -> tuple[tuple[tuple[int, ...], ...], bool, bool]:
    """Return the stages of each rank, whether backwards are split, and whether stages have two copies."""
    found = plan(schedule, n_ranks, 2 * n_ranks, virtual_stages)
    held = tuple(held_stages(actions) for actions in found)
    is_split = any(action.kind == "W" for actions in found for action in actions)
    return held, is_split, has_two_copies(schedule)


@lru_cache(maxsize=4096)
def _alike(model: Model, layers: tuple[int, ...]) -> dict[tuple[bool, int], list[int]]:
    """Return *layers* by what tells their work apart."""
    found: dict[tuple[bool, int], list[int]] = {}
    for layer in layers:
        found.setdefault(layer_kind(model, layer), []).append(layer)
    return found


def _by_recomputing(job: Job, layers: range) -> Iterator[tuple[bool, tuple[int, ...]]]:
    """Yield the *layers* of a stage that are computed again before their backward, and those that are not."""
    again = tuple(layer for layer in layers if recomputes(job, layer, layers))
    for which, found in ((True, again), (False, tuple(layer for layer in layers if layer not in again))):
        if found:
            yield which, found


def _alone_ns(chains: Chains, unit: Unit, action: Pass, costs: Costs) -> int:
    """Return how long *action* takes in *unit* on rank 0 if nobody is waited for."""
    template = Template()
    chains.unit(template, unit, action)
    return _template_ns(template, costs)


def _pair_alone_ns(
    job: Job, chains: Chains, stages: Sequence[tuple[Unit, ...]], costs: Costs, gathers: Sequence[Task | None]
) -> int:
    """Return how long the forward of one stage and the backward of another take together."""
    lines = (Template(), Template())
    for line, kind, units, gather in zip(lines, "FB", stages, gathers, strict=True):
        layers = [unit.layer for unit in units if unit.layer >= 0]
        if gather:
            line.then(gather)
        for unit in units if kind == "F" else reversed(units):
            again = recomputes(job, unit.layer, layers)
            chains.unit(line, unit, Pass(kind, job.recompute if again else "none"))
    template = Template()
    write_both(template, *lines)
    return _template_ns(template, costs)


def _template_ns(template: Template, costs: Costs) -> int:
    """Return when the tails of *template* have ended on rank 0 if nobody is waited for."""
    waits: list[list[int]] = [[] for _ in template.tasks]
    for waiter, other in template.waits:
        if other >= 0:
            waits[waiter].append(other)
    ends: list[int] = []
    free: dict[int, int] = {}
    for task, others in zip(template.tasks, waits, strict=True):
        start_ns = max([free.get(task.stream, 0), *(ends[other] for other in others)])
        if task.message is None:
            took_ns = task.duration_ns
        else:
            transfer = costs.transfer(0, task.message)
            took_ns = transfer.latency_ns + transfer.wire_ns
        ends.append(start_ns + took_ns)
        free[task.stream] = ends[-1]
    return max((ends[at] for at in template.tails if at >= 0), default=0)
