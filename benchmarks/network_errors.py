"""Draws how far simulated collectives are from measured ones, and prints the table of docs/network.md.

    python benchmarks/network_errors.py collectives.csv docs/pictures/network-errors.svg

Tables are those that ``foretrace validate collectives`` reads. A dot is a row: its size across, simulated
over measured time upward, both in logarithms.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from html import escape
from pathlib import Path
from statistics import median

from simulator.validate.collectives import validate_collectives
from simulator.validate.scores import Scored, Validation

WIDTH, HEIGHT, LEFT, TOP = 860, 420, 60, 20
SMALLEST, LARGEST = 8, 2**34
MOST = math.log(16)
COLOURS = ("#2b7bb9", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#666666")


def source(row: Scored) -> str:
    """Return the source group of a row and where it was measured."""
    return f"{row.family.partition(' · ')[0]}, {row.group}"


def size_bytes(row: Scored) -> int:
    """Return the size of a row, 0 if its table gives none."""
    word = row.what.split(" of ")[1].split(" bytes")[0]
    return int(word) if word.isdecimal() else 0


def table(validation: Validation) -> str:
    """Return one line per source: families, rows, and the median and worst of their errors."""
    rows: dict[str, list[Scored]] = defaultdict(list)
    for row in validation.rows:
        rows[source(row)].append(row)
    lines = ["| source | families | rows | median of families | worst family |", "|---|---|---|---|---|"]
    for name, found in sorted(rows.items()):
        families: dict[str, list[float]] = defaultdict(list)
        for row in found:
            families[row.family].append(abs(row.log_ratio))
        errors = sorted(median(values) for values in families.values())
        lines.append(
            f"| {name} | {len(errors)} | {len(found)} | {100 * median(errors):.0f} % "
            f"| {100 * errors[-1]:.0f} % |"
        )
    return "\n".join(lines)


def picture(validation: Validation) -> str:
    """Return an SVG of every row that has a size."""
    names = sorted({source(row) for row in validation.rows if size_bytes(row)})
    hue = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    height = HEIGHT + 30 + 18 * len(names)
    view = f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {view}>']
    parts.append(f'<rect width="{WIDTH}" height="{height}" fill="white"/>')
    for factor in (0.25, 0.5, 0.8, 1, 1.25, 2, 4):
        y = _y(math.log(factor))
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="8" y="{y + 4:.1f}">{factor:g} x</text>')
    for power, name in ((3, "8 B"), (10, "1 KiB"), (20, "1 MiB"), (30, "1 GiB"), (34, "16 GiB")):
        parts.append(f'<text x="{_x(2**power):.1f}" y="{HEIGHT}" text-anchor="middle">{name}</text>')
    for row in validation.rows:
        if size := size_bytes(row):
            parts.append(
                f'<circle cx="{_x(size):.1f}" cy="{_y(row.log_ratio):.1f}" r="2.5" fill="{hue[source(row)]}" '
                'fill-opacity="0.6"/>'
            )
    for at, name in enumerate(names):
        y = HEIGHT + 24 + 18 * at
        parts.append(f'<circle cx="{LEFT}" cy="{y - 4}" r="5" fill="{hue[name]}"/>')
        parts.append(f'<text x="{LEFT + 12}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(size: float) -> float:
    share = math.log(size / SMALLEST) / math.log(LARGEST / SMALLEST)
    return LEFT + 20 + share * (WIDTH - LEFT - 60)


def _y(log_ratio: float) -> float:
    bounded = max(-MOST, min(MOST, log_ratio))
    return TOP + (1 - bounded / MOST) / 2 * (HEIGHT - TOP - 30)


def main(path: str, output: str) -> None:
    """Print the table for *path* and write the picture to *output*."""
    validation = validate_collectives(path)
    Path(output).write_text(picture(validation), encoding="utf-8")
    sys.stdout.write(table(validation) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:3])
