"""One kind of link, and how well collective communication uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from topologies.errors import CatalogError

COLLECTIVES: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")
"""Operations that a link may have a measured curve for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """How one operation uses a link: ``t = latency + W / (efficiency B) (1 + (half_size / S)^exponent)``.

    ``W`` is the traffic of the busiest rank (whole size times the bus factor of nccl-tests), ``B`` the bandwidth
    of the link per direction, and ``S`` the size of the whole array.

    Attributes:
        efficiency: bus bandwidth at large sizes over link bandwidth. It may exceed 1 where switches reduce.
        latency_s: time of an empty operation between two ranks.
        latency_per_rank_s: what each further rank adds to it.
        half_size_bytes: whole size, per rank, at which half of the large-size bandwidth is reached.
        exponent: how sharply the bandwidth rises around that size.
    """

    efficiency: float
    latency_s: float
    latency_per_rank_s: float = 0.0
    half_size_bytes: float = 0.0
    exponent: float = 1.0

    def __post_init__(self) -> None:
        if self.efficiency <= 0 or self.exponent <= 0:
            raise CatalogError(
                f"efficiency = {self.efficiency}, exponent = {self.exponent}: both must be above zero"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """A kind of link: what it carries in each direction, how long it takes, and how well it is used.

    Attributes:
        name: as in the catalogue, or of the table that describes it.
        kind: what it is, e.g. ``"nvlink"``, ``"infiniband"``, ``"loopback"``.
        bandwidth_bytes_per_s: of one link (all NVLinks of one GPU together; one NIC), per direction.
        latency_s: of one traversal.
        efficiency: share of the bandwidth that a large transfer reaches where no curve says otherwise.
        curves: measured use by operation, a key of ``COLLECTIVES``.
        sources: where each figure comes from.
    """

    name: str
    kind: str
    bandwidth_bytes_per_s: float
    latency_s: float
    efficiency: float = 1.0
    curves: Mapping[str, Curve] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_s <= 0:
            raise CatalogError(
                f"link {self.name}: bandwidth = {self.bandwidth_bytes_per_s} must be above zero"
            )
        if not 0 < self.efficiency <= 1:
            raise CatalogError(
                f"link {self.name}: efficiency = {self.efficiency} is a share, above 0 and at most 1"
            )

    def describe(self) -> dict[str, Any]:
        """Return every figure, and its source, as plain JSON types."""
        return {
            "name": self.name,
            "kind": self.kind,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "latency_s": self.latency_s,
            "efficiency": self.efficiency,
            "curves": {op: asdict(curve) for op, curve in self.curves.items()},
            "sources": dict(self.sources),
        }
