"""What layers have in common on one rank: token counts, linear layers under tensor parallelism, norms."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from statistics import NormalDist
from typing import Final, NamedTuple

from foretrace.simulator.compute.fusion import elementwise_piece, is_separate
from foretrace.simulator.compute.gemm import ALIGNED_BYTES, UNALIGNED
from foretrace.simulator.job import Job
from foretrace.simulator.models.model import Linear, share
from foretrace.simulator.workload.lora import adapter, dequantised
from foretrace.simulator.workload.ops import (
    DTYPE_BYTES,
    Comm,
    Op,
    Phase,
    Piece,
    elementwise,
    gemm,
    memory,
    weight_gradient,
)
from foretrace.simulator.workload.recipes import RECIPES, Recipe, quantised, rescaled


def tokens_per_rank(job: Job) -> int:
    """Return the tokens of one micro-batch that a rank works on between tensor-parallel communications."""
    return job.micro_batch * job.seq_len // job.layout.cp


def tokens_per_shard(job: Job) -> int:
    """Return the tokens that a rank holds outside the tensor-parallel regions."""
    return tokens_per_rank(job) // (job.layout.tp if job.sequence_parallel else 1)


def expert_tokens(job: Job) -> int:
    """Return the tokens of a micro-batch that the ranks which cut an expert have together, before routing."""
    layout = job.layout
    return tokens_per_shard(job) * layout.expert_tp if layout.expert_tp else tokens_per_rank(job)


def hidden_bytes(job: Job, n_tokens: int) -> int:
    """Return the size of the residual stream for *n_tokens*."""
    return n_tokens * job.model.hidden * DTYPE_BYTES[job.precision]


def residual_dtype(job: Job) -> str:
    """Return the dtype of what blocks hand on: that of the job, or fp32 if products alone are cast."""
    return "fp32" if job.autocasts else job.precision


def tp_comm(job: Job, kind: str, width: int, overlap_ops: int = 0) -> Comm:
    """Return a tensor-parallel collective over all tokens of the micro-batch, *width* features each."""
    size_bytes = tokens_per_rank(job) * width * DTYPE_BYTES[job.precision]
    return Comm(kind, "tp", size_bytes, overlap_ops, job.precision)


class LinearOps(NamedTuple):
    """Operations of a matrix on this rank: forward, input gradient, weight gradient with that of the bias."""

    forward: tuple[Op, ...]
    dgrad: tuple[Op, ...]
    weights: tuple[Op, ...]

    def piece(self) -> Piece:
        """Return them without any communication."""
        return Piece(self.forward, (*self.dgrad, *self.weights), self.dgrad, self.weights)


IN_FULL: Final = ("router", "logits")
"""Matrices that fp8 recipes leave in 16 bit: small, or sensitive (Transformer Engine, torchao)."""


def linear_ops(job: Job, name: str, linear: Linear, n_tokens: int) -> LinearOps:
    """Return what a matrix does on this rank to *n_tokens* tokens.

    With ``job.fp8`` its three products run in the few bits of the recipe. Inputs and gradients of outputs are
    quantised first, and weights where the recipe does that for every micro-batch.
    """
    recipe = None if linear.name in IN_FULL else job_recipe(job)
    dtype, device = recipe.dtype if recipe else job.precision, job.cluster.device
    each = recipe if recipe and recipe.weights_each else None
    parts, width = parts_of(job, linear), DTYPE_BYTES[job.precision]
    weights = [
        fed(job, part, op) for part in parts for op in weight_gradients(job, name, part, n_tokens, dtype)
    ]
    if linear.bias:
        weights.append(memory(f"{name}.bgrad", n_tokens * linear.n_out * width, job.precision))
    dgrads: list[Op] = [
        fed(job, part, gemm(f"{name}.dgrad", n_tokens, linear.n_in, part.n_out, dtype)) for part in parts
    ]
    if len(parts) > 1:
        # Each sum reads two and writes one.
        summed = 3 * width * n_tokens * linear.n_in
        n_sums = len(parts) - 1
        dgrads.append(memory(f"{name}.dgrad.sum", n_sums * summed, job.precision, count=n_sums))
    weights, dgrads = (list(paced(job, recipe, ops, gradients=True)) for ops in (weights, dgrads))
    weights += rescaled(f"{name}.wgrad.rescale", linear.n_in * linear.n_out, job.precision, recipe)
    dgrads += rescaled(f"{name}.dgrad.rescale", len(parts) * n_tokens * linear.n_in, job.precision, recipe)
    products = [fed(job, part, gemm(name, n_tokens, part.n_out, linear.n_in, dtype)) for part in parts]
    found = LinearOps(
        (
            *quantised(f"{name}.quantise", n_tokens * linear.n_in, recipe, device),
            *quantised(f"{name}.weight.quantise", linear.n_in * linear.n_out, each, device),
            *paced(job, recipe, products),
        ),
        (*quantised(f"{name}.dgrad.quantise", n_tokens * linear.n_out, recipe, device), *dgrads),
        tuple(weights),
    )
    return _frozen(job, name, linear, n_tokens, found) if job.lora_rank else found


def _frozen(job: Job, name: str, linear: Linear, n_tokens: int, found: LinearOps) -> LinearOps:
    """Return *found* without weight gradients, with an adapter beside it, and with 4-bit weights made whole.

    Router and output matrix are frozen too, without an adapter and in 16 bit.
    """
    if linear.name in IN_FULL:
        return found._replace(weights=())
    beside = adapter(job, name, linear, n_tokens)
    whole = dequantised(job, name, linear.n_in * linear.n_out)
    return LinearOps(
        (*whole, *found.forward, *beside.forward),
        (*whole, *found.dgrad, *beside.dgrad),
        beside.weights,
    )


def fed(job: Job, linear: Linear, op: Op) -> Op:
    """Return *op*, if it is a product of *linear*, marked where rows of a matrix in it are not aligned.

    Rows have the features of an input or an output. Logits of a framework that pads its vocabulary are
    aligned, and so is what a compiler pads (torch/_inductor/fx_passes/pad_mm.py).
    """
    is_padded = job.kernels == "fused" or (linear.name == "logits" and job.profile.pads_vocabulary)
    if op.kind != "gemm" or op.dtype not in ("bf16", "fp16") or is_padded:
        return op
    rows = (linear.n_in * DTYPE_BYTES[op.dtype], linear.n_out * DTYPE_BYTES[op.dtype])
    return replace(op, kernel=UNALIGNED) if any(row % ALIGNED_BYTES for row in rows) else op


def paced(job: Job, recipe: Recipe | None, ops: Iterable[Op], *, gradients: bool = False) -> tuple[Op, ...]:
    """Return *ops*, the products among them at the rate that *recipe* allows on the device.

    Sums of 8-bit products lose bits on Hopper; those that make *gradients* are split, which takes longer.
    """
    if recipe is None:
        return tuple(ops)
    # Such a recipe makes gradients with one scale per tensor, at the full rate, and scales them afterwards.
    rate = 1.0 if gradients and recipe.rescales else recipe.rate
    rate *= job.cluster.device.gemm_split_share if gradients and recipe.splits else 1.0
    return tuple(
        replace(op, rate=rate) if op.dtype == recipe.dtype and op.kind == "gemm" else op for op in ops
    )


def with_casts(
    job: Job, name: str, linear: Linear, n_tokens: int, found: LinearOps, *, wide: str
) -> LinearOps:
    """Return *found* with what ``torch.autocast`` adds: casts of the weight, and of what is in fp32.

    Weights are cast once per forward, an ``"input"`` in fp32 for each of the products that read it, and its
    gradients before they are summed; a ``"result"`` comes as it is, but its gradient is in fp32. The host is
    charged for products alone, as for parts that eager code adds. Reference: aten/src/ATen/autocast_mode.cpp,
    ``cached_cast``, which keeps casts of leaves that need gradients alone.
    """
    n_parts = len(parts_of(job, linear))
    weight = cast(job, f"{name}.weight.cast", linear.n_in * linear.n_out, n_parts)
    if wide == "result":
        back = cast(job, f"{name}.dgrad.cast", n_tokens * linear.n_out)
        return found._replace(forward=(weight, *found.forward), dgrad=(back, *found.dgrad))
    read = n_parts * n_tokens * linear.n_in
    return found._replace(
        forward=(weight, cast(job, f"{name}.cast", read, n_parts), *found.forward),
        dgrad=(*map(in_fp32, found.dgrad), cast(job, f"{name}.dgrad.cast", read, n_parts)),
    )


def weight_gradients(job: Job, name: str, linear: Linear, n_tokens: int, dtype: str) -> list[Op]:
    """Return the product that makes the gradient of a matrix, and what adds it to the sum if that is apart.

    Where parameters are sharded the sums are over shards, after the gradients have been scattered. A pipeline
    stage that stays whole adds whole ones, each in a kernel (FSDP2's ``unsharded_accumulated_grad``).
    """
    is_sharded = job.shards.parameters
    in_shards = is_sharded and not job.keeps_stages_whole
    if job.profile.fused_wgrad and not is_sharded:
        return [weight_gradient(f"{name}.wgrad", n_tokens, linear, dtype, sum_dtype=job.gradient_dtype)]
    product = gemm(f"{name}.wgrad", linear.n_out, linear.n_in, n_tokens, dtype)
    return [product] if in_shards else [product, gradient_sum(job, name, linear.n_in * linear.n_out)]


def gradient_sum(job: Job, name: str, n_params: int, dtype: str = "") -> Op:
    """Return the kernel that adds gradients of *n_params* to their sums: reads both, writes one.

    Gradients are in the precision of the job; under autocast those that come in *dtype* fp32 are not cast.
    """
    if job.autocasts:
        return cast_gradients(job, name, n_params, dtype or job.precision)
    moved = n_params * (DTYPE_BYTES[job.precision] + 2 * DTYPE_BYTES[job.gradient_dtype])
    return memory(f"{name}.wgrad.sum", moved, job.gradient_dtype)


def parts_of(job: Job, linear: Linear) -> tuple[Linear, ...]:
    """Return what *linear* is computed as: query, key and value, or gate and up, may be matrices apart."""
    model, tp = job.model, job.layout.tp
    if not is_separate(job, "projections"):
        return (linear,)
    if linear.name == "qkv":
        n_key = model.kv_heads_per_rank(tp) * model.head_dim
        widths: tuple[int, ...] = (linear.n_out - 2 * n_key, n_key, n_key)
    elif linear.name == "up" and model.gated:
        widths = (linear.n_out // 2, linear.n_out - linear.n_out // 2)
    else:
        return (linear,)
    return tuple(linear._replace(n_out=n_out) for n_out in widths)


def job_recipe(job: Job) -> Recipe | None:
    """Return the recipe of the products of layers in *job*, None if they run in ``job.precision``."""
    return RECIPES[job.recipe or job.profile.fp8_recipe] if job.fp8 else None


def replicated_linear(job: Job, block: str, linear: Linear) -> Piece:
    """Return a matrix that every tensor-parallel rank holds whole and applies to its own tokens."""
    return linear_ops(job, f"{block}.{linear.name}", linear, tokens_per_shard(job)).piece()


def norm(job: Job, block: str, width: int = 0, n_tokens: int = 0, name: str = "norm") -> Piece:
    """Return a norm; fused, it makes one read and one write forward, two reads and one write backward.

    *width*: features that are normalised; by default the residual stream. *n_tokens*: tokens; by default
    those outside the tensor-parallel regions.
    """
    n_elements = (n_tokens or tokens_per_shard(job)) * (width or job.model.hidden)
    return elementwise_piece(job, "norm", job.model.norm, f"{block}.{name}", n_elements)


def residual_in(job: Job, block: str) -> Piece:
    """Return the branch point before a block: in backward the two gradients are added."""
    n_elements, dtype = tokens_per_shard(job) * job.model.hidden, residual_dtype(job)
    size = n_elements * DTYPE_BYTES[dtype]
    return elementwise((), (memory(f"{block}.residual.backward", 3 * size, dtype),))


def residual_out(job: Job, block: str) -> Piece:
    """Return the sum after a block, fused with bias and dropout; a dropout mask is a byte per element.

    Dropout as a kernel of its own writes its result, which the sum reads.
    """
    size = hidden_bytes(job, tokens_per_shard(job))
    if not job.model.dropout:
        wide = tokens_per_shard(job) * job.model.hidden * DTYPE_BYTES[residual_dtype(job)]
        return elementwise((memory(f"{block}.residual", size + 2 * wide, job.precision),), ())
    mask = tokens_per_shard(job) * job.model.hidden
    moved = (5 if is_separate(job, "residual") else 3) * size + mask
    return elementwise(
        (memory(f"{block}.residual", moved, job.precision),),
        (memory(f"{block}.dropout.backward", 2 * size + mask, job.precision),),
    )


def cast(job: Job, name: str, n_elements: int, count: int = 1) -> Op:
    """Return *count* kernels that turn *n_elements* from fp32 to the precision of the job, or back."""
    each = DTYPE_BYTES["fp32"] + DTYPE_BYTES[job.precision]
    return replace(memory(name, n_elements * each, job.precision, count=count), launches=0)


def in_fp32(op: Op) -> Op:
    """Return *op*, with its operands in fp32 if it is a sum of gradients."""
    if op.kind != "memory" or not op.name.endswith(".dgrad.sum"):
        return op
    # Sums of gradients are in fp32 then: as many elements, wider.
    wider = DTYPE_BYTES["fp32"] // DTYPE_BYTES[op.dtype]
    return replace(op, bytes_moved=op.bytes_moved * wider, dtype="fp32")


def cast_gradients(job: Job, name: str, n_params: int, dtype: str) -> Op:
    """Return what becomes of gradients of *n_params* in *dtype*, on average over micro-batches.

    Each micro-batch casts them to fp32 if they are not. The first hands them over, the others are added to
    those; in the last one DDP scales them into a bucket and copies its sums back.

    Reference: torch/csrc/autograd/functions/accumulate_grad.h, ``accumulateGrad``; torch/csrc/distributed/
    c10d/reducer.cpp, ``mark_variable_ready_dense`` and ``finalize_bucket_dense``, without
    ``gradient_as_bucket_view``.
    """
    wide, n = DTYPE_BYTES["fp32"], job.n_microbatches
    # Of a step: each micro-batch but the first adds (two reads, a write); DDP copies out and back.
    in_step = 3 * wide * (n - 1) + (4 * wide if job.layout.dp * job.layout.cp > 1 else 0)
    cast_bytes = 0 if dtype == "fp32" else wide + DTYPE_BYTES[dtype]
    each = cast_bytes + in_step / n
    op = memory(f"{name}.wgrad.sum", round(n_params * each), "fp32", count=3)
    return replace(op, launches=1)


# Matrices cut over tensor-parallel ranks: what is gathered and scattered, and what runs beside it.


def column_linear(job: Job, block: str, linear: Linear) -> Piece:
    """Return a matrix cut by output features: every rank needs all tokens of the input.

    With sequence parallelism the input is gathered before forward, gathered again for the weight gradient
    (only a shard of it is kept, except where a framework keeps it as gathered) and its gradient is
    reduce-scattered; without, the gradient is all-reduced. Both run beside a GEMM, unless the framework
    waits. Reference: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2; Megatron-LM
    ``LinearWithGradAccumulationAndAsyncCommunication``.
    """
    name, n_tokens = f"{block}.{linear.name}", tokens_per_rank(job)
    ops = linear_ops(job, name, linear, n_tokens)
    if job.autocasts:
        ops = with_casts(job, name, linear, n_tokens, ops, wide="input")
    forward, dgrad, weights = ops
    if job.layout.tp == 1:
        return ops.piece()
    # The reduction runs beside the weight gradients, which do not need it.
    beside = len(weights) if job.profile.overlap_tp_backward else 0
    if not job.sequence_parallel:
        reduce = tp_comm(job, "all_reduce", linear.n_in)
        return Piece(
            forward,
            (*dgrad, replace(reduce, overlap_ops=beside), *weights),
            (*dgrad, reduce),
            weights,
        )
    gather = tp_comm(job, "all_gather", linear.n_in)
    scatter = tp_comm(job, "reduce_scatter", linear.n_in)
    sent = (*dgrad, *_copied(job, scatter, dgrad))
    again: tuple[Comm, ...] = () if job.profile.keeps_gathered_inputs else (gather,)
    # The gathering for weight gradients may run beside the input gradient, which needs no input.
    early = tuple(replace(one, overlap_ops=len(dgrad) if beside else 0) for one in again)
    return Piece(
        gathered(job, gather, forward),
        (*early, *sent, replace(scatter, overlap_ops=beside), *weights),
        (*sent, scatter),
        (*again, *weights),
    )


def row_linear(job: Job, block: str, linear: Linear) -> Piece:
    """Return a matrix cut by input features: the outputs of all ranks are summed.

    Forward ends in a reduce-scatter with sequence parallelism, whose backward is an all-gather, and in an
    all-reduce without, whose backward is nothing.
    """
    name, n_tokens = f"{block}.{linear.name}", tokens_per_rank(job)
    ops = linear_ops(job, name, linear, n_tokens)
    if job.autocasts:
        ops = with_casts(job, name, linear, n_tokens, ops, wide="result")
    forward, dgrad, weights = ops
    if job.layout.tp == 1:
        return ops.piece()
    if not job.sequence_parallel:
        reduce = tp_comm(job, "all_reduce", linear.n_out)
        return Piece((*forward, reduce), (*dgrad, *weights), dgrad, weights)
    gather = tp_comm(job, "all_gather", linear.n_out)
    inputs = gathered(job, gather, dgrad)
    return Piece(
        scattered(job, tp_comm(job, "reduce_scatter", linear.n_out), forward),
        (*inputs, *weights),
        inputs,
        weights,
    )


def gathered(job: Job, gather: Comm, ops: tuple[Op, ...]) -> Phase:
    """Return *gather* before the *ops* that need it.

    With async TP it arrives in as many slices as there are ranks, and products of one run beside the way of
    the next: only the first slice is waited for. Reference: Wang et al. 2023, ASPLOS, "Overlap Communication
    with Dependent Computation via Decomposition"; Transformer Engine's user buffers, PyTorch's async TP.
    """
    if not job.profile.async_tp:
        return (gather, *_copied(job, gather, ops), *ops)
    first, rest = _slices(job, gather, len(ops))
    return (first, rest, *ops)


def scattered(job: Job, scatter: Comm, ops: tuple[Op, ...]) -> Phase:
    """Return *scatter* after the *ops* that it sums; with async TP only the last slice is waited for."""
    if not job.profile.async_tp:
        return (*ops, *_copied(job, scatter, ops), scatter)
    last, rest = _slices(job, scatter, len(ops))
    return (rest, *ops, last)


def _copied(job: Job, comm: Comm, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Return the copy of what *comm* brings to *ops*, or takes from them, if sequences are cut apart in it.

    Reference: torch/distributed/_functional_collectives.py, ``all_gather_single`` and
    ``reduce_scatter_single`` along another dimension than the first, which is a view for one sequence.
    """
    if not job.profile.batch_first or job.micro_batch == 1:
        return ()
    return (memory(f"{ops[-1].name}.{comm.kind}.copy", 2 * comm.size_bytes, comm.dtype),)


def _slices(job: Job, comm: Comm, n_ops: int) -> tuple[Comm, Comm]:
    """Return the slice of *comm* that is waited for, and the rest, which runs beside *n_ops*."""
    # What comes first, or goes last, has nothing to hide behind.
    one = comm.size_bytes // job.layout.tp
    return replace(comm, size_bytes=one), replace(comm, size_bytes=comm.size_bytes - one, overlap_ops=n_ops)


# How many tokens experts get: evenly, at a capacity, or as unevenly as a router leaves them.
#
# Ranks of an expert group exchange tokens, so that the one with the most tokens sets the pace for all.
# What is predicted is that rank.

BLOM: Final = 0.375
"""Of the expected largest of ``n`` normal values, ``quantile((n - a) / (n + 1 - 2 a))``.

Blom 1958, Statistical Estimates and Transformed Beta-Variables.
"""


def load_factor(job: Job) -> float:
    """Return the tokens on the fullest rank of an expert group over their even share; 1 for a dense model.

    With ``job.capacity_factor`` every expert computes just as many tokens, padded or cut: that factor.
    Without, tokens per expert vary by ``job.expert_imbalance`` (standard deviation over mean), experts lie on
    ranks at random, and the fullest of ``ep`` ranks with ``E/ep`` experts each is looked for.
    """
    if not job.model.n_experts:
        return 1.0
    if job.capacity_factor:
        return job.capacity_factor
    return fullest(job.model.n_experts, job.layout.ep, job.expert_imbalance)


def fullest(n_experts: int, n_ranks: int, imbalance: float) -> float:
    """Return the expected load of the fullest of *n_ranks* over the mean.

    A rank has the mean of ``n = E / ranks`` of ``E`` loads, drawn without replacement, whose standard
    deviation is ``imbalance sqrt((E - n) / (n (E - 1)))``. At most everything is on one rank.

    >>> fullest(64, 1, 0.5), fullest(64, 8, 0.0)
    (1.0, 1.0)
    """
    n_local = share(n_experts, n_ranks)
    if n_ranks == 1 or n_experts == 1 or not imbalance:
        return 1.0
    spread = imbalance * math.sqrt((n_experts - n_local) / (n_local * (n_experts - 1)))
    highest = NormalDist().inv_cdf((n_ranks - BLOM) / (n_ranks + 1 - 2 * BLOM))
    return min(1 + spread * highest, float(n_ranks))


def routed_tokens(job: Job, n_tokens: int) -> int:
    """Return the token copies that the fullest rank gets where *n_tokens* on each rank are routed."""
    return math.ceil(n_tokens * job.model.top_k * load_factor(job))
