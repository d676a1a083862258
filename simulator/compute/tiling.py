"""Matrix products as tiles of the output, dealt to processors in waves, at a limited clock."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from foretrace.topologies.kernel import GemmTiles

Floats = npt.NDArray[np.float64]

K_STEP: Final = 64
"""Depth of the operand slices that a main loop steps over; k is rounded up to it (CUTLASS tile shapes)."""

SPLITS: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""Ways to split k among processors when the output has too few tiles to occupy them."""


class Rates(NamedTuple):
    """What a product runs at.

    Attributes:
        tiles: the constants.
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

    Args:
        on: what they run at.
        shapes: m, n and k; shape ``(3, n_products)``.
        moved: bytes each product reads and writes; shape ``(n_products,)``.
        batch: members that run as one kernel.

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
    depth = np.ceil(k / splits / K_STEP) * K_STEP
    rate = tiles.efficiency * on.peak / tiles.processors
    found: Floats = 2 * a * b * depth / rate * (1 + tiles.operand_side * (a + b) / (a * b))
    return found + tiles.tile_overhead_s


def blended_s(on: Rates, compute: Floats, whole: Floats, moved: Floats, outputs: Floats) -> Floats:
    """Return the time at the clock that power leaves, blended with that of memory; ``inf``: no such split.

    Args:
        on: what they run at.
        compute: time of the tiles; shape ``(n_products, n_tiles, n_splits)``.
        whole: tiles of each; broadcast to that shape, as all others.
        moved: bytes that each reads and writes.
        outputs: elements that each writes.
    """
    tiles, splits = on.tiles, choices(on.tiles)[2]
    slowed = compute * np.maximum(1 + tiles.throttle * compute / (compute + tiles.throttle_s), 1 / on.clock)
    parts = np.where(splits > 1, 8 * splits * outputs, 0.0)
    memory = (moved + parts) / (tiles.memory_fraction * on.bandwidth)
    # a library does not split further once every processor has a part
    possible = (splits == 1) | (whole * (splits - 1) < tiles.processors)
    scale = np.maximum(slowed, memory)
    both = scale * ((slowed / scale) ** tiles.blend + (memory / scale) ** tiles.blend) ** (1 / tiles.blend)
    found: Floats = np.where(possible, both, np.inf)
    return found
