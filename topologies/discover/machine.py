"""Writes what was found of a node as a machine, in the form of ``docs/topologies.md``."""

from __future__ import annotations

from typing import Final

from foretrace.topologies.catalog import link_names, load_device, load_link
from foretrace.topologies.device import Device
from foretrace.topologies.discover.found import Wiring
from foretrace.topologies.discover.known import CAPABILITIES, NICS, family
from foretrace.topologies.errors import CatalogError
from foretrace.topologies.node import CUBE_LINKS

UNBRIDGED: Final = ("a100-pcie", "h100-pcie", "h100-nvl", "a40", "a6000", "rtx-3090")
"""Cards that have NVLinks only where somebody put a bridge on them."""

_USUAL_GBIT: Final = 100
"""Gb/s of a NIC of which the file does not say how fast it is."""


def to_toml(found: Wiring, device: str = "") -> str:
    """Return a machine as text of a TOML file.

    Args:
        found: what was read.
        device: a device of the catalogue, where the file does not say or says too little.

    Raises:
        CatalogError: nothing says which device it is, the catalogue has none of that name, or GPUs are joined
            by NVLinks of a device that has none.
    """
    name = device or found.device or CAPABILITIES.get(found.capability, "")
    if not name:
        raise CatalogError("the file does not say which GPU this is; give --device, e.g. --device h100-sxm")
    card = load_device(name)
    sure = bool(device or found.device)
    guessed = found.guessed or "by its compute capability: give --device if it is another"
    lines = [
        f'device = "{name}"' + ("" if sure else f" # {guessed}"),
        f"gpus_per_node = {found.n_gpus}",
        f"n_gpus = {found.n_gpus}",
    ]
    if found.cpu:
        lines.append(f'cpu = "{found.cpu}"')
    inside, listed = _gpu_links(found, card)
    if found.nics and listed:
        inside.append(f"# its {len(found.nics)} NICs are left out: where links are listed, list theirs, too")
    elif found.nics:
        lines += _network(found, name)
    return "\n".join([*lines, *inside, *listed]) + "\n"


def _network(found: Wiring, device: str) -> list[str]:
    """Return the lines about NICs and how they are wired."""
    meant = family(device)
    said = "as the file says" if max(found.nics) else "not in the file: check it"
    gbit = max(found.nics) or (meant[2] if meant else _USUAL_GBIT)
    known = NICS[found.nic]
    # The link of the catalogue that is nearest in speed; its bandwidth is then set to what was found.
    link = known[min(known, key=lambda width: abs(width - gbit))]
    changed = "" if gbit in known else f', bandwidth = "{gbit:g} Gb/s"'
    changed += "" if found.gpu_direct or not load_link(link).gpu_direct else ", gpu_direct = false"
    others = f" # {found.n_other_nics} more serve no GPU" if found.n_other_nics else ""
    return [
        (f'nic = {{ base = "{link}"{changed} }}' if changed else f'nic = "{link}"') + f" # {said}",
        f"nics_per_node = {len(found.nics)}{others}",
        'fabric = { kind = "rail" }',
    ]


def _gpu_links(found: Wiring, card: Device) -> tuple[list[str], list[str]]:
    """Return the lines about links between GPUs: those by kind, and those that list each."""
    pcie = _pcie(found, card)
    meant = family(card.name)
    if found.template and meant and card.name not in UNBRIDGED:
        return [*_usual(found.n_gpus, meant[0]), "# the file names no NVLinks: those are of the device"], []
    if not found.between and not found.to_switch:
        return [f'intra = "{pcie}" # no NVLink in the file'], []
    if meant is None:
        raise CatalogError(f"NVLinks between GPUs that have none ({card.name}); give --device")
    link, width, _ = meant
    if len(found.to_switch) == found.n_gpus and len(set(found.to_switch.values())) == 1 and not found.between:
        links = found.to_switch[0]
        return [f"{_intra(link, links * width)} # {links} NVLinks from each GPU to switches"], []
    if named := _named(found, link, width, pcie):
        return named, []
    listed: list[str] = []
    for gpu, links in sorted(found.to_switch.items()):
        listed += ["", *_link(f"gpu:{gpu}", "nvswitch:0", links * width)]
    if not found.to_switch:  # pairs without an NVLink meet over PCIe
        host = load_link(pcie).bandwidth_bytes_per_s / 1e9
        for gpu in range(found.n_gpus):
            listed += ["", *_link(f"gpu:{gpu}", "host:0", host)]
    for (a, b), links in sorted(found.between.items()):
        listed += ["", *_link(f"gpu:{a}", f"gpu:{b}", links * width)]
    return [f'intra = "{link}"'], listed


def _pcie(found: Wiring, card: Device) -> str:
    """Return the link of the catalogue for PCIe: the file's generation, else the fastest that *card* has."""
    if found.pcie >= 3:
        return f"pcie{min(found.pcie, 5)}"
    wide = {name: load_link(name).bandwidth_bytes_per_s for name in ("pcie3", "pcie4", "pcie5")}
    # The slowest generation that carries what the card is known to reach; pcie5 if none does.
    return next(name for name, rate in wide.items() if rate >= card.host_bytes_per_s or name == "pcie5")


def _usual(n_gpus: int, link: str) -> list[str]:
    """Return the wiring of *n_gpus* that are sold with *link*."""
    if link != "nvlink2":
        return [f'intra = "{link}"']
    return [f'intra = "{link}"', f'node = {{ kind = "{"cube-mesh" if n_gpus == 8 else "full-mesh"}" }}']


def _intra(link: str, gigabytes_per_s: float) -> str:
    """Return the line about all links of one GPU: *link*, as wide as was found."""
    if load_link(link).bandwidth_bytes_per_s == gigabytes_per_s * 1e9:
        return f'intra = "{link}"'
    return f'intra = {{ base = "{link}", bandwidth = "{gigabytes_per_s:g} GB/s" }}'


def _named(found: Wiring, link: str, width: float, pcie: str) -> list[str]:
    """Return the lines about a wiring that has a name, nothing for any other.

    Neighbours over a bridge, all pairs alike, or the cube mesh of a DGX-1.
    """
    n, counts = found.n_gpus, set(found.between.values())
    if found.to_switch:
        return []
    # The cube mesh comes before the other wirings: its counts are 1 and 2, which none of those has.
    if found.between == {(a, b): links for a, b, links in CUBE_LINKS}:
        return [f'intra = "{link}"', 'node = { kind = "cube-mesh" }']
    if len(counts) != 1:
        return []
    links = counts.pop()
    if sorted(found.between) == [(a, a + 1) for a in range(0, n, 2)]:
        bridge = link if link.endswith("-bridge") else f"{link}-bridge"
        base = bridge if bridge in link_names() else link
        return [_intra(base, links * width), f'node = {{ kind = "pairs", host = "{pcie}" }}']
    # All pairs, alike: those of a full mesh.
    if len(found.between) == n * (n - 1) // 2:
        return [_intra(link, (n - 1) * links * width), 'node = { kind = "full-mesh" }']
    return []


def _link(a: str, b: str, gigabytes_per_s: float) -> list[str]:
    return ["[[links]]", f'between = ["{a}", "{b}"]', f'bandwidth = "{gigabytes_per_s:g} GB/s"']
