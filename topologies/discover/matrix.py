"""Reads the text of ``nvidia-smi topo -m``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Final

from foretrace.topologies.discover.found import Wiring
from foretrace.topologies.discover.known import LINKS_TO_SWITCH, MOST_LINKS
from foretrace.topologies.errors import CatalogError

NEAR: Final = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")
"""How far a NIC is from a GPU, nearest first: legend of ``nvidia-smi topo -m``; SOC is SYS of old drivers."""

BESIDE: Final = NEAR.index("PXB")
"""Behind the same PCIe switches: NICs that NCCL gives to a GPU before any other."""

_CELL: Final = re.compile(r"\bX\b|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC")
"""An entry of the matrix, also where a terminal has glued two together."""


def from_matrix(content: str) -> Wiring:
    """Return the wiring that *content* shows; it may stand in the midst of a log.

    Raises:
        CatalogError: rows or entries are missing: the text is cut off.
    """
    # Terminals underline the header, and logs keep the codes for it.
    plain = re.sub(r"\x1b\[[0-9;]*m", "", content)
    lines = [line.split() for line in plain.splitlines()]
    head = next((at for at, words in enumerate(lines) if words[:1] == ["GPU0"]), None)
    if head is None:
        return Wiring(n_gpus=0)
    words = lines[head]
    # After the NICs come columns of affinities, "CPU Affinity" first, which are no distances.
    columns = words[: words.index("CPU")] if "CPU" in words else words
    rows = _rows(plain.splitlines()[head + 1 :], columns)
    gpus = [name for name in columns if re.fullmatch(r"GPU\d+", name)]
    # Only rows of GPUs have to be whole: of NICs a lone "PIX" is looked for, and may be missing.
    for name in gpus:
        if len(found := rows.get(name, [])) < len(columns):
            raise CatalogError(
                f"row {name} of the matrix has {len(found)} entries for {len(columns)} columns: "
                "the text is cut off"
            )
    wiring = Wiring(n_gpus=len(gpus))
    for (a, one), (b, _) in combinations(enumerate(gpus), 2):
        if rows[one][b].startswith("NV"):
            wiring.between[a, b] = int(rows[one][b][2:])
    serving, others = _nics(rows, gpus, columns)
    wiring.nics, wiring.n_other_nics = [0.0] * serving, others
    _lift_switch(wiring)
    return wiring


def _rows(lines: Sequence[str], columns: Sequence[str]) -> dict[str, list[str]]:
    """Return the entries of each row; a line that starts with an entry goes on with the row before it."""
    rows: dict[str, list[str]] = {}
    name = ""
    for line in lines:
        words = line.split()
        if not words or words[0] == "Legend:":
            if rows:
                break
            continue
        if words[0] in columns:
            name = words[0]
            rows[name] = _CELL.findall(line.partition(name)[2])
        elif name and _CELL.match(words[0]):
            rows[name] += _CELL.findall(line)
    return {name: cells[: len(columns)] for name, cells in rows.items()}


def _nics(rows: Mapping[str, list[str]], gpus: list[str], columns: list[str]) -> tuple[int, int]:
    """Return how many NICs serve GPUs, and how many others are listed.

    Those beside a GPU serve, or, where none is, the nearest; not one that the matrix says no distance of.
    More than two on one PCIe bridge are taken for functions of one card.
    """
    names = columns[len(gpus) :]
    distance = {
        name: min(near)
        for j, name in enumerate(names)
        if (near := [NEAR.index(cell) for gpu in gpus if (cell := rows[gpu][len(gpus) + j]) in NEAR])
    }
    limit = max(BESIDE, min(distance.values(), default=BESIDE))
    serving = [name for name in names if distance.get(name, len(NEAR)) <= limit]
    cards: list[list[str]] = []
    for name in serving:
        place = columns.index(name)
        card = next((c for c in cards if rows.get(c[0], [])[place : place + 1] == ["PIX"]), None)
        if card is None:
            cards.append([name])
        else:
            card.append(name)
    return sum(1 if len(card) > 2 else len(card) for card in cards), len(names) - len(serving)


def _lift_switch(found: Wiring) -> None:
    """Take equal links between all pairs, more than go to that many peers, for those to a switch."""
    n = found.n_gpus
    counts = set(found.between.values())
    if len(found.between) < n * (n - 1) // 2 or len(counts) != 1:
        return
    links = counts.pop()
    if links * (n - 1) > MOST_LINKS or links in LINKS_TO_SWITCH:
        found.to_switch = dict.fromkeys(range(n), links)
        found.between = {}
        found.capability, found.guessed = LINKS_TO_SWITCH.get(links, ("", ""))
