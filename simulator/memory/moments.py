"""The moments of a step at which a stage may hold its most: in the loss, behind the head, behind a layer.

What is there in one of them is gone in another: the gradients of a layer's activations are not there while
the loss is computed, logits not while a layer goes backward. A stage needs the fullest moment, not their sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from foretrace.simulator.job import Job
from foretrace.simulator.memory.activations import layer_input_bytes, logits_bytes, n_logits
from foretrace.simulator.memory.states import (
    Unit,
    bucket_bytes,
    gathered_parameters_bytes,
    placeholder_bytes,
    step_copy_bytes,
    whole_gradient_bytes,
)
from foretrace.simulator.workload.linear import hidden_bytes, tokens_per_rank
from foretrace.simulator.workload.ops import DTYPE_BYTES

IN_LOSS: Final = "in the loss"
AT_HEAD: Final = "in the backward of the head"
AT_LAYER: Final = "in the backward of a layer"


class Moment(NamedTuple):
    """What a stage holds at one moment beside model states and what is reserved.

    Attributes:
        when: in words.
        items: bytes of ``activations``, ``gathered``, ``logits`` and ``buffers``.
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

    Args:
        job: the job.
        layers: transformer layers of the stage.
        units: its parts that are sharded as one.
        held: what it keeps.
        last: the stage has the head and the loss.
    """
    whole, gradient = gathered_parameters_bytes(job, units), whole_gradient_bytes(job, units)
    always = _always_bytes(job, layers, units)
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
