"""Data-parallel traffic: gradients reduced in buckets, sharded parameters gathered and reduced by unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from foretrace.simulator.builder.groups import OF_REPLICAS, Groups
from foretrace.simulator.builder.instances import Message
from foretrace.simulator.builder.program_builder import DP, DP_COPIES, Task, Template
from foretrace.simulator.builder.stages import Unit
from foretrace.simulator.job import Job
from foretrace.simulator.program import Label
from foretrace.simulator.workload.linear import parts_of
from foretrace.simulator.workload.lora import NF4_BITS
from foretrace.simulator.workload.ops import DTYPE_BYTES, Block

# The parameters of a unit one tensor at a time: what buckets of gradients are filled with.


def tensors(job: Job, unit: Unit, scope: str) -> tuple[int, ...]:
    """Return the sizes of the parameters of *unit* whose gradients are summed over *scope*.

    In the order in which backward makes the gradients: from the last matrix of a block to its norms, which
    are taken for one tensor. Adapters are small, and taken for one too.

    *scope*: ``dp``, or ``edp`` for the experts of that rank.
    """
    if job.lora_rank:
        found = [unit.adapters if scope == "dp" else 0]
    elif scope == "dp":
        found = [n for block in reversed(unit.blocks) for n in _dense(job, block)]
    else:
        found = [n for block in reversed(unit.blocks) for n in _experts(job, block)]
    return tuple(n for n in found if n)


class Bucket(NamedTuple):
    """Gradients that travel together: how many, and the place of the unit that fills the bucket."""

    n_params: int
    unit: int


def buckets(sizes: Sequence[Sequence[int]], cap: int) -> list[Bucket]:
    """Return the buckets that the tensors of some units go to in turn.

    One is full from *cap* on, the last may not be. No tensor is split: PyTorch
    ``compute_bucket_assignment_by_size`` (``reducer.cpp``) and Megatron-LM ``param_and_grad_buffer.py`` close
    a bucket with the tensor that reaches its size.

    >>> buckets([(3, 3, 9), (1, 2)], 4)
    [Bucket(n_params=6, unit=0), Bucket(n_params=9, unit=0), Bucket(n_params=3, unit=1)]
    """
    found, held = [], 0
    for unit, tensors_of_unit in enumerate(sizes):
        for size in tensors_of_unit:
            held += size
            if held >= cap:
                found.append(Bucket(held, unit))
                held = 0
    return [*found, Bucket(held, len(sizes) - 1)] if held else found


def _dense(job: Job, block: Block) -> Iterator[int]:
    """Matrices of *block* outside of routed experts, then everything else."""
    # Experts are reduced over other ranks, and so in buckets of their own.
    left = block.params - block.expert_params
    for linear in reversed(block.linears):
        for part in reversed(parts_of(job, linear)):
            yield part.params
            left -= part.params
    # Norms and biases, which are what is left of the block.
    yield left


def _experts(job: Job, block: Block) -> Iterator[int]:
    """Both matrices of every expert of *block* on this rank."""
    if not block.expert_params:
        return
    up, down = job.model.mlp_linears(job.model.moe_ffn_hidden, job.layout.etp)
    for _ in range(block.expert_params // (up.params + down.params)):
        yield from (down.params, up.params)


DDP_BUCKET_BYTES: Final = 25 * 2**20
"""Default ``bucket_cap_mb`` of torch.nn.parallel.DistributedDataParallel, 25 MiB."""

MEGATRON_BUCKET_PARAMS: Final = 40_000_000
MEGATRON_BUCKET_PARAMS_PER_RANK: Final = 1_000_000
"""Default bucket of Megatron-LM, ``max(40000000, 1000000 * dp)`` parameters: ``DistributedDataParallel``."""


def replicas(scope: str, unit: Unit) -> int:
    """Return the parameters of *unit* that are replicated over the groups of *scope* (``dp`` or ``edp``)."""
    return unit.params if scope == "dp" else unit.expert_params


class DataParallel:
    """Writes the data-parallel communication of a job into templates.

    Attributes:
        is_fully_sharded: parameters are gathered before they are used.
        keeps_whole: they then stay whole until the last backward of the step, as gradients do.
        gathers_ahead: updated parameters are gathered while the first forward of a step goes on.
        reduces_late: gradients are reduced after backward, not beside it.
    """

    def __init__(self, job: Job, groups: Groups) -> None:
        self._job = job
        # By the identity of blocks, which layers of a kind share.
        self._sizes: dict[tuple[int, str], tuple[Unit, tuple[int, ...]]] = {}
        self._scopes = tuple(scope for scope in OF_REPLICAS if groups.size(scope) > 1)
        self._replicas = {scope: groups.size(scope) for scope in OF_REPLICAS}
        self._shards = {scope: groups.size(f"{scope}.shard") for scope in OF_REPLICAS}
        self.is_alone = not self._scopes
        self.is_fully_sharded = job.shards.parameters
        self.keeps_whole = job.keeps_stages_whole
        whole = job.shards.gathers_updated
        self.gathers_ahead = whole and job.profile.overlap_param_gather
        self.reduces_late = not self.is_fully_sharded and not job.profile.overlap_grad_reduce

    def reduces(self, *, is_last: bool) -> bool:
        """Return whether a backward reduces gradients over replicas; *is_last*: the last one of a step.

        DDP under ``no_sync`` and Megatron-LM's distributed optimizer (``zero1``) reduce once per step, in the
        backward of the last micro-batch. DeepSpeed's stage 2 keeps only a shard of the gradients and so
        reduces in every one (``stage_1_and_2.py``), as stage 3 and FSDP do, unless a pipeline keeps its
        stages whole.
        """
        # Where ranks keep a shard of the gradients only, every backward has to reduce.
        if self.reduces_late and not self._job.shards.gradients:
            return False
        each = self._job.shards.gradients or not self._job.profile.no_sync
        return is_last or (each and not self.keeps_whole)

    def gathers_again(self, unit: Unit) -> bool:
        """Return whether *unit* is freed after its forward and gathered again for its backward.

        The root of what is wrapped never is, as its backward comes next (FSDP1 ``_post_forward_reshard``,
        FSDP2 ``reshard_after_forward=None``): the head, or the whole model if that is wrapped as one.
        torchtitan wraps norm and output alike (``apply_fsdp``).
        """
        profile = self._job.profile
        return profile.reshard_after_forward and profile.wrap == "block" and not unit.is_head

    def gather(self, template: Template, unit: Unit, after: Sequence[int]) -> tuple[int, ...]:
        """Append the gathering of the parameters of *unit*; return its tasks."""
        return self._each(template, unit, "all_gather", after)

    def scatter(
        self, template: Template, unit: Unit, after: Sequence[int], *, is_last: bool = False
    ) -> tuple[int, ...]:
        """Append the reduce-scatter of the gradients of *unit*, and the sum over copies; return its tasks.

        Some sum over copies only in the last backward of a step (*is_last*).
        """
        sums = is_last or not self._job.profile.copies_once
        return self._each(template, unit, "reduce_scatter", after, sums=sums)

    def reduce_in_buckets(self, template: Template, ready: Sequence[tuple[Unit, Sequence[int]]]) -> None:
        """Append the reduction of gradients in buckets, in the order in which backward makes them ready.

        A bucket is sent when the unit that fills it has its gradients; what is left goes at the end. No
        tensor is split between buckets; the gradients of a unit are taken to be ready together. ``ddp``
        all-reduces, the others reduce-scatter. What does not overlap waits for the whole backward, and what
        comes next waits for it.

        *ready*: units in the order of backward, each with the tasks that make its gradients.
        """
        late, units = self.reduces_late, [unit for unit, _ in ready]
        filled = [(at, scope, n) for scope in self._scopes for n, at in self._buckets(scope, units)]
        for at, scope, n_params in sorted(filled, key=itemgetter(0)):
            # Late ones follow the whole backward, and each other; others wait for their own unit alone.
            last = self._reduce(template, scope, n_params, template.tails if late else ready[at][1])
            template.tails = (last,) if late else template.tails

    def reduce_late(self, template: Template, units: Sequence[Unit]) -> None:
        """Append the reduction of all gradients of a step, if none was reduced in its backward."""
        if not self.reduces_late or self._job.shards.gradients:
            return
        for scope in self._scopes:
            for n_params, _ in self._buckets(scope, units):
                template.tails = (self._reduce(template, scope, n_params, template.tails),)

    def _reduce(self, template: Template, scope: str, n_params: int, after: Sequence[int]) -> int:
        """Append the reduction of a bucket over all replicas; return its last task.

        ``ddp`` all-reduces, the others reduce-scatter, and then sum over the copies if there are several.
        """
        if not self._job.shards.optimizer:
            return template.add(self._task("all_reduce", scope, n_params), after)
        last = after
        for kind, part, n in self._scattering(scope, n_params):
            last = (template.add(self._task(kind, f"{scope}{part}", n), last),)
        return last[0]

    def _scattering(self, scope: str, n_params: int) -> list[tuple[str, str, int]]:
        """Return kind, part of the scope and parameters of what gradients go through to their shards."""
        n = self._shards[scope]
        found = [("reduce_scatter", ".shard", n_params)] if n > 1 else []
        copies = self._replicas[scope] // n
        # Copies sum the shard that each rank holds, rounded up to whole parameters.
        return [*found, ("all_reduce", ".copies", -(-n_params // n))] if copies > 1 else found

    def gather_in_buckets(self, template: Template, units: Sequence[Unit]) -> None:
        """Append the gathering of updated parameters after the optimizer, if only its states are shared.

        Blocking, as Megatron-LM without ``--overlap-param-gather`` and DeepSpeed's stages 1 and 2.
        """
        if not self._job.shards.gathers_updated or self.gathers_ahead:
            return
        for scope in self._scopes:
            if self._shards[scope] < 2:
                continue
            for n_params, _ in self._buckets(scope, units):
                template.then(self._task("all_gather", f"{scope}.shard", n_params))

    def gather_momenta(self, template: Template, units: Sequence[Unit]) -> None:
        """Append the gathering of momenta in the precision of the job, to be multiplied as whole matrices.

        Reference: Liu et al. 2025, arXiv:2502.16982, algorithm 1 (Distributed Muon), "DP gather".
        """
        if not self._job.updates.iterations or not self._job.shards.optimizer:
            return
        for scope in self._scopes:
            n_params = sum(self._trained(scope, unit) for unit in units if unit.layer >= 0)
            if self._shards[scope] > 1 and n_params:
                template.then(self._task("all_gather", f"{scope}.shard", n_params))

    @property
    def reduced_dtype(self) -> str:
        """Dtype in which gradients travel: under autocast that of the parameters, fp32."""
        narrow = self._job.profile.reduces_in_16_bit and not self._job.autocasts
        return self._job.precision if narrow else self._job.gradient_dtype

    def owned_params(self, units: Sequence[Unit]) -> int:
        """Return how many of the parameters of *units* one rank updates."""
        shared = self._job.shards.optimizer
        return sum(
            -(-sum(self._trained(scope, unit) for unit in units) // (n if shared else 1))
            for scope, n in self._shards.items()
        )

    def owned_tensors(self, units: Sequence[Unit]) -> int:
        """Return in how many tensors the parameters of *units* lie that one rank updates."""
        # Full sharding cuts every tensor, so that a rank updates a part of each; otherwise it has some whole
        # ones.
        shared = self._job.shards.optimizer and not self.is_fully_sharded
        return sum(
            -(-sum(len(self._tensors(unit, scope)) for unit in units) // (n if shared else 1))
            for scope, n in self._shards.items()
        )

    def exchanged_params(self, units: Sequence[Unit]) -> int:
        """Return how many of *units* are trained and one rank's part, where all replicas share them out."""
        return sum(
            -(-sum(self._trained(scope, unit) for unit in units) // n) for scope, n in self._replicas.items()
        )

    def trained_params(self, units: Sequence[Unit]) -> int:
        """Return how many parameters of *units* are trained over all ranks that hold a part of them."""
        layout = self._job.layout
        # Over these ranks a parameter is cut, not copied.
        cut = {"dp": layout.tp, "edp": layout.ep * layout.etp}
        return sum(cut[scope] * self._trained(scope, unit) for scope in OF_REPLICAS for unit in units)

    def _trained(self, scope: str, unit: Unit) -> int:
        """Return the parameters of *unit* that have gradients and are updated."""
        if not self._job.lora_rank:
            return replicas(scope, unit)
        # Routed experts have no adapters.
        return unit.adapters if scope == "dp" else 0

    def _held(self, scope: str, unit: Unit) -> int:
        """Return the parameters of *unit*, those in 4 bits as so many fewer in ``job.precision``."""
        n_params = replicas(scope, unit) + (unit.adapters if scope == "dp" else 0)
        if not self._job.quantized_base:
            return n_params
        few = unit.matrices if scope == "dp" else unit.expert_params
        return n_params - few + round(few * NF4_BITS / 8 / DTYPE_BYTES[self._job.precision])

    def shard_params(self, unit: Unit, *, trained: bool = False) -> int:
        """Return the parameters of *unit* in the shard of one rank: all that it holds, or those *trained*."""
        count = self._trained if trained else self._held
        return sum(-(-count(scope, unit) // self._shards[scope]) for scope in OF_REPLICAS)

    def _buckets(self, scope: str, units: Sequence[Unit]) -> list[Bucket]:
        """Return the buckets of *units*; without the embedding some frameworks have one for all."""
        sizes = [self._tensors(unit, scope) for unit in units]
        if self._job.profile.buckets_first_chunk_only and not any(unit.is_embedding for unit in units):
            # A bucket as large as all tensors: one for all of them.
            return buckets(sizes, sum(map(sum, sizes)))
        return buckets(sizes, self._bucket_params(scope))

    def _tensors(self, unit: Unit, scope: str) -> tuple[int, ...]:
        key = id(unit.blocks), scope
        if key not in self._sizes:
            self._sizes[key] = unit, tensors(self._job, unit, scope)
        return self._sizes[key][1]

    def _bucket_params(self, scope: str) -> int:
        if self._job.profile.bucket_mib:
            # At least one: a bucket of none would never be full.
            return max(1, int(self._job.profile.bucket_mib * 2**20) // DTYPE_BYTES[self.reduced_dtype])
        if not self._job.shards.optimizer:
            return DDP_BUCKET_BYTES // DTYPE_BYTES[self.reduced_dtype]
        return max(MEGATRON_BUCKET_PARAMS, MEGATRON_BUCKET_PARAMS_PER_RANK * self._replicas[scope])

    def _each(
        self, template: Template, unit: Unit, kind: str, after: Sequence[int], *, sums: bool = True
    ) -> tuple[int, ...]:
        """Append what each kind of parameters in *unit* goes through; return the last task of each.

        What is scattered is summed over copies if it *sums*.
        """
        found: list[int] = []
        for scope in self._scopes:
            gathers, last = kind == "all_gather", tuple(after)
            n_params = self._held(scope, unit) if gathers else self._trained(scope, unit)
            if not n_params:
                continue
            steps = [("all_gather", ".shard", n_params)] if self._shards[scope] > 1 else []
            if not gathers:
                steps = [step for step in self._scattering(scope, n_params) if sums or step[1] != ".copies"]
            for one, part, n in steps:
                task = self._task(one, f"{scope}{part}", n)._replace(layer=unit.layer)
                last = (template.add(task._replace(stream=DP_COPIES) if part == ".copies" else task, last),)
            # Where nothing was appended, what comes next has nothing new to wait for.
            found += last if last != tuple(after) else ()
        return tuple(found)

    def _task(self, kind: str, scope: str, n_params: int) -> Task:
        """Return a collective over *n_params* parameters, or over their gradients."""
        if kind == "all_gather":
            name, dtype = "parameters", self._job.precision
        else:
            name, dtype = "gradients", self.reduced_dtype
        label = Label("collective", kind, name, "dp", dtype)
        return Task(DP, label, message=Message(kind, scope, n_params * DTYPE_BYTES[dtype], dtype))
