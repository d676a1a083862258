"""Writes ``simulator/search/ties.toml``: how far two layouts have to differ for measurements to agree.

    python benchmarks/ties.py steps.csv

Takes the groups of layouts that share source, model, machine, GPUs and batch. What a prediction is off by in
both layouts of a pair cancels; what is left is by how much the ratio of their measured times differs from the
ratio of the predicted ones. Groups count the same within a source, and sources the same.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Final

from simulator.validate.choices import LEAST_CHOICE
from simulator.validate.ranking import quantile
from simulator.validate.steps import COLUMNS
from simulator.validate.steps_run import Step, run_rows
from simulator.validate.steps_scores import is_main
from simulator.validate.table import read_table

FILE: Final = Path(__file__).parents[1] / "simulator" / "search" / "ties.toml"

LEVEL: Final = 0.8
"""Share of pairs whose error is within what is written: the level of the other intervals."""

NEAR: Final = math.log(1.25)
"""Pairs that are predicted to be further apart than this are not about ties."""

Pair = tuple[float, float]
"""Logarithm of the ratio of two predicted times, from the faster to the slower, and of the measured ones."""


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=FILE)
    args = parser.parse_args()
    found = run_rows(read_table(args.steps, COLUMNS), args.workers)
    groups = pairs(step for step in found if isinstance(step, Step) and is_main(step))
    args.output.write_text("\n".join(lines(groups)), encoding="utf-8")


def pairs(steps: Iterable[Step]) -> dict[tuple[str, ...], list[Pair]]:
    """Return the pairs of layouts of every group, of those that are predicted to be ``NEAR`` each other.

    A layout that was measured several times counts once, with its medians.
    """
    found: dict[tuple[str, ...], dict[tuple[str, ...], list[Step]]] = defaultdict(dict)
    for step in steps:
        found[step.choice].setdefault(step.layout, []).append(step)
    near: dict[tuple[str, ...], list[Pair]] = {}
    for choice, layouts in found.items():
        if len(layouts) < LEAST_CHOICE:
            continue
        times = sorted(_times(same) for same in layouts.values())
        both = [(math.log(b[0] / a[0]), math.log(b[1] / a[1])) for a, b in combinations(times, 2)]
        if own := [pair for pair in both if pair[0] <= NEAR]:
            near[choice] = own
    return near


def lines(groups: Mapping[tuple[str, ...], Sequence[Pair]]) -> Iterable[str]:
    """Yield the lines of the file."""
    per_source: dict[str, int] = defaultdict(int)
    for choice in groups:
        per_source[choice[0]] += 1
    weighted = [
        (abs(measured - predicted), 1 / (len(own) * per_source[choice[0]]))
        for choice, own in groups.items()
        for predicted, measured in own
    ]
    yield "# Written by benchmarks/ties.py. Ratio of two predicted step times of one model and machine that"
    yield "# a ratio of measured ones is within, for so many of the pairs of layouts; sources count the same."
    yield f"level = {LEVEL}"
    yield f"ratio = {math.exp(quantile(weighted, LEVEL)):.4f}"
    yield f"half = {math.exp(quantile(weighted, 0.5)):.4f}"
    yield f"pairs = {len(weighted)}"
    yield f"groups = {len(groups)}"
    yield f"sources = {len(per_source)}"
    yield ""


def _times(same: Sequence[Step]) -> Pair:
    scored = [step.scored for step in same]
    return median(one.predicted for one in scored), median(one.measured for one in scored)


if __name__ == "__main__":
    main()
