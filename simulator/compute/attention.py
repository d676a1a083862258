"""How long a fused attention kernel takes: rows of tiles, softmax beside the products, a tail at the end."""

from __future__ import annotations

from typing import Final

from simulator.workload.ops import Op
from topologies.device import Device
from topologies.kernel import AttentionPass

TILE: Final = 128
"""Queries that one row of tiles works on (FlashAttention-2 and -3, cuDNN: 64 to 192)."""

PRODUCTS: Final = {"attention": 2, "attention_backward": 5}
"""Matrix products over the scores: forward two; backward five, as it computes the scores again."""


def attention_s(op: Op, device: Device) -> float:
    """Return the time of a fused attention kernel.

    On a device that lists the kernel, rows of ``TILE`` queries are dealt to its processors; see ``rows_s``.
    Elsewhere: ``max(flops / (e P c), bytes / (f BW)) + t0`` with one efficiency per direction.
    """
    forward = op.kind == "attention"
    kernel = device.attention_kernels.get(op.kernel or device.attention_kernel)
    bandwidth = device.memory_bound_fraction * device.memory_bytes_per_s
    moving_s = op.bytes_moved / bandwidth
    if kernel is None or device.gemm_tiles is None or not op.k:
        efficiency = device.attention_efficiency_forward if forward else device.attention_efficiency_backward
        peak = efficiency * device.peak(op.dtype) * device.sustained_clock_fraction
        return max(op.flops / peak, moving_s) + op.count * device.gemm_latency_s
    one = kernel.forward if forward else kernel.backward
    rate = one.efficiency * device.peak(op.dtype) * device.sustained_clock_fraction
    return max(rows_s(op, one, rate, device.gemm_tiles.processors), moving_s) + op.count * one.latency_s


def rows_s(op: Op, one: AttentionPass, flops_per_s: float, processors: int) -> float:
    """Return how long *processors* take for all rows of tiles of *op*.

    A score costs ``products (d_k + d_v) + 2 score_width`` multiply-adds' worth of time: the softmax does not
    depend on the width of a head, so narrow heads are less efficient. A causal kernel skips what the mask
    hides, except in the tiles that it cuts. Rows under a mask differ in length, and the longest one starts
    late enough to be waited for ``tail`` times.

    Args:
        op: attention, with ``m`` queries, ``n`` keys, width ``k``, and ``batch`` heads over all sequences.
        one: constants of the direction.
        flops_per_s: rate of its products over the whole device.
        processors: number of them.
    """
    seen_at_most = min(op.n, op.window + TILE) if op.window else op.n
    width = PRODUCTS[op.kind] / 2 * (op.k + (op.v_dim or op.k)) + 2 * one.score_width
    rows = op.batch * -(-op.m // TILE)
    seen = min((op.n + min(TILE, op.n)) / 2 if op.causal else op.n, seen_at_most)
    work_s = 2 * op.batch * op.m * seen * width / flops_per_s + rows * one.tile_overhead_s / processors
    row_s = 2 * min(TILE, op.m) * seen_at_most * width / flops_per_s * processors
    return work_s + one.tail * row_s
