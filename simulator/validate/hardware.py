"""Which device of the catalogue a table of measurements speaks of."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final

from foretrace.simulator.errors import TableError
from foretrace.topologies.catalog import device_names, load_cluster, load_device, names
from foretrace.topologies.device import Device
from foretrace.topologies.errors import CatalogError
from foretrace.topologies.reader import read_toml
from foretrace.topologies.words import machine

PATTERNS: Final = (
    (r"gb300", "gb300"),
    (r"gb200", "gb200"),
    (r"b300", "b300-sxm"),
    (r"b200", "b200-sxm"),
    (r"gh200", "gh200"),
    (r"h200", "h200-sxm"),
    (r"h100.*nvl\b", "h100-nvl"),
    (r"h100.*pcie", "h100-pcie"),
    (r"h100.*(96 ?gb|hbm2e)", "h100-96gb"),
    (r"h100", "h100-sxm"),
    (r"h800", "h800"),
    (r"h20\b", "h20"),
    (r"a(100|800).*pcie", "a100-pcie"),
    (r"a(100|800).*40 ?gb", "a100-40gb"),
    (r"a(100|800)", "a100-80gb"),
    (r"v100.*16 ?gb", "v100-16gb"),
    (r"v100", "v100-32gb"),
    (r"p100", "p100"),
    (r"l40s", "l40s"),
    (r"l40", "l40"),
    (r"\bl4\b", "l4"),
    (r"\bt4\b", "t4"),
    (r"a10g", "a10g"),
    (r"\ba10\b", "a10"),
    (r"\ba30\b", "a30"),
    (r"6000.?ada", "rtx-6000-ada"),
    (r"a6000", "a6000"),
    (r"a40", "a40"),
    (r"3090", "rtx-3090"),
    (r"4090", "rtx-4090"),
    (r"5090", "rtx-5090"),
    (r"mi250", "mi250x"),
    (r"mi300x?\b", "mi300x"),
    (r"mi325", "mi325x"),
    (r"mi355", "mi355x"),
)
"""What people write, and the device they mean; the first that is found counts."""


@cache
def device_of(hardware: str) -> Device:
    """Return the device that *hardware* names: of the catalogue, as tables write it, or in a TOML file.

    A machine of the catalogue, or the file of a machine, stands for its device.

    Raises:
        TableError: no device of the catalogue is meant.
        TopologyError: a file does not describe a device or a machine.

    >>> device_of("H100-SXM-80GB (8xH100 nodes)").name
    'h100-sxm'
    """
    if hardware.endswith(".toml"):
        is_machine = not read_toml(Path(hardware)).keys().isdisjoint(("device", "gpus_per_node"))
        return load_cluster(hardware).device if is_machine else load_device(hardware)
    name = hardware.lower().replace("_", "-")
    if name in names():
        return load_cluster(name).device
    if name in device_names():
        return load_device(name)
    for pattern, device in PATTERNS:
        if re.search(pattern, name):
            return load_device(device)
    try:
        return machine(name, 1, 1).device  # an instance of a cloud, which is named without its GPU
    except CatalogError:
        raise TableError(f"hardware {hardware!r} is not a device of the catalogue") from None
