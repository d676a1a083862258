"""Devices, NVLinks and processors as tools name them, as ``known.toml`` lists and explains them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from foretrace.door import own_table

_KNOWN: Final = own_table("topologies/discover/known.toml")

CAPABILITIES: Final[Mapping[str, str]] = _KNOWN["capabilities"]
FAMILIES: Final[Mapping[str, tuple[str, float, int]]] = {
    start: (link, rate, nic) for start, (link, rate, nic) in _KNOWN["families"].items()
}
LINKS_TO_SWITCH: Final[Mapping[int, tuple[str, str]]] = {
    int(n_links): (capability, sure) for n_links, (capability, sure) in _KNOWN["links_to_switch"].items()
}
NICS: Final[Mapping[str, Mapping[int, str]]] = {
    kind: {int(rate): link for rate, link in links.items()} for kind, links in _KNOWN["nics"].items()
}
MAKERS: Final[Mapping[str, str]] = _KNOWN["makers"]
MOST_LINKS: Final = 18
"""Most NVLinks of one GPU; more than that to its peers together means that a switch is between them."""


def family(device: str) -> tuple[str, float, int] | None:
    """Return link, GB/s of one NVLink and Gb/s of a NIC of *device*, None where it has no NVLink."""
    return next((meant for start, meant in FAMILIES.items() if device.startswith(start)), None)
