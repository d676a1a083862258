"""Devices, NVLinks and processors as tools name them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

CAPABILITIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "70": "v100-32gb",
        "80": "a100-80gb",
        "86": "a40",
        "89": "l40s",
        "90": "h100-sxm",
        "100": "b200-sxm",
        "103": "b300-sxm",
    }
)
"""By compute capability: the device of the catalogue that is meant where nothing else says which."""

FAMILIES: Final[Mapping[str, tuple[str, float, int]]] = MappingProxyType(
    {
        "v100": ("nvlink2", 25, 100),
        "a100": ("nvlink3", 25, 200),
        "a40": ("nvlink3-bridge", 14.0625, 200),
        "a6000": ("nvlink3-bridge", 14.0625, 200),
        "rtx-3090": ("nvlink3-bridge", 14.0625, 100),
        "h100": ("nvlink4", 25, 400),
        "h200": ("nvlink4", 25, 400),
        "h20": ("nvlink4", 25, 400),
        "h800": ("nvlink4-h800", 25, 400),
        "gh200": ("nvlink4", 25, 400),
        "b200": ("nvlink5", 50, 400),
        "b300": ("nvlink5", 50, 800),
        "gb200": ("nvlink5", 50, 400),
        "gb300": ("nvlink5", 50, 800),
    }
)
"""By how the name of a device starts: its link, GB/s of one NVLink per direction, and Gb/s of the NICs of its
time (NVIDIA data sheets; bridges of A40, A6000 and RTX 3090 have 112.5 GB/s both ways in four links)."""

LINKS_TO_SWITCH: Final[Mapping[int, tuple[str, str]]] = MappingProxyType(
    {
        12: ("80", "12 NVLinks: an A100; with 40 GB give --device a100-40gb"),
        18: ("90", "18 NVLinks: an H100; for H200, H20, Blackwell give --device"),
    }
)
"""NVLinks per GPU where all reach all, the compute capability they are taken for, and how sure that is."""

MOST_LINKS: Final = 18
"""Most NVLinks of one GPU; more than that to its peers together means that a switch is between them."""

NICS: Final[Mapping[str, Mapping[int, str]]] = MappingProxyType(
    {
        "infiniband": {100: "ib-edr", 200: "ib-hdr", 400: "ib-ndr", 800: "ib-xdr"},
        "roce": {100: "roce-100", 200: "roce-200", 400: "roce-400"},
        "efa": {100: "efa-p5", 200: "efa-p5en", 400: "efa-p6"},
        "ethernet": {10: "ethernet-10", 25: "ethernet-25", 100: "ethernet-100"},
    }
)
"""Links of the catalogue by kind of NIC and Gb/s."""

MAKERS: Final[Mapping[str, str]] = MappingProxyType({"AuthenticAMD": "amd", "GenuineIntel": "intel"})
"""Makers of processors as NCCL's topology file names them."""


def family(device: str) -> tuple[str, float, int] | None:
    """Return link, GB/s of one NVLink and Gb/s of a NIC of *device*, None where it has no NVLink."""
    return next((meant for start, meant in FAMILIES.items() if device.startswith(start)), None)
