"""What the tools of a node say about it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Wiring:
    """What was found of one node.

    Attributes:
        n_gpus: GPUs.
        device: the GPU as the catalogue names it, by its PCI id; empty if not said.
        capability: compute capability without the point, e.g. ``"90"``; empty if not said.
        to_switch: NVLinks from each GPU to switches.
        between: NVLinks between pairs of GPUs.
        nics: Gb/s of each NIC that serves GPUs; 0 if not said.
        nic: kind of those NICs, a key of ``known.NICS``.
        n_other_nics: NICs that were listed and serve none.
        pcie: generation of PCIe that GPUs are attached by; 0 if not said.
        gpu_direct: whether NICs reach the memory of GPUs; taken so if not said.
        cpu: who made the processor, one of ``topologies.cluster.CPUS``; empty if not said.
        template: it names places and no NVLinks, as the files that clouds give to ``NCCL_TOPO_FILE``.
        guessed: how the device was told, where the file does not name it; for people.
    """

    n_gpus: int
    device: str = ""
    capability: str = ""
    to_switch: dict[int, int] = field(default_factory=dict)
    between: dict[tuple[int, int], int] = field(default_factory=dict)
    nics: list[float] = field(default_factory=list)
    nic: str = "infiniband"
    n_other_nics: int = 0
    pcie: int = 0
    gpu_direct: bool = True
    cpu: str = ""
    template: bool = False
    guessed: str = ""
