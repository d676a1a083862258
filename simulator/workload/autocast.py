"""Casts that ``torch.autocast`` adds to products: parameters and hidden states stay in fp32."""

from __future__ import annotations

from dataclasses import replace

from foretrace.simulator.job import Job
from foretrace.simulator.workload.ops import DTYPE_BYTES, Op, memory


def cast(job: Job, name: str, n_elements: int, count: int = 1) -> Op:
    """Return *count* kernels that turn *n_elements* from fp32 to the precision of the job, or back."""
    each = DTYPE_BYTES["fp32"] + DTYPE_BYTES[job.precision]
    return replace(memory(name, n_elements * each, job.precision, count=count), launches=0)


def in_fp32(op: Op) -> Op:
    """Return *op*, with its operands in fp32 if it is a sum of gradients."""
    if op.kind != "memory" or not op.name.endswith(".dgrad.sum"):
        return op
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
    in_step = 3 * wide * (n - 1) + (4 * wide if job.layout.dp * job.layout.cp > 1 else 0)
    cast_bytes = 0 if dtype == "fp32" else wide + DTYPE_BYTES[dtype]
    each = cast_bytes + in_step / n
    op = memory(f"{name}.wgrad.sum", round(n_params * each), "fp32", count=3)
    return replace(op, launches=1)
