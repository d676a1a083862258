"""Reads how one node is wired from what its tools print: NCCL's topology XML, ``nvidia-smi topo -m``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

from topologies.catalog import link_names, load_link
from topologies.errors import CatalogError
from topologies.node import CUBE_LINKS

DEVICES: Final = {
    "70": ("v100-32gb", "nvlink2", 25),
    "80": ("a100-80gb", "nvlink3", 25),
    "86": ("a40", "nvlink3-bridge", 28),
    "89": ("l40s", "pcie4", 0),
    "90": ("h100-sxm", "nvlink4", 25),
    "100": ("b200-sxm", "nvlink5", 50),
    "103": ("b300-sxm", "nvlink5", 50),
}
"""By compute capability: the device and link of the catalogue that are meant, and GB/s of one NVLink per
direction (NVIDIA data sheets). The memory of a device, or its form, NCCL does not say."""

FAMILIES: Final = {
    "v100": ("nvlink2", 25),
    "a100": ("nvlink3", 25),
    "h100": ("nvlink4", 25),
    "h20": ("nvlink4", 25),
    "h800": ("nvlink4-h800", 25),
    "gh200": ("nvlink4", 25),
    "b": ("nvlink5", 50),
    "gb": ("nvlink5", 50),
}
"""By how the name of a device starts: its link and GB/s of one NVLink."""

LINKS_TO_SWITCH: Final = {12: "80", 18: "90"}
"""NVLinks per GPU of nodes where all reach all: A100, Hopper. Blackwell has 18, too: give ``--device``."""

PCIE_GB_PER_S: Final = 32
"""PCIe 4.0, 16 lanes; neither file says which PCIe it is."""

NVSWITCH: Final = "0x068000"
"""PCI class of an NVSwitch in NCCL's topology file."""

MAKERS: Final = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}
"""Makers of processors as NCCL's topology file names them."""

NEAR: Final = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""How far a NIC is from a GPU, nearest first: legend of ``nvidia-smi topo -m``."""


@dataclass(slots=True, kw_only=True)
class Wiring:
    """What was found of one node.

    Attributes:
        n_gpus: GPUs.
        capability: compute capability without the point, e.g. ``"90"``; empty if not said.
        to_switch: NVLinks from each GPU to switches.
        between: NVLinks between pairs of GPUs.
        nics: Gb/s of each NIC; 0 if not said.
        gpu_direct: whether NICs reach the memory of GPUs; taken so if not said.
        cpu: who made the processor, one of ``topologies.cluster.CPUS``; empty if not said.
    """

    n_gpus: int
    capability: str = ""
    to_switch: dict[int, int] = field(default_factory=dict)
    between: dict[tuple[int, int], int] = field(default_factory=dict)
    nics: list[float] = field(default_factory=list)
    gpu_direct: bool = True
    cpu: str = ""


def discover(path: str | Path) -> Wiring:
    """Return the wiring that a file describes: XML, or the text of ``nvidia-smi topo -m``.

    Raises:
        CatalogError: it cannot be read, is neither, or says in words what should be a number.
    """
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogError(f"{path} cannot be read: {error}") from None
    try:
        found = _from_xml(content, path) if content.lstrip().startswith("<") else _from_matrix(content)
    except ValueError as error:
        raise CatalogError(f"{path}: a count or speed is no number: {error}") from None
    if not found.n_gpus:
        raise CatalogError(f"{path} names no GPU: give NCCL_TOPO_DUMP_FILE's XML or `nvidia-smi topo -m`")
    return found


def _from_xml(content: str, path: Path) -> Wiring:
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
    for at, gpu in enumerate(gpus):
        for nvlink in gpu.findall("nvlink"):
            links = int(nvlink.get("count", "1"))
            target = places.get(nvlink.get("target", ""))
            if nvlink.get("tclass", "").startswith(NVSWITCH):
                found.to_switch[at] = found.to_switch.get(at, 0) + links
            elif target is not None and at != target:
                pair = (min(at, target), max(at, target))
                found.between[pair] = max(found.between.get(pair, 0), links)
    found.n_gpus = len(gpus)
    nets = list(system.iter("net"))
    found.nics = [float(net.get("speed", "0")) / 1000 for net in nets]
    found.gpu_direct = not nets or any(net.get("gdr", "1") != "0" for net in nets)
    found.cpu = next(
        (MAKERS[cpu.get("vendor", "")] for cpu in system.iter("cpu") if cpu.get("vendor") in MAKERS), ""
    )
    return found


def _from_matrix(content: str) -> Wiring:
    """Read the matrix: rows and columns are GPUs and NICs, ``NV4`` is four NVLinks."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", content)
    rows = {
        words[0]: words[1:]
        for line in plain.splitlines()
        if (words := line.split()) and re.fullmatch(r"(GPU|NIC|mlx5_)\d+", words[0]) and len(words) > 1
    }
    head = next((line.split() for line in plain.splitlines() if line.split()[:1] == ["GPU0"]), [])
    columns = [name for name in head if name in rows or re.fullmatch(r"(GPU|NIC|mlx5_)\d+", name)]
    gpus = [name for name in columns if name.startswith("GPU")]
    found = Wiring(n_gpus=len(gpus), nics=[0.0 for name in columns if not name.startswith("GPU")])
    for a, name in enumerate(gpus):
        for b, cell in enumerate(rows.get(name, [])[: len(gpus)]):
            if a < b and (links := re.fullmatch(r"NV(\d+)", cell)):
                found.between[a, b] = int(links[1])
    _lift_switch(found)
    return found


def _lift_switch(found: Wiring) -> None:
    """Take equal links between all pairs, as many as a GPU has, for those to a switch."""
    n = found.n_gpus
    counts = set(found.between.values())
    if (
        len(found.between) == n * (n - 1) // 2
        and len(counts) == 1
        and (links := counts.pop()) in LINKS_TO_SWITCH
    ):
        found.to_switch = dict.fromkeys(range(n), links)
        found.between = {}
        found.capability = LINKS_TO_SWITCH[links]


def to_toml(found: Wiring, device: str = "") -> str:
    """Return a machine in the form of ``docs/topologies.md``.

    Args:
        found: what was read.
        device: a device of the catalogue, where the file does not say or says too little.

    Raises:
        CatalogError: nothing says which device it is, or GPUs are joined by no link that can be told.
    """
    known = {name: (link, width) for name, link, width in DEVICES.values()}
    name, link, width = DEVICES.get(found.capability, ("", "", 0))
    if device:
        begins = (meant for start, meant in FAMILIES.items() if device.startswith(start))
        link, width = known.get(device) or next(begins, (link or "nvlink4", width or 25))
        name = device
    if not name:
        raise CatalogError("the file does not say which GPU this is; give --device, e.g. --device h100-sxm")
    lines = [f'device = "{name}"', f"gpus_per_node = {found.n_gpus}", f"n_gpus = {found.n_gpus}"]
    if found.cpu:
        lines.append(f'cpu = "{found.cpu}"')
    inside, listed = _gpu_links(found, link, width)
    if found.nics and listed:
        inside.append(f"# its {len(found.nics)} NICs are left out: where links are listed, list theirs, too")
    elif found.nics:
        lines += _network(found)
    return "\n".join([*lines, *inside, *listed]) + "\n"


def _network(found: Wiring) -> list[str]:
    """Return the lines about NICs and how they are wired."""
    gbit = max(found.nics) or 400
    said = "as the file says" if max(found.nics) else "not in the file: check it"
    figures = f'bandwidth = "{gbit:g} Gb/s", latency = "2.7 us", kind = "infiniband"'
    if not found.gpu_direct:
        figures += ", gpu_direct = false"
    return [
        f"nic = {{ {figures} }} # {said}",
        f"nics_per_node = {len(found.nics)}",
        'fabric = { kind = "rail" }',
    ]


def _gpu_links(found: Wiring, link: str, width: int) -> tuple[list[str], list[str]]:
    """Return the lines about links between GPUs: those by kind, and those that list each."""
    if found.to_switch and len(set(found.to_switch.values())) == 1 and not found.between:
        return [f'intra = "{link}" # {found.to_switch[0]} NVLinks from each GPU to switches'], []
    if not found.between and not found.to_switch:
        return ['intra = "pcie4" # no NVLink in the file'], []
    if not width:
        raise CatalogError(f"NVLinks between GPUs that have none ({link}); give --device")
    if named := _named(found, link, width):
        return named, []
    listed: list[str] = []
    for gpu, links in sorted(found.to_switch.items()):
        listed += ["", *_link(f"gpu:{gpu}", "nvswitch:0", links * width)]
    if not found.to_switch:  # pairs without an NVLink meet over PCIe
        for gpu in range(found.n_gpus):
            listed += ["", *_link(f"gpu:{gpu}", "host:0", PCIE_GB_PER_S)]
    for (a, b), links in sorted(found.between.items()):
        listed += ["", *_link(f"gpu:{a}", f"gpu:{b}", links * width)]
    return [f'intra = "{link}"'], listed


def _named(found: Wiring, link: str, width: int) -> list[str]:
    """Return the lines about a wiring that has a name, nothing for any other.

    Neighbours over a bridge, all pairs alike, or the cube mesh of a DGX-1.
    """
    n, counts = found.n_gpus, set(found.between.values())
    if found.to_switch:
        return []
    if found.between == {(a, b): links for a, b, links in CUBE_LINKS}:
        return [f'intra = "{link}"', 'node = { kind = "cube-mesh" }']
    if len(counts) != 1:
        return []
    links = counts.pop()
    if sorted(found.between) == [(a, a + 1) for a in range(0, n, 2)]:
        intra = f'{{ kind = "nvlink", bandwidth = "{links * width} GB/s", latency = "1 us" }}'
        bridge = f"{link}-bridge"
        if bridge in link_names() and load_link(bridge).bandwidth_bytes_per_s == links * width * 1e9:
            intra = f'"{bridge}"'
        return [f"intra = {intra}", 'node = { kind = "pairs", host = "pcie4" }']
    if len(found.between) == n * (n - 1) // 2 and load_link(link).bandwidth_bytes_per_s == (
        (n - 1) * links * width * 1e9
    ):
        return [f'intra = "{link}"', 'node = { kind = "full-mesh" }']
    return []


def _link(a: str, b: str, gigabytes_per_s: int) -> list[str]:
    return ["[[links]]", f'between = ["{a}", "{b}"]', f'bandwidth = "{gigabytes_per_s} GB/s"']
