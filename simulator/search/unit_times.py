"""What layers, stages and messages of one machine take, each worked out once for all layouts that share it.

A layer takes the same time in every layout with the same tensor, context and expert parallelism, whatever
the schedule. So the actions of a stage are sums over few kinds of layers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from foretrace.simulator.builder.chain import Chains, Pass
from foretrace.simulator.builder.gradients import DataParallel
from foretrace.simulator.builder.groups import Groups
from foretrace.simulator.builder.instances import Costs
from foretrace.simulator.builder.line import MainLine
from foretrace.simulator.builder.pipeline import Visit
from foretrace.simulator.builder.program_builder import DP, DP_COPIES, Template
from foretrace.simulator.builder.stages import Unit, layer_kind, stage_layers, units_by_stage
from foretrace.simulator.builder.step import job_groups
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.job import Job
from foretrace.simulator.network.cost import Network
from foretrace.simulator.program import Int64Array
from foretrace.simulator.schedules import ACTION_KINDS, has_two_copies
from foretrace.simulator.workload.micro_batch import embedding_block, head_blocks, layer_blocks
from foretrace.simulator.workload.recompute import as_kept, recomputes

_ELSEWHERE: Final = {
    *("model", "cluster", "layout", "global_batch", "schedule", "virtual_stages", "overlap_p2p"),
    *("deallocate_outputs", "n_steps", "variation", "sharding", "overlap_pairs"),
}
_OF_UNITS: Final = tuple(field.name for field in fields(Job) if field.name not in _ELSEWHERE)
"""Settings of a job on which the time of a layer depends; more of them only mean remembering more."""

OF_TRAFFIC: Final = tuple(name for name in _OF_UNITS if name not in {"micro_batch", "recompute", "seq_len"})
"""Settings on which the traffic of parameters and gradients, and their update, depend."""

_OF_SPLIT: Final = (
    *("layers_per_stage", "counted_ends", "framework", "conventions", "recompute_layers", "recompute_every"),
)
"""Settings that say which layers a stage has, and which of them are computed again."""


@dataclass(frozen=True, slots=True, eq=False)
class Makeup:
    """What stages are made of, the embedding and the head aside.

    Attributes:
        kinds: what tells units apart, with a layer of that kind and the layers of its stage.
        counts: how many of each kind a stage has; shape ``(n_kinds, n_stages)``.
    """

    kinds: tuple[tuple[Hashable, int, range], ...]
    counts: Int64Array


class UnitTimes:
    """Answers what the parts of a step take in ns, on one machine.

    Args:
        cluster: the machine, used as a whole by every job.
        network: what communications cost on it.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self._known: dict[Hashable, Any] = {}
        self._groups: dict[Any, Groups] = {}
        self._models: dict[int, object] = {}

    def groups(self, job: Job) -> Groups:
        """Return the groups of *job*."""
        key = (job.layout, job.shard_ranks, has_two_copies(job.schedule))
        if key not in self._groups:
            self._groups[key] = job_groups(job)
        return self._groups[key]

    def key(self, job: Job, names: Sequence[str] = _OF_UNITS) -> tuple[Hashable, ...]:
        """Return what tells jobs apart: the model, by identity, and the settings with these *names*."""
        self._models.setdefault(id(job.model), job.model)
        return (id(job.model), *(getattr(job, name) for name in names))

    def action_ns(self, job: Job, n_stages: int) -> Int64Array:
        """Return how long each kind of action takes in each stage: ``(len(ACTION_KINDS), n_stages)``.

        Data parallelism plays no part.

        Raises:
            SimulationError: there are more stages than layers.
        """
        layout = job.layout
        shared = (layout.tp, layout.cp, layout.ep, layout.etp, *self.key(job))
        key = ("actions", n_stages, shared)
        if key not in self._known:
            makeup = self._makeup(job, n_stages)
            each = [
                self._unit_ns(as_kept(job, layer, held), layer, (kind, *shared))
                for kind, layer, held in makeup.kinds
            ]
            found = np.stack(each, axis=1) @ makeup.counts
            found[:, 0] += self._unit_ns(job, -1, ("embedding", *shared))
            found[:, -1] += self._unit_ns(job, job.model.n_layers, ("head", *shared))
            self._known[key] = found
        answer: Int64Array = self._known[key]
        return answer

    def traffic_ns(self, job: Job, n_stages: int) -> Int64Array:
        """Return how long every micro-batch keeps the stream of data parallelism busy: ``(n_stages,)``.

        Under full sharding it gathers the parameters of each unit and reduces its gradients; where gradients
        alone are shared out it reduces them, in buckets; otherwise nothing.
        """
        copies = has_two_copies(job.schedule)
        key = ("traffic", n_stages, copies, job.layout, job.sharding, self.key(job, OF_TRAFFIC))
        if key not in self._known:
            self._known[key] = self._traffic(job, n_stages)
        answer: Int64Array = self._known[key]
        return answer

    def sharded_action_ns(self, job: Job, n_stages: int) -> Int64Array:
        """Return ``action_ns`` with the gathering and copying that an action waits for.

        Every action is written as the program of the job has it and timed with idle streams, so that nothing
        is ever shorter in a step.
        """
        copies = has_two_copies(job.schedule)
        key = ("sharded", n_stages, copies, job.layout, job.sharding, self.key(job))
        if key not in self._known:
            self._known[key] = self._sharded_actions(job, n_stages)
        answer: Int64Array = self._known[key]
        return answer

    def chains(self, job: Job) -> Chains:
        """Return who writes the units of *job*; equal phases are costed once."""
        layout = job.layout
        key = ("chains", layout.tp, layout.cp, layout.ep, layout.etp, *self.key(job))
        if key not in self._known:
            self._known[key] = Chains(ComputeModel(job.cluster.device, job.precision))
        answer: Chains = self._known[key]
        return answer

    def costs(self, job: Job) -> Costs:
        """Return what communications of *job* cost."""
        return Costs(self.groups(job), self.network, folded=False)

    def _makeup(self, job: Job, n_stages: int) -> Makeup:
        key = ("makeup", n_stages, self.key(job, _OF_SPLIT))
        if key not in self._known:
            layers = stage_layers(job, n_stages)
            seen: dict[Hashable, tuple[int, int, range]] = {}
            found: list[tuple[int, int]] = []
            for stage, held in enumerate(layers):
                for layer in held:
                    kind = (layer_kind(job, layer), recomputes(job, layer, held))
                    at, _, _ = seen.setdefault(kind, (len(seen), layer, held))
                    found.append((at, stage))
            counts = np.zeros((len(seen), n_stages), np.int64)
            np.add.at(counts, tuple(np.array(found).T), 1)
            kinds = tuple((kind, layer, held) for kind, (_, layer, held) in seen.items())
            self._known[key] = Makeup(kinds, counts)
        answer: Makeup = self._known[key]
        return answer

    def _unit_ns(self, job: Job, layer: int, key: Hashable) -> Int64Array:
        """Return how long each kind of action takes in a layer; -1: the embedding, ``n_layers``: the head."""
        if ("unit", key) not in self._known:
            chains, costs, unit = self.chains(job), self.costs(job), _unit(job, layer)
            self._known["unit", key] = np.array(
                [_alone_ns(chains, unit, Pass(kind, job.recompute), costs) for kind in ACTION_KINDS], np.int64
            )
        answer: Int64Array = self._known["unit", key]
        return answer

    def _traffic(self, job: Job, n_stages: int) -> Int64Array:
        found = np.zeros(n_stages, np.int64)
        parallel = DataParallel(job, self.groups(job))
        if parallel.is_alone or job.cluster.others or not parallel.reduces(is_last=False):
            return found
        if not job.shards.parameters:
            alike: dict[Hashable, int] = {}
            for stage, units in enumerate(units_by_stage(job, n_stages)):
                params = tuple((unit.params, unit.expert_params, unit.is_embedding) for unit in units)
                if params not in alike:
                    template = Template()
                    parallel.reduce_in_buckets(template, [(unit, ()) for unit in reversed(units)])
                    alike[params] = busy_ns(template, self.costs(job), DP)
                found[stage] = alike[params]
            return found
        makeup = self._makeup(job, n_stages)
        each = [self._exchange_ns(job, parallel, layer) for _, layer, _ in makeup.kinds]
        by_stream = np.array(each, np.int64).T @ makeup.counts
        by_stream[:, 0] += self._exchange_ns(job, parallel, -1)
        by_stream[:, -1] += self._exchange_ns(job, parallel, job.model.n_layers)
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
                    template = Template()
                    line.write(template, Visit(kind, stage, 0, None, None, is_last=False), units)
                    alike[kind, makeup] = template_ns(template, costs)
                found[at, stage] = alike[kind, makeup]
        return found


def _unit(job: Job, layer: int) -> Unit:
    """Return a layer; -1: the embedding, ``n_layers``: the head."""
    if layer in (-1, job.model.n_layers):
        return Unit(-1, (embedding_block(job),) if layer < 0 else head_blocks(job))
    return Unit(layer, layer_blocks(job, layer))


def _kinds(job: Job, units: Sequence[Unit]) -> Iterator[Hashable]:
    """Yield what tells the *units* of a stage apart from those of others."""
    layers = [unit.layer for unit in units if unit.layer >= 0]
    for unit in units:
        if unit.layer < 0:
            yield unit.blocks[0].name
        else:
            yield layer_kind(job, unit.layer), recomputes(job, unit.layer, layers)


def _alone_ns(chains: Chains, unit: Unit, action: Pass, costs: Costs) -> int:
    """Return how long *action* takes in *unit* on rank 0 if nobody is waited for."""
    template = Template()
    chains.unit(template, unit, action)
    return template_ns(template, costs)


def template_ns(template: Template, costs: Costs, rank: int = 0) -> int:
    """Return when the tails of *template* have ended on *rank* if all streams are idle and nobody is late."""
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
            transfer = costs.transfer(rank, task.message)
            took_ns = transfer.latency_ns + transfer.wire_ns
        ends.append(start_ns + took_ns)
        free[task.stream] = ends[-1]
    return max((ends[at] for at in template.tails if at >= 0), default=0)


def busy_ns(template: Template, costs: Costs, stream: int) -> int:
    """Return how long the communications of *template* keep *stream* of rank 0 busy."""
    found = 0
    for task in template.tasks:
        if task.stream == stream and task.message is not None:
            transfer = costs.transfer(0, task.message)
            found += transfer.latency_ns + transfer.wire_ns
    return found
