"""How much memory a pipeline stage needs, by category, at its worst moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from simulator.activations import (
    head_bytes,
    kept_bytes,
    layer_input_bytes,
    logits_bytes,
    recomputed_bytes,
    working_bytes,
)
from simulator.framework import load_framework
from simulator.job import Job
from simulator.model import share
from simulator.ops import DTYPE_BYTES

FIXED = ("parameters", "gradients", "optimizer", "reserved")
"""Categories that are held from the first step to the last."""


class StateBytes(NamedTuple):
    """Model states of one rank."""

    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of every rank of one pipeline stage.

    Attributes:
        stage: pipeline stage.
        in_flight: micro-batches whose activations are held at once.
        activation_bytes_per_microbatch: what one micro-batch keeps between its forward and its backward.
        items: bytes by category at the worst moment: ``parameters``, ``gradients``, ``optimizer``,
            ``activations`` (of all micro-batches in flight, and what recomputation brings back), ``gathered``
            (parameters and gradients of sharded layers while they are whole), ``logits``, ``buffers``
            (gradients of activations, messages between stages), ``reserved`` (context and libraries).
    """

    stage: int
    in_flight: int
    activation_bytes_per_microbatch: int
    items: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        """All categories together."""
        return sum(self.items.values())

    @property
    def fixed_bytes(self) -> int:
        """What is held all the time: model states and what is reserved."""
        return sum(self.items[name] for name in FIXED)

    def baseline(self) -> dict[str, int]:
        """Return bytes by category between two steps, when no micro-batch is in flight."""
        return {name: size if name in FIXED else 0 for name, size in self.items.items()}

    def largest(self, n: int = 3) -> list[tuple[str, int]]:
        """Return the *n* largest categories with their bytes, largest first."""
        return sorted(self.items.items(), key=lambda item: -item[1])[:n]


def state_bytes(job: Job, n_params: int, replicas: int) -> StateBytes:
    """Return the model states of *n_params* parameters that *replicas* ranks hold in common.

    Adam in mixed precision keeps a parameter and a gradient to compute with, and in fp32 a master weight
    and two moments: 2 + 2 + 12 bytes per parameter, or 2 + 4 + 12 with ``job.fp32_gradients``. In fp32 there
    is no second copy: 4 + 4 + 8. ``zero1`` shares the optimizer states out, ``zero2`` the gradients too,
    ``zero3`` the parameters too. ``fsdp`` is PyTorch's FSDP2 with a mixed-precision policy: its sharded
    parameters *are* the fp32 master, so that 4 + 4 + 8 bytes are shared out.

    References: Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1; Megatron-LM ``docs/dist_optimizer``;
    ``torch.distributed.fsdp.MixedPrecisionPolicy``.

    Args:
        job: for precision and sharding.
        n_params: parameters on this rank before data-parallel sharding.
        replicas: data-parallel ranks among which they are shared out.
    """
    part = share(n_params, replicas)
    if job.precision == "fp32" or job.sharding == "fsdp":
        weight, gradient, optimizer = 4, 4, 8
    else:
        weight, gradient, optimizer = DTYPE_BYTES[job.precision], DTYPE_BYTES[job.gradient_dtype], 12
    return StateBytes(
        parameters=weight * (part if job.sharding in ("zero3", "fsdp") else n_params),
        gradients=gradient * (part if job.sharding in ("zero2", "zero3", "fsdp") else n_params),
        optimizer=optimizer * (n_params if job.sharding == "ddp" else part),
    )


def stage_memory(
    job: Job, layers: Sequence[int], stage: int, in_flight: int, *, first: bool, last: bool
) -> StageMemory:
    """Return the memory of a rank of *stage*.

    Args:
        job: the job.
        layers: transformer layers of the stage, from 0.
        stage: its number, for the answer.
        in_flight: micro-batches that have been through forward and not yet through backward, at most.
        first: the stage has the embedding.
        last: the stage has the head and the loss.
    """
    kept = sum(kept_bytes(job, layer) for layer in layers) + (head_bytes(job) if last else 0)
    if first and job.model.dropout:
        kept += layer_input_bytes(job) // DTYPE_BYTES[job.precision]
    brought_back = max((recomputed_bytes(job, layer) for layer in layers), default=0)
    states = _stage_states(job, layers, first=first, last=last)
    framework = load_framework(job.framework)
    has_buckets = job.layout.dp * job.layout.cp >= framework.bucket_ranks
    n_params = sum(sum(unit) for unit in _units(job, layers, first=first, last=last))
    items = {
        **states._asdict(),
        "activations": kept * in_flight + (brought_back if in_flight else 0),
        "gathered": _gathered_bytes(job, layers, first=first, last=last),
        "logits": logits_bytes(job, in_flight) if last else 0,
        "buffers": max((working_bytes(job, layer) for layer in layers), default=0)
        + (2 * layer_input_bytes(job) if job.layout.pp > 1 else 0)
        + (framework.bucket_bytes * n_params if has_buckets else 0),
        "reserved": job.cluster.device.reserved_bytes,
    }
    return StageMemory(stage=stage, in_flight=in_flight, activation_bytes_per_microbatch=kept, items=items)


def _units(job: Job, layers: Sequence[int], *, first: bool, last: bool) -> list[tuple[int, int]]:
    """Parameters of each part that is sharded as one, in order: (replicated over dp * cp, experts)."""
    model, tp, ep = job.model, job.layout.tp, job.layout.ep
    found = [(model.embedding_params(tp), 0)] if first else []
    for layer in layers:
        experts = model.expert_params(layer, tp, ep)
        found.append((model.layer_params(layer, tp, ep) - experts, experts))
    if last:
        own_head = not model.tied_embeddings or not first
        found.append((model.norm_params + (model.head_params(tp) if own_head else 0), 0))
    return found


def _stage_states(job: Job, layers: Sequence[int], *, first: bool, last: bool) -> StateBytes:
    """Model states of a stage; experts have fewer replicas than the rest."""
    units = _units(job, layers, first=first, last=last)
    replicas = job.layout.dp * job.layout.cp
    dense = state_bytes(job, sum(unit[0] for unit in units), replicas)
    experts = state_bytes(job, sum(unit[1] for unit in units), replicas // job.layout.ep)
    return StateBytes(*(a + b for a, b in zip(dense, experts, strict=True)))


def _gathered_bytes(job: Job, layers: Sequence[int], *, first: bool, last: bool) -> int:
    """Parameters and gradients that are whole for a while although ranks share them out.

    Two neighbouring units are whole at once, the one in use and the one gathered ahead; and one unit has its
    gradient whole, as computed and as reduced.
    """
    if job.sharding not in ("zero2", "zero3", "fsdp"):
        return 0
    sizes = [sum(unit) for unit in _units(job, layers, first=first, last=last)]
    width, gradient = DTYPE_BYTES[job.precision], DTYPE_BYTES[job.gradient_dtype]
    if job.sharding == "zero2":
        return gradient * max(sizes)
    pair = max(a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True))
    return width * pair + (width + gradient) * max(sizes)
