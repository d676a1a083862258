"""How the GPUs of one node reach each other without a NIC."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType
from typing import Any, Final

from foretrace.topologies.errors import CatalogError
from foretrace.topologies.link import LinkSpec

Wire = tuple[str, str, float, float, str]
"""Two ends, bytes per second in each direction, latency in seconds, kind."""

CUBE_LINKS: Final = (
    *((0, 1, 1), (0, 2, 1), (0, 3, 2), (1, 2, 2), (1, 3, 1), (2, 3, 2), (0, 4, 2), (1, 5, 2)),
    *((2, 6, 1), (3, 7, 1), (4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2)),
)
"""Hybrid cube mesh: pairs of GPUs and the NVLinks between them, six per GPU. ``nvidia-smi topo -m`` of an AWS
p3.16xlarge; NVIDIA DGX-1 with Tesla V100 System Architecture, WP-08437, is the same up to the numbers."""


MOST_MESHED: Final = 256
"""Most GPUs of a full mesh, which has a link for every pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """How the GPUs of one node are wired to each other.

    Attributes:
        kind: a key of ``NODES``.
        host: the PCIe link of one GPU, where not every pair of GPUs has an NVLink.
    """

    kind: str = "switch"
    host: LinkSpec | None = None

    def __post_init__(self) -> None:
        if self.kind not in NODES:
            raise CatalogError(f"node kind {self.kind!r}: one of {', '.join(NODES)}")
        if (self.kind == "pairs") != (self.host is not None):
            raise CatalogError(
                f"node kind {self.kind!r}: 'pairs' needs host, the link over PCIe; others take none"
            )

    def describe(self) -> dict[str, Any]:
        """Return the wiring as plain JSON types."""
        return {"kind": self.kind, "host": self.host.describe() if self.host else None}


def wires(spec: NodeSpec, intra: LinkSpec, gpus: list[int], *, hub: str, full: int) -> Iterator[Wire]:
    """Yield the links inside one node.

    Args:
        spec: how the GPUs are wired.
        intra: all links of one GPU, taken together.
        gpus: the GPUs of the node.
        hub: name of its switch, if it has one.
        full: number of GPUs of a complete node; *gpus* take its first places.

    Raises:
        CatalogError: a node of this kind does not have that many GPUs.
    """
    yield from NODES[spec.kind](spec, intra, gpus, hub, full)


def _switch(_spec: NodeSpec, intra: LinkSpec, gpus: list[int], hub: str, _full: int, /) -> Iterator[Wire]:
    """Yield one link per GPU, to the switch."""
    for gpu in gpus:
        # From GPU to GPU are two of these, which together take the latency.
        yield f"gpu:{gpu}", hub, intra.bandwidth_bytes_per_s, intra.latency_s / 2, intra.kind


def _full_mesh(_spec: NodeSpec, intra: LinkSpec, gpus: list[int], _hub: str, full: int, /) -> Iterator[Wire]:
    """Yield one link per pair, equally wide."""
    if full > MOST_MESHED:
        raise CatalogError(
            f"node kind 'full-mesh' of {full:,} GPUs; at most {MOST_MESHED} are wired to each other"
        )
    for a, b in combinations(gpus, 2):
        # Every link is there in a node that is not full, too: absent peers leave theirs idle.
        width = intra.bandwidth_bytes_per_s / (full - 1)
        yield f"gpu:{a}", f"gpu:{b}", width, intra.latency_s, intra.kind


def _cube_mesh(_spec: NodeSpec, intra: LinkSpec, gpus: list[int], _hub: str, full: int, /) -> Iterator[Wire]:
    """Yield the links of the hybrid cube mesh."""
    if full != 8:
        raise CatalogError(f"node kind 'cube-mesh' has 8 GPUs, not {full}")
    for a, b, links in CUBE_LINKS:
        # GPUs of a node that is not full take its first places; links to the others lead nowhere.
        if b < len(gpus):
            # The bandwidth is that of all six NVLinks of a GPU.
            width = intra.bandwidth_bytes_per_s * links / 6
            yield f"gpu:{gpus[a]}", f"gpu:{gpus[b]}", width, intra.latency_s, intra.kind


def _pairs(spec: NodeSpec, intra: LinkSpec, gpus: list[int], hub: str, _full: int, /) -> Iterator[Wire]:
    """Yield a bridge over every pair of neighbours, and every GPU's way over PCIe."""
    for a, b in zip(gpus[::2], gpus[1::2], strict=False):
        yield f"gpu:{a}", f"gpu:{b}", intra.bandwidth_bytes_per_s, intra.latency_s, intra.kind
    if (host := spec.host) is not None:
        for gpu in gpus:
            # Two of these lead from GPU to GPU, as over a switch.
            yield f"gpu:{gpu}", hub, host.bandwidth_bytes_per_s, host.latency_s / 2, host.kind


NODES: Final[Mapping[str, Callable[[NodeSpec, LinkSpec, list[int], str, int], Iterator[Wire]]]] = (
    MappingProxyType(
        {
            "switch": _switch,  # NVSwitch, or a PCIe switch: intra says which
            "full-mesh": _full_mesh,  # AMD MI300X platform, four-way NVLink boards
            "cube-mesh": _cube_mesh,  # DGX-1, AWS p3
            "pairs": _pairs,  # NVLink bridges between PCIe cards, Azure NC v4 and v5
        }
    )
)
"""How the GPUs of a node are wired, by ``kind`` in ``[node]``."""
