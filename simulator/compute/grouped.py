"""A product for each of several experts in one launch, where each has rows of its own.

Tiles of all members are dealt to the processors of the device as those of one product are, so that what
matters is how many tiles the rows of each come to. Assumed: the tile is the best for all members together
(torch chooses between two by the mean of their rows, ``dispatch_bf16_grouped_kernel_on_tile_size`` in
ATen/native/cuda/GroupMM.cu), and a member without rows takes no processor. No kernel with uneven rows has
been measured for it.
"""

from __future__ import annotations

import numpy as np

from foretrace.simulator.compute.tiling import Floats, Rates, blended_s, choices, tile_s
from foretrace.simulator.workload.ops import Op, operand_bytes, result_bytes


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
    read = k * (m + n) * (m * n * k > 0)
    return operand_bytes(int(read.sum()), op.dtype) + int((m * n).sum()) * result_bytes(op.dtype)


def members_s(on: Rates, sides: Floats, moved: float) -> float:
    """Return the time of products that one kernel works through, each of its own size.

    As ``tiled_s``: of the time in which the processors do all tiles one by one, and that in which the last of
    them is done, by the share of a wave that runs beside others. No less than the longest tile. It never
    falls where a member gets more rows.

    Args:
        on: what they run at.
        sides: m, n and k of each; shape ``(3, n_members)``.
        moved: bytes that all of them read and write.
    """
    m, n, k = (values[:, None, None] for values in sides)
    has_work = m * n * k > 0
    if not has_work.any():
        return moved / (on.tiles.memory_fraction * on.bandwidth)
    a, b, splits = choices(on.tiles)
    n_tiles = np.ceil(m / a) * np.ceil(n / b)
    per_tile = tile_s(on, k) * has_work
    mean_s = (n_tiles * splits * per_tile).sum(axis=0) / on.tiles.processors
    if np.ptp(k):
        last_s = _last_s(n_tiles * splits, per_tile, on.tiles.processors)
    else:
        waves = np.ceil((n_tiles * splits).sum(axis=0) / on.tiles.processors)
        last_s = waves * per_tile.max(axis=0)
    overlap = on.tiles.wave_overlap
    compute = np.maximum(overlap * mean_s + (1 - overlap) * last_s, per_tile.max(axis=0))
    whole, outputs = (n_tiles * has_work).sum(axis=0), (m * n * has_work).sum(axis=0)
    return float(blended_s(on, compute[None], whole[None], np.array(moved), outputs[None]).min())


def _last_s(n_tiles: Floats, per_tile: Floats, processors: int) -> Floats:
    """Return when the last of *processors* is done, if none begins a tile before its last one is done.

    Tiles are numbered member by member, and processor ``p`` takes every ``processors``-th from ``p`` on, as
    persistent kernels of CUTLASS do (``sm90_tile_scheduler_group.hpp``).

    Args:
        n_tiles: of each member, also of one without work; shape ``(n_members, n_tiles, n_splits)``.
        per_tile: what one of them takes, in seconds; 0 where there is nothing to do; same shape.
        processors: how many there are.
    """
    ends = np.cumsum(n_tiles, axis=0)[..., None]
    places = np.arange(processors)
    before = np.ceil((ends - n_tiles[..., None] - places) / processors)
    taken = np.ceil((ends - places) / processors) - before
    busiest: Floats = (taken * per_tile[..., None]).sum(axis=0).max(axis=-1)
    return busiest
