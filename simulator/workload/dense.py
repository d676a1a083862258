"""A dense MLP on one rank: up (with gate), activation, down."""

from __future__ import annotations

from foretrace.simulator.compute.fusion import elementwise_piece, is_clamped_apart, is_separate
from foretrace.simulator.job import Job
from foretrace.simulator.workload.linear import tokens_per_rank
from foretrace.simulator.workload.ops import Piece
from foretrace.simulator.workload.tensor import column_linear, row_linear


def dense_mlp(job: Job, block: str, ffn_hidden: int) -> list[Piece]:
    """Return an MLP of inner width *ffn_hidden* as part of *block*."""
    up, down = job.model.mlp_linears(ffn_hidden, job.layout.tp)
    return [
        column_linear(job, block, up),
        *activation(job, block, tokens_per_rank(job) * down.n_in),
        row_linear(job, block, down),
    ]


def activation(job: Job, block: str, n_elements: int) -> list[Piece]:
    """Return the activation with *n_elements* outputs, after the clamps of its inputs if they are apart.

    Fused, it reads one input per output, two where there is a gate; backward reads the inputs and the
    gradient, and writes one gradient per input.
    """
    form = _form(job) if job.model.gated else "activation"
    found = elementwise_piece(job, "activation", form, f"{block}.activation", n_elements)
    if not is_clamped_apart(job):
        return [found]
    return [elementwise_piece(job, "clamp", "clamp", f"{block}.clamp", n_elements), found]


def _form(job: Job) -> str:
    """Return how a gated activation finds its inputs: each in order, or as halves of one product."""
    return "gated activation" if is_separate(job, "projections") else "joined activation"
