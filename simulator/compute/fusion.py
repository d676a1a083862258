"""Which element-wise work runs as one kernel, and what it costs in memory traffic where it does not.

A fused kernel reads its inputs and writes its outputs once. Eager PyTorch runs every line of a model as a
kernel of its own and writes what lies between to memory, some of it in fp32. Traffic is counted in passes:
one read or one write per element. Kernels of eager PyTorch compute the address of each element where operands
do not lie alike, as a norm's weight that is broadcast (tracer/rehearse/tape/pricing.py finds them in a
script by their strides, the tables below list them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple

from foretrace.simulator.job import Job
from foretrace.simulator.workload.ops import DTYPE_BYTES, Addressed, Op, Piece, elementwise, memory


class Apart(NamedTuple):
    """A kernel that computes the address of each element.

    *narrow*, *wide*: its part of the ``Passes``. *share*: its elements over all; a half of each head is 0.5,
    as is a complex number for two real ones.
    """

    narrow: float
    wide: float = 0.0
    share: float = 1.0


class Passes(NamedTuple):
    """Reads and writes per element.

    Attributes:
        narrow: those in the precision of the job.
        wide: those in fp32.
        kernels: over which they are spread.
        apart: those of the kernels whose operands do not lie alike.
    """

    narrow: int
    wide: int
    kernels: int
    apart: tuple[Apart, ...] = ()


class Both(NamedTuple):
    """Passes of a forward and of its backward."""

    forward: Passes
    backward: Passes


FUSED: Final[Mapping[str, Both]] = MappingProxyType(
    {
        "rmsnorm": Both(Passes(2, 0, 1), Passes(3, 0, 2)),
        "layernorm": Both(Passes(2, 0, 1), Passes(3, 0, 2)),
        "rotary": Both(Passes(2, 0, 2), Passes(2, 0, 2)),
        "scaled_rotary": Both(Passes(2, 0, 2), Passes(2, 0, 2)),
        "half_rotary": Both(Passes(2, 0, 2), Passes(2, 0, 2)),
        "gated activation": Both(Passes(3, 0, 1), Passes(5, 0, 1)),
        "joined activation": Both(Passes(3, 0, 1), Passes(5, 0, 1)),
        "activation": Both(Passes(2, 0, 1), Passes(3, 0, 1)),
        "clamp": Both(Passes(0, 0, 1), Passes(0, 0, 1)),
        "loss": Both(Passes(1, 4, 3), Passes(1, 3, 2)),
    }
)
"""One kernel each way, or one per tensor: every input read once, every output written once.

An activation is counted per output: with a gate it has two inputs. The loss casts logits to fp32 and makes
two reads and one write of them; backward reads and writes them once and casts the gradient back.
"""

HALF: Final = Apart(1, share=0.5)
"""The negation of a half of each head."""

EAGER: Final[Mapping[str, Both]] = MappingProxyType(
    {
        # cast up, square, mean, add, rsqrt, product, cast down, weight; autograd of each, and two gradients
        # of x added: Llama's RMSNorm as in meta-llama/llama model.py, torchtitan and transformers. Roots and
        # weights are broadcast, and the gradient of the mean
        "rmsnorm": Both(
            Passes(4, 7, 8, (Apart(0, 2), Apart(2))),
            Passes(8, 19, 16, (Apart(2), Apart(0, 2), Apart(0, 1))),
        ),
        # torch.nn.functional.layer_norm is one kernel in eager mode too
        "layernorm": FUSED["layernorm"],
        # queries and keys: cast up, complex product, cast down (apply_rotary_emb of the same model.py);
        # angles are broadcast over heads, here and below
        "rotary": Both(
            Passes(2, 4, 6, (Apart(0, 2, 0.5),)),
            Passes(2, 4, 6, (Apart(0, 2, 0.5),)),
        ),
        # queries and keys, each: half negated, joined, two products, sum, joined with what is not rotated;
        # backward two products, negation, join, sum, and zeros and a sum for the empty rest: autograd of
        # NVIDIA/Megatron-LM core/models/common/embeddings/rope_utils.py, _apply_rotary_pos_emb_bshd
        "scaled_rotary": Both(
            Passes(12, 0, 12, (HALF, Apart(2), Apart(2))),
            Passes(14, 0, 14, (HALF, Apart(2), Apart(2))),
        ),
        # queries and keys, each: two products, half negated, joined, sum; backward two products, negation,
        # two slices of zeros, two sums, and a copy to rows of tokens: autograd of transformers
        # models/llama/modeling_llama.py, apply_rotary_pos_emb. Products keep the order of rows of tokens,
        # joined halves have that of heads
        "half_rotary": Both(
            Passes(10, 0, 10, (Apart(2), HALF, Apart(2), Apart(3))),
            Passes(16, 0, 16, (Apart(2), HALF, Apart(2), Apart(3), Apart(2))),
        ),
        # silu(gate), then times up; backward of the product, twice, then of silu
        "gated activation": Both(Passes(5, 0, 2), Passes(9, 0, 3)),
        # of halves of one product, whose gradients are joined again: NVIDIA/Megatron-LM core/transformer/
        # mlp.py, glu; huggingface/nanotron src/nanotron/models/llama.py, GLUActivation
        "joined activation": Both(
            Passes(5, 0, 2, (Apart(2), Apart(3))), Passes(13, 0, 4, (Apart(3), Apart(3)))
        ),
        "activation": FUSED["activation"],
        # each half clamped, both joined; backward compares with one and two limits, selects, joins again:
        # NVIDIA/Megatron-LM fusions/fused_bias_geglu.py, weighted_bias_quick_geglu_impl, and autograd of it;
        # what a comparison writes is a byte each
        "clamp": Both(
            Passes(8, 0, 3, (Apart(2), Apart(2))),
            Passes(15, 0, 7, (Apart(1.5), Apart(1.5), Apart(2.5), Apart(1.5), Apart(2.5))),
        ),
        # backward of nll_loss writes zeros, that of log_softmax reads both and their product's sum
        "loss": Both(Passes(1, 4, 3), Passes(1, 6, 3)),
    }
)
"""What eager PyTorch does: kernels as autograd issues them."""

AUTOCAST: Final[Mapping[str, Both]] = MappingProxyType(
    {
        # input, weight and result are fp32: nothing is cast
        "rmsnorm": Both(
            Passes(0, 7, 6, (Apart(0, 2), Apart(0, 2))),
            Passes(0, 23, 14, (Apart(0, 2), Apart(0, 2), Apart(0, 1))),
        ),
        "layernorm": Both(Passes(0, 2, 1), Passes(0, 3, 2)),
        # cosines are fp32 as the hidden states, so that products and sum are; then a cast for attention
        "half_rotary": Both(
            Passes(6, 6, 12, (Apart(1, 1), HALF, Apart(1, 1), Apart(0, 3))),
            Passes(15, 7, 22, (Apart(0, 2), HALF, Apart(0, 2), Apart(3), Apart(2))),
        ),
        # two casts, of ForCausalLMLoss and of Accelerate's convert_outputs_to_fp32, and the copy of outputs
        # by which DDP finds unused parameters (torch/nn/parallel/distributed.py, _DDPSink; asked for by
        # transformers/trainer.py unless activations are recomputed)
        "loss": Both(Passes(2, 7, 5), Passes(1, 6, 3)),
    }
)
"""What is different from ``EAGER`` under ``torch.autocast``, where weights and hidden states are fp32: the
operators of transformers ``models/llama/modeling_llama.py`` as a rehearsal of its Trainer counts them."""

ADAM_FUSED_PASSES: Final = 6
"""Of fp32 states in a fused Adam: master weight and two moments, each read and written."""

ADAM_EAGER_PASSES: Final = 19
"""The same in ``torch.optim`` with ``foreach``: decay 2, first moment 2, second moment 4, root 2, two
scalings 4, update 4, and one more read of the gradient."""


def is_separate(job: Job, part: str) -> bool:
    """Return whether *part*, one of ``simulator.framework.EAGER_PARTS``, runs as separate kernels in *job*.

    ``job.kernels`` decides: ``"fused"`` nothing, ``"eager"`` everything, empty what the framework's profile
    lists under ``eager``.
    """
    if job.kernels:
        return job.kernels == "eager"
    return part in job.profile.eager


def is_clamped_apart(job: Job) -> bool:
    """Return whether inputs of the gated activation are clamped in kernels of their own."""
    return job.model.clamped and job.model.gated and is_separate(job, "clamp")


def traffic(job: Job, part: str, form: str, name: str, n_elements: int) -> tuple[Op, Op]:
    """Return forward and backward of an element-wise *part* with *n_elements*.

    The device has the fixed time of a kernel for each one that runs. The host is charged for the operations
    of the fused form: what it needs for each is measured with everything around it, and kernels that eager
    code adds are part of that.

    *part*: one of ``simulator.framework.EAGER_PARTS``. *form*: a key of ``FUSED``. *n_elements*: over which
    it goes.
    """
    both, fused = _passes(job, part, form), FUSED[form]
    return (
        _op(job, name, n_elements, both.forward, fused.forward.kernels),
        _op(job, f"{name}.backward", n_elements, both.backward, fused.backward.kernels),
    )


def _passes(job: Job, part: str, form: str) -> Both:
    if not is_separate(job, part):
        return FUSED[form]
    return AUTOCAST[form] if job.autocasts and form in AUTOCAST else EAGER[form]


def elementwise_piece(job: Job, part: str, form: str, name: str, n_elements: int) -> Piece:
    """Return what ``traffic`` does, as a piece of a block."""
    forward, backward = traffic(job, part, form, name, n_elements)
    return elementwise((forward,), (backward,))


def _op(job: Job, name: str, n_elements: int, one: Passes, launches: int) -> Op:
    op = memory(name, _moved(job, n_elements, one), job.precision, count=one.kernels)
    apart = (
        Addressed(round(n_elements * kernel.share), _moved(job, n_elements, kernel)) for kernel in one.apart
    )
    return replace(op, launches=launches, addressed=tuple(apart))


def _moved(job: Job, n_elements: int, one: Passes | Apart) -> int:
    narrow, wide = DTYPE_BYTES[job.precision], DTYPE_BYTES["fp32"]
    return round(n_elements * (one.narrow * narrow + one.wide * wide))
