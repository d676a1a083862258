"""One kind of link, and how well communication uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import inf, isfinite
from typing import Any, Final

from foretrace.topologies.errors import CatalogError

COLLECTIVES: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")
"""Operations whose use of a link may have been measured."""

PROTOCOLS: Final = ("ll", "ll128", "simple")
"""Protocols of NCCL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """How one operation uses a link: ``t = latency + W / (efficiency B) (1 + (half_size / S)^exponent)``.

    ``W`` is the traffic of the busiest rank (the whole size times the bus factor of nccl-tests), ``B`` the
    bandwidth of the link per direction, and ``S`` the size of the whole array.

    Attributes:
        efficiency: bus bandwidth at large sizes over link bandwidth; above 1 where switches reduce.
        latency_s: time of an empty operation between two ranks.
        latency_per_rank_s: what each further rank adds to it.
        half_size_bytes: size of the whole array at which half of the large-size bandwidth is reached.
        exponent: how sharply the bandwidth rises around that size.
    """

    efficiency: float
    latency_s: float
    latency_per_rank_s: float = 0.0
    half_size_bytes: float = 0.0
    exponent: float = 1.0

    def __post_init__(self) -> None:
        if self.efficiency <= 0 or not 0 < self.exponent <= 1:
            raise CatalogError(
                f"efficiency = {self.efficiency} must be above 0, and exponent = {self.exponent} "
                "above 0 and at most 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Measured times of one operation inside one node, by number of ranks and size.

    Attributes:
        sizes_bytes: sizes of the whole array, rising, shape ``(n_sizes,)``.
        times_s: for each number of ranks the time at each size; it never falls as the size rises.
        bytes_per_s: bandwidth of the link that was measured, per direction.
    """

    sizes_bytes: tuple[int, ...]
    times_s: Mapping[int, tuple[float, ...]] = field(hash=False)
    bytes_per_s: float

    def __post_init__(self) -> None:
        if len(self.sizes_bytes) < 2 or any(a >= b for a, b in pairwise(self.sizes_bytes)):
            raise CatalogError("sizes of a measured table must rise, and there must be at least two")
        if not self.times_s:
            raise CatalogError("a measured table needs times for at least one number of ranks")
        for n_ranks, times in self.times_s.items():
            if n_ranks < 2 or len(times) != len(self.sizes_bytes):
                raise CatalogError(
                    f"{len(times)} times for {n_ranks} ranks: give {len(self.sizes_bytes)}, one per size, "
                    "and at least 2 ranks"
                )
            if times[0] <= 0 or any(a > b for a, b in pairwise(times)):
                raise CatalogError(f"times for {n_ranks} ranks must be above zero and never fall")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """A kind of link: what it carries in each direction, how long it takes, and how well it is used.

    Attributes:
        name: as in the catalogue, or of the table that describes it.
        kind: what it is, e.g. ``"nvlink"``, ``"infiniband"``, ``"loopback"``.
        bandwidth_bytes_per_s: bandwidth per direction of one NIC, or of all NVLinks of one GPU together.
        latency_s: time of an empty message from end to end of an uncongested link, software included.
        efficiency: share of the bandwidth that a large transfer reaches; a curve or table goes before it.
        reduces: the switches add numbers themselves (NVLink SHARP).
        protocols: those of NCCL that may be used over it; all of them if empty.
        algorithms: those that its software chooses from; all of NCCL's if empty.
        chunk_bytes: what must have arrived in whole before any of it goes on; 0 where bytes stay in order.
        eager_bytes: longest message sent before the receiver has said where to put it; 0 where none waits, or
            all do and ``latency_s`` counts it.
        flow_bytes_per_s: what one connection carries, of which each channel of NCCL has one; ``inf`` if no
            less than the link.
        gpu_direct: a NIC reads and writes the memory of GPUs itself; else every byte passes the host's.
        experts_bytes_per_s: what kernels on each GPU hand on to the experts of its node of tokens that come
            from other nodes, whatever the link carries; ``inf`` if no less.
        curves: fitted use by operation, a key of ``COLLECTIVES``.
        tables: measured use by operation; goes before a curve.
        sources: where each figure comes from.
    """

    name: str
    kind: str
    bandwidth_bytes_per_s: float
    latency_s: float
    efficiency: float = 1.0
    reduces: bool = False
    protocols: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    chunk_bytes: int = 0
    eager_bytes: int = 0
    flow_bytes_per_s: float = inf
    gpu_direct: bool = True
    experts_bytes_per_s: float = inf
    curves: Mapping[str, Curve] = field(default_factory=dict, hash=False)
    tables: Mapping[str, Table] = field(default_factory=dict, hash=False, repr=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_s <= 0:
            raise CatalogError(
                f"link {self.name}: bandwidth = {self.bandwidth_bytes_per_s} must be above zero"
            )
        if unknown := sorted(set(self.protocols) - set(PROTOCOLS)):
            raise CatalogError(f"link {self.name}: protocol {unknown[0]!r}: one of {', '.join(PROTOCOLS)}")
        if not 0 < self.efficiency <= 1:
            raise CatalogError(
                f"link {self.name}: efficiency = {self.efficiency} is a share, above 0 and at most 1"
            )

    def describe(self) -> dict[str, Any]:
        """Return every figure, and its source, as plain JSON types; of measured tables only their extent."""
        names = {
            "bandwidth": "bandwidth_bytes_per_s",
            "latency": "latency_s",
            "efficiency": "efficiency",
            "experts": "experts_bytes_per_s",
        }
        sources = {name: self.sources[key] for key, name in names.items() if key in self.sources}
        for part, ops in (("curves", self.curves), ("tables", self.tables)):
            said = {source for key, source in self.sources.items() if key.partition(".")[0] in ops}
            if said:
                sources[part] = "; ".join(sorted(said))
        return {
            "name": self.name,
            "kind": self.kind,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "latency_s": self.latency_s,
            "efficiency": self.efficiency,
            "reduces": self.reduces,
            "protocols": list(self.protocols),
            "algorithms": list(self.algorithms),
            "chunk_bytes": self.chunk_bytes,
            "eager_bytes": self.eager_bytes,
            # JSON has no infinity.
            "flow_bytes_per_s": self.flow_bytes_per_s if isfinite(self.flow_bytes_per_s) else None,
            "gpu_direct": self.gpu_direct,
            "experts_bytes_per_s": self.experts_bytes_per_s if isfinite(self.experts_bytes_per_s) else None,
            "curves": {op: asdict(curve) for op, curve in self.curves.items()},
            "tables": {
                op: {"ranks": sorted(table.times_s), "up_to_bytes": table.sizes_bytes[-1]}
                for op, table in self.tables.items()
            },
            "sources": sources,
        }
