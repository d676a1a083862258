"""How much memory a pipeline stage needs at its peak, by category."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from foretrace.simulator.job import Job
from foretrace.simulator.memory.activations import (
    head_bytes,
    kept_bytes,
    layer_input_bytes,
    logits_bytes,
    n_logits,
    recomputed_bytes,
    tower_bytes,
    working_bytes,
)
from foretrace.simulator.memory.states import (
    StateBytes,
    Unit,
    bucket_bytes,
    gathered_parameters_bytes,
    outer_bytes,
    placeholder_bytes,
    reserved_bytes,
    sharding_units,
    stage_states,
    state_bytes,
    step_copy_bytes,
    whole_gradient_bytes,
)
from foretrace.simulator.workload.linear import hidden_bytes, tokens_per_rank
from foretrace.simulator.workload.ops import DTYPE_BYTES
from foretrace.simulator.workload.recompute import as_kept, recomputes

# The moments of a step at which a stage may hold its most: in the loss, behind the head, behind a layer.
#
# What is there in one of them is gone in another: the gradients of a layer's activations are not there
# while the loss is computed, logits not while a layer goes backward. A stage needs the fullest moment, not
# their sum.

IN_LOSS: Final = "in the loss"
AT_HEAD: Final = "in the backward of the head"
AT_LAYER: Final = "in the backward of a layer"


class Moment(NamedTuple):
    """What a stage holds at one moment beside model states and what is reserved.

    *items*: bytes of ``activations``, ``gathered``, ``logits`` and ``buffers``.
    """

    when: str
    items: Mapping[str, int]

    @property
    def total(self) -> int:
        """All items together."""
        return sum(self.items.values())


class Held(NamedTuple):
    """What a stage keeps whatever the moment.

    Attributes:
        kept: activations of all micro-batches in flight.
        brought_back: what recomputation adds while a layer goes backward.
        working: gradients of the activations of one block.
        in_flight: micro-batches between their forward and their backward.
    """

    kept: int
    brought_back: int
    working: int
    in_flight: int


def fullest_moment(
    job: Job, layers: Sequence[int], units: Sequence[Unit], held: Held, *, last: bool
) -> Moment:
    """Return the moment at which a stage holds its most.

    *units*: its parts that are sharded as one.
    """
    whole, gradient = gathered_parameters_bytes(job, units), whole_gradient_bytes(job, units)
    always = _always_bytes(job, layers, units)
    # The micro-batch of the moment is no longer waiting: its logits are counted where it is.
    waiting = logits_bytes(job, held.in_flight - 1, working=False) if last and held.in_flight else 0
    moments = [
        Moment(
            AT_LAYER,
            {
                "activations": held.kept + held.brought_back,
                "gathered": whole + gradient,
                "logits": waiting,
                "buffers": always + held.working,
            },
        )
    ]
    if last and held.in_flight:
        at_loss = {
            "activations": held.kept,
            "gathered": whole,
            "logits": logits_bytes(job, held.in_flight),
            "buffers": always,
        }
        at_head = {
            "activations": held.kept,
            "gathered": whole + gradient,
            "logits": waiting + 2 * n_logits(job) * DTYPE_BYTES[job.precision],
            "buffers": always
            + hidden_bytes(job, tokens_per_rank(job))
            + placeholder_bytes(job, (), head=True),
        }
        moments += [Moment(IN_LOSS, at_loss), Moment(AT_HEAD, at_head)]
    return max(moments, key=lambda moment: moment.total)


def _always_bytes(job: Job, layers: Sequence[int], units: Sequence[Unit]) -> int:
    """Buffers that stay from the first forward to the last backward.

    Messages to and from the neighbours, communication buckets, what the framework holds in place of weight
    gradients, the buffer into which inputs of column-parallel matrices are gathered again, and a copy of
    gradients for the step, which the caching allocator cannot make of what activations leave.
    """
    messages = 2 * layer_input_bytes(job) if job.layout.pp > 1 else 0
    again = job.sequence_parallel and job.layout.tp > 1 and not job.profile.keeps_gathered_inputs
    gathered = hidden_bytes(job, tokens_per_rank(job)) if again else 0
    of_gradients = bucket_bytes(job, units) + placeholder_bytes(job, layers) + step_copy_bytes(job, units)
    return messages + gathered + of_gradients


__all__ = ["FIXED", "Peak", "StageMemory", "StateBytes", "stage_memory", "state_bytes"]

FIXED = ("parameters", "gradients", "optimizer", "outer", "reserved")
"""Categories that are held from the first step to the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes by category at the peak.

    *items*: ``parameters``, ``gradients``, ``optimizer``, ``activations`` (of all micro-batches in flight,
    and recomputed ones), ``gathered`` (parameters and gradients of sharded layers while they are gathered),
    ``logits``, ``buffers`` (gradients of activations, messages between stages), ``reserved`` (context and
    libraries).
    """

    items: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        """All categories together."""
        return sum(self.items.values())

    def largest(self, n: int = 3) -> list[tuple[str, int]]:
        """Return the *n* largest categories with their bytes, largest first."""
        return sorted(self.items.items(), key=lambda item: -item[1])[:n]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory(Peak):
    """Memory of every rank of one pipeline stage.

    Attributes:
        in_flight: micro-batches whose activations are held at once.
        activation_bytes_per_microbatch: what one micro-batch saves between its forward and its backward.
        when: the moment of the peak, in words.
        host_bytes: bytes that ``job.offload`` keeps in host memory instead.
    """

    stage: int
    in_flight: int
    activation_bytes_per_microbatch: int
    when: str = AT_LAYER
    host_bytes: int = 0


def stage_memory(
    job: Job, layers: Sequence[int], stage: int, in_flight: int, *, first: bool, last: bool
) -> StageMemory:
    """Return the memory of a rank of *stage*.

    *layers*: transformer layers of the stage, from 0. *in_flight*: maximum number of micro-batches between
    their forward and their backward.
    """
    alike = _alike(job, layers)
    kept = sum(n * kept_bytes(one, layer) for layer, one, n in alike) + (head_bytes(job) if last else 0)
    if first and job.model.dropout:
        # The mask of the dropout behind the embedding, a byte for each element.
        kept += layer_input_bytes(job) // DTYPE_BYTES[job.precision]
    of_tower, back, beside = tower_bytes(job) if first else (0, 0, 0)
    kept += of_tower
    held = Held(
        kept=kept * in_flight,
        brought_back=max([back, *(recomputed_bytes(one, layer) for layer, one, _ in alike)])
        if in_flight
        else 0,
        working=max([beside, *(working_bytes(job, layer) for layer, _, _ in alike)]),
        in_flight=in_flight,
    )
    units = sharding_units(job, layers, first=first, last=last)
    moment = fullest_moment(job, layers, units, held, last=last)
    items = {
        **stage_states(job, units)._asdict(),
        **moment.items,
        **({"outer": outer} if (outer := outer_bytes(job, units)) else {}),
        "reserved": reserved_bytes(job),
    }
    on_device = _kept_on_device(job, items, kept)
    # Layers by number travel without ``_kept_on_device``, which knows only all or none.
    if job.offload_layers and in_flight:
        on_device["activations"] = items["activations"] - _sent_away(job, items["activations"])
    return StageMemory(
        stage=stage,
        in_flight=in_flight,
        activation_bytes_per_microbatch=kept if on_device["activations"] == items["activations"] else 0,
        items=on_device,
        when=moment.when,
        host_bytes=sum(items.values()) - sum(on_device.values()),
    )


def _sent_away(job: Job, activations_bytes: int) -> int:
    """Return what ``job.offload_layers`` takes off the device, one layer on its way excepted.

    Layers leave while those behind them are computed and come back as those are done with, so that the end
    of a forward is the fullest moment (Transformer Engine, transformer_engine/pytorch/cpu_offload.py).
    """
    away = [kept_bytes(job, layer) for layer in range(job.offload_layers)]
    return min(sum(away) - max(away), activations_bytes)


def _alike(job: Job, layers: Sequence[int]) -> list[tuple[int, Job, int]]:
    """Return a layer of each kind, the job as it sees it, and how many of *layers* are of that kind."""
    counts: Counter[tuple[tuple[str, ...], bool]] = Counter()
    first: dict[tuple[tuple[str, ...], bool], int] = {}
    for layer in layers:
        kind = (job.model.kinds(layer), recomputes(job, layer, layers))
        counts[kind] += 1
        first.setdefault(kind, layer)
    return [(first[kind], as_kept(job, first[kind], layers), n) for kind, n in counts.items()]


def _kept_on_device(job: Job, items: Mapping[str, int], kept: int) -> dict[str, int]:
    """Return *items* without what ``job.offload`` keeps in the memory of the host.

    Activations travel while others are computed: two layers' worth of a micro-batch stays, one that is used
    and one on its way. Parameters that are whole for a while (``gathered``) stay too.
    """
    gone = {
        "none": (),
        "optimizer": ("optimizer",),
        "states": ("optimizer", "gradients", *(("parameters",) if job.shards.parameters else ())),
        "activations": ("activations",),
        "all": ("optimizer", "gradients", "activations", "parameters"),
    }[job.offload]
    if job.offload == "all" and not job.shards.parameters:
        gone = tuple(name for name in gone if name != "parameters")
    stays = {name: 0 if name in gone else size for name, size in items.items()}
    if "activations" in gone:
        in_transit = 2 * max(kept // max(job.model.n_layers // job.layout.pp, 1), layer_input_bytes(job))
        stays["activations"] = min(items["activations"], in_transit)
    return stays
