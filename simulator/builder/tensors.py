"""The parameters of a unit one tensor at a time: what buckets of gradients are filled with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from foretrace.simulator.builder.stages import Unit
from foretrace.simulator.job import Job
from foretrace.simulator.models.model import Linear
from foretrace.simulator.workload.linear import parts_of
from foretrace.simulator.workload.ops import Block


def tensors(job: Job, unit: Unit, scope: str) -> tuple[int, ...]:
    """Return the sizes of the parameters of *unit* whose gradients are summed over *scope*.

    In the order in which backward makes the gradients: from the last matrix of a block to its norms, which
    are taken for one tensor. Adapters are small, and taken for one too.

    Args:
        job: for how matrices are joined and cut.
        unit: on one rank.
        scope: ``dp``, or ``edp`` for the experts of that rank.
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

    Args:
        sizes: parameters of every tensor, by unit.
        cap: parameters that fill a bucket.

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
    left = block.params - block.expert_params
    for linear in reversed(_linears(job, block)):
        for part in reversed(parts_of(job, linear)):
            yield part.params
            left -= part.params
    yield left


def _linears(job: Job, block: Block) -> tuple[Linear, ...]:
    model, tp = job.model, job.layout.tp
    if block.name == "attention":
        return model.attention_linears(tp)
    if block.name == "mlp":
        return model.mlp_linears(model.ffn_hidden, tp)
    if block.name == "moe" and model.n_shared_experts:
        return model.mlp_linears(model.shared_ffn_hidden, tp)
    return ()


def _experts(job: Job, block: Block) -> Iterator[int]:
    """Both matrices of every expert of *block* on this rank."""
    if not block.expert_params:
        return
    up, down = job.model.mlp_linears(job.model.moe_ffn_hidden, job.layout.etp)
    for _ in range(block.expert_params // (up.params + down.params)):
        yield from (down.params, up.params)
