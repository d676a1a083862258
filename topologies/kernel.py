"""How matrix products and attention run on a device: tiles over processors, at a clock that power limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

from foretrace.topologies.errors import CatalogError

MOST_EFFICIENT: Final = 1.25
"""Most of its data sheet's peak that a card can reach: GeForce cards run up to a fifth above its clock."""


def _check(where: str, values: Mapping[str, float], shares: tuple[str, ...]) -> None:
    for name, value in values.items():
        if value < 0 or (name in shares and not 0 < value <= 1):
            kind = "a share, above 0 and at most 1" if name in shares else "not negative"
            raise CatalogError(f"{where}: {name} = {value} must be {kind}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTiles:
    """Matrix products as tiles of the output that processors work through in waves.

    ``simulator/compute/gemm.py`` has the formula; a committed script (``benchmarks/fit_gemm.py``) fits the
    constants.

    Attributes:
        processors: streaming multiprocessors.
        tiles: sizes (rows, columns) of an output tile that the library can choose from.
        efficiency: share of the peak that the main loop of an endlessly large tile reaches; above 1 on
            cards that run above the clock of their data sheet, which states the peak.
        operand_side: a tile of ``m x n`` loses ``operand_side (m + n) / (m n)`` to loading its operands.
        tile_overhead_s: start and end of a tile.
        memory_fraction: share of memory bandwidth that operands are read at.
        wave_overlap: share of a last, partly filled wave that runs beside others (0: none of it).
        blend: exponent that joins compute and memory time, ``(c^p + m^p)^(1/p)``; large means ``max``.
        throttle: slowdown that power imposes on a product that lasts for ever, in a burst of its own.
        throttle_s: duration after which half of that is reached.
    """

    processors: int
    tiles: tuple[tuple[int, int], ...]
    efficiency: float
    operand_side: float
    tile_overhead_s: float
    memory_fraction: float
    wave_overlap: float
    blend: float
    throttle: float
    throttle_s: float

    def __post_init__(self) -> None:
        if not self.tiles or min(min(tile) for tile in self.tiles) < 1 or self.processors < 1:
            raise CatalogError("[tiles]: give at least one tile and one processor, each at least 1")
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tiles"}
        _check("[tiles]", numbers, ("memory_fraction",))
        if not 0 < self.efficiency <= MOST_EFFICIENT:
            raise CatalogError(
                f"[tiles]: efficiency = {self.efficiency} is above 0, at most {MOST_EFFICIENT}"
            )
        if not 0 <= self.wave_overlap <= 1 or self.blend < 1:
            raise CatalogError(
                f"[tiles]: wave_overlap = {self.wave_overlap} is from 0 to 1, blend = {self.blend} at least 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPass:
    """One direction of a fused attention kernel.

    ``simulator/compute/attention.py`` has the formula; ``benchmarks/fit_attention.py`` fits the constants.

    Attributes:
        efficiency: share of the peak that its matrix products reach while they run.
        score_width: cost of one score beside the products (softmax), as that many columns of head width.
        tail: how many times the longest row of tiles is waited for at the end.
        tile_overhead_s: start and end of a row of tiles.
        latency_s: fixed part of the kernel.
        queries: that one row of tiles works on.
        wide_step: a head wider than this is computed in whole multiples of it; 0 means as wide as it is.
        narrowest: a head narrower than this is computed as wide as it; 0 means as wide as it is.
        lasting_clock: clock that lasting load of this kernel leaves, over that in a short burst, where that
            is known and more than what matrix products leave; 0: it is as theirs.
        scores_per_s: what the units that compute exponentials allow, in a short burst; 0 means no limit.
    """

    efficiency: float
    score_width: float
    tail: float
    tile_overhead_s: float
    latency_s: float
    queries: int = 128
    wide_step: int = 0
    narrowest: int = 0
    lasting_clock: float = 0.0
    scores_per_s: float = 0.0

    def __post_init__(self) -> None:
        numbers = {f.name: getattr(self, f.name) for f in fields(self)}
        _check("[kernels]", numbers, ("efficiency",))
        if self.queries < 1:
            raise CatalogError(f"[kernels]: queries = {self.queries} is at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """A fused attention kernel, forward and backward, e.g. FlashAttention-2 on one device."""

    forward: AttentionPass
    backward: AttentionPass

    def delayed(self, factor: float) -> Self:
        """Return this kernel with *factor* times its fixed parts."""
        return replace(
            self,
            forward=replace(self.forward, latency_s=self.forward.latency_s * factor),
            backward=replace(self.backward, latency_s=self.backward.latency_s * factor),
        )

    def describe(self) -> dict[str, Any]:
        """Return every figure as plain JSON types."""
        return {
            name: {f.name: getattr(one, f.name) for f in fields(AttentionPass)}
            for name, one in (("forward", self.forward), ("backward", self.backward))
        }
