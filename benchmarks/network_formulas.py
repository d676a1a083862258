"""Draws how far each formula of the network is from what was measured: docs/network-evidence.md.

    python benchmarks/network_formulas.py picture.svg collectives.csv "A100 DGX=dgx-a100-staged"

Tables are those that ``validate.py collectives`` reads; what has a ``=`` is its ``--machine``. Every
row counts for the formula that answered it, and a family of one row as much as others. A dot is a row, to
the right where it was simulated too long; a bar is the middle of a formula's rows.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import median

from measured.collectives import score_collectives

from foretrace.simulator.network.nccl import ALGORITHMS, TEXTBOOK
from foretrace.simulator.validate.scores import Scored
from foretrace.traces.report.format import format_share

WIDTH, LEFT, ROW = 860, 250, 26
MOST = math.log(16)
KINDS = {"alltoall": "all_to_all", "send_recv": "send"}
WITHOUT = ("collnet", "pat", *TEXTBOOK)
"""Formulas of which no row of a table may speak."""


def formula(row: Scored) -> str:
    """Return the formula that answered *row*, as docs/network-evidence.md calls it.

    Inside a node it is that of its link and operation, between nodes an algorithm in a protocol.
    """
    kind = row.what.split(" of ")[0].lower()
    by, _, how = row.by.partition("/")
    if by == "experts":
        return f"experts over {'rails' if how == 'rails' else 'NICs alone'}"
    if row.group == "multi-node":
        return f"{by}, {how.upper() if how.startswith('ll') else how.capitalize()}"
    link = "PCIe" if by.startswith("pcie") else "NVLink"
    kinds = "sends" if kind == "send_recv" else KINDS.get(kind, kind)
    return f"{how} over {link}: {kinds}"


def families(rows: Iterable[Scored]) -> list[float]:
    """Return the median error of each family, the least first."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        found[row.family].append(abs(row.log_ratio))
    return sorted(median(errors) for errors in found.values())


def grouped(rows: Sequence[Scored]) -> dict[str, list[Scored]]:
    """Return the rows of each formula, those inside nodes first."""
    found: dict[str, list[Scored]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.group == "multi-node", formula(row))):
        found[formula(row)].append(row)
    return found


def table(rows: Sequence[Scored]) -> str:
    """Return one line per formula: families, rows, the median and worst family, and the bias."""
    lines = ["| formula | families | rows | median of families | worst | bias |", "|---|---|---|---|---|---|"]
    for name, found in grouped(rows).items():
        errors = families(found)
        bias = math.expm1(median(row.log_ratio for row in found))
        lines.append(
            f"| {name} | {len(errors)} | {len(found)} | {format_share(median(errors), '.0f')} "
            f"| {format_share(errors[-1], '.0f')} | {format_share(bias, '+.0f')} |"
        )
    known = {row.by.partition("/")[0] for row in rows}
    silent = [name for name in (*ALGORITHMS, *TEXTBOOK) if name in WITHOUT and name not in known]
    return "\n".join([*lines, f"| {', '.join(silent)} | 0 | 0 | no row to hold them against | | |"])


def picture(rows: Sequence[Scored]) -> str:
    """Return an SVG with a line of dots per formula."""
    found = grouped(rows)
    height = 30 + ROW * len(found) + 50
    view = f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {view}>']
    parts.append(f'<rect width="{WIDTH}" height="{height}" fill="white"/>')
    for factor in (0.1, 0.25, 0.5, 0.8, 1, 1.25, 2, 4, 10):
        x = _x(math.log(factor))
        shade = "#888" if factor == 1 else "#ddd"
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="24" y2="{height - 44}" stroke="{shade}"/>')
        name = "" if factor in (0.8, 1.25) else f"{factor:g} x"
        parts.append(f'<text x="{x:.1f}" y="{height - 28}" text-anchor="middle">{name}</text>')
    parts.append(
        f'<text x="{_x(0):.1f}" y="{height - 8}" text-anchor="middle">simulated over measured time</text>'
    )
    for at, (name, dots) in enumerate(found.items()):
        y = 40 + ROW * at
        parts.append(f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        for row in dots:
            parts.append(
                f'<circle cx="{_x(row.log_ratio):.1f}" cy="{y}" r="3" fill="#2b7bb9" fill-opacity="0.3"/>'
            )
        middle = _x(median(row.log_ratio for row in dots))
        parts.append(
            f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{y - 8}" y2="{y + 8}" stroke="#d95f02"/>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(log_ratio: float) -> float:
    bounded = max(-MOST, min(MOST, log_ratio))
    return LEFT + (1 + bounded / MOST) / 2 * (WIDTH - LEFT - 20)


def main(output: str, words: Sequence[str]) -> None:
    """Print the table for the paths among *words* and write the picture to *output*."""
    machines = [(before, name) for before, equals, name in (word.rpartition("=") for word in words) if equals]
    paths = [word for word in words if "=" not in word]
    rows = [row for path in paths for row in score_collectives(path, machines).rows]
    Path(output).write_text(picture(rows), encoding="utf-8")
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
