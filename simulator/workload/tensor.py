"""Matrices cut over tensor-parallel ranks: what is gathered and scattered, and what runs beside it."""

from __future__ import annotations

from dataclasses import replace

from foretrace.simulator.job import Job
from foretrace.simulator.models.model import Linear
from foretrace.simulator.workload.linear import linear_ops, tokens_per_rank, tp_comm, with_casts
from foretrace.simulator.workload.ops import Comm, Op, Phase, Piece


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
    again: tuple[Comm, ...] = () if job.profile.keeps_gathered_inputs else (gather,)
    early = tuple(replace(one, overlap_ops=len(dgrad) if beside else 0) for one in again)
    return Piece(
        gathered(job, gather, forward),
        (*early, *dgrad, replace(scatter, overlap_ops=beside), *weights),
        (*dgrad, scatter),
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
        return (gather, *ops)
    first, rest = _slices(job, gather, len(ops))
    return (first, rest, *ops)


def scattered(job: Job, scatter: Comm, ops: tuple[Op, ...]) -> Phase:
    """Return *scatter* after the *ops* that it sums; with async TP only the last slice is waited for."""
    if not job.profile.async_tp:
        return (*ops, scatter)
    last, rest = _slices(job, scatter, len(ops))
    return (rest, *ops, last)


def _slices(job: Job, comm: Comm, n_ops: int) -> tuple[Comm, Comm]:
    """Return the slice of *comm* that is waited for, and the rest, which runs beside *n_ops*."""
    one = comm.size_bytes // job.layout.tp
    return replace(comm, size_bytes=one), replace(comm, size_bytes=comm.size_bytes - one, overlap_ops=n_ops)
