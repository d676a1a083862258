"""The main line of an action: its units in order, parameters gathered before, gradients sent after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from foretrace.simulator.builder.chain import Chains, Pass
from foretrace.simulator.builder.gradients import DataParallel
from foretrace.simulator.builder.instances import Message
from foretrace.simulator.builder.offload import Offload
from foretrace.simulator.builder.pipeline import Visit
from foretrace.simulator.builder.program_builder import COMPUTE, HOST, STREAMS, Task, Template
from foretrace.simulator.builder.stages import Unit
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.job import Job
from foretrace.simulator.program import Label, to_ns
from foretrace.simulator.workload.linear import job_recipe
from foretrace.simulator.workload.ops import DTYPE_BYTES, Op, memory
from foretrace.simulator.workload.recompute import recomputes

# What 8-bit products with delayed scales say to each other: the largest values they have seen.
#
# With delayed scaling the scale of a tensor comes from the largest values of the steps before, which all
# ranks that hold a part of it have to agree on. Transformer Engine collects them and reduces them at once,
# in autocast_exit after each forward and in the backward of the first module, and waits for the result
# (FP8GlobalStateManager.reduce_and_update_fp8_tensors, async_op=False): once for every micro-batch
# of every stage and direction. Scales that are found on the spot, or for blocks, are nobody else's
# business.

PRODUCTS: Final = 4
"""Matrices of a layer that have scales: two of attention, two of the MLP."""

TENSORS: Final = {"F": 3, "B": 2, "I": 2}
"""Tensors of each product with a scale, by the kind of an action: input, weight and output; two gradients."""


def amax_scope(job: Job) -> str:
    """Return whose ranks agree on scales in *job*: ``"stage"``, ``"tp"``, or nobody, ``""``.

    >>> from foretrace.simulator.config import job_from
    >>> where = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "global_batch": 8, "tp": 2}
    >>> amax_scope(job_from(where)), amax_scope(job_from({**where, "fp8": True}))
    ('', 'stage')
    """
    recipe = job_recipe(job)
    return job.profile.amax_ranks if recipe is not None and recipe.is_delayed else ""


def write_amax(template: Template, job: Job, kind: str, n_layers: int) -> None:
    """Append the reduction of the largest values in *n_layers* to *template*; what follows waits for it."""
    if n_layers == 0 or kind not in TENSORS:
        return
    scope = amax_scope(job)
    size_bytes = n_layers * PRODUCTS * TENSORS[kind] * DTYPE_BYTES["fp32"]
    label = Label("collective", "all_reduce", "largest values", "tp" if scope == "tp" else "dp", "fp32")
    message = Message("all_reduce", scope, size_bytes, "fp32")
    template.then(Task(STREAMS.index("tp"), label, message=message))


UNSHARDED_UNITS: Final = 2
"""Units that may be whole at once under full sharding: the one in use and the one gathered ahead.

FSDP2 frees the buffer of one all-gather before the next but one may begin; FSDP1 has ``limit_all_gathers``.
"""

Tasks = tuple[int, ...]


class MainLine:
    """Writes what an action does with the units of its stage.

    *amax_ranks*: ranks that agree on 8-bit scales after every action.
    """

    def __init__(
        self,
        job: Job,
        chains: Chains,
        data_parallel: DataParallel,
        compute: ComputeModel,
        amax_ranks: int = 1,
    ) -> None:
        self._job = job
        self._chains = chains
        self._data_parallel = data_parallel
        self._compute = compute
        self._offload = Offload(job)
        self._amax_ranks = amax_ranks
        self._wrapping: dict[int, tuple[Unit, int]] = {}  # by the identity of blocks
        self._host_is_device = compute.device.kind == "cpu"

    def passes(self, kind: str, units: Sequence[Unit]) -> list[tuple[Unit, Pass]]:
        """Return what an action of *kind* does with each of the *units* of a stage, in forward order."""
        layers = [unit.layer for unit in units if unit.layer >= 0]
        return [
            (unit, Pass(kind, self._job.recompute if recomputes(self._job, unit.layer, layers) else "none"))
            for unit in units
        ]

    def is_host_bound(self, visits: Sequence[tuple[Visit, Sequence[Unit]]]) -> bool:
        """Return whether the device may have to wait for the host in *visits*, each with its units."""
        passes = [one for visit, units in visits for one in self.passes(visit.kind, units)]
        handled = [unit for visit, units in visits for unit in units if any(self._handles(visit, unit))]
        beside_ns = 0 if self._host_is_device else sum(map(self._wrapping_ns, handled))
        return self._chains.is_host_bound(passes, beside_ns)

    def write(
        self, template: Template, visit: Visit, units: Sequence[Unit], following: Sequence[Unit] = ()
    ) -> None:
        """Write *visit* with the *units* of its stage into *template*.

        *following*: units of the stage that the rank comes to next for the first time in a step.
        """
        order = self.passes(visit.kind, units)
        # A backward goes through the units from the last to the first.
        if visit.kind != "F":
            order.reverse()
        reduces = self._reduces(visit)
        if self._data_parallel.is_fully_sharded:
            self._write_sharded(template, order, visit, reduces=reduces)
        else:
            ahead = self._gather_ahead(template, visit, units, following)
            self._write_whole(template, order, ahead, reduces=reduces)
        if self._amax_ranks > 1:
            write_amax(template, self._job, visit.kind, sum(unit.layer >= 0 for unit in units))

    def _gather_ahead(
        self, template: Template, visit: Visit, units: Sequence[Unit], following: Sequence[Unit]
    ) -> dict[int, Tasks]:
        """Write the gathering of what other ranks updated, if it overlaps with the first forwards of a step.

        The first action of a step gathers for itself; each first forward of a stage gathers for the next
        one. Return what the units wait for, by their place. Megatron-LM ``--overlap-param-gather``.
        """
        if not (visit.first and self._data_parallel.gathers_ahead):
            return {}
        # Nothing holds these up but what came before the action: they run beside its first units.
        start = (Template.BEFORE,)
        if visit.first == 1:
            found = {at: self._data_parallel.gather(template, unit, start) for at, unit in enumerate(units)}
        else:
            # An earlier action of this rank has asked for them, as *following*.
            found = {0: (Template.GRADIENTS,)}
        for unit in following:
            self._data_parallel.gather(template, unit, start)
        return found

    def _write_whole(
        self,
        template: Template,
        order: Sequence[tuple[Unit, Pass]],
        ahead: Mapping[int, Tasks],
        *,
        reduces: bool,
    ) -> None:
        """Write the main line where every rank holds all parameters; gradients follow in buckets.

        In the first forward of a step, parameters that others updated may still be on their way *ahead*.
        """
        if not (reduces or ahead or self._offload.has_activations):
            self._chains.units(template, order)
            return
        ready: list[tuple[Unit, Tasks]] = []
        moved: list[Tasks] = []
        for at, (unit, _) in enumerate(order):
            beside = (*ahead.get(at, ()), *self._in_memory(template, order, at, moved))
            self._chains.units(template, [order[at]], beside)
            self._out_of_memory(template, order, at, moved)
            ready.append((unit, template.tails))
        if reduces:
            self._data_parallel.reduce_in_buckets(template, ready)

    def _write_sharded(
        self, template: Template, order: Sequence[tuple[Unit, Pass]], visit: Visit, *, reduces: bool
    ) -> None:
        """Write the main line where parameters are gathered by unit, ahead of use, and freed after it.

        A unit is gathered while the one before it computes, once the one before that has been freed. Its
        gradients are reduce-scattered as soon as they are there. Order on the stream: FSDP2
        (``_fsdp_param_group.py``: ``pre_forward``, ``pre_backward`` with its prefetch, ``post_backward``).
        Without prefetch a unit is gathered when its turn has come; without a limit all are asked for at
        once. Wrapped as one, the whole model is gathered first, and reduced last. A pipeline stage that is
        kept whole is gathered where it is first used in a step, and reduced last. What comes last in a
        forward is not gathered again for backward, which begins with it (``DataParallel.gathers_again``).
        """
        kind, profile = visit.kind, self._job.profile
        keeps_whole = self._data_parallel.keeps_whole
        gathers = [self._handles(visit, unit)[0] for unit, _ in order]
        as_one = profile.wrap == "model"
        ahead = self._gathered_ahead(kind, len(order)) if any(gathers) else 0
        gathered: list[Tasks] = []
        done: list[Unit] = []
        moved: list[Tasks] = []

        def gather(at: int) -> None:
            gathered.append(self._gather(template, order[at][0], template.tails) if gathers[at] else ())

        for at in range(ahead):
            gather(at)
        # Wrapped as one, the first unit waits for all of them.
        waits = tuple(task for tasks in gathered for task in tasks) if as_one else ()
        for at, (unit, _) in enumerate(order):
            if gathers[at] or reduces:
                self._wrap(template, unit)
            if len(gathered) == at:
                gather(at)
            beside = waits or gathered[at]
            if gathers[at]:
                beside = self._copied(template, unit, "parameters", beside)
            beside = (*beside, *self._in_memory(template, order, at, moved))
            self._chains.units(template, [order[at]], beside)
            self._out_of_memory(template, order, at, moved)
            if reduces:
                # The copy joins the main line, which the reduction below then waits for.
                self._copied(template, unit, "gradients", ())
                if as_one or keeps_whole:
                    done.append(unit)
                else:
                    sent = self._scatter(template, unit, visit)
                    if not profile.overlap_grad_reduce:
                        template.tails = (*template.tails, *sent)
            if ahead and at + ahead < len(order):
                gather(at + ahead)
        # Whole gradients are complete only when the last unit has added its own.
        for unit in done:
            self._scatter(template, unit, visit)

    def _reduces(self, visit: Visit) -> bool:
        return visit.kind in "BW" and self._data_parallel.reduces(is_last=visit.is_last)

    def _handles(self, visit: Visit, unit: Unit) -> tuple[bool, bool]:
        """Return whether *visit* gathers *unit*, and whether it reduces gradients, under full sharding."""
        if not self._data_parallel.is_fully_sharded:
            return False, False
        if self._data_parallel.keeps_whole:
            # Gathered at the first use in a step, not again.
            return visit.first > 0, self._reduces(visit)
        again = visit.kind != "W" and self._data_parallel.gathers_again(unit)
        return visit.kind == "F" or again, self._reduces(visit)

    def _wrapping_ns(self, unit: Unit) -> int:
        """Return the time of the host, each way, for what gathers, frees and reduces *unit*."""
        if self._data_parallel.is_alone:
            return 0
        if id(unit.blocks) not in self._wrapping:
            profile = self._job.profile
            calls = profile.unit_calls + profile.tensor_calls * self._data_parallel.owned_tensors([unit])
            self._wrapping[id(unit.blocks)] = unit, to_ns(calls * self._compute.call_s)
        return self._wrapping[id(unit.blocks)][1]

    def _wrap(self, template: Template, unit: Unit) -> None:
        """Append that time where the device waits for the host, or is the host."""
        if ns := self._wrapping_ns(unit):
            task = Task(HOST, Label("host", "launch", "full sharding"), ns, layer=unit.layer)
            if self._host_is_device:
                template.then(task)
            elif template.launches:
                template.add(task, template.synchronized)
                template.synchronized = ()

    def _gather(self, template: Template, unit: Unit, after: Tasks) -> Tasks:
        """Append the gathering of *unit*; its own shard comes from the host first if it lives there."""
        if self._offload.has_states:
            size = self._data_parallel.shard_params(unit) * DTYPE_BYTES[self._job.precision]
            after = self._offload.copy(template, "parameters", size, after, layer=unit.layer)
        # Nothing was gathered where nobody shares: what came before holds all the same.
        return self._data_parallel.gather(template, unit, after) or after

    def _scatter(self, template: Template, unit: Unit, visit: Visit) -> Tasks:
        """Append the reduction of gradients of *unit*; its own shard goes to the host if used there."""
        sent = self._data_parallel.scatter(template, unit, template.tails, is_last=visit.is_last)
        if not self._offload.has_optimizer:
            return sent
        width = DTYPE_BYTES[self._job.gradient_dtype]
        size = self._data_parallel.shard_params(unit, trained=True) * width
        return self._offload.copy(template, "gradients", size, sent or template.tails, layer=unit.layer)

    def _in_memory(
        self, template: Template, order: Sequence[tuple[Unit, Pass]], at: int, moved: list[Tasks]
    ) -> Tasks:
        """Return the copies that unit *at* waits for: what it needs is back, or there is room for more."""
        if not self._offload.has_activations or order[at][1].kind == "W":
            return ()
        if order[at][1].kind != "F":
            self._offload.fetched(template, [unit for unit, _ in order], at, moved)
            return moved[at]
        return self._offload.room([unit for unit, _ in order], at, moved)

    def _out_of_memory(
        self, template: Template, order: Sequence[tuple[Unit, Pass]], at: int, moved: list[Tasks]
    ) -> None:
        """Append the copy of what unit *at* of a forward keeps."""
        if self._offload.has_activations and order[at][1].kind == "F":
            self._offload.stored(template, [unit for unit, _ in order], at, moved)

    def _gathered_ahead(self, kind: str, n_units: int) -> int:
        """Return how many of *n_units* are gathered before the first of them computes; 0: no prefetch."""
        profile = self._job.profile
        if profile.wrap == "model" or not profile.limit_all_gathers:
            return n_units
        prefetches = profile.prefetch_forward if kind == "F" else profile.prefetch_backward
        return min(UNSHARDED_UNITS, n_units) if prefetches else 0

    def _copied(self, template: Template, unit: Unit, what: str, beside: Tasks) -> Tasks:
        """Append the copying of *what* between tensors and the buffer that travels, if they are apart.

        Return what comes next has to wait for beside the main line.
        """
        profile, width = self._job.profile, DTYPE_BYTES[self._job.precision]
        other = width if what == "parameters" else DTYPE_BYTES[self._data_parallel.reduced_dtype]
        joins = profile.joins_gradients and what == "gradients"
        if not (profile.copies_gathered or joins) or self._data_parallel.is_alone:
            return beside
        # Read in one type and written in the other; joined, they are written and read once more.
        moved = width + other + (2 * other if joins else 0)
        op: Op = memory(f"copy.{what}", unit.params_in_all * moved, self._job.precision, count=1 + joins)
        label = Label("compute", "copy", what, "", self._job.precision)
        busy_ns = to_ns(self._compute.op_s(op))
        template.then(Task(COMPUTE, label, busy_ns, layer=unit.layer, bytes_moved=op.bytes_moved), beside)
        # The copy is on the main line, whose order says the rest.
        return ()
