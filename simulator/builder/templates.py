"""The templates of a job: what a rank does in a forward, a backward and an optimizer step.

Every rule follows a framework that is named where the rule is written; docs/simulation.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from foretrace.simulator.builder.chain import Chains, host_of
from foretrace.simulator.builder.gradients import DataParallel
from foretrace.simulator.builder.groups import Groups
from foretrace.simulator.builder.instances import Message
from foretrace.simulator.builder.line import MainLine, amax_scope
from foretrace.simulator.builder.merged import TakesNs
from foretrace.simulator.builder.offload import Offload
from foretrace.simulator.builder.pipeline import Pipeline, Visit
from foretrace.simulator.builder.program_builder import COMPUTE, DP, HOST, STREAMS, Task, Template
from foretrace.simulator.builder.stages import (
    Unit,
    job_pairs,
    job_plan,
    n_stages,
    scatters_p2p,
    units_by_stage,
)
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.engine.slowdown import MILLION
from foretrace.simulator.job import Job
from foretrace.simulator.program import Label, to_ns
from foretrace.simulator.schedules import Plan, held_stages
from foretrace.simulator.workload.linear import hidden_bytes, tokens_per_shard
from foretrace.simulator.workload.micro_batch import optimizer_ops
from foretrace.simulator.workload.ops import DTYPE_BYTES

# A forward and a backward that a schedule pairs: one template, in which each computes while the other
# waits.
#
# DualPipe's authors write the kernels of both into one order by hand, so that the all-to-all of one micro-
# batch hides behind the computing of another. Both receive before it, and both send after it. Reference:
# DeepSeek-V3, arXiv:2412.19437, section 3.2.1 and figure 4; github.com/deepseek-ai/DualPipe,
# _forward_backward_chunk.

BLOCKING: Final = tuple(STREAMS.index(axis) for axis in ("tp", "cp", "ep"))
"""Streams of communication that the main line of an action waits for."""


def write_both(template: Template, forward: Template, backward: Template) -> None:
    """Append two main lines to *template*, whose tails both of them follow.

    They take turns: after every communication that it waits for, one leaves the device to the other.

    *template*: what to append to; its tails become those of both.
    """
    before = template.tails
    tails: list[int] = []
    lines: list[tuple[Template, Iterator[range], dict[int, int]]] = [
        (line, _turns(line), {}) for line in (forward, backward)
    ]
    waits: list[list[list[int]]] = [[[] for _ in line.tasks] for line, _, _ in lines]
    for (line, _, _), own in zip(lines, waits, strict=True):
        for task, other in line.waits:
            own[task].append(other)
    going = [0, 1]
    while going:
        for which in tuple(going):
            line, turns, numbers = lines[which]
            turn = next(turns, None)
            if turn is None:
                going.remove(which)
                continue
            for at in turn:
                after = [a for other in waits[which][at] for a in _placed(other, before, numbers)]
                numbers[at] = template.add(line.tasks[at]._replace(part=which), after)
    for line, _, numbers in lines:
        tails += [a for other in line.tails for a in _placed(other, before, numbers)]
    template.tails = tuple(dict.fromkeys(tails))


def _placed(other: int, before: tuple[int, ...], numbers: dict[int, int]) -> tuple[int, ...]:
    """Return what a task of one main line stands for in the template of both."""
    if other == Template.BEFORE:
        return before
    return (numbers[other],) if other >= 0 else (other,)


def _turns(line: Template) -> Iterator[range]:
    """Yield the tasks of *line* in runs that end with a communication that it waits for."""
    start = 0
    for at, task in enumerate(line.tasks):
        if task.message is not None and task.stream in BLOCKING:
            yield range(start, at + 1)
            start = at + 1
    if start < len(line.tasks):
        yield range(start, len(line.tasks))


SCALAR_BYTES: Final = 4
"""One fp32 number per rank: a sum of squares, a loss."""


def checkpoint_s(job: Job, groups: Groups) -> float:
    """Return how long all ranks wait for a checkpoint, in s: as long as the one that saves most takes.

    0 if *job* saves none.
    """
    if not job.checkpoint_every:
        return 0.0
    data_parallel = DataParallel(job, groups)
    saved = (_saved_bytes(job, data_parallel, own) for own in units_of_ranks(job))
    return max(saved) / job.checkpoint_bytes_per_s


def units_of_ranks(job: Job) -> list[list[Unit]]:
    """Return the units that each pipeline rank of *job* holds."""
    orders = job_plan(job)
    units = units_by_stage(job, n_stages(orders))
    return [[unit for stage in held_stages(order) for unit in units[stage]] for order in orders]


def _saved_bytes(job: Job, data_parallel: DataParallel, units: Sequence[Unit]) -> int:
    """Return the bytes that a rank with *units* saves of what it owns: weights and optimizer states."""
    per_param = job.master_bytes + job.updates.state_bytes + DTYPE_BYTES[job.precision]
    return round(data_parallel.owned_params(units) * per_param)


class Templates:
    """Writes the template of each kind of action of each stage once.

    *orders*: the plan of the schedule, which says which pipeline rank holds which stage.

    *takes_ns*: by pipeline rank, what communications of a layer take, if its phases are to be single tasks.

    *visits*: what each action is, by pipeline rank, in the order of the plan. *pairs*: forwards that run
    together with the backward after them.
    """

    def __init__(
        self,
        job: Job,
        groups: Groups,
        compute: ComputeModel,
        orders: Plan,
        takes_ns: Callable[[int], TakesNs] | None = None,
    ) -> None:
        self._takes_ns = takes_ns
        self._job = job
        self._world = groups.size("world")
        self._compute = compute
        self._data_parallel = DataParallel(job, groups)
        self._offload = Offload(job)
        amax_ranks = groups.size(scope) if (scope := amax_scope(job)) else 1
        self._line = MainLine(job, Chains(compute, host_of(job)), self._data_parallel, compute, amax_ranks)
        self._passed_bytes = hidden_bytes(job, tokens_per_shard(job))
        self._scatters_p2p = scatters_p2p(job)
        size_bytes = self._passed_bytes // (job.layout.tp if self._scatters_p2p else 1)
        self._pipeline = Pipeline(orders, size_bytes, job.precision, overlap_p2p=job.overlap_p2p)
        self.visits = self._pipeline.visits
        self.pairs = job_pairs(job)
        self._units = units_by_stage(job, self._pipeline.n_stages)
        self._at_first = {(visit.pp, visit.first): visit.stage for own in self.visits for visit in own}
        self._written: dict[object, Template] = {}

    def action(self, visit: Visit) -> Template:
        """Return the template of an action. The last backward of a stage reduces gradients, others may."""
        if visit not in self._written:
            template = self._written[visit] = Template()
            units = self._units[visit.stage]
            template.takes_ns = self._takes_ns(visit.pp) if self._takes_ns else None
            template.launches = self._line.is_host_bound([(visit, units)])
            self._pipeline.write(template, visit, lambda: self._main(template, visit, units))
        return self._written[visit]

    def pair(self, forward: Visit, backward: Visit) -> Template:
        """Return the template of a forward and a backward that run together."""
        key = ("pair", forward, backward)
        if key not in self._written:
            template = self._written[key] = Template()
            lines = (Template(), Template())
            both = (forward, backward)
            visits = [(visit, self._units[visit.stage]) for visit in both]
            for one in (template, *lines):
                one.launches = self._line.is_host_bound(visits)

            def main() -> None:
                for line, visit in zip(lines, both, strict=True):
                    line.synchronized = (Template.BEFORE,) if template.synchronized else ()
                    template.synchronized = ()
                    self._main(line, visit, self._units[visit.stage])
                write_both(template, *lines)

            self._pipeline.write_pair(template, both, main)
        return self._written[key]

    def _main(self, template: Template, visit: Visit, units: Sequence[Unit]) -> None:
        """Write the main line; a message that came in parts is first gathered over tensor-parallel ranks."""
        if self._scatters_p2p and visit.source is not None:
            template.then(gather_received(self._passed_bytes, self._job.precision))
        following = self._at_first.get((visit.pp, visit.first + 1)) if visit.first else None
        self._line.write(template, visit, units, () if following is None else self._units[following])

    def update(self, stages: tuple[int, ...]) -> Template:
        """Return the template of what ends a step on the rank that holds *stages*.

        Gradients that were not reduced in backward are. The norm of the gradients is summed over all ranks,
        the optimizer updates the parameters that this rank owns, and those that others own are gathered. The
        host waits for the end, as it does for the loss of a step to be logged.
        """
        if stages not in self._written:
            units = [unit for stage in stages for unit in self._units[stage]]
            template = Template()
            template.tails = (Template.BEFORE, Template.GRADIENTS)
            self._data_parallel.reduce_late(template, units)
            if self._job.profile.grad_norm:
                self._all_reduce(template, "gradient norm")
            self._reduce_norms(template, units)
            self._data_parallel.gather_momenta(template, units)
            self._update(template, units)
            self._data_parallel.gather_in_buckets(template, units)
            if self._job.profile.loss_all_reduce:
                self._all_reduce(template, "loss")
            host_ns = to_ns(self._job.profile.step_host_s)
            if host_ns or self._waits_for_host:
                template.then(Task(HOST, Label("host", "synchronize", "step end"), host_ns))
            self._written[stages] = template
        return self._written[stages]

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint follows *step*."""
        return bool(self._job.checkpoint_every) and (step + 1) % self._job.checkpoint_every == 0

    def checkpoint(self, stages: tuple[int, ...]) -> Template:
        """Return the template of saving what the rank that holds *stages* owns: weights and fp32 states.

        Everyone waits until it is written, as ``torch.distributed.checkpoint.save`` does.
        """
        key = ("checkpoint", *stages)
        if key not in self._written:
            units = [unit for stage in stages for unit in self._units[stage]]
            size = _saved_bytes(self._job, self._data_parallel, units)
            template = self._written[key] = Template()
            saved_ns = to_ns(size / self._job.checkpoint_bytes_per_s)
            label = Label("host", "checkpoint", "checkpoint")
            template.then(Task(HOST, label, saved_ns, bytes_moved=size))
            self._all_reduce(template, "checkpoint barrier")
        return self._written[key]

    def _all_reduce(self, template: Template, name: str) -> None:
        """Append the all-reduce of one number over all ranks; what follows waits for it."""
        if self._world > 1:
            label = Label("collective", "all_reduce", name, "world", "fp32")
            message = Message("all_reduce", "world", SCALAR_BYTES, "fp32")
            template.then(Task(DP, label, message=message))

    def _reduce_norms(self, template: Template, units: Sequence[Unit]) -> None:
        """Append all-reduces of norms' gradients over tensor-parallel ranks, if the framework leaves them."""
        job = self._job
        if job.layout.tp == 1 or not job.sequence_parallel:
            return
        n_norms = 2 * sum(unit.layer >= 0 for unit in units)
        n_norms += any(block.name == "head" for unit in units for block in unit.blocks)
        size_bytes = job.model.hidden * DTYPE_BYTES[job.precision]
        label = Label("collective", "all_reduce", "norm gradient", "tp", job.precision)
        message = Message("all_reduce", "tp", size_bytes, job.precision)
        for _ in range(n_norms * job.profile.norm_reductions):
            template.then(Task(STREAMS.index("tp"), label, message=message))

    def _update(self, template: Template, units: Sequence[Unit]) -> None:
        """Append the optimizer step of what this rank owns of *units*, here or where its states live."""
        n_params = self._data_parallel.owned_params(units)
        if self._offload.has_optimizer:
            sent = self._data_parallel.is_fully_sharded
            self._offload.optimizer(template, n_params, gradients_are_there=sent)
        else:
            template.then(self._optimizer(n_params, units))

    @property
    def _waits_for_host(self) -> bool:
        """Whether the device may have to wait for the host in what was written."""
        return any(action.launches for action in self._written.values())

    def _optimizer(self, n_params: int, units: Sequence[Unit]) -> Task:
        profile, device = self._job.profile, self._compute.device
        ops = optimizer_ops(self._job, n_params, [unit.layer for unit in units if unit.layer >= 0])
        n_tensors, busy_ns = self._data_parallel.owned_tensors(units), self._compute.duration_ns(ops)
        host_ns = to_ns(n_tensors * profile.update_launches * profile.host_work * device.launch_s)
        calls = n_tensors * profile.update_calls if self._data_parallel.is_fully_sharded else 0
        if device.kind == "cpu":
            busy_ns += to_ns(calls * self._compute.call_s)
        elif self._waits_for_host:
            host_ns += to_ns(calls * self._compute.call_s)
        return Task(
            COMPUTE,
            Label("compute", "optimizer", "optimizer", "", "fp32"),
            duration_ns=max(busy_ns, host_ns),
            memory_bound=0 if self._job.updates.iterations else MILLION,
            flops=sum(op.flops for op in ops),
            bytes_moved=sum(op.bytes_moved for op in ops),
        )


def gather_received(size_bytes: int, dtype: str) -> Task:
    """Return the gathering of a message that came in parts, over tensor-parallel ranks."""
    label = Label("collective", "all_gather", "received", "tp", dtype)
    return Task(STREAMS.index("tp"), label, message=Message("all_gather", "tp", size_bytes, dtype))
