"""Times many layouts of one machine: the schedule of each is run, what its parts take is remembered.

A layer takes the same time in every layout with the same tensor, context and expert parallelism, and a
schedule has the same program in every layout with the same pipeline. Both are worked out once; a layout then
costs one pass over the tasks of its schedule. Needs numba, as the compiled engine does.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from foretrace.simulator.builder.chain import Chains, Pass
from foretrace.simulator.builder.instances import Costs
from foretrace.simulator.builder.pairs import write_both
from foretrace.simulator.builder.program_builder import Task, Template
from foretrace.simulator.builder.stages import Unit, job_pairs, layer_kind, scatters_p2p, units_by_stage
from foretrace.simulator.builder.templates import Templates, gather_received
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.engine import choose
from foretrace.simulator.job import Job
from foretrace.simulator.network.cost import network_of
from foretrace.simulator.program import Int64Array
from foretrace.simulator.schedules import ACTION_KINDS, Plan, has_pairs, has_two_copies, held_stages, plan
from foretrace.simulator.search.least_memory import short_plan
from foretrace.simulator.search.schedule_program import BACKWARD, FORWARD, ScheduleProgram, schedule_program
from foretrace.simulator.search.space import Family
from foretrace.simulator.search.unit_times import OF_TRAFFIC, UnitTimes, template_ns
from foretrace.simulator.workload.linear import hidden_bytes, tokens_per_shard
from foretrace.simulator.workload.recompute import recomputes
from foretrace.topologies.cluster import Cluster
from foretrace.traces.layout import Coord

INPUT, WEIGHT = (ACTION_KINDS.index(kind) for kind in "IW")


class PipelineTimes:
    """Answers how long the forwards and backwards of a step take, in every layout of one machine.

    The answer is that of the whole program of the job up to its last backward, where all groups of an axis
    are alike, the device is slower than its host, and nothing of data parallelism is in the way.

    Args:
        cluster: the machine, used as a whole by every job.
        per_node: ranks on each of its nodes; 0: one on every GPU.

    Attributes:
        units: what layers, stages and messages take there.
    """

    def __init__(self, cluster: Cluster, per_node: int = 0) -> None:
        network = network_of(cluster, cluster.n_gpus, ranks_per_node=per_node)
        self.units = UnitTimes(network)
        self._kinds = [UnitTimes(one) for one in network.kinds]
        self._links: dict[tuple[int, int, int], Int64Array] = {}
        self._schedules: dict[Any, tuple[ScheduleProgram, Any]] = {}
        self._pairs: dict[Hashable, Int64Array] = {}
        self._updates: dict[Hashable, int] = {}

    def pipeline_ns(self, job: Job) -> int:
        """Return the time from the first forward to the last backward of a step of *job*, in ns.

        Raises:
            SimulationError: the job cannot run, or numba is not installed.
        """
        return max(self._run_ns(job, actions) for actions in self._replicas(job, _n_stages(job)))

    def _replicas(self, job: Job, n_stages: int) -> list[Int64Array]:
        """Return what actions take at least without data parallelism, for each different kind of replica.

        On a machine of several kinds of node a stage takes at least what it takes on the kind of the first
        of its tensor-parallel ranks. If there are two copies of the model (DualPipe) the faster kind counts.
        """
        if not self._kinds:
            return [self.units.action_ns(job, n_stages)]
        tables = [units.action_ns(one, n_stages) for units, one in zip(self._kinds, job.kinds, strict=True)]
        if has_two_copies(job.schedule):
            return [np.minimum.reduce(tables)]
        of, layout = self.units.network.kind, job.layout
        held = [held_stages(actions) for actions in short_plan(job)]
        found = {
            tuple(of(layout.rank(Coord(pp, dp, 0, 0))) for pp in range(layout.pp)) for dp in range(layout.dp)
        }
        replicas = []
        for kinds in sorted(found):
            actions = tables[0].copy()
            for kind, stages in zip(kinds, held, strict=True):
                actions[:, list(stages)] = tables[kind][:, list(stages)]
            replicas.append(actions)
        return replicas

    def step_floor_ns(self, job: Job) -> int:
        """Return a time that a step of *job* is never below: ``pipeline_ns``, and what is known beyond it.

        Under full sharding actions take as long as with their own gathering. The stream of data parallelism
        is as busy as its traffic. Then the optimizer follows.

        Raises:
            SimulationError: the job cannot run, or numba is not installed.
        """
        run_ns = max(self._run_ns(job, actions) for actions in self._actions_ns(job))
        return max(run_ns, self.replicas_ns(job)) + self.update_ns(job)

    def actions_floor_ns(self, job: Job) -> int:
        """Return a time that a step of *job* is never below, without running the schedule.

        It is that of ``floor_ns`` and ``update_ns``, where actions take as long as with their own gathering.

        Raises:
            SimulationError: the job cannot run.
        """
        actions = None if job_pairs(job) else self._actions_ns(job)  # pairs share what they gather
        return max(self.floor_ns(job, actions), self.replicas_ns(job)) + self.update_ns(job)

    def _actions_ns(self, job: Job) -> list[Int64Array]:
        """Return what actions take at least: under full sharding with what they gather, on idle streams."""
        shards = job.shards.parameters and job.layout.dp * job.layout.cp > 1
        if shards and not job.cluster.others:
            return [self.units.sharded_action_ns(job, _n_stages(job))]
        return self._replicas(job, _n_stages(job))

    def floor_ns(self, job: Job, actions: Sequence[Int64Array] | None = None) -> int:
        """Return a time that ``pipeline_ns`` is never below, without running the schedule.

        A rank works on its micro-batches one after the other. Before, one forward has come all the way to its
        first stage; after, where no weight gradients are left to fill the time, one backward has all the way
        to go from there.

        Args:
            job: what to run.
            actions: what each kind of action takes in each stage, for each different kind of replica; by
                default without data parallelism.

        Raises:
            SimulationError: the job cannot run.
        """
        held, is_split, has_copies = _shape(job.schedule, job.layout.pp, job.virtual_stages)
        replicas = self._replicas(job, 1 + int(held.max())) if actions is None else actions
        return max(self._floor_ns(job, times, held, (is_split, has_copies)) for times in replicas)

    @staticmethod
    def _floor_ns(job: Job, times: Int64Array, held: Int64Array, shape: tuple[bool, bool]) -> int:
        """Return the floor of a replica whose actions take *times*; *held* and *shape* are of ``_shape``."""
        is_split, has_copies = shape
        forward, back = times[FORWARD], times[BACKWARD]
        # Where weight gradients can wait, no backward is left to come all the way after the last one.
        around = forward if is_split else forward + back
        if is_split:
            back = np.minimum(back, times[INPUT] + times[WEIGHT])
        # A forward and a backward that run as a pair take as long as the longer of them, at least.
        together = np.maximum if job_pairs(job) else np.add
        if has_copies:
            return int(together(forward.sum(), back.sum())) * job.n_microbatches // job.layout.pp
        before = np.cumsum(around) - around
        own = together(forward[held].sum(axis=1), back[held].sum(axis=1))
        return int((before[held].min(axis=1) + job.n_microbatches * own).max())

    def replicas_ns(self, job: Job) -> int:
        """Return how long the stream of data parallelism is busy in a step, on its busiest rank.

        Where gradients are shared out every micro-batch reduces them, and where parameters are, it gathers
        those too, one after the other. 0 where that happens once per step.

        Raises:
            SimulationError: the job cannot run.
        """
        held, _, has_copies = _shape(job.schedule, job.layout.pp, job.virtual_stages)
        traffic = self.units.traffic_ns(job, 1 + int(held.max()))
        if has_copies:
            return int(traffic.sum()) * job.n_microbatches // job.layout.pp
        return int(traffic[held].sum(axis=1).max()) * job.n_microbatches

    def family_ns(self, family: Family) -> int:
        """Return a time that no step of *family* is below, whatever its schedule.

        Every layer works on every micro-batch, and one rank has at least its share of that; so it is with the
        traffic of parameters that are gathered for every use.

        Raises:
            SimulationError: the parts of its jobs cannot be built.
        """
        job, names = family.job, {schedule for schedule, _ in family.pipelines}
        if job.layers_per_stage or job.recompute_layers or job.recompute_every > 1:
            return 0  # what a layer does depends on its stage, and so on the schedule
        is_paired = job.overlap_pairs is not False and any(map(has_pairs, names))
        found = []
        for units, one in zip(self._kinds or [self.units], job.kinds, strict=True):
            whole = units.action_ns(one, 1)[:, 0]
            forward, back = int(whole[FORWARD]), int(min(whole[BACKWARD], whole[INPUT] + whole[WEIGHT]))
            found.append(max(forward, back) if is_paired else forward + back)
        # Without a pipeline a replica is on one kind of node; with one, nothing is slower than the fastest.
        each = max(found) if job.layout.pp == 1 else min(found)
        if job.shards.parameters and not any(map(has_two_copies, names)):
            each = max(each, int(self.units.traffic_ns(job, 1)[0]))
        return each * job.n_microbatches // job.layout.pp

    def update_ns(self, job: Job) -> int:
        """Return how long what follows the last backward takes at least: norms, optimizer, gathering.

        Where the norm of the gradients is summed over all ranks, every rank updates after the last one has
        come, so that the slowest update counts; otherwise the fastest does.
        """
        orders = short_plan(job)
        stages = tuple(held_stages(actions) for actions in orders)
        settings = (has_two_copies(job.schedule), job.layout, job.sharding)
        key = (stages, settings, self.units.key(job, OF_TRAFFIC))
        if key not in self._updates:
            one = tuple(tuple(a for a in actions if not a.microbatch) for actions in orders)  # all stages
            costs = self.units.costs(job)
            firsts = [self.units.groups(job).of_pipeline_rank(pp)[0] for pp in range(job.layout.pp)]
            found = [
                template_ns(templates.update(own), costs, rank)
                for kind in job.kinds
                for templates in [self._templates(kind, one)]
                for own, rank in zip(stages, firsts, strict=True)
            ]
            meet = job.profile.grad_norm and job.profile.overlap_grad_reduce and not job.cluster.others
            self._updates[key] = max(found) if meet else min(found)
        return self._updates[key]

    def _templates(self, job: Job, orders: Plan) -> Templates:
        compute = ComputeModel(job.cluster.device, job.precision)
        return Templates(job, self.units.groups(job), compute, orders)

    def _run_ns(self, job: Job, actions: Int64Array) -> int:
        """Return when the schedule of *job* has ended if its actions take so long."""
        layout = job.layout
        found, clock = self._schedule(job)
        passed_bytes = hidden_bytes(job, tokens_per_shard(job))
        in_parts = scatters_p2p(job)
        size_bytes = passed_bytes // (layout.tp if in_parts else 1)
        links = self._link_ns(layout.pp, layout.world_size // layout.pp, size_bytes)
        if in_parts:
            actions = actions + found.receives * self._gather_ns(job, passed_bytes)
        pairs = self._pair_ns(job, found) if found.pairs else None
        found_ns: int = clock.last_ns(found.durations(actions, pairs), found.transfers(links))
        return found_ns

    def _schedule(self, job: Job) -> tuple[ScheduleProgram, Any]:
        """Return the program of the schedule of *job*, and its clock."""
        together = job.overlap_pairs is not False
        sizes = (job.schedule, job.layout.pp, job.n_microbatches, job.virtual_stages)
        key = (*sizes, job.overlap_p2p, together)
        if key not in self._schedules:
            made = schedule_program(*sizes, overlap_p2p=job.overlap_p2p, overlap_pairs=together)
            self._schedules[key] = (made, choose("compiled", 0).Makespan(made.program))
        return self._schedules[key]

    def _link_ns(self, n_ranks: int, stride: int, size_bytes: int) -> Int64Array:
        """Return the time of a message between any two pipeline ranks that may be neighbours."""
        key = (n_ranks, stride, size_bytes)
        if key not in self._links:
            found = np.zeros((n_ranks, n_ranks), np.int64)
            for a in range(n_ranks):
                for b in {(a + 1) % n_ranks, (a - 1) % n_ranks} - {a}:
                    transfer = self.units.network.p2p(size_bytes, a * stride, b * stride)
                    found[a, b] = transfer.latency_ns + transfer.wire_ns
            self._links[key] = found
        return self._links[key]

    def _gather_ns(self, job: Job, size_bytes: int) -> int:
        """Return how long gathering a message that came in parts takes."""
        message = gather_received(size_bytes, job.precision).message
        if message is None:
            return 0
        transfer = self.units.costs(job).transfer(0, message)
        return transfer.latency_ns + transfer.wire_ns

    def _pair_ns(self, job: Job, found: ScheduleProgram) -> Int64Array:
        """Return how long a forward of one stage takes together with a backward of another."""
        layout = job.layout
        shared = (layout.tp, layout.cp, layout.ep, layout.etp, *self.units.key(job))
        key = (found.n_stages, found.pairs, layout.pp, shared)
        if key not in self._pairs:
            times = np.zeros((found.n_stages, found.n_stages), np.int64)
            units = units_by_stage(job, found.n_stages)
            gather = None
            if scatters_p2p(job):
                gather = gather_received(hidden_bytes(job, tokens_per_shard(job)), job.precision)
            known: dict[Hashable, int] = {}
            for pair in found.pairs:
                kinds = tuple(_alike(job, found, *one, units) for one in zip("FB", pair, strict=True))
                if kinds not in known:
                    known[kinds] = min(
                        _pair_alone_ns(
                            one,
                            timed.chains(one),
                            [units[stage] for stage in pair],
                            timed.costs(one),
                            [gather if alike[-1] else None for alike in kinds],
                        )
                        for timed, one in zip(self._kinds or [self.units], job.kinds, strict=True)
                    )
                times[pair] = known[kinds]
            self._pairs[key] = times
        return self._pairs[key]


def _n_stages(job: Job) -> int:
    """Return the number of stages that the schedule of *job* cuts the model into."""
    return 1 + int(_shape(job.schedule, job.layout.pp, job.virtual_stages)[0].max())


@lru_cache(maxsize=4096)
def _shape(schedule: str, n_ranks: int, virtual_stages: int | None) -> tuple[Int64Array, bool, bool]:
    """Return the stages of each rank, whether backwards are split, and whether stages have two copies.

    Stages are an array of shape ``(n_ranks, stages per rank)``.
    """
    found = plan(schedule, n_ranks, 2 * n_ranks, virtual_stages)
    held = np.array([held_stages(actions) for actions in found], np.int64)
    is_split = any(action.kind == "W" for actions in found for action in actions)
    return held, is_split, has_two_copies(schedule)


def _alike(
    job: Job, found: ScheduleProgram, kind: str, stage: int, units: Sequence[Iterable[Unit]]
) -> tuple[Hashable, ...]:
    """Return what tells an action of *stage* in a pair from others; last, whether it receives."""
    return (
        *(layer_kind(job, unit.layer) if unit.layer >= 0 else unit.blocks[0].name for unit in units[stage]),
        bool(found.receives[ACTION_KINDS.index(kind), stage]),
    )


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
    return template_ns(template, costs)
