"""How long a matrix product takes: plain, batched or grouped, in tiles or from three constants."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from foretrace.simulator.workload.ops import DTYPE_BYTES, Op, operand_bytes, result_bytes
from foretrace.topologies.device import Device
from foretrace.topologies.kernel import GemmTiles

# Matrix products as tiles of the output, dealt to processors in waves, at a limited clock.

Floats = npt.NDArray[np.float64]

K_STEP: Final = 64
"""Depth of the operand slices that a main loop steps over; k is rounded up to it (CUTLASS tile shapes)."""

SPLITS: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""Ways to split k among processors when the output has too few tiles to occupy them."""


class Rates(NamedTuple):
    """What a product runs at.

    Attributes:
        peak: peak rate of the dtype, FLOP/s.
        bandwidth: bandwidth of the memory, bytes/s.
        clock: clock under lasting load over that in a short burst.
    """

    tiles: GemmTiles
    peak: float
    bandwidth: float
    clock: float


def tiled_s(on: Rates, shapes: Floats, *, moved: Floats, batch: int = 1) -> Floats:
    """Return the time of matrix products, the best over all tiles and splits, without fixed latency.

    With ``T`` tiles of ``a x b``, each split ``s`` ways along k, on ``S`` processors:

    - one tile takes ``2 a b k/s / (e P/S) * (1 + side (a + b) / (a b)) + overhead``;
    - there are ``T s / S`` waves, the last one counted up to a whole for ``1 - wave_overlap`` of it;
    - the clock stretches that by ``1 + throttle t / (t + throttle_s)``, or by ``1 / clock`` if that is more;
    - operands take ``bytes / (b BW)``, and a split writes and reads its fp32 parts.

    *shapes*: m, n and k; shape ``(3, n_products)``. *moved*: bytes each product reads and writes; shape
    ``(n_products,)``. *batch*: members that run as one kernel.

    Returns:
        Seconds; shape ``(n_products,)``.
    """
    tiles = on.tiles
    m, n, k = (values[:, None, None] for values in shapes)
    a, b, splits = choices(tiles)
    whole = np.ceil(m / a) * np.ceil(n / b) * batch
    per_tile = tile_s(on, k)
    filled = whole * splits / tiles.processors
    waves = tiles.wave_overlap * filled + (1 - tiles.wave_overlap) * np.ceil(filled)
    # Fewer tiles than processors take as long as one tile does.
    compute = np.maximum(waves, 1.0) * per_tile
    best: Floats = blended_s(on, compute, whole, moved[:, None, None], m * n * batch).min(axis=(1, 2))
    return best


def choices(tiles: GemmTiles) -> tuple[Floats, Floats, Floats]:
    """Return rows and columns of a tile and ways to split k, along axes 1, 1 and 2 of three."""
    a, b = (np.array(sides, float)[None, :, None] for sides in zip(*tiles.tiles, strict=True))
    return a, b, np.array(SPLITS, float)[None, None, :]


def tile_s(on: Rates, k: Floats) -> Floats:
    """Return what one tile takes, of products of depth *k*; shape ``(n_products, n_tiles, n_splits)``."""
    tiles = on.tiles
    a, b, splits = choices(tiles)
    # The main loop steps over whole slices, however little of the last one is used.
    depth = np.ceil(k / splits / K_STEP) * K_STEP
    rate = tiles.efficiency * on.peak / tiles.processors
    found: Floats = 2 * a * b * depth / rate * (1 + tiles.operand_side * (a + b) / (a * b))
    return found + tiles.tile_overhead_s


def blended_s(on: Rates, compute: Floats, whole: Floats, moved: Floats, outputs: Floats) -> Floats:
    """Return the time at the clock that power leaves, blended with that of memory; ``inf``: no such split.

    *compute*: time of the tiles; shape ``(n_products, n_tiles, n_splits)``. *whole*: tiles of each; broadcast
    to that shape, as all others. *moved*: bytes that each reads and writes.
    """
    tiles, splits = on.tiles, choices(on.tiles)[2]
    slowed = compute * np.maximum(1 + tiles.throttle * compute / (compute + tiles.throttle_s), 1 / on.clock)
    # Each part is written in fp32 and read again, 4 bytes each way.
    parts = np.where(splits > 1, 8 * splits * outputs, 0.0)
    memory = (moved + parts) / (tiles.memory_fraction * on.bandwidth)
    # a library does not split further once every processor has a part
    possible = (splits == 1) | (whole * (splits - 1) < tiles.processors)
    # Over the larger of both, so that no high power overflows.
    scale = np.maximum(slowed, memory)
    both = scale * ((slowed / scale) ** tiles.blend + (memory / scale) ** tiles.blend) ** (1 / tiles.blend)
    found: Floats = np.where(possible, both, np.inf)
    return found


# A product for each of several experts in one launch, where each has rows of its own.
#
# Tiles of all members are dealt to the processors of the device as those of one product are, so that what
# matters is how many tiles the rows of each come to. Assumed: the tile is the best for all members
# together (torch chooses between two by the mean of their rows,
# dispatch_bf16_grouped_kernel_on_tile_size in ATen/native/cuda/GroupMM.cu), and a member without rows
# takes no processor. No kernel with uneven rows has been measured for it.


def members(op: Op) -> Floats:
    """Return m, n and k of every member of *op*; shape ``(3, n_members)``."""
    sides = {"m": op.m, "n": op.n, "k": op.k}
    return np.array(
        [op.rows if op.along == side else [size] * len(op.rows) for side, size in sides.items()], float
    )


def plain_bytes(op: Op) -> int:
    """Return what *op* reads and writes, sums in the result left out.

    A member without rows reads nothing. Its result is written where rows are summed over: it is zero.
    """
    if not op.rows:
        operands = operand_bytes(op.m * op.k + op.k * op.n, op.dtype)
        return (operands + op.m * op.n * result_bytes(op.dtype)) * op.batch
    m, n, k = members(op)
    # Nothing is read where one of the sides is 0.
    read = k * (m + n) * (m * n * k > 0)
    return operand_bytes(int(read.sum()), op.dtype) + int((m * n).sum()) * result_bytes(op.dtype)


def members_s(on: Rates, sides: Floats, moved: float) -> float:
    """Return the time of products that one kernel works through, each of its own size.

    As ``tiled_s``: of the time in which the processors do all tiles one by one, and that in which the last of
    them is done, by the share of a wave that runs beside others. No less than the longest tile. It never
    falls where a member gets more rows.

    *sides*: m, n and k of each; shape ``(3, n_members)``. *moved*: bytes that all of them read and write.
    """
    m, n, k = (values[:, None, None] for values in sides)
    has_work = m * n * k > 0
    if not has_work.any():
        return moved / (on.tiles.memory_fraction * on.bandwidth)
    a, b, splits = choices(on.tiles)
    n_tiles = np.ceil(m / a) * np.ceil(n / b)
    per_tile = tile_s(on, k) * has_work
    mean_s = (n_tiles * splits * per_tile).sum(axis=0) / on.tiles.processors
    # Where all are as deep, a tile takes the same of every member, and counting waves is enough.
    if np.ptp(k):
        last_s = _last_s(n_tiles * splits, per_tile, on.tiles.processors)
    else:
        waves = np.ceil((n_tiles * splits).sum(axis=0) / on.tiles.processors)
        last_s = waves * per_tile.max(axis=0)
    overlap = on.tiles.wave_overlap
    # Fewer tiles than processors take as long as the longest one does.
    compute = np.maximum(overlap * mean_s + (1 - overlap) * last_s, per_tile.max(axis=0))
    whole, outputs = (n_tiles * has_work).sum(axis=0), (m * n * has_work).sum(axis=0)
    return float(blended_s(on, compute[None], whole[None], np.array(moved), outputs[None]).min())


def _last_s(n_tiles: Floats, per_tile: Floats, processors: int) -> Floats:
    """Return when the last of *processors* is done, if none begins a tile before its last one is done.

    Tiles are numbered member by member, and processor ``p`` takes every ``processors``-th from ``p`` on, as
    persistent kernels of CUTLASS do (``sm90_tile_scheduler_group.hpp``).

    *n_tiles*: of each member, also of one without work; shape ``(n_members, n_tiles, n_splits)``. *per_tile*:
    what one of them takes, in seconds; 0 where there is nothing to do; same shape.
    """
    ends = np.cumsum(n_tiles, axis=0)[..., None]
    places = np.arange(processors)
    # How many of the tiles that processor p takes lie before this member: those numbered p, p + P, p + 2P and
    # so on.
    before = np.ceil((ends - n_tiles[..., None] - places) / processors)
    taken = np.ceil((ends - places) / processors) - before
    busiest: Floats = (taken * per_tile[..., None]).sum(axis=0).max(axis=-1)
    return busiest


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

UNALIGNED_BATCH_FLOPS_PER_S: Final = 0.48e12
"""The same of a batch that was seen to be unaligned, on today's libraries.

Cores of attention over 3137 and 5185 rows without a fused kernel, bf16: 0.39 to 0.54 on H100, 0.33 to 0.54 on
MI300X (timesformer and owlv2 of AMD-AGI/TraceLens 171dd74, tests/traces).
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
    ``TORCH_GROUPED_SHARE`` of the rate, also where members have unlike rows (``members_s``).
    """
    if op.kernel == CONVOLUTION and op.batch > 1:
        return _grouped_convolution_s(op, device)
    if op.kernel != UNALIGNED and is_unaligned(op):
        return op.flops / (UNALIGNED_SHARE * device.peak("fp32")) + op.count * device.gemm_latency_s
    # A side of 0 has no tiles.
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
    each = UNALIGNED_FLOPS_PER_S if op.batch == 1 else UNALIGNED_BATCH_FLOPS_PER_S
    return each * tiles.processors * DTYPE_BYTES["bf16"] / DTYPE_BYTES[op.dtype]


def is_unaligned(op: Op) -> bool:
    """Return whether the members of a batch have rows that tensor cores cannot be fed with.

    The core of attention without a fused kernel is such a batch, with heads as rows.
    """
    width = result_bytes(op.dtype)
    # Full fp32 is not computed by tensor cores.
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


# How long a convolution by groups of channels takes: on tensor cores, or directly.

CONVOLUTION: Final = "convolution"
"""``Op.kernel`` of a product whose members are the groups of a convolution."""

DIRECT_SHARE: Final = 0.11
"""Rate of kernels that add up a convolution without tensor cores, such as depthwise ones, over that of large
fp32 products.

Set on three of 24 training steps of timm on RTX 3090, of the half of them that a rule chose before any was
run: EfficientNet-B4, MobileNetV2 and ConvNeXt-T, with depthwise kernels of 3, 5 and 7 places
(benchmarks/tables/rehearsed_times.toml). Those of the other half, EfficientNetV2-M, MobileNetV3 and Xception,
are predicted at 0.87 to 0.99 of their times.
"""


def direct_s(op: Op, device: Device) -> float:
    """Return the time of the convolution *op* element by element, without fixed latency.

    The slower of ``flops / (DIRECT_SHARE s P)`` and ``bytes / (f BW)``: P the peak of fp32, s the
    ``gemm_fp32_share``, f the ``memory_bound_fraction``, BW the memory bandwidth.
    """
    peak = device.gemm_fp32_share * (device.peak_flops_per_s.get("fp32") or device.peak(op.dtype))
    bandwidth = device.memory_bound_fraction * device.memory_bytes_per_s
    return max(op.flops / (DIRECT_SHARE * peak), op.bytes_moved / bandwidth)
