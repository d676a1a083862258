"""The MLP block on one rank, dense or a mixture of experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from foretrace.simulator.compute.fusion import elementwise_piece, is_clamped_apart, is_separate
from foretrace.simulator.job import Job
from foretrace.simulator.models.kinds import KINDS, router
from foretrace.simulator.models.model import Linear, share
from foretrace.simulator.workload.linear import (
    column_linear,
    expert_tokens,
    hidden_bytes,
    job_recipe,
    load_factor,
    norm,
    paced,
    replicated_linear,
    residual_in,
    residual_out,
    routed_tokens,
    row_linear,
    tokens_per_rank,
    tokens_per_shard,
)
from foretrace.simulator.workload.lora import adapted, dequantised
from foretrace.simulator.workload.ops import (
    DTYPE_BYTES,
    Block,
    Comm,
    Op,
    Phase,
    Piece,
    both_ways,
    elementwise,
    gemm,
    memory,
    phases,
    replayed,
    weight_gradient,
)
from foretrace.simulator.workload.recipes import MEMBER_LAUNCH, RECIPES, quantised
from foretrace.simulator.workload.recompute import recompute_phase

# A dense MLP on one rank: up (with gate), activation, down.


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


# A mixture of experts on one rank: router, dispatch, grouped products, combine, shared experts.

FP8_BLOCK: Final = 128
"""Elements that share a scale where tokens travel in 8 bits."""


def experts_mlp(job: Job) -> list[Piece]:
    """Return router, dispatch, experts, combine, and before them the shared experts as one MLP.

    Every token is sent to ``top_k`` experts, each copy once; ``simulator.workload.linear`` says how many
    the fullest rank gets. Without sequence parallelism the tensor-parallel ranks route the same tokens.
    """
    model = job.model
    head, tail = [replicated_linear(job, "moe", router(model)), _gate(job)], [_permute(job, "combine")]
    shared = dense_mlp(job, "moe.shared", model.shared_ffn_hidden) if model.n_shared_experts else []
    if model.shared_gate:
        shared.append(_shared_gate(job))
    if "router" in job.profile.graphed:
        head = replayed(head)
    head += _prepared(job)
    if shared and job.profile.overlap_shared_experts and job.layout.ep > 1 and job.layout.tp == 1:
        return [*head, *_beside_exchanges(_exchange(job), shared, _grouped_mlp(job)), *tail]
    return [*shared, *head, *_exchange(job), *_grouped_mlp(job), *_exchange(job, back=True), *tail]


def _shared_gate(job: Job) -> Piece:
    """A column that scores each token, times what shared experts answer: bytes decide, not FLOPs.

    Forward reads the input and the answer and writes one; backward reads both and a gradient, writes two.
    """
    n_tokens = tokens_per_shard(job)
    size, flops = hidden_bytes(job, n_tokens), 2 * n_tokens * job.model.hidden
    there = replace(memory("moe.shared.gate", 3 * size, job.precision, count=2), flops=flops)
    return both_ways(there, flops=2 * flops, bytes_moved=5 * size)


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
    # In backward this comes first: pieces run in reverse.
    returned = Piece((), back["backward"], back["backward_input"], back["backward_weight"])
    return [first, Piece(forward), *routed, returned, second]


def _over(phase: Phase, overlap_ops: int) -> Phase:
    """Return the communications of *phase*, beside which the *overlap_ops* operations after them run."""
    return tuple(replace(one, overlap_ops=overlap_ops) if isinstance(one, Comm) else one for one in phase)


def _gate(job: Job) -> Piece:
    """Softmax and top-k over fp32 scores: about three passes forward, three backward, in small kernels."""
    size = tokens_per_shard(job) * job.model.n_experts * DTYPE_BYTES["fp32"]
    there = replace(memory("moe.gate", 3 * size, "fp32", count=3), launches=job.profile.router_launches)
    return both_ways(there)


def _prepared(job: Job) -> list[Piece]:
    """Count the tokens of each expert and copy them into the order of experts, in one CUDA graph or not.

    Where a token is sent once, the kernels that send it count as well (DeepEP, ``get_dispatch_layout``).
    """
    (there,), (back,), *_ = _permute(job, "dispatch")
    launches = 1 + (job.profile.dispatch_launches if job.profile.expert_dispatch == "copies" else 0)
    found = [elementwise(*((replace(op, launches=launches),) for op in (there, back) if isinstance(op, Op)))]
    return replayed(found) if "dispatch" in job.profile.graphed else found


def _permute(job: Job, name: str) -> Piece:
    """Copy tokens into the order of their experts, or back with the weighted sum over ``top_k``."""
    # One read of each token, ``top_k`` copies written; or the other way round.
    one = tokens_per_shard(job) * job.model.hidden * DTYPE_BYTES[job.precision]
    size = one * (1 + job.model.top_k)
    return both_ways(memory(f"moe.{name}", size, job.precision))


def _exchange(job: Job, *, back: bool = False) -> list[Piece]:
    """All-to-all of every token copy among the ranks of an expert group; backward is the opposite.

    With ``expert_dispatch = "once"`` a token goes once to each GPU that holds any of its experts. What goes
    to experts may be in 8 bits with an fp32 scale for 128: tokens, and gradients of what comes *back*
    (DeepSeek-V3, arXiv:2412.19437, section 3.3.3; DeepEP's FP8 dispatch and BF16 combine).
    """
    if job.layout.ep == 1:
        return []
    copies = routed_tokens(job, tokens_per_shard(job))
    n_elements = copies * job.model.hidden
    once = job.profile.expert_dispatch == "once"
    top_k, nodes = (job.model.top_k, job.model.route_nodes) if once else (0, 0)
    from_experts = Comm(
        "all_to_all", "ep", n_elements * DTYPE_BYTES[job.precision], 0, job.precision, top_k, nodes
    )
    to_experts = from_experts
    if job.profile.dispatch_fp8 and job_recipe(job) is not None:
        size_bytes = n_elements + n_elements // FP8_BLOCK * DTYPE_BYTES["fp32"]
        to_experts = replace(from_experts, size_bytes=size_bytes, dtype="fp8")
    there, other = (from_experts, to_experts) if back else (to_experts, from_experts)
    return [Piece((there,), (other,), (other,))]


def _sort(job: Job, name: str) -> list[Piece]:
    """Copy what came from other ranks into the order of the local experts, or back.

    Tokens arrive ordered by sender. Reference: Megatron-LM ``token_dispatcher.py``, ``sort_chunks_by_idxs``.
    """
    if job.layout.ep == 1 or share(job.model.n_experts, job.layout.ep) == 1:
        # From one rank, or for one expert, tokens are in order as they come.
        return []
    size = 2 * routed_tokens(job, expert_tokens(job)) * job.model.hidden * DTYPE_BYTES[job.precision]
    return [both_ways(memory(f"moe.{name}.sort", size, job.precision))]


def _pad(job: Job, name: str, n_tokens: int) -> list[Piece]:
    """Copy *n_tokens* to where each expert has a multiple of what products in few bits need, or back.

    Reference: Megatron-LM ``experts.py``, ``Fp8Padding`` and ``Fp8Unpadding``.
    """
    if job_recipe(job) is None:
        return []
    return [both_ways(memory(f"moe.{name}.pad", 2 * hidden_bytes(job, n_tokens), job.precision))]


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
    # Of each token of these ranks as many copies as the fullest rank gets.
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
    return [both_ways(there, bytes_moved=size * (4 * narrow + 8 * wide), count=5 * n_local + 2)]


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
    # FLOPs of the tokens that there are; shapes are rounded up to whole rows for each expert.
    exact = 2 * n_tokens * linear.n_in * linear.n_out
    kernel = job.profile.grouped
    each = kernel == "streams" and not is_fused(job)  # the host has to see to every member on its own
    launches = 1 + MEMBER_LAUNCH * n_local if each else 1
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


def mlp_block(job: Job, layer: int) -> Block:
    """Return the MLP of *layer*, named ``"moe"`` if it has experts, for one micro-batch on one rank."""
    model, layout = job.model, job.layout
    name = "moe" if model.is_moe(layer) else "mlp"
    inner = experts_mlp(job) if model.is_moe(layer) else dense_mlp(job, name, model.ffn_hidden)
    pieces = [residual_in(job, name), norm(job, name), *inner]
    if model.norms_per_layer > 2:
        pieces.append(norm(job, name, name="post_norm"))
    pieces.append(residual_out(job, name))
    # A graph has fixed shapes: of experts too where they are filled to their capacity.
    if "mlp" in job.profile.graphed and (name == "mlp" or job.capacity_factor):
        pieces = replayed(pieces)
    needed = pieces[: len(pieces) - _n_unneeded(job, layer)]
    full = tuple(op for piece in needed for op in piece.forward)
    experts = model.expert_params(layer, layout.etp, layout.ep)
    return Block(
        name=name,
        layer=layer,
        params=model.block_params(name, layout.tp) + experts,
        expert_params=experts,
        phases=phases(pieces, recompute_phase(job, full, ())),
        **adapted(job, KINDS[name].linears(model, layout.tp)),
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
