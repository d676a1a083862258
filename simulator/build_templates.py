"""The templates of a job: what a rank does in a forward, a backward and an optimizer step.

Every rule follows a framework that is named where the rule is written; docs/simulation.md lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from simulator.build_chain import Chains, Pass
from simulator.build_gradients import DataParallel
from simulator.build_groups import Groups
from simulator.build_instances import Message
from simulator.build_pipeline import Pipeline, Visit
from simulator.build_stages import Unit, units_by_stage
from simulator.compute import ComputeModel
from simulator.job import Job
from simulator.program import Label
from simulator.program_builder import COMPUTE, DP, HOST, Task, Template
from simulator.schedules import Plan
from simulator.workload import optimizer_ops
from simulator.workload_linear import hidden_bytes, tokens_per_shard

UNSHARDED_UNITS: Final = 2
"""Units that may be whole at once under full sharding: the one in use and the one gathered ahead.

FSDP2 frees the buffer of one all-gather before the next but one may begin; FSDP1 has ``limit_all_gathers``.
"""

GRADIENT_NORM_BYTES: Final = 4
"""One fp32 sum of squares per rank."""


class Templates:
    """Writes the template of each kind of action of each stage once.

    Args:
        job: the job.
        groups: its process groups.
        compute: how long operations take.
        orders: the plan of the schedule, which says which pipeline rank holds which stage.

    Attributes:
        visits: what each action is, by pipeline rank, in the order of the plan.
    """

    def __init__(self, job: Job, groups: Groups, compute: ComputeModel, orders: Plan) -> None:
        self._job = job
        self._world = groups.size("world")
        self._compute = compute
        self._chains = Chains(compute)
        self._data_parallel = DataParallel(job, groups)
        size_bytes = hidden_bytes(job, tokens_per_shard(job))
        self._pipeline = Pipeline(orders, size_bytes, job.precision, overlap_p2p=job.overlap_p2p)
        self.visits = self._pipeline.visits
        self._units = units_by_stage(job, self._pipeline.n_stages)
        self._written: dict[object, Template] = {}

    def action(self, visit: Visit) -> Template:
        """Return the template of an action. The last backward of a stage reduces gradients, others may."""
        if visit not in self._written:
            template = self._written[visit] = Template()
            template.launches = self._chains.is_host_bound(
                self._units[visit.stage], Pass(visit.kind, self._job.recompute)
            )
            self._pipeline.write(template, visit, lambda: self._write_main_line(template, visit))
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

    def _write_main_line(self, template: Template, visit: Visit) -> None:
        """Write what is done with the units of the stage."""
        action, units = Pass(visit.kind, self._job.recompute), self._units[visit.stage]
        reduces = visit.kind in "BW" and self._data_parallel.reduces(is_last=visit.is_last)
        if self._data_parallel.is_fully_sharded:
            self._write_sharded(template, action, units, reduces=reduces)
        else:
            self._write_whole(template, action, units, reduces=reduces)

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
