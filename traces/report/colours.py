"""Colours and hatches of kinds: solid is working, hatched is waiting, hue and direction say for what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

_PALE: Final = {"exposed": 0.62, "wait": 0.9}
"""How much of the background is in a hatch's ground, by state; as in ``traces/viewer/palette.js``."""


@dataclass(frozen=True, slots=True)
class Fill:
    """How an area is filled: a colour, and for a state a hatch on it."""

    colour: str  # colour of the area, ``#rrggbb``
    hatch: str = ""  # direction of the hatch as plotly spells it, "" if solid
    line: str = ""  # colour of the hatch


def palette() -> dict[str, Any]:
    """Return the colours that the page and the figures share: by theme, and the hatch of each state."""
    colours: dict[str, Any] = json.loads(
        (files("foretrace.traces.viewer") / "palette.json").read_text("utf-8")
    )
    return colours


def fill(entry: Mapping[str, Any], colours: Mapping[str, Any], theme: str) -> Fill:
    """Return how a kind is filled.

    Args:
        entry: one of the entries of ``traces.report.kinds.Kinds``.
        colours: what ``palette`` returns.
        theme: ``"light"`` or ``"dark"``.
    """
    own = colours[theme]
    if entry["group"] == "compute":
        return Fill(own["compute"][entry["colour"]])
    axis_colour = own["axes"].get(entry["axis"], own["axes"]["world"])
    if entry["group"] == "communication":
        return Fill(axis_colour)
    if entry["id"] in own["idle"]:
        ground, line = own["idle"][entry["id"]]
        return Fill(ground, colours["hatch"][entry["id"]], line)
    ground = mix(axis_colour, own["surface"]["bg"], _PALE[entry["id"].partition(":")[0]])
    return Fill(ground, colours["hatch"].get(entry["axis"], colours["hatch"]["world"]), axis_colour)


def mix(first: str, second: str, share: float) -> str:
    """Return a blend of two colours; *share* is how much of the second.

    >>> mix("#000000", "#ffffff", 0.5)
    '#808080'
    """
    pairs = ((int(first[i : i + 2], 16), int(second[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a * (1 - share) + b * share):02x}" for a, b in pairs)
