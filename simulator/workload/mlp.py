"""The MLP block on one rank, dense or a mixture of experts."""

from __future__ import annotations

from foretrace.simulator.job import Job
from foretrace.simulator.workload.dense import dense_mlp
from foretrace.simulator.workload.experts import experts_mlp
from foretrace.simulator.workload.linear import norm, residual_in, residual_out
from foretrace.simulator.workload.lora import adapted
from foretrace.simulator.workload.ops import Block, phases
from foretrace.simulator.workload.recompute import recompute_phase


def mlp_block(job: Job, layer: int) -> Block:
    """Return the MLP of *layer*, named ``"moe"`` if it has experts, for one micro-batch on one rank."""
    model, layout = job.model, job.layout
    name = "moe" if model.is_moe(layer) else "mlp"
    inner = experts_mlp(job) if model.is_moe(layer) else dense_mlp(job, name, model.ffn_hidden)
    pieces = [residual_in(job, name), norm(job, name), *inner]
    if model.norms_per_layer > 2:
        pieces.append(norm(job, name, name="post_norm"))
    pieces.append(residual_out(job, name))
    needed = pieces[: len(pieces) - _n_unneeded(job, layer)]
    full = tuple(op for piece in needed for op in piece.forward)
    experts = model.expert_params(layer, layout.etp, layout.ep)
    width = model.shared_ffn_hidden if model.is_moe(layer) else model.ffn_hidden
    return Block(
        name=name,
        layer=layer,
        params=model.mlp_params(layer, layout.tp) + experts,
        expert_params=experts,
        phases=phases(pieces, recompute_phase(job, full, ())),
        **adapted(job, model.mlp_linears(width, layout.tp) if width else ()),
    )


def _n_unneeded(job: Job, layer: int) -> int:
    """Return how many of the last pieces of *layer* recomputation leaves out: their results nobody needs.

    A sum needs neither of its terms, a product not its result; a dropout mask, a norm, and weights of experts
    do need what is before them. Reference: PyTorch ``torch/utils/checkpoint.py``, ``early_stop``.
    """
    model = job.model
    if not job.profile.stops_early or model.dropout:
        return 0
    return 1 if model.norms_per_layer > 2 or model.is_moe(layer) else 2
