"""The templates of a job: what a rank does in a forward, a backward and an optimizer step.

Every rule follows a framework that is named where the rule is written; docs/simulation.md lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from simulator.build_chain import Chains, Pass
from simulator.build_gradients import DataParallel
from simulator.build_groups import Groups
from simulator.build_instances import Message
from simulator.build_stages import Unit, n_stages, split_layers, stage_units
from simulator.compute import ComputeModel
from simulator.job import Job
from simulator.program import Label
from simulator.program_builder import COMPUTE, DP, HOST, STREAMS, Task, Template
from simulator.schedules import Action, Plan, holders
from simulator.workload import optimizer_ops
from simulator.workload_linear import hidden_bytes, tokens_per_shard

UNSHARDED_UNITS: Final = 2
"""Units that may be whole at once under full sharding: the one in use and the one gathered ahead.

FSDP2 frees the buffer of one all-gather before the next but one may begin; FSDP1 has ``limit_all_gathers``.
"""

GRADIENT_NORM_BYTES: Final = 4
"""One fp32 sum of squares per rank."""


class _Visit(NamedTuple):
    """What tells the template of an action from others.

    Attributes:
        kind: of the action.
        stage: its stage.
        pp: pipeline rank that carries it out.
        source: pipeline rank that it receives from, None if it does not receive.
        destination: pipeline rank that it sends to, None if it does not send.
        reduces: whether gradients are reduced over replicas.
    """

    kind: str
    stage: int
    pp: int
    source: int | None
    destination: int | None
    reduces: bool


class Templates:
    """Writes the template of each kind of action of each stage once.

    Args:
        job: the job.
        groups: its process groups.
        compute: how long operations take.
        orders: the plan of the schedule, which says which pipeline rank holds which stage.
    """

    def __init__(self, job: Job, groups: Groups, compute: ComputeModel, orders: Plan) -> None:
        self._job = job
        self._world = groups.size("world")
        self._compute = compute
        self._chains = Chains(compute)
        self._data_parallel = DataParallel(job, groups)
        self._units = _units_by_stage(job, n_stages(orders))
        self._holders = holders(orders)
        self._last = {(pp, a.stage): a for pp, own in enumerate(orders) for a in own if a.kind in "BW"}
        self._has_one_stage_each = len(self._last) == len(orders) == len(self._units)
        self._overlaps_p2p = job.overlap_p2p if job.overlap_p2p is not None else not self._has_one_stage_each
        self._written: dict[object, Template] = {}

    def action(self, pp: int, action: Action) -> Template:
        """Return the template of *action* on pipeline rank *pp*.

        The last backward of a stage reduces gradients, others may.
        """
        is_last = action == self._last[pp, action.stage]
        reduces = action.kind in "BW" and self._data_parallel.reduces(is_last=is_last)
        before, after = (self._holders.get((action.stage + step, action.microbatch)) for step in (-1, 1))
        if action.kind == "W":
            before = after = None
        source, destination = (before, after) if action.kind == "F" else (after, before)
        visit = _Visit(
            action.kind,
            action.stage,
            pp,
            source if source != pp else None,
            destination if destination != pp else None,
            reduces,
        )
        if visit not in self._written:
            self._written[visit] = self._write_action(visit)
        return self._written[visit]

    def update(self, stages: tuple[int, ...]) -> Template:
        """Return the template of what ends a step on the rank that holds *stages*.

        The norm of the gradients is summed over all ranks, the optimizer updates the parameters that this
        rank owns, and those that others own are gathered. The host waits for the end, as it does for the loss
        of a step to be logged.
        """
        if stages not in self._written:
            units = [unit for stage in stages for unit in self._units[stage]]
            template = Template()
            template.tails = (Template.BEFORE, Template.GRADIENTS)
            if self._world > 1:
                label = Label("collective", "all_reduce", "gradient norm", "world", "fp32")
                message = Message("all_reduce", "world", GRADIENT_NORM_BYTES, "fp32")
                template.then(Task(DP, label, message=message))
            template.then(self._optimizer(self._data_parallel.owned_params(units)))
            self._data_parallel.gather_in_buckets(template, units)
            if any(action.launches for action in self._written.values()):
                template.then(Task(HOST, Label("host", "synchronize", "step end")))
            self._written[stages] = template
        return self._written[stages]

    def _optimizer(self, n_params: int) -> Task:
        ops = optimizer_ops(self._job, n_params)
        return Task(
            COMPUTE,
            Label("compute", "optimizer", "optimizer", "", "fp32"),
            duration_ns=self._compute.duration_ns(ops),
            flops=sum(op.flops for op in ops),
            bytes_moved=sum(op.bytes_moved for op in ops),
        )

    def _write_action(self, visit: _Visit) -> Template:
        """Write receive, main line and send of an action.

        A receive is posted when the action before it has been computed, so that its span shows the wait; a
        send does not hold up what follows (Megatron-LM ``schedules.py``, without overlapped p2p). The host
        waits for what was received (``batch_p2p_sync`` there). With overlapped p2p the receive is posted one
        action earlier, and the host does not wait.
        """
        template, action = Template(), Pass(visit.kind, self._job.recompute)
        units = self._units[visit.stage]
        template.launches = self._chains.is_host_bound(units, action)
        if visit.source is not None:
            message = self._message(visit, "recv", visit.source)
            if self._overlaps_p2p:
                template.tails = (Template.BEFORE, template.add(message, (Template.EARLIER,)))
            else:
                template.synchronized = (template.then(message),)
        if self._data_parallel.is_fully_sharded:
            self._write_sharded(template, action, units, reduces=visit.reduces)
        else:
            self._write_whole(template, action, units, reduces=visit.reduces)
        if visit.destination is not None:
            template.add(self._message(visit, "send", visit.destination), template.tails)
        return template

    def _write_whole(self, template: Template, action: Pass, units: Sequence[Unit], *, reduces: bool) -> None:
        """Write the main line where every rank holds all parameters; gradients follow in buckets."""
        ready: list[tuple[Unit, tuple[int, ...]]] = []
        for unit in units if action.kind == "F" else reversed(units):
            self._chains.unit(template, unit, action)
            ready.append((unit, template.tails))
        if reduces:
            self._data_parallel.reduce_in_buckets(template, ready)

    def _write_sharded(
        self, template: Template, action: Pass, units: Sequence[Unit], *, reduces: bool
    ) -> None:
        """Write the main line where parameters are gathered by unit, one ahead, and freed after use.

        A unit is gathered while the one before it computes, once the one before that has been freed. Its
        gradients are reduce-scattered as soon as they are there. Order on the stream: FSDP2
        (``_fsdp_param_group.py``: ``pre_forward``, ``pre_backward`` with its prefetch, ``post_backward``).
        """
        order = list(units if action.kind == "F" else reversed(units))
        gathers = action.kind != "W"  # weight gradients need activations, not parameters
        freed = [template.tails] * (UNSHARDED_UNITS if gathers else 0)
        gather = self._data_parallel.gather
        gathered = [gather(template, unit, after) for unit, after in zip(order, freed, strict=False)]
        for at, unit in enumerate(order):
            self._chains.unit(template, unit, action, gathered[at] if gathers else ())
            if reduces:
                self._data_parallel.scatter(template, unit, template.tails)
            if gathers and at + UNSHARDED_UNITS < len(order):
                gathered.append(gather(template, order[at + UNSHARDED_UNITS], template.tails))

    def _message(self, visit: _Visit, kind: str, peer_pp: int) -> Task:
        """Return the transfer of one micro-batch's activations or their gradients."""
        size_bytes = hidden_bytes(self._job, tokens_per_shard(self._job))
        name = "activations" if visit.kind == "F" else "gradients"
        label = Label("p2p", kind, name, "pp", self._job.precision)
        boundary = visit.stage + ((kind == "send") == (visit.kind == "F"))
        message = Message(kind, "pp", size_bytes, self._job.precision, peer_pp, boundary)
        stream = f"pp.{kind}"
        if not self._has_one_stage_each:
            is_next = (peer_pp - visit.pp) % self._job.layout.pp == 1
            stream += f".{name}.{'next' if is_next else 'prev'}"
        return Task(STREAMS.index(stream), label, message=message)


def _units_by_stage(job: Job, n: int) -> list[tuple[Unit, ...]]:
    """Return what each of *n* stages holds."""
    layers = split_layers(job.model.n_layers, n)
    return [stage_units(job, layers[stage], first=stage == 0, last=stage == n - 1) for stage in range(n)]
