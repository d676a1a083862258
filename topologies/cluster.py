"""A machine: devices, the links inside a node, the NICs between nodes, and the fabric they form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final

from foretrace.topologies.device import Device
from foretrace.topologies.errors import CatalogError
from foretrace.topologies.fabric import FabricSpec
from foretrace.topologies.link import LinkSpec
from foretrace.topologies.node import NodeSpec

MOST_GPUS: Final = 1 << 22
"""Largest machine that is believed."""

CPUS: Final = ("", "amd", "arm", "intel")
"""Makers of processors that NCCL tells apart."""


@dataclass(frozen=True, kw_only=True)
class Others:
    """The last nodes of a machine where they are of another kind than the rest.

    Attributes:
        machine: a machine with such nodes; its device, links and NICs count, its fabric does not.
        nodes: how many there are.
    """

    machine: Cluster
    nodes: int

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise CatalogError(f"others: nodes = {self.nodes}, at least 1")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of devices, joined by one fabric; all alike, unless there are ``others``.

    A *node* is an NVLink domain: the GPUs that reach each other without a NIC. For GB200 NVL72 it is the
    rack. On a machine without GPUs a device is a process, and ``device`` is what one process gets of the
    processor when ``n_gpus`` of them run.

    Attributes:
        name: as in the catalogue, or of the file.
        device: one GPU (or process).
        n_gpus: devices in the machine; the last node may be partly filled.
        gpus_per_node: devices in one node.
        intra: the link of one device into its node.
        nic: one NIC, or None for a machine of one node.
        nics_per_node: NICs of one node.
        nics_used: those of them that software uses, however many there are; all if 0.
        rings_out: rings between nodes that NCCL finds for one group, each of which leaves by one NIC; 0 where
            there are as many as NICs.
        cpu: who made the processor of a node, one of ``CPUS``, which drives its NICs; empty if not known.
        fabric_spec: how NICs are wired.
        others: the last nodes, where they are of other kinds; each has as many GPUs as the rest.
        node: how the GPUs of a node are wired to each other.
        cores: processor cores that the processes of one node share; 0 where devices are GPUs.
        time_slice_s: how long a process holds a core that others wait for.
        transfer_factors: how many times as long communication takes here as the links say, out of a
            calibration: by link, kind and part, ``"near.all_reduce.wire"``; kind ``others`` is for the rest.
        uncalibrated: kinds of operators whose factor a calibration has for its own run alone.
        price_usd_per_gpu_hour: what one device costs, if known.
        node_power_w: what a node draws at most, GPUs included, if known.
        node_memory_bytes: memory of the host of a node, if known.
        gpus_per_tray: GPUs of a node that are rented, and powered, together; all of them if 0.
        description: one line for people.
        sources: where each figure of the machine itself comes from.
    """

    name: str
    device: Device
    n_gpus: int
    gpus_per_node: int
    intra: LinkSpec
    nic: LinkSpec | None = None
    nics_per_node: int = 0
    nics_used: int = 0
    rings_out: int = 0
    cpu: str = ""
    fabric_spec: FabricSpec = field(default_factory=FabricSpec)
    node: NodeSpec = field(default_factory=NodeSpec)
    others: tuple[Others, ...] = ()
    cores: int = 0
    time_slice_s: float = 0.0
    transfer_factors: Mapping[str, float] = field(default_factory=dict, hash=False)
    uncalibrated: tuple[str, ...] = ()
    price_usd_per_gpu_hour: float | None = None
    node_power_w: float | None = None
    node_memory_bytes: int | None = None
    gpus_per_tray: int = 0
    description: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("n_gpus", "gpus_per_node"):
            if (value := getattr(self, name)) < 1:
                raise CatalogError(f"cluster {self.name}: {name} = {value}, at least 1")
        if min(self.nics_per_node, self.cores, self.rings_out) < 0:
            raise CatalogError(f"cluster {self.name}: nics_per_node, rings_out and cores are at least 0")
        if not 0 <= self.nics_used <= self.nics_per_node:
            raise CatalogError(
                f"cluster {self.name}: nics_used = {self.nics_used}: from 0, all of them, to nics_per_node = "
                f"{self.nics_per_node}"
            )
        if self.gpus_per_tray and (self.gpus_per_tray < 0 or self.gpus_per_node % self.gpus_per_tray):
            raise CatalogError(
                f"cluster {self.name}: gpus_per_tray = {self.gpus_per_tray} does not divide gpus_per_node = "
                f"{self.gpus_per_node}"
            )
        if self.n_gpus > MOST_GPUS:
            raise CatalogError(f"cluster {self.name}: {self.n_gpus} GPUs: at most {MOST_GPUS:,}")
        if self.cpu not in CPUS:
            raise CatalogError(
                f"cluster {self.name}: cpu = {self.cpu!r}: one of {', '.join(filter(None, CPUS))}"
            )
        gpus_w = self.gpus_per_node * self.device.power_limit_w
        if self.node_power_w is not None and self.node_power_w <= gpus_w:
            raise CatalogError(
                f"cluster {self.name}: node_power = {self.node_power_w:g} W, its GPUs draw {gpus_w:g} W alone"
            )
        for other in self.others:
            self._check_other(other)
        if self.others and sum(other.nodes for other in self.others) >= self.n_nodes:
            raise CatalogError(
                f"cluster {self.name}: {sum(other.nodes for other in self.others)} nodes of other kinds in a "
                f"machine of {self.n_nodes}; at least one must be of its own kind, so raise n_gpus"
            )

    @property
    def calibrated(self) -> list[str]:
        """Sentences on the factors of a calibration on communication, and on those that are not used."""
        return [
            *(f"calibrated: {name} x {factor:.3f}" for name, factor in self.transfer_factors.items()),
            *(
                f"not calibrated: {name}, whose factor is of the run's own operators"
                for name in self.uncalibrated
            ),
        ]

    @property
    def n_nodes(self) -> int:
        """Number of nodes (NVLink domains), the last one perhaps partly filled."""
        return -(-self.n_gpus // self.gpus_per_node)

    @property
    def turn_s(self) -> float:
        """Wait of a message until its receiver has a core again; 0 unless processes outnumber cores."""
        return (1 / processor_share(self.cores, self.n_gpus) - 1) * self.time_slice_s if self.cores else 0.0

    def _check_other(self, other: Others) -> None:
        """Raise CatalogError if *other* nodes cannot stand beside those of this machine."""
        theirs = other.machine
        for name in ("gpus_per_node", "nics_per_node"):
            if (own := getattr(self, name)) != (found := getattr(theirs, name)):
                raise CatalogError(
                    f"cluster {self.name}: others of kind {theirs.name} have {name} = {found}, its own "
                    f"{own}; nodes of one machine have as many GPUs and as many NICs"
                )

    def kind_of(self, node: int) -> Cluster:
        """Return a machine with nodes like *node*: this one, or that of ``others``."""
        first = self.n_nodes
        for other in reversed(self.others):
            first -= other.nodes
            if node >= first:
                return other.machine
        return self

    @property
    def kinds(self) -> tuple[Cluster, ...]:
        """Machines of this size and fabric whose nodes are all of one kind, for each kind that there is.

        Each has the memory of the smallest device: what runs on all has to fit into that.
        """
        if not self.others:
            return (self,)
        machines = {machine.device.name: machine for machine in map(self.kind_of, range(self.n_nodes))}
        return tuple(
            replace(
                machine,
                name=self.name,
                n_gpus=self.n_gpus,
                fabric_spec=self.fabric_spec,
                transfer_factors=self.transfer_factors,
                uncalibrated=self.uncalibrated,
                device=replace(machine.device, memory_bytes=self.device.memory_bytes),
                others=(),
            )
            for machine in machines.values()
        )

    @property
    def mean_price_usd_per_gpu_hour(self) -> float | None:
        """What a GPU costs on average over the nodes; None if the price of one kind is not known."""
        return self._mean(lambda machine: machine.price_usd_per_gpu_hour)

    def powers(self) -> dict[str, float | None]:
        """Return what a GPU, and the rest of a node for it, draw at most: means over nodes, or None."""

        def host_w(machine: Cluster) -> float | None:
            limit_w, node_w = machine.device.power_limit_w, machine.node_power_w
            return None if node_w is None or not limit_w else node_w / machine.gpus_per_node - limit_w

        return {
            "power_limit_w_per_gpu": self._mean(lambda machine: machine.device.power_limit_w or None),
            "host_power_w_per_gpu": self._mean(host_w),
        }

    def _mean(self, figure: Callable[[Cluster], float | None]) -> float | None:
        """Return the mean of *figure* over the nodes; None if that of one kind is not known."""
        found = [figure(self.kind_of(node)) for node in range(self.n_nodes if self.others else 1)]
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if len(known) == len(found) else None

    def kind_at(self, gpu: int) -> int:
        """Return the place in ``kinds`` of the kind of *gpu*."""
        if not self.others:
            return 0
        names = [kind.device.name for kind in self.kinds]
        return names.index(self.kind_of(self.node_of(gpu)).device.name)

    def node_of(self, gpu: int) -> int:
        """Return the node that *gpu* is in."""
        return gpu // self.gpus_per_node

    def sized(self, n_gpus: int) -> Cluster:
        """Return the same machine with *n_gpus* devices. Raises CatalogError if it cannot have that many."""
        if n_gpus < 1:
            raise CatalogError(f"{n_gpus} GPUs: a machine has at least 1")
        if self.fabric_spec.links and n_gpus != self.n_gpus:
            raise CatalogError(
                f"cluster {self.name} has its {self.n_gpus} GPUs wired link by link and cannot be resized to "
                f"{n_gpus}; use --gpus {self.n_gpus} or describe the fabric by kind"
            )
        if self.nic is None and n_gpus > self.gpus_per_node and not self.cores:
            raise CatalogError(
                f"cluster {self.name} is one node of {self.gpus_per_node} GPUs without NICs; "
                f"{n_gpus} do not fit"
            )
        if not self.cores:
            return replace(self, n_gpus=n_gpus)
        share = processor_share(self.cores, n_gpus) / processor_share(self.cores, self.n_gpus)
        memory_bytes = self.device.memory_bytes * self.n_gpus // n_gpus
        device = replace(self.device.shared(share), memory_bytes=memory_bytes)
        return replace(self, n_gpus=n_gpus, gpus_per_node=n_gpus, device=device)

    def describe(self) -> dict[str, Any]:
        """Return the machine, with every figure, their digest and every source, as plain JSON types."""
        return {
            "name": self.name,
            "description": self.description,
            "n_gpus": self.n_gpus,
            "n_nodes": self.n_nodes,
            "gpus_per_node": self.gpus_per_node,
            "gpus_per_tray": self.gpus_per_tray,
            "nics_per_node": self.nics_per_node,
            "nics_used": self.nics_used,
            "rings_out": self.rings_out,
            "cpu": self.cpu,
            "cores": self.cores,
            "time_slice_s": self.time_slice_s,
            "device": self.device.describe(),
            "intra": self.intra.describe(),
            "node": self.node.describe(),
            "nic": self.nic.describe() if self.nic else None,
            "others": [{"machine": other.machine.name, "nodes": other.nodes} for other in self.others],
            "fabric": self.fabric_spec.describe() | {"sources": self._fabric_sources()},
            "price_usd_per_gpu_hour": self.mean_price_usd_per_gpu_hour,
            **self.powers(),
            "node_memory_bytes": self.node_memory_bytes,
            "digest": digest(self),
            "sources": dict(self.sources),
        }

    def _fabric_sources(self) -> dict[str, str]:
        """Return the sources of the fabric's figures, by the names in ``FabricSpec.describe``."""
        names = {"hop_latency": "hop_latency_s"}
        keys = (key.removeprefix("fabric.") for key in self.sources if key.startswith("fabric."))
        return {names.get(key, key): self.sources[f"fabric.{key}"] for key in keys}


def processor_share(cores: int, n_processes: int) -> float:
    """Return how much of a core each of *n_processes* single-threaded processes gets.

    Measured with two cores: two processes each run as fast as one alone, four run exactly twice as slow.

    >>> processor_share(2, 2), processor_share(2, 4)
    (1.0, 0.5)
    """
    return min(1.0, cores / n_processes)


WORDS: Final = frozenset(
    {"name", "description", "sources", "power_limit_w", "node_power_w", "node_memory_bytes", "gpus_per_tray"}
)
"""What a machine and its parts say of themselves that no time depends on."""

CALIBRATED: Final = frozenset({"factors", "transfer_factors", "uncalibrated"})
"""What a calibration puts on a machine, which stays the same machine."""

LENGTH: Final = 16
"""Hexadecimal digits of a digest."""


@lru_cache(maxsize=64)
def digest(machine: Cluster) -> str:
    """Return the digest of a cluster: of its figures, measured tables included, and of its size."""
    text = json.dumps(_plain(machine), sort_keys=True)
    return sha256(text.encode()).hexdigest()[:LENGTH]


def _plain(value: Any) -> Any:
    """Return *value* as plain JSON types, without words."""
    if is_dataclass(value):
        said = (field.name for field in fields(value))
        return {name: _plain(getattr(value, name)) for name in said if name not in WORDS | CALIBRATED}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
