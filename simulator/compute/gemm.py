"""How long a matrix product takes: plain, batched or grouped, in tiles or from three constants."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np

from foretrace.simulator.compute.convolution import CONVOLUTION, direct_s
from foretrace.simulator.compute.grouped import members, members_s, plain_bytes
from foretrace.simulator.compute.tiling import Rates, tiled_s
from foretrace.simulator.workload.ops import DTYPE_BYTES, Op, result_bytes
from foretrace.topologies.device import Device

SUMS_EXPOSED: Final = 0.25
"""Share of the traffic of sums in the output that no main loop hides.

Weight gradients with fp32 accumulation against plain products on A100-PCIe and B200, both in the system files
of MooreThreads/SimuMax 4dcaae5 (Apache-2.0): 0.24 and 0.26.
"""

SPACING_S: Final = 9.2e-6
"""Time between the starts of two members of a grouped product.

Small members on B200, 9.1 to 9.4 us each whatever their size (MooreThreads/SimuMax 4dcaae5, Apache-2.0).
"""

MEMBER_S: Final = 2.5e-6
"""Start and end of a member of a grouped product, which others on its streams do not hide.

120 grouped products of Transformer Engine on B200 and A100-PCIe (the same source); benchmarks/fit_grouped.py
on 88 of them, 32 held out: 5.8 % median.
"""

ALIGNED_BYTES: Final = 16
"""What tensor cores are fed with at once: rows of operands have to start at multiples of it."""

UNALIGNED_SHARE: Final = 0.4
"""Share of the fp32 rate of plain cores that batched products reach whose rows are not aligned.

26 runs of bigscience-workshop/bigscience 9e64ede (tr11-176B-ml/chronicles-prequel.md) with heads 150 and 450
wide took about 15 ms per layer and micro-batch longer than with 104 to 224: 8 of 19.5 TFLOP/s on A100.
"""


UNALIGNED: Final = "unaligned"
"""``Op.kernel`` of a plain product of which rows of a matrix are not aligned."""

UNALIGNED_FLOPS_PER_S: Final = 0.7e12
"""What a processor computes of such a product in 16 bit at most, as elements are loaded one by one.

GPT-2 with 50257 tokens against 50304, in eager mode on A100: 0.68 (steps 7 to 9 of the README of ch05/10 of
rasbt/LLMs-from-scratch fa5348d). Squares of 2055 to 2073 on RTX 4090, 107 to 116 TFLOP/s: 0.87
(pytorch/pytorch issue 181718).
"""

TORCH_GROUPED_SHARE: Final = 0.71
"""Rate of ``torch._grouped_mm`` over that of one product of as many rows.

Median of 16 times on B200, bf16 and mxfp8, forward and backward, 1 to 8 experts (pytorch/ao 36027d8,
torchao/prototype/moe_training/README.md, BSD-3): 0.73 and 0.68; benchmarks/fit_grouped.py on 10 of them, the
other 6 are 10 % off.
"""

GROUPED: Final = ("streams", "torch")
"""Ways to run a group of products: a kernel per member on several streams (Transformer Engine), or one kernel
over all (``torch._grouped_mm``)."""


def peak_of(op: Op, device: Device) -> float:
    """Return the rate that the main loop of *op* could run at: the peak of its dtype or a share of it."""
    return device.peak(op.dtype) * op.rate * _fed_share(op, device)


def clock_of(op: Op, device: Device) -> float:
    """Return the clock of *op* under lasting load over that in a burst.

    Power lowers the clock of processors that are busy; those that wait for operands need less of it. So the
    lower of the two shares counts, not their product. Plain fp32 units of a GPU draw less than its tensor
    cores: GPT-2 in fp32 takes 1.00 s for 16 x 1024 tokens and 0.62 s for 8 x 1024 on A100 (rows in
    benchmarks/tables/rehearsed_times.toml), 14 and 11 % less than with the clock of tensor cores.
    """
    if op.dtype == "fp32" and device.kind == "gpu":
        return 1.0
    return min(1.0, device.sustained_clock_fraction / _fed_share(op, device))


def _fed_share(op: Op, device: Device) -> float:
    """Return the share of the peak that operands arrive for."""
    return {"fp4": device.gemm_fp4_share, "fp32": device.gemm_fp32_share}.get(op.dtype, 1.0)


def roofline_s(op: Op, device: Device) -> float:
    """Return the time of a matrix product from three constants, where no tiles are known.

    ``t = max(flops / (e P c), bytes / (b BW)) + n t0``: e ``gemm_efficiency``, P the peak of the dtype,
    c ``sustained_clock_fraction``, b ``gemm_memory_fraction``, t0 ``gemm_latency_s``, n operations.
    """
    peak = device.gemm_efficiency * peak_of(op, device) * clock_of(op, device)
    bandwidth = device.gemm_memory_fraction * device.memory_bytes_per_s
    return max(op.flops / peak, op.bytes_moved / bandwidth) + op.count * device.gemm_latency_s


def gemm_s(op: Op, device: Device) -> float:
    """Return the time of a matrix product, batched or grouped.

    A batch runs as one kernel over the tiles of all members. A grouped product (experts) is one kernel per
    member on a few streams, as Transformer Engine issues them: tiles of the next member fill processors that
    the last wave of one leaves, so that each takes its share of one kernel and ``MEMBER_S``, and
    ``SPACING_S`` at least; or, with the kernel ``"torch"``, one kernel over all members at
    ``TORCH_GROUPED_SHARE`` of the rate, also where members have unlike rows (``simulator.compute.grouped``).
    """
    if op.kernel == CONVOLUTION and op.batch > 1:
        return _grouped_convolution_s(op, device)
    if is_unaligned(op):
        return op.flops / (UNALIGNED_SHARE * device.peak("fp32")) + op.count * device.gemm_latency_s
    if device.gemm_tiles is None or min(op.m, op.n, op.k) < 1:
        return roofline_s(op, device)
    busy = _tiled_s(device, op)
    if op.grouped and op.kernel == "torch":
        busy /= TORCH_GROUPED_SHARE
    elif op.grouped and op.batch > 1:
        busy = op.batch * max(busy / op.batch + MEMBER_S, SPACING_S)
    elif op.kernel == UNALIGNED:
        busy = max(busy, op.flops / unaligned_rate(op, device))
    return busy + op.count * device.gemm_latency_s


def _grouped_convolution_s(op: Op, device: Device) -> float:
    """Return the time of a convolution by groups: the faster of products by group and of a direct kernel.

    A product may take several narrow groups at once, as wide as the narrowest tile: outside of their own
    channels it multiplies zeros.
    """
    tiles = device.gemm_tiles
    if tiles is None:
        return min(roofline_s(op, device), direct_s(op, device)) + op.count * device.gemm_latency_s
    narrowest = min(columns for _, columns in tiles.tiles)
    joined = [n for n in range(1, op.batch + 1) if op.batch % n == 0 and (n == 1 or n * op.n <= narrowest)]
    products = [replace(op, n=n * op.n, k=n * op.k, batch=op.batch // n) for n in joined]
    busy_s = min(*(_tiled_s(device, product) for product in products), direct_s(op, device))
    return busy_s + op.count * device.gemm_latency_s


def unaligned_rate(op: Op, device: Device) -> float:
    """Return the FLOP/s that loads of single elements can feed tensor cores with, infinite for plain ones."""
    tiles = device.gemm_tiles
    if tiles is None or op.dtype == "fp32":
        return math.inf
    return UNALIGNED_FLOPS_PER_S * tiles.processors * DTYPE_BYTES["bf16"] / DTYPE_BYTES[op.dtype]


def is_unaligned(op: Op) -> bool:
    """Return whether the members of a batch have rows that tensor cores cannot be fed with.

    The core of attention without a fused kernel is such a batch, with heads as rows.
    """
    width = result_bytes(op.dtype)
    is_batch = op.batch > 1 and not op.grouped and width < DTYPE_BYTES["fp32"]
    return is_batch and (op.n * width % ALIGNED_BYTES > 0 or op.k * width % ALIGNED_BYTES > 0)


@lru_cache(maxsize=65536)
def _tiled_s(device: Device, op: Op) -> float:
    """Return the time of *op* as one kernel, and what of the traffic of its sums is not hidden."""
    tiles = device.gemm_tiles
    if tiles is None:
        return roofline_s(op, device)
    moved, bandwidth = float(op.bytes_moved), device.memory_bytes_per_s
    on = Rates(tiles, peak=peak_of(op, device), bandwidth=bandwidth, clock=clock_of(op, device))
    if op.rows:
        busy_s = members_s(on, members(op), moved)
    else:
        shape = np.array([[op.m], [op.n], [op.k]], float)
        busy_s = float(tiled_s(on, shape, moved=np.array([moved]), batch=op.batch)[0])
    return busy_s + max(op.bytes_moved - plain_bytes(op), 0) * SUMS_EXPOSED / (
        tiles.memory_fraction * bandwidth
    )
