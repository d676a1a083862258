"""The MLP block on one rank, dense or a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from simulator.fusion import elementwise_piece
from simulator.job import Job
from simulator.model import Linear, share
from simulator.ops import (
    DTYPE_BYTES,
    Block,
    Comm,
    Op,
    Piece,
    elementwise,
    gemm,
    memory,
    phases,
    weight_gradient,
)
from simulator.recipes import quantised
from simulator.workload_linear import (
    column_linear,
    job_recipe,
    norm,
    replicated_linear,
    residual_in,
    residual_out,
    row_linear,
    tokens_per_rank,
    tokens_per_shard,
    tp_comm,
)
from simulator.workload_recompute import recompute_phase


def mlp_block(job: Job, layer: int) -> Block:
    """Return the MLP of *layer*, named ``"moe"`` if it has experts, for one micro-batch on one rank."""
    model, layout = job.model, job.layout
    name = "moe" if model.is_moe(layer) else "mlp"
    inner = _experts(job) if model.is_moe(layer) else _dense(job, name, model.ffn_hidden)
    pieces = [residual_in(job, name), norm(job, name), *inner]
    if model.norms_per_layer > 2:
        pieces.append(norm(job, name, name="post_norm"))
    pieces.append(residual_out(job, name))
    full = tuple(op for piece in pieces for op in piece.forward)
    experts = model.expert_params(layer, layout.tp, layout.ep)
    return Block(
        name=name,
        layer=layer,
        params=model.mlp_params(layer, layout.tp) + experts,
        expert_params=experts,
        phases=phases(pieces, recompute_phase(job, full, ())),
    )


def _dense(job: Job, block: str, ffn_hidden: int) -> list[Piece]:
    """Up (with gate), activation, down."""
    up, down = job.model.mlp_linears(ffn_hidden, job.layout.tp)
    return [
        column_linear(job, block, up),
        _activation(job, block, tokens_per_rank(job) * down.n_in),
        row_linear(job, block, down),
    ]


def _activation(job: Job, block: str, n_elements: int) -> Piece:
    """Activation with *n_elements* outputs: fused, it reads one input per output, two where there is a gate.

    Backward reads the inputs and the gradient, and writes one gradient per input.
    """
    form = "gated activation" if job.model.gated else "activation"
    return elementwise_piece(job, "activation", form, f"{block}.activation", n_elements)


def _experts(job: Job) -> list[Piece]:
    """Router, dispatch, experts, combine, and beside them the shared experts as one MLP.

    Tokens are spread evenly over the experts. Every token is sent to ``top_k`` experts, each copy once.
    Without sequence parallelism the tensor-parallel ranks route the same tokens.
    """
    model = job.model
    router = replicated_linear(job, "moe", Linear("router", model.hidden, model.n_experts))
    routed = [router, _gate(job), _permute(job, "dispatch"), *_exchange(job), *_grouped_mlp(job)]
    routed += [*_exchange(job), _permute(job, "combine")]
    shared = _dense(job, "moe.shared", model.shared_ffn_hidden) if model.n_shared_experts else []
    return [*shared, *routed]


def _gate(job: Job) -> Piece:
    """Softmax and top-k over fp32 scores: about three passes forward, three backward."""
    size = tokens_per_shard(job) * job.model.n_experts * DTYPE_BYTES["fp32"]
    return elementwise(
        (memory("moe.gate", 3 * size, "fp32", count=3),),
        (memory("moe.gate.backward", 3 * size, "fp32", count=3),),
    )


def _permute(job: Job, name: str) -> Piece:
    """Copy tokens into the order of their experts, or back with the weighted sum over ``top_k``."""
    one = tokens_per_shard(job) * job.model.hidden * DTYPE_BYTES[job.precision]
    size = one * (1 + job.model.top_k)
    return elementwise(
        (memory(f"moe.{name}", size, job.precision),), (memory(f"moe.{name}.backward", size, job.precision),)
    )


def _exchange(job: Job) -> list[Piece]:
    """All-to-all of every token copy among the ranks of an expert group; backward is the same."""
    if job.layout.ep == 1:
        return []
    copies = tokens_per_shard(job) * job.model.top_k
    size_bytes = copies * job.model.hidden * DTYPE_BYTES[job.precision]
    swap = (Comm("all_to_all", "ep", size_bytes, 0, job.precision),)
    return [Piece(swap, swap, swap)]


def _grouped_mlp(job: Job) -> list[Piece]:
    """The local experts, each on its share of the tokens; cut over tp like any MLP."""
    model, layout = job.model, job.layout
    up, down = model.mlp_linears(model.moe_ffn_hidden, layout.tp)
    n_tokens = tokens_per_rank(job) * model.top_k
    pieces = [
        _grouped(job, "moe.up", up, n_tokens),
        _activation(job, "moe", n_tokens * down.n_in),
        _grouped(job, "moe.down", down, n_tokens),
    ]
    if layout.tp == 1:
        return pieces
    width = model.hidden * model.top_k
    if not job.sequence_parallel:
        reduce = (tp_comm(job, "all_reduce", width),)
        return [Piece((), reduce, reduce), *pieces, Piece(reduce)]
    gather, scatter = (tp_comm(job, kind, width) for kind in ("all_gather", "reduce_scatter"))
    return [Piece((gather,), (scatter,), (scatter,)), *pieces, Piece((scatter,), (gather,), (gather,))]


def _grouped(job: Job, name: str, linear: Linear, n_tokens: int) -> Piece:
    """One matrix per local expert, in one grouped kernel; *n_tokens* over all of them, evenly."""
    n_local = share(job.model.n_experts, job.layout.ep)
    rows, recipe = share(n_tokens, n_local), job_recipe(job)
    dtype = recipe.dtype if recipe else job.precision
    forward = gemm(name, rows, linear.n_out, linear.n_in, dtype, batch=n_local, grouped=True)
    dgrad = gemm(f"{name}.dgrad", rows, linear.n_in, linear.n_out, dtype, batch=n_local, grouped=True)
    wgrad = weight_gradient(
        f"{name}.wgrad", rows, linear, dtype, sum_dtype=job.gradient_dtype, batch=n_local, grouped=True
    )
    exact = 2 * n_tokens * linear.n_in * linear.n_out
    ops: list[Op] = [replace(op, flops=exact) for op in (forward, dgrad, wgrad)]
    inputs = quantised(f"{name}.quantise", n_tokens * linear.n_in, recipe)
    gradients = (*quantised(f"{name}.dgrad.quantise", n_tokens * linear.n_out, recipe), ops[1])
    return Piece((*inputs, ops[0]), (*gradients, ops[2]), gradients, (ops[2],))
