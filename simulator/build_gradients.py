"""Data-parallel traffic: gradients reduced in buckets, sharded parameters gathered and reduced by unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from simulator.build_groups import Groups
from simulator.build_instances import Message
from simulator.build_stages import Unit
from simulator.job import Job
from simulator.ops import DTYPE_BYTES
from simulator.program import Label
from simulator.program_builder import DP, Task, Template

DDP_BUCKET_BYTES: Final = 25 * 2**20
"""Default ``bucket_cap_mb`` of torch.nn.parallel.DistributedDataParallel, 25 MiB."""

MEGATRON_BUCKET_PARAMS: Final = 40_000_000
MEGATRON_BUCKET_PARAMS_PER_RANK: Final = 1_000_000
"""Default bucket of Megatron-LM, ``max(40000000, 1000000 * dp)`` parameters: ``DistributedDataParallel``."""

FULLY_SHARDED: Final = ("zero3", "fsdp")
SHARES_OPTIMIZER: Final = ("zero1", "zero2", "zero3", "fsdp")


def replicas(scope: str, unit: Unit) -> int:
    """Return the parameters of *unit* that are replicated over the groups of *scope* (``dp`` or ``edp``)."""
    return unit.params if scope == "dp" else unit.expert_params


class DataParallel:
    """Writes the data-parallel communication of a job into templates.

    Args:
        job: for sharding and dtypes.
        groups: for the number of replicas.
    """

    def __init__(self, job: Job, groups: Groups) -> None:
        self._job = job
        self._scopes = tuple(scope for scope in ("dp", "edp") if groups.size(scope) > 1)
        self._replicas = {scope: groups.size(scope) for scope in ("dp", "edp")}
        self.is_fully_sharded = job.sharding in FULLY_SHARDED

    def reduces(self, *, is_last: bool) -> bool:
        """Return whether a backward reduces gradients over replicas; *is_last*: the last one of a step.

        DDP under ``no_sync`` and Megatron-LM's distributed optimizer (``zero1``) reduce once per step, in the
        backward of the last micro-batch. DeepSpeed's stage 2 keeps only a shard of the gradients and so
        reduces in every one (``stage_1_and_2.py``), as stage 3 and FSDP do.
        """
        return is_last or self._job.sharding in ("zero2", *FULLY_SHARDED)

    def gather(self, template: Template, unit: Unit, after: Sequence[int]) -> tuple[int, ...]:
        """Append the gathering of the parameters of *unit*; return its tasks."""
        return self._each(template, unit, "all_gather", after)

    def scatter(self, template: Template, unit: Unit, after: Sequence[int]) -> tuple[int, ...]:
        """Append the reduce-scatter of the gradients of *unit*; return its tasks."""
        return self._each(template, unit, "reduce_scatter", after)

    def reduce_in_buckets(self, template: Template, ready: Sequence[tuple[Unit, Sequence[int]]]) -> None:
        """Append the reduction of gradients in buckets, in the order in which backward makes them ready.

        A bucket is sent when the unit that fills it has its gradients; what is left goes at the end. The
        gradients of a unit are taken to be ready together. ``ddp`` all-reduces, the others reduce-scatter.

        Args:
            template: where to.
            ready: units in the order of backward, each with the tasks that make its gradients.
        """
        kind = "all_reduce" if self._job.sharding == "ddp" else "reduce_scatter"
        for scope in self._scopes:
            held, cap = 0, self._bucket_params(scope)
            for unit, after in ready:
                held += replicas(scope, unit)
                while held >= cap:
                    held -= cap
                    template.add(self._task(kind, scope, cap), after)
            if held and ready:
                template.add(self._task(kind, scope, held), ready[-1][1])

    def gather_in_buckets(self, template: Template, units: Sequence[Unit]) -> None:
        """Append the gathering of updated parameters after the optimizer, if only its states are shared.

        Blocking, as Megatron-LM without ``--overlap-param-gather`` and DeepSpeed's stages 1 and 2.
        """
        if self._job.sharding not in ("zero1", "zero2"):
            return
        for scope in self._scopes:
            held, cap = sum(replicas(scope, unit) for unit in units), self._bucket_params(scope)
            for start in range(0, held, cap):
                template.then(self._task("all_gather", scope, min(cap, held - start)))

    def owned_params(self, units: Sequence[Unit]) -> int:
        """Return how many of the parameters of *units* one rank updates."""
        shared = self._job.sharding in SHARES_OPTIMIZER
        return sum(
            -(-sum(replicas(scope, unit) for unit in units) // (n if shared else 1))
            for scope, n in self._replicas.items()
        )

    def _bucket_params(self, scope: str) -> int:
        if self._job.sharding == "ddp":
            return DDP_BUCKET_BYTES // DTYPE_BYTES[self._job.gradient_dtype]
        return max(MEGATRON_BUCKET_PARAMS, MEGATRON_BUCKET_PARAMS_PER_RANK * self._replicas[scope])

    def _each(self, template: Template, unit: Unit, kind: str, after: Sequence[int]) -> tuple[int, ...]:
        """Append one collective for each kind of parameters in *unit*."""
        counts = {scope: replicas(scope, unit) for scope in self._scopes}
        return tuple(
            template.add(self._task(kind, scope, n_params)._replace(layer=unit.layer), after)
            for scope, n_params in counts.items()
            if n_params
        )

    def _task(self, kind: str, scope: str, n_params: int) -> Task:
        """Return a collective over *n_params* parameters, or over their gradients."""
        if kind == "all_gather":
            name, dtype = "parameters", self._job.precision
        else:
            name, dtype = "gradients", self._job.gradient_dtype
        label = Label("collective", kind, name, "dp", dtype)
        return Task(DP, label, message=Message(kind, scope, n_params * DTYPE_BYTES[dtype], dtype))
