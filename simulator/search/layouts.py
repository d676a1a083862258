"""Times many layouts of one machine: the schedule of each is run, what its parts take is remembered.

A layer takes the same time in every layout with the same tensor, context and expert parallelism, and a
schedule has the same program in every layout with the same pipeline. Both are worked out once; a layout then
costs one pass over the tasks of its schedule. Needs numba, as the compiled engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from foretrace.simulator.builder.chain import Chains, Pass, host_of
from foretrace.simulator.builder.gradients import DataParallel
from foretrace.simulator.builder.instances import Costs
from foretrace.simulator.builder.line import MainLine
from foretrace.simulator.builder.pipeline import Visit
from foretrace.simulator.builder.program_builder import DP, DP_COPIES, HOST, Task, Template
from foretrace.simulator.builder.stages import (
    Unit,
    job_pairs,
    layer_kind,
    n_stages,
    scatters_p2p,
    stage_layers,
    units_by_stage,
)
from foretrace.simulator.builder.step import RecentGroups
from foretrace.simulator.builder.templates import Templates, gather_received, write_both
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.engine import choose
from foretrace.simulator.job import Job
from foretrace.simulator.memory.ranks import rank_memory
from foretrace.simulator.memory.stage import StageMemory, stage_memory
from foretrace.simulator.network.cost import Network, network_of
from foretrace.simulator.program import Int64Array
from foretrace.simulator.schedules import (
    ACTION_KINDS,
    SCHEDULES,
    Plan,
    has_pairs,
    has_two_copies,
    held_stages,
    plan,
)
from foretrace.simulator.search.schedule_program import BACKWARD, FORWARD, ScheduleProgram, schedule_program
from foretrace.simulator.search.space import Family
from foretrace.simulator.workload.linear import hidden_bytes, tokens_per_shard
from foretrace.simulator.workload.micro_batch import embedding_blocks, head_blocks, layer_blocks
from foretrace.simulator.workload.recompute import as_kept, recomputes
from foretrace.topologies.cluster import Cluster
from foretrace.traces.layout import Coord

# What layers, stages and messages of one machine take, each worked out once for all layouts that share it.
#
# A layer takes the same time in every layout with the same tensor, context and expert parallelism,
# whatever the schedule. So the actions of a stage are sums over few kinds of layers.

Answer = TypeVar("Answer")

_ELSEWHERE: Final = {
    *("model", "cluster", "layout", "global_batch", "schedule", "virtual_stages", "overlap_p2p"),
    *("deallocate_outputs", "n_steps", "variation", "sharding", "overlap_pairs"),
}
_OF_UNITS: Final = tuple(field.name for field in fields(Job) if field.name not in _ELSEWHERE)
"""Settings of a job on which the time of a layer depends; more of them only mean remembering more."""

_PLAIN: Final = tuple(name for name in _OF_UNITS if name != "recompute")
"""The same where nothing is computed again."""

OF_TRAFFIC: Final = tuple(name for name in _OF_UNITS if name not in {"micro_batch", "recompute", "seq_len"})
"""Settings on which the traffic of parameters and gradients, and their update, depend."""

_OF_SPLIT: Final = (
    *("layers_per_stage", "counted_ends", "framework", "conventions", "recompute_layers", "recompute_every"),
)
"""Settings that say which layers a stage has, and which of them are computed again."""


@dataclass(frozen=True, slots=True, eq=False)
class Makeup:
    """What stages are made of, the embedding and the head aside.

    *kinds*: what tells units apart, with a layer of that kind and the layers of its stage. *counts*: how many
    of each kind a stage has; shape ``(n_kinds, n_stages)``.
    """

    kinds: tuple[tuple[Hashable, int, range], ...]
    counts: Int64Array


class OfUnit(NamedTuple):
    """What each kind of action takes in a unit, or in the units of each stage; in ns, ``(kinds, ...)``.

    The device never comes to a unit before the last one has ended; the host may be ahead. Where it has to
    wait for the device on the way, it is no longer, and all that follows in the action comes one after the
    other: what it launches, and what it waits for.

    Attributes:
        alone: on an idle device, if what the host can do ahead takes no time.
        launches: of the host.
        computes: of the device, without communication.
        waits: how often the host waits for the device.
        serial: of the host with its waiting, where it waits; else 0.
        ahead: part of ``serial`` that may be over when the device comes to the unit.
    """

    alone: Int64Array
    launches: Int64Array
    computes: Int64Array
    waits: Int64Array
    serial: Int64Array
    ahead: Int64Array


class OfStages(NamedTuple):
    """What each kind of action takes at least in each stage; ``(len(ACTION_KINDS), n_stages)``.

    *units*: what its units take, wherever stages end. *host*: what the host launches, where the device may
    have to wait for it.
    """

    action: Int64Array
    units: Int64Array
    host: Int64Array


class UnitTimes:
    """Answers what the parts of a step take in ns, on one machine.

    *cluster*: the machine, used as a whole by every job.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self._known: dict[Hashable, Any] = {}
        self.groups = RecentGroups().of
        self._models: dict[int, object] = {}

    def _once(self, key: Hashable, make: Callable[[], Answer]) -> Answer:
        """Return what *make* answered to *key*, now or before."""
        if key not in self._known:
            self._known[key] = make()
        answer: Answer = self._known[key]
        return answer

    def key(self, job: Job, names: Sequence[str] = _OF_UNITS) -> tuple[Hashable, ...]:
        """Return what tells jobs apart: the model, by identity, and the settings with these *names*."""
        # Kept alive: another model must not get the same id, which is in the keys.
        self._models.setdefault(id(job.model), job.model)
        return (id(job.model), *(getattr(job, name) for name in names))

    def stages(self, job: Job, n_stages: int) -> OfStages:
        """Return what actions take at least in each stage; data parallelism plays no part.

        Raises SimulationError if there are more stages than layers.
        """
        layout = job.layout

        def stages() -> OfStages:
            makeup = self._makeup(job, n_stages)
            each = [
                self._unit(kept := as_kept(job, layer, held), layer, kind, kept.recompute)
                for kind, layer, held in makeup.kinds
            ]
            # Times of each kind of layer, times how many of it every stage has.
            found = np.moveaxis(np.array(each), 0, -1) @ makeup.counts
            found[:, :, 0] += self._unit(job, -1, "embedding", job.recompute)
            found[:, :, -1] += self._unit(job, job.model.n_layers, "head", job.recompute)
            total = OfUnit(*found)
            # Of the first unit of an action the host may have done its part ahead: whichever that is.
            ahead = np.array([unit.ahead for unit in each]).max(axis=0)[:, None]
            is_bound = (total.waits > 0) | (total.launches > total.computes)
            return OfStages(
                action=np.maximum(total.alone, total.serial - ahead),
                units=total.alone,
                host=np.where(is_bound, total.launches, 0),
            )

        key = ("stages", n_stages, layout.tp, layout.cp, layout.ep, layout.etp, host_of(job), self.key(job))
        return self._once(key, stages)

    def plain_ns(self, job: Job) -> Int64Array:
        """Return how long each kind of action takes in all layers, if nothing is computed again."""
        layout = job.layout

        def plain() -> Int64Array:
            makeup = self._makeup(job, 1)
            each = [self._unit(job, layer, kind, "none").alone for kind, layer, _ in makeup.kinds]
            ends = ((-1, "embedding"), (job.model.n_layers, "head"))
            found: Int64Array = np.stack(each, axis=1) @ makeup.counts[:, 0]
            return found + sum(self._unit(job, layer, kind, "none").alone for layer, kind in ends)

        key = ("plain", layout.tp, layout.cp, layout.ep, layout.etp, host_of(job), self.key(job, _PLAIN))
        return self._once(key, plain)

    def traffic_ns(self, job: Job, n_stages: int) -> Int64Array:
        """Return how long every micro-batch keeps the stream of data parallelism busy: ``(n_stages,)``.

        Under full sharding it gathers the parameters of each unit and reduces its gradients; where gradients
        alone are shared out it reduces them, in buckets; otherwise nothing.
        """
        copies = has_two_copies(job.schedule)
        key = ("traffic", n_stages, copies, job.layout, job.sharding, self.key(job, OF_TRAFFIC))
        return self._once(key, lambda: self._traffic(job, n_stages))

    def sharded_action_ns(self, job: Job, n_stages: int) -> Int64Array:
        """Return what actions take with the gathering and copying that they wait for.

        Every action is written as the program of the job has it and timed with idle streams, so that nothing
        is ever shorter in a step.
        """
        copies = has_two_copies(job.schedule)
        key = ("sharded", n_stages, copies, job.layout, job.sharding, self.key(job))
        return self._once(key, lambda: self._sharded_actions(job, n_stages))

    def chains(self, job: Job) -> Chains:
        """Return who writes the units of *job*; equal phases are costed once."""
        key, compute = (
            ("chains", host_of(job), job.precision),
            ComputeModel(job.cluster.device, job.precision),
        )
        return self._once(key, lambda: Chains(compute, host_of(job)))

    def costs(self, job: Job) -> Costs:
        """Return what communications of *job* cost."""
        return Costs(self.groups(job), self.network, folded=False)

    def _makeup(self, job: Job, n_stages: int) -> Makeup:
        key = ("makeup", n_stages, self.key(job, _OF_SPLIT))

        def makeup() -> Makeup:
            layers = stage_layers(job, n_stages)
            seen: dict[Hashable, tuple[int, int, range]] = {}
            found: list[tuple[int, int]] = []
            for stage, held in enumerate(layers):
                for layer in held:
                    kind = (layer_kind(job, layer), recomputes(job, layer, held))
                    at, _, _ = seen.setdefault(kind, (len(seen), layer, held))
                    found.append((at, stage))
            counts = np.zeros((len(seen), n_stages), np.int64)
            # ``add.at`` counts a pair of indices as often as it comes up, where ``+=`` counts it once.
            np.add.at(counts, tuple(np.array(found).T), 1)
            kinds = tuple((kind, layer, held) for kind, (_, layer, held) in seen.items())
            return Makeup(kinds, counts)

        return self._once(key, makeup)

    def _unit(self, job: Job, layer: int, kind: Hashable, recompute: str) -> OfUnit:
        """Return what a layer of a *kind* takes; -1: the embedding, ``n_layers``: the head."""
        layout = job.layout
        # The embedding and the head have no experts.
        experts = (layout.ep, layout.etp) if 0 <= layer < job.model.n_layers else ()

        def unit() -> OfUnit:
            chains, costs, made = self.chains(job), self.costs(job), _unit(job, layer)
            times = [_alone(chains, made, Pass(kind, recompute), costs) for kind in ACTION_KINDS]
            return OfUnit(*np.array(times, np.int64).T)

        key = ("unit", kind, recompute, layout.tp, layout.cp, experts, host_of(job), self.key(job, _PLAIN))
        return self._once(key, unit)

    def _traffic(self, job: Job, n_stages: int) -> Int64Array:
        found = np.zeros(n_stages, np.int64)
        parallel = DataParallel(job, self.groups(job))
        # Where gradients are reduced once a step, no micro-batch keeps the stream busy.
        if parallel.is_alone or job.cluster.others or not parallel.reduces(is_last=False):
            return found
        if not job.shards.parameters:
            alike: dict[Hashable, int] = {}
            for stage, units in enumerate(units_by_stage(job, n_stages)):
                params = tuple((unit.params, unit.expert_params, unit.is_embedding) for unit in units)
                if params not in alike:
                    template = Template()
                    # Nothing is waited for: only how long the stream is busy is asked.
                    parallel.reduce_in_buckets(template, [(unit, ()) for unit in reversed(units)])
                    alike[params] = busy_ns(template, self.costs(job), DP)
                found[stage] = alike[params]
            return found
        makeup = self._makeup(job, n_stages)
        each = [self._exchange_ns(job, parallel, layer) for _, layer, _ in makeup.kinds]
        by_stream = np.array(each, np.int64).T @ makeup.counts
        by_stream[:, 0] += self._exchange_ns(job, parallel, -1)
        by_stream[:, -1] += self._exchange_ns(job, parallel, job.model.n_layers)
        # Two streams work at once: the busier one is the floor.
        busiest: Int64Array = by_stream.max(axis=0)
        return busiest

    def _exchange_ns(self, job: Job, parallel: DataParallel, layer: int) -> tuple[int, ...]:
        """Return how long a unit keeps each stream of data parallelism busy.

        On one its parameters are gathered and its gradients reduced, the other sums these over copies.
        """
        template, unit = Template(), _unit(job, layer)
        for _ in range(1 + parallel.gathers_again(unit)):
            parallel.gather(template, unit, ())
        parallel.scatter(template, unit, ())
        return tuple(busy_ns(template, self.costs(job), stream) for stream in (DP, DP_COPIES))

    def _sharded_actions(self, job: Job, n_stages: int) -> Int64Array:
        found = np.zeros((len(ACTION_KINDS), n_stages), np.int64)
        compute, costs = ComputeModel(job.cluster.device, job.precision), self.costs(job)
        line = MainLine(job, self.chains(job), DataParallel(job, self.groups(job)), compute)
        alike: dict[Hashable, int] = {}
        for stage, units in enumerate(units_by_stage(job, n_stages)):
            makeup = tuple(_kinds(job, units))
            for at, kind in enumerate(ACTION_KINDS):
                if (kind, makeup) not in alike:
                    visit, template = Visit(kind, stage, 0, None, None, is_last=False), Template()
                    template.launches = line.is_host_bound([(visit, units)])
                    line.write(template, visit, units)
                    alike[kind, makeup] = template_ns(template, costs)
                found[at, stage] = alike[kind, makeup]
        return found


def _unit(job: Job, layer: int) -> Unit:
    """Return a layer; -1: the embedding, ``n_layers``: the head."""
    if layer in (-1, job.model.n_layers):
        return Unit(-1, embedding_blocks(job) if layer < 0 else head_blocks(job))
    return Unit(layer, layer_blocks(job, layer))


def _kinds(job: Job, units: Sequence[Unit]) -> Iterator[Hashable]:
    """Yield what tells the *units* of a stage apart from those of others."""
    layers = [unit.layer for unit in units if unit.layer >= 0]
    for unit in units:
        if unit.layer < 0:
            yield unit.blocks[0].name
        else:
            yield layer_kind(job, unit.layer), recomputes(job, unit.layer, layers)


def _alone(chains: Chains, unit: Unit, action: Pass, costs: Costs) -> tuple[int, ...]:
    """Return what ``OfUnit`` says of *action* in *unit*, on rank 0 if nobody is waited for."""
    host = chains.of_host(unit, action)
    template = Template()
    template.launches = host.waits
    chains.units(template, [(unit, action)])
    if not host.waits:
        return template_ns(template, costs), host.launches_ns, host.busy_ns, 0, 0, 0
    alone_ns, left_ns = _ends_ns(template, costs, is_ahead=True)
    serial_ns = min(_ends_ns(template, costs))
    return alone_ns, host.launches_ns, host.busy_ns, 1, serial_ns, serial_ns - min(alone_ns, left_ns)


def template_ns(template: Template, costs: Costs, rank: int = 0) -> int:
    """Return when the tails of *template* have ended on *rank* if all streams are idle and nobody is late.

    What the host can launch ahead takes no time.
    """
    return _ends_ns(template, costs, rank, is_ahead=True)[0]


def _ends_ns(template: Template, costs: Costs, rank: int = 0, *, is_ahead: bool = False) -> tuple[int, int]:
    """Return when the tails of *template*, and its host, have ended on *rank* if all streams are idle.

    *is_ahead*: what the host does before it first waits for the device is done already.
    """
    waits: list[list[int]] = [[] for _ in template.tasks]
    for waiter, other in template.waits:
        waits[waiter].append(other)
    ends: list[int] = []
    free: dict[int, int] = {}
    for task, others in zip(template.tasks, waits, strict=True):
        # Numbers below 0 stand for what came before the template.
        start_ns = max([free.get(task.stream, 0), *(ends[other] for other in others if other >= 0)])
        is_ahead = is_ahead and not (task.stream == HOST and others)
        if task.message is not None:
            transfer = costs.transfer(rank, task.message)
            took_ns = transfer.latency_ns + transfer.wire_ns
        else:
            took_ns = 0 if is_ahead and task.stream == HOST else task.duration_ns
        ends.append(start_ns + took_ns)
        free[task.stream] = ends[-1]
    return max((ends[at] for at in template.tails if at >= 0), default=0), free.get(HOST, 0)


def busy_ns(template: Template, costs: Costs, stream: int) -> int:
    """Return how long the communications of *template* keep *stream* of rank 0 busy."""
    found = 0
    for task in template.tasks:
        if task.stream == stream and task.message is not None:
            transfer = costs.transfer(0, task.message)
            found += transfer.latency_ns + transfer.wire_ns
    return found


# Bounds on memory at a fraction of the cost: for one job, and for all that differ in their schedule only.

FULL: Final = 2
"""Micro-batches per pipeline rank that are planned: with as many a pipeline is full."""

SPREAD: Final = ("parameters", "gradients", "optimizer")
"""Categories of which the ranks of a pipeline together hold at least what one rank would hold alone."""

_OF_STAGE: Final = tuple(
    field.name
    for field in fields(Job)
    if field.name not in {"model", "cluster", "schedule", "virtual_stages", "overlap_p2p", "variation"}
)
"""Settings of a job on which the memory of a stage depends; more of them only mean remembering more."""


class LeastMemory:
    """Answers how much memory jobs need at least; stages that are alike are worked out once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, StageMemory] = {}
        self._kinds: dict[Hashable, Hashable] = {}
        self._alive: dict[int, object] = {}

    def least_bytes(self, job: Job) -> int:
        """Return bytes that the fullest rank of *job* needs at least.

        The ranks of the first and of the last stage are looked at, with as many micro-batches in flight as in
        a shorter step. No schedule holds fewer when a step is longer (a test over all of them), so this is
        never above what ``rank_memories`` finds. Raises SimulationError if the schedule does not allow these
        sizes.
        """
        orders = short_plan(job)
        layers = stage_layers(job, n_stages(orders))
        last = len(layers) - 1
        ends = [pp for pp, actions in enumerate(orders) if {0, last} & set(held_stages(actions))]
        return max(rank_memory(job, pp, orders[pp], layers, self._of_stage).peak_bytes for pp in ends)

    def family_bytes(self, job: Job) -> int:
        """Return bytes that the fullest rank of *job* needs at least, whatever its schedule.

        All ranks of a pipeline together hold the states of the whole model, and each what the first
        micro-batch keeps in every one of its stages: when that has come to the last stage, no backward has
        begun. The fullest rank has at least the average.
        """
        whole = self._of_stage(job, range(job.model.n_layers), 0, 1, first=True, last=True)
        spread = sum(whole.items[name] for name in SPREAD)
        if not job.recompute_layers:  # which count from the first layer of every stage
            spread += whole.activation_bytes_per_microbatch
        # The average, rounded down: a bound must not be above what it bounds.
        return spread // job.layout.pp + whole.items["reserved"]

    def _of_stage(
        self, job: Job, layers: Sequence[int], stage: int, in_flight: int, *, first: bool, last: bool
    ) -> StageMemory:
        """Return what ``stage_memory`` does, of a stage that is alike."""
        # Kept alive, as their ids are in the keys.
        self._alive.setdefault(id(job.model), job.model)
        self._alive.setdefault(id(job.cluster), job.cluster)
        settings = (id(job.model), id(job.cluster), *(getattr(job, name) for name in _OF_STAGE))
        key = (settings, self._alike(job, layers), in_flight, first, last)
        if key not in self._known:
            self._known[key] = stage_memory(job, layers, stage, in_flight, first=first, last=last)
        return self._known[key]

    def _alike(self, job: Job, layers: Sequence[int]) -> Hashable:
        """Return what tells the *layers* of a stage from those of others."""
        key = (id(job.model), job.recompute_layers, job.recompute_every, layers)
        if key not in self._kinds:
            self._kinds[key] = tuple(
                (layer_kind(job, layer), recomputes(job, layer, layers)) for layer in layers
            )
        return self._kinds[key]


def short_plan(job: Job) -> Plan:
    """Return the plan of *job* with as many micro-batches as make its pipeline just full."""
    n_ranks = job.layout.pp
    n_microbatches = short_microbatches(job.schedule, n_ranks, job.n_microbatches)
    return plan(job.schedule, n_ranks, n_microbatches, job.virtual_stages)


def short_microbatches(schedule: str, n_ranks: int, n_microbatches: int) -> int:
    """Return the fewest micro-batches, from twice the ranks on, that a schedule allows; at most those given.

    >>> short_microbatches("1f1b", 4, 64), short_microbatches("1f1b", 4, 5)
    (8, 5)
    """
    if schedule not in SCHEDULES:
        return n_microbatches
    fits = SCHEDULES[schedule].fits
    enough = range(FULL * n_ranks, n_microbatches)
    return next((n for n in enough if fits(n_ranks, n)), n_microbatches)


INPUT, WEIGHT = (ACTION_KINDS.index(kind) for kind in "IW")


class PipelineTimes:
    """Answers how long the forwards and backwards of a step take, in every layout of one machine.

    The answer is that of the whole program of the job up to its last backward, where all groups of an axis
    are alike, the device is slower than its host, and nothing of data parallelism is in the way.

    *cluster*: the machine, used as a whole by every job. *per_node*: ranks on each of its nodes; 0: one on
    every GPU.

    *units*: what layers, stages and messages take there.
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

        Raises SimulationError if the job cannot run, or numba is not installed.
        """
        runs_ns = [self._run_ns(job, actions) for actions in self._replicas(job, _n_stages(job))]
        return max(self._host_ns(job), *runs_ns)

    def _replicas(self, job: Job, n_stages: int) -> list[Int64Array]:
        """Return what actions take at least without data parallelism, for each different kind of replica.

        On a machine of several kinds of node a stage takes at least what it takes on the kind of the first
        of its tensor-parallel ranks. If there are two copies of the model (DualPipe) the faster kind counts.
        """
        if not self._kinds:
            return [self.units.stages(job, n_stages).action]
        tables = [
            units.stages(one, n_stages).action for units, one in zip(self._kinds, job.kinds, strict=True)
        ]
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
                # A stage takes the times of the kind of node that this rank is on.
                actions[:, list(stages)] = tables[kind][:, list(stages)]
            replicas.append(actions)
        return replicas

    def step_floor_ns(self, job: Job) -> int:
        """Return a time that a step of *job* is never below: ``pipeline_ns``, and what is known beyond it.

        Under full sharding actions take as long as with their own gathering. The stream of data parallelism
        is as busy as its traffic. Then the optimizer follows. Raises SimulationError if the job cannot run,
        or numba is not installed.
        """
        runs_ns = [self._run_ns(job, actions) for actions in self._actions_ns(job)]
        return max(self._host_ns(job), self.replicas_ns(job), *runs_ns) + self.update_ns(job)

    def actions_floor_ns(self, job: Job) -> int:
        """Return a time that a step of *job* is never below, without running the schedule.

        It is that of ``floor_ns`` and ``update_ns``, where actions take as long as with their own gathering.
        Raises SimulationError if the job cannot run.
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

        *actions*: what each kind of action takes in each stage, for each different kind of replica; by
        default without data parallelism. Raises SimulationError if the job cannot run.
        """
        held, is_split, has_copies = _shape(job.schedule, job.layout.pp, job.virtual_stages)
        replicas = self._replicas(job, 1 + int(held.max())) if actions is None else actions
        floors = [self._floor_ns(job, times, held, (is_split, has_copies)) for times in replicas]
        return max(self._host_ns(job), *floors)

    def _host_ns(self, job: Job) -> int:
        """Return how long the host of a rank launches what its device may have to wait for, at least."""
        held, is_split, has_copies = _shape(job.schedule, job.layout.pp, job.virtual_stages)
        if has_copies or self._kinds or job_pairs(job):
            return 0  # it depends on who meets whom, and where
        host = self.units.stages(job, 1 + int(held.max())).host
        back = np.minimum(host[BACKWARD], host[INPUT] + host[WEIGHT]) if is_split else host[BACKWARD]
        return int((host[FORWARD] + back)[held].sum(axis=1).max()) * job.n_microbatches

    @staticmethod
    def _floor_ns(job: Job, times: Int64Array, held: Int64Array, shape: tuple[bool, bool]) -> int:
        """Return the floor of a replica whose actions take *times*; *held* and *shape* are of ``_shape``."""
        is_split, has_copies = shape
        forward, back = times[FORWARD], times[BACKWARD]
        # Where weight gradients can wait, no backward is left to come all the way after the last one.
        around = forward if is_split else forward + back
        if is_split:
            # Split or not, whichever the framework has faster: a floor is below both.
            back = np.minimum(back, times[INPUT] + times[WEIGHT])
        # A forward and a backward that run as a pair take as long as the longer of them, at least.
        together = np.maximum if job_pairs(job) else np.add
        if has_copies:
            # Of two copies each rank has a share of both: in the mean that of all stages.
            return int(together(forward.sum(), back.sum())) * job.n_microbatches // job.layout.pp
        # Until the first stage of a rank begins, a forward has passed all before it.
        before = np.cumsum(around) - around
        own = together(forward[held].sum(axis=1), back[held].sum(axis=1))
        return int((before[held].min(axis=1) + job.n_microbatches * own).max())

    def replicas_ns(self, job: Job) -> int:
        """Return how long the stream of data parallelism is busy in a step, on its busiest rank.

        Where gradients are shared out every micro-batch reduces them, and where parameters are, it gathers
        those too, one after the other. 0 where that happens once per step. Raises SimulationError if the job
        cannot run.
        """
        held, _, has_copies = _shape(job.schedule, job.layout.pp, job.virtual_stages)
        traffic = self.units.traffic_ns(job, 1 + int(held.max()))
        if has_copies:
            return int(traffic.sum()) * job.n_microbatches // job.layout.pp
        return int(traffic[held].sum(axis=1).max()) * job.n_microbatches

    def family_ns(self, family: Family, *, again: bool = True) -> int:
        """Return a time that no step of *family* is below, whatever its schedule.

        *again*: with what it computes again, which takes longer to find out.

        Every layer works on every micro-batch, and one rank has at least its share of that; so it is with the
        traffic of parameters that are gathered for every use. Raises SimulationError if the parts of its jobs
        cannot be built.
        """
        job, names = family.job, {schedule for schedule, _ in family.pipelines}
        if job.layers_per_stage or job.recompute_layers or job.recompute_every > 1:
            return 0  # what a layer does depends on its stage, and so on the schedule
        is_paired = job.overlap_pairs is not False and any(map(has_pairs, names))
        found = []
        for units, one in zip(self._kinds or [self.units], job.kinds, strict=True):
            whole = units.stages(one, 1).units[:, 0] if again else units.plain_ns(one)
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
                # A rank is no neighbour of itself, and of two ranks both neighbours are the same.
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
                    # On a machine of several kinds the fastest kind: this is a floor.
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
    # Twice the ranks: enough for every schedule, and held stages do not depend on the number.
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
            chains.units(line, [(unit, Pass(kind, job.recompute if again else "none"))])
    template = Template()
    write_both(template, *lines)
    return template_ns(template, costs)
