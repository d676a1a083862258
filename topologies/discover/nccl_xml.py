"""Reads NCCL's XML: what it dumps to ``NCCL_TOPO_DUMP_FILE``, what clouds give to ``NCCL_TOPO_FILE``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

from foretrace.topologies.catalog import device_of_pci_id
from foretrace.topologies.discover.found import Wiring
from foretrace.topologies.discover.known import MAKERS
from foretrace.topologies.errors import CatalogError

NVSWITCH: Final = "0x068000"
"""PCI class of an NVSwitch in NCCL's topology file."""

GPU_CLASSES: Final = ("0x0302", "0x0300")
NIC_CLASSES: Final = ("0x0207", "0x0200")
"""PCI classes of 3D controllers and displays, of InfiniBand and Ethernet, where a file names nothing else."""

AMAZON: Final = "0x1d0f"
"""PCI vendor of EFA."""

GENERATIONS: Final = {2.5: 1, 5: 2, 8: 3, 16: 4, 32: 5, 64: 6}
"""Generation of PCIe by GT/s of a lane (PCI-SIG)."""


def from_xml(content: str, path: Path) -> Wiring:
    """Return the wiring that *content* of *path* describes. Raises CatalogError if it is not XML."""
    try:
        system = ET.fromstring(content)
    except ET.ParseError as error:
        raise CatalogError(f"{path} is not XML: {error}") from None
    found = Wiring(n_gpus=0)
    places: dict[str, int] = {}
    gpus: list[ET.Element] = []
    for pci in system.iter("pci"):
        for gpu in pci.findall("gpu"):
            places[pci.get("busid", "")] = len(gpus)
            gpus.append(gpu)
            found.capability = gpu.get("sm", found.capability)
            _note_card(found, pci)
    _links(found, gpus, places)
    found.n_gpus = len(gpus)
    nets = list(system.iter("net"))
    found.nic = _nic_kind(system)
    # NCCL writes Mb/s.
    speeds = [float(net.get("speed", "0")) / 1000 for net in nets]
    # Slower cards are counted apart, as those that serve no GPU.
    found.nics = [speed for speed in speeds if speed == max(speeds)]
    found.n_other_nics = len(speeds) - len(found.nics)
    found.gpu_direct = not nets or any(net.get("gdr", "1") != "0" for net in nets)
    found.cpu = next(
        (MAKERS[cpu.get("vendor", "")] for cpu in system.iter("cpu") if cpu.get("vendor") in MAKERS), ""
    )
    if not gpus:
        _places_only(found, system)
    return found


def _note_card(found: Wiring, pci: ET.Element) -> None:
    """Take device and generation of PCIe from the place of a GPU."""
    found.device = device_of_pci_id(pci.get("device", "")) or found.device
    if speed := re.match(r"[\d.]+", pci.get("link_speed", "")):
        found.pcie = GENERATIONS.get(float(speed[0]), found.pcie)


def _nic_kind(system: ET.Element) -> str:
    """Return what the NICs are: those of AWS, sockets, or by the class of their PCI function."""
    cards = [pci for pci in system.iter("pci") if pci.get("class", "").startswith(NIC_CLASSES)]
    names = [net.get("name", "") for net in system.iter("net")]
    if any(pci.get("vendor") == AMAZON for pci in cards):
        return "efa"
    if names and all(re.match(r"e(th|n)", name) for name in names):
        return "ethernet"
    ethernet = bool(names and cards) and all(pci.get("class", "").startswith(NIC_CLASSES[1]) for pci in cards)
    return "roce" if ethernet else "infiniband"


def _links(found: Wiring, gpus: list[ET.Element], places: dict[str, int]) -> None:
    """Take the NVLinks of *gpus*, which stand at *places*."""
    for at, gpu in enumerate(gpus):
        for nvlink in gpu.findall("nvlink"):
            links = int(nvlink.get("count", "1"))
            target = places.get(nvlink.get("target", ""))
            if nvlink.get("tclass", "").startswith(NVSWITCH):
                found.to_switch[at] = found.to_switch.get(at, 0) + links
            elif target is not None and at != target:
                pair = (min(at, target), max(at, target))
                # Both ends list the same links: the larger count, not the sum.
                found.between[pair] = max(found.between.get(pair, 0), links)


def _places_only(found: Wiring, system: ET.Element) -> None:
    """Count GPUs and NICs by their PCI classes, in a file that names neither."""
    for pci in system.iter("pci"):
        kind = pci.get("class", "")
        if kind.startswith(GPU_CLASSES):
            found.n_gpus += 1
            _note_card(found, pci)
        # Speeds that were read already are of ``net`` entries; classes are a second-best.
        elif kind.startswith(NIC_CLASSES) and not found.nics:
            found.n_other_nics += 1
    if not found.nics:
        found.nics, found.n_other_nics = [0.0] * found.n_other_nics, 0
    found.template = found.n_gpus > 0
