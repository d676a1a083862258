"""A mixture of experts on one rank: router, dispatch, grouped products, combine, shared experts."""

from __future__ import annotations

import math
from dataclasses import replace

from foretrace.simulator.job import Job
from foretrace.simulator.models.model import Linear, share
from foretrace.simulator.workload.dense import activation, dense_mlp
from foretrace.simulator.workload.linear import (
    expert_tokens,
    hidden_bytes,
    job_recipe,
    paced,
    replicated_linear,
    tokens_per_shard,
)
from foretrace.simulator.workload.lora import dequantised
from foretrace.simulator.workload.ops import (
    DTYPE_BYTES,
    Comm,
    Op,
    Phase,
    Piece,
    elementwise,
    gemm,
    memory,
    phases,
    weight_gradient,
)
from foretrace.simulator.workload.recipes import RECIPES, quantised
from foretrace.simulator.workload.routing import load_factor, routed_tokens


def experts_mlp(job: Job) -> list[Piece]:
    """Return router, dispatch, experts, combine, and before them the shared experts as one MLP.

    Every token is sent to ``top_k`` experts, each copy once; ``simulator.workload.routing`` says how many
    the fullest rank gets. Without sequence parallelism the tensor-parallel ranks route the same tokens.
    """
    model = job.model
    router = replicated_linear(job, "moe", Linear("router", model.hidden, model.n_experts))
    head, tail = [router, _gate(job), _permute(job, "dispatch")], [_permute(job, "combine")]
    shared = dense_mlp(job, "moe.shared", model.shared_ffn_hidden) if model.n_shared_experts else []
    if shared and job.profile.overlap_shared_experts and job.layout.ep > 1 and job.layout.tp == 1:
        return [*head, *_beside_exchanges(_exchange(job), shared, _grouped_mlp(job)), *tail]
    return [*shared, *head, *_exchange(job), *_grouped_mlp(job), *_exchange(job), *tail]


def _beside_exchanges(exchange: list[Piece], shared: list[Piece], routed: list[Piece]) -> list[Piece]:
    """Return *routed* experts between two exchanges, with the *shared* ones beside the first of each way.

    Forward that is the dispatch; backward the gradients of what was combined. Reference: Megatron-LM
    ``shared_experts.py``, ``--moe-shared-expert-overlap``.
    """
    done = phases(shared, ())
    (swap,) = exchange
    forward = tuple(done["forward"])
    back = {name: tuple(done[name]) for name in ("backward", "backward_input", "backward_weight")}
    there = _over(swap.forward, len(forward))
    first = Piece(there, swap.backward, swap.inputs)
    second = Piece(
        swap.forward,
        _over(swap.backward, len(back["backward"])),
        _over(swap.inputs, len(back["backward_input"])),
    )
    returned = Piece((), back["backward"], back["backward_input"], back["backward_weight"])
    return [first, Piece(forward), *routed, returned, second]


def _over(phase: Phase, overlap_ops: int) -> Phase:
    """Return the communications of *phase*, beside which the *overlap_ops* operations after them run."""
    return tuple(replace(one, overlap_ops=overlap_ops) if isinstance(one, Comm) else one for one in phase)


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
    """All-to-all of every token copy among the ranks of an expert group; backward is the same.

    With ``expert_dispatch = "once"`` a token goes once to each GPU that holds any of its experts.
    """
    if job.layout.ep == 1:
        return []
    copies = routed_tokens(job, tokens_per_shard(job))
    size_bytes = copies * job.model.hidden * DTYPE_BYTES[job.precision]
    top_k = job.model.top_k if job.profile.expert_dispatch == "once" else 0
    swap = (Comm("all_to_all", "ep", size_bytes, 0, job.precision, top_k),)
    return [Piece(swap, swap, swap)]


def _sort(job: Job, name: str) -> list[Piece]:
    """Copy what came from other ranks into the order of the local experts, or back.

    Tokens arrive ordered by sender. Reference: Megatron-LM ``token_dispatcher.py``, ``sort_chunks_by_idxs``.
    """
    if job.layout.ep == 1 or share(job.model.n_experts, job.layout.ep) == 1:
        return []
    size = 2 * routed_tokens(job, expert_tokens(job)) * job.model.hidden * DTYPE_BYTES[job.precision]
    copy = memory(f"moe.{name}.sort", size, job.precision)
    return [elementwise((copy,), (replace(copy, name=f"moe.{name}.sort.backward"),))]


def _pad(job: Job, name: str, n_tokens: int) -> list[Piece]:
    """Copy *n_tokens* to where each expert has a multiple of what products in few bits need, or back.

    Reference: Megatron-LM ``experts.py``, ``Fp8Padding`` and ``Fp8Unpadding``.
    """
    if job_recipe(job) is None:
        return []
    copy = memory(f"moe.{name}.pad", 2 * hidden_bytes(job, n_tokens), job.precision)
    return [elementwise((copy,), (replace(copy, name=f"moe.{name}.pad.backward"),))]


def _grouped_mlp(job: Job) -> list[Piece]:
    """The local experts, each on its share of the tokens; cut like any MLP, over as many ranks as ``etp``."""
    model, layout = job.model, job.layout
    up, down = model.mlp_linears(model.moe_ffn_hidden, layout.etp)
    n_tokens = routed_tokens(job, expert_tokens(job))
    pieces = [
        *_sort(job, "dispatch"),
        *_pad(job, "dispatch", n_tokens),
        _grouped(job, "moe.up", up, n_tokens),
        *(() if is_fused(job) else activation(job, "moe", n_tokens * down.n_in)),
        _grouped(job, "moe.down", down, n_tokens),
        *_pad(job, "combine", n_tokens),
        *_weighted_bias(job, down, n_tokens),
        *_sort(job, "combine"),
    ]
    if layout.etp == 1:
        return pieces
    width = math.ceil(model.hidden * model.top_k * load_factor(job))
    size_bytes = expert_tokens(job) * width * DTYPE_BYTES[job.precision]
    axis = "etp" if layout.expert_tp else "tp"
    if not (job.sequence_parallel or layout.expert_tp):
        reduce = (Comm("all_reduce", axis, size_bytes, 0, job.precision),)
        return [Piece((), reduce, reduce), *pieces, Piece(reduce)]
    gather, scatter = (
        (Comm(kind, axis, size_bytes, 0, job.precision),) for kind in ("all_gather", "reduce_scatter")
    )
    return [Piece(gather, scatter, scatter), *pieces, Piece(scatter, gather, gather)]


def is_fused(job: Job) -> bool:
    """Return whether activation, biases and quantisation between both products of experts are inside of them.

    Forward that is done where the first product writes its result, backward where the second writes its
    gradients; scales are those of blocks of 32. Reference: Transformer Engine ``pytorch/ops/fused``,
    ``forward_grouped_mlp.py``.
    """
    recipe = job_recipe(job)
    return job.profile.fused_experts and recipe is RECIPES["mxfp8"]


def _weighted_bias(job: Job, linear: Linear, n_tokens: int) -> list[Piece]:
    """Add to what each expert put out its bias, times the weight of the token, if experts have biases.

    Expert by expert and in fp32: the product, the sum, their concatenation and the cast back write 3 wide
    results and read 3, beside one narrow read and write. Backward casts up, cuts up and casts down again, and
    has one product and one sum for the weights and one for the bias. Reference: Megatron-LM
    ``moe/experts.py``, ``TEGroupedMLP._apply_bias``.
    """
    if not linear.bias or job.profile.grouped != "streams" or is_fused(job):
        return []
    n_local, size = share(job.model.n_experts, job.layout.ep), n_tokens * linear.n_out
    narrow, wide = DTYPE_BYTES[job.precision], DTYPE_BYTES["fp32"]
    there = memory("moe.bias", size * (2 * narrow + 6 * wide), job.precision, count=2 * n_local + 2)
    back = memory("moe.bias.backward", size * (4 * narrow + 8 * wide), job.precision, count=5 * n_local + 2)
    return [elementwise((there,), (back,))]


def _bias_gradient(job: Job, name: str, linear: Linear, n_tokens: int) -> tuple[Op, ...]:
    """Return the sums of the output gradients of all tokens, if the experts have biases."""
    moved = n_tokens * linear.n_out * DTYPE_BYTES[job.precision]
    return (memory(f"{name}.bgrad", moved, job.precision),) if linear.bias else ()


def _grouped(job: Job, name: str, linear: Linear, n_tokens: int) -> Piece:
    """One matrix per local expert, as the framework runs a group; *n_tokens* over all of them, evenly.

    Beside adapters of other matrices experts are frozen.
    """
    n_local = share(job.model.n_experts, job.layout.ep)
    rows, recipe = share(n_tokens, n_local), job_recipe(job)
    dtype = recipe.dtype if recipe else job.precision
    forward = gemm(name, rows, linear.n_out, linear.n_in, dtype, batch=n_local, grouped=True)
    dgrad = gemm(f"{name}.dgrad", rows, linear.n_in, linear.n_out, dtype, batch=n_local, grouped=True)
    wgrad = weight_gradient(
        f"{name}.wgrad", rows, linear, dtype, sum_dtype=job.gradient_dtype, batch=n_local, grouped=True
    )
    exact = 2 * n_tokens * linear.n_in * linear.n_out
    kernel = job.profile.grouped
    each = kernel == "streams" and not is_fused(job)  # the host has to see to every member on its own
    launches = n_local if each else 1
    exactly = [replace(op, flops=exact, kernel=kernel, launches=launches) for op in (forward, dgrad, wgrad)]
    ops = [*paced(job, recipe, exactly[:1]), *paced(job, recipe, exactly[1:], gradients=True)]
    whole = dequantised(job, name, n_local * linear.n_in * linear.n_out)
    apart = not is_fused(job)
    inputs, gradients = (
        quantised(f"{name}.{way}quantise", n_tokens * width, recipe, job.cluster.device, n_local, each=each)
        if apart or linear.name == first
        else ()
        for way, width, first in (("", linear.n_in, "up"), ("dgrad.", linear.n_out, "down"))
    )
    inputs, gradients = (*whole, *inputs), (*whole, *gradients, ops[1])
    weights = () if job.lora_rank else (ops[2], *_bias_gradient(job, name, linear, n_tokens))
    return Piece((*inputs, ops[0]), (*gradients, *weights), gradients, weights)
