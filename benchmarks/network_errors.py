"""Draws how far simulated collectives are from measured ones: the table of docs/network-evidence.md.

    python benchmarks/network_errors.py collectives.csv docs/pictures/network-errors.svg

Tables are those that ``validate.py collectives`` reads. A dot is a row: its size across, simulated
over measured time upward, both in logarithms; in the band they are less than 25 % apart.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from html import escape
from pathlib import Path
from statistics import median

from measured.collectives import score_collectives

from foretrace.simulator.validate.scores import Scored, Validation
from foretrace.traces.report.format import format_share

WIDTH, HEIGHT, LEFT, RIGHT, GAP = 860, 260, 60, 740, 34
PANELS = (("single-node", "Inside a node"), ("multi-node", "Between nodes"))
SMALLEST, LARGEST = 8, 2**34
MOST = math.log(16)
NAMES = {
    "aws": "AWS",
    "bigscience": "Jean Zay",
    "deepep": "DeepEP",
    "hf-playbook": "Playbook",
    "stas00": "ml-engineering",
    "vtrain-lut": "vTrain",
}
"""What docs/network-evidence.md calls a source group, where it has another name for it."""
COLOURS = ("#2b7bb9", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#666666")


def source(row: Scored) -> str:
    """Return who published a row and where it was measured."""
    return f"{publisher(row)}, {row.group}"


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
            f"| {name} | {len(errors)} | {len(found)} | {format_share(median(errors), '.0f')} "
            f"| {format_share(errors[-1], '.0f')} |"
        )
    return "\n".join(lines)


def picture(validation: Validation) -> str:
    """Return an SVG of every row that has a size: above those inside a node, below those between nodes."""
    rows = [row for row in validation.rows if size_bytes(row)]
    names = sorted({publisher(row) for row in rows})
    hue = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    height = len(PANELS) * (HEIGHT + GAP) + 40
    view = f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {view}>']
    parts.append(f'<rect width="{WIDTH}" height="{height}" fill="white"/>')
    for at, (group, title) in enumerate(PANELS):
        top = GAP + at * (HEIGHT + GAP)
        found = [row for row in rows if row.group == group]
        parts += _frame(title, top)
        parts += [_dot(row, top, hue[publisher(row)]) for row in found]
        parts += _legend({publisher(row): hue[publisher(row)] for row in found}, top)
    for power, name in ((3, "8 B"), (10, "1 KiB"), (20, "1 MiB"), (30, "1 GiB"), (34, "16 GiB")):
        parts.append(f'<text x="{_x(2**power):.1f}" y="{height - 26}" text-anchor="middle">{name}</text>')
    parts.append(
        f'<text x="{(LEFT + RIGHT) / 2}" y="{height - 6}" text-anchor="middle">size of the array</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def publisher(row: Scored) -> str:
    """Return who published a row."""
    group = row.family.partition(" · ")[0]
    return NAMES.get(group, group)


def _frame(title: str, top: float) -> list[str]:
    """Return the title and the lines of a panel, and the band in which a row is less than 25 % off."""
    high, low = _y(math.log(1.25)), _y(math.log(0.8))
    heading = f'<tspan font-weight="bold">{title}</tspan>: simulated over measured time'
    parts = [f'<text x="{LEFT}" y="{top - 8}">{heading}</text>']
    parts.append(
        f'<rect x="{LEFT}" y="{top + high:.1f}" width="{RIGHT - LEFT}" height="{low - high:.1f}" '
        'fill="#eef3ee"/>'
    )
    for factor in (0.1, 0.25, 0.5, 1, 2, 4):
        y = top + _y(math.log(factor))
        grey = "#999" if factor == 1 else "#ddd"
        parts.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{grey}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{factor:g} x</text>')
    return parts


def _dot(row: Scored, top: float, hue: str) -> str:
    x, y = _x(size_bytes(row)), top + _y(row.log_ratio)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.8" fill="{hue}" fill-opacity="0.6"/>'


def _legend(hues: dict[str, str], top: float) -> list[str]:
    parts = []
    for at, (name, hue) in enumerate(sorted(hues.items())):
        y = top + 16 + 18 * at
        parts.append(f'<circle cx="{RIGHT + 18}" cy="{y - 4}" r="5" fill="{hue}"/>')
        parts.append(f'<text x="{RIGHT + 28}" y="{y}">{escape(name)}</text>')
    return parts


def _x(size: float) -> float:
    share = math.log(size / SMALLEST) / math.log(LARGEST / SMALLEST)
    return LEFT + 12 + share * (RIGHT - LEFT - 24)


def _y(log_ratio: float) -> float:
    bounded = max(-MOST, min(MOST, log_ratio))
    return (1 - bounded / MOST) / 2 * HEIGHT


def main(path: str, output: str) -> None:
    """Print the table for *path* and write the picture to *output*."""
    validation = score_collectives(path)
    Path(output).write_text(picture(validation), encoding="utf-8")
    sys.stdout.write(table(validation) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:3])
