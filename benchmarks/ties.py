"""Writes ``simulator/search/ties.toml``: from which predicted difference on measurements agree who is faster.

    python benchmarks/ties.py steps.csv

Takes the groups of layouts that share source, model, machine, GPUs and batch, rows that say everything alone.
What a prediction is off by in both layouts of a pair cancels; what is left shows in how often the order of
two measured times is the predicted one, at every predicted difference. Groups count the same within a source,
and sources the same, so that no large group decides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Final

from measured.judge import COLUMNS, LEAST_CHOICE, Step, is_main, quantile, run_rows
from measured.table import read_table
from published import table_parser

from foretrace.traces.report.format import format_share

FILE: Final = Path(__file__).parents[1] / "simulator" / "search" / "ties.toml"

LEVEL: Final = 0.8
"""Share of the pairs whose order has to be right where layouts are not tied: the level of the intervals."""

WINDOW: Final = math.sqrt(2)
"""Pairs count for a difference if theirs is so much smaller or larger at most."""

GAPS: Final = tuple(at / 200 for at in range(1, 51))
"""Predicted differences that are looked at: every half per cent up to 25 %."""

NEAR: Final = math.log1p(GAPS[-1]) * WINDOW
"""Pairs that are predicted to be further apart than this are not about ties."""

RESAMPLES: Final = 500
"""Times that groups are drawn again, for how certain the threshold is."""

Pair = tuple[float, float]
"""Logarithm of the ratio of two predicted times, from the faster to the slower, and of the measured ones."""

Group = tuple[str, ...]
"""What the layouts of a group share; first, who measured them."""

Shares = Mapping[Group, Mapping[float, float]]
"""Share of the pairs of each group at about a difference whose order is right, where it has any."""


def main() -> None:
    """Write the file."""
    parser = table_parser(__doc__)
    parser.add_argument("--output", type=Path, default=FILE)
    args = parser.parse_args()
    found = run_rows(read_table(args.table, COLUMNS), args.workers)
    groups = pairs(step for step in found if isinstance(step, Step) and is_main(step))
    args.output.write_text("\n".join(lines(groups)), encoding="utf-8")


def pairs(steps: Iterable[Step]) -> dict[Group, list[Pair]]:
    """Return the pairs of layouts of every group, of those that are predicted to be ``NEAR`` each other.

    A layout that was measured several times counts once, with its medians.
    """
    found: dict[Group, dict[tuple[str, ...], list[Step]]] = defaultdict(dict)
    for step in steps:
        found[step.choice].setdefault(step.layout, []).append(step)
    near: dict[Group, list[Pair]] = {}
    for choice, layouts in found.items():
        if len(layouts) < LEAST_CHOICE:
            continue
        times = sorted(_times(same) for same in layouts.values())
        both = [(math.log(b[0] / a[0]), math.log(b[1] / a[1])) for a, b in combinations(times, 2)]
        if own := [pair for pair in both if pair[0] <= NEAR]:
            near[choice] = own
    return near


def lines(groups: Mapping[Group, Sequence[Pair]]) -> Iterable[str]:
    """Yield the lines of the file."""
    shares = {group: dict(_shares(own)) for group, own in groups.items()}
    drawn = Random(0)
    again = [(threshold(resampled(shares, drawn)), 1.0) for _ in range(RESAMPLES)]
    yield "# Written by benchmarks/ties.py. From a predicted ratio of two step times of one model and machine"
    yield "# on, the order of measured ones was the predicted one in so many pairs; sources count the same."
    yield "# Share in order at a predicted difference of about:"
    for gap in (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25):
        yield f"# {format_share(gap, '3.0f')}  {right(shares.items(), gap):.2f}"
    yield f"level = {LEVEL}"
    yield f"ratio = {1 + threshold(shares.items())}"
    yield "# 8 of 10 times between these, if groups are drawn again:"
    yield f"between = [{', '.join(f'{1 + quantile(again, share)}' for share in (0.1, 0.9))}]"
    yield f"pairs = {sum(map(len, groups.values()))}"
    yield f"groups = {len(groups)}"
    yield f"sources = {len({group[0] for group in groups})}"
    yield ""


def right(shares: Iterable[tuple[Group, Mapping[float, float]]], gap: float) -> float:
    """Return the share of pairs in the predicted order at about *gap*, a mean over sources."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for group, own in shares:
        if gap in own:
            by_source[group[0]].append(own[gap])
    return fmean(map(fmean, by_source.values()))


def threshold(shares: Iterable[tuple[Group, Mapping[float, float]]]) -> float:
    """Return the difference from which on *right* is never below ``LEVEL``."""
    known = list(shares)
    wrong = [gap for gap in GAPS if right(known, gap) < LEVEL]
    return min(gap for gap in (*GAPS, math.inf) if gap > max(wrong, default=0.0))


def resampled(shares: Shares, drawn: Random) -> list[tuple[Group, Mapping[float, float]]]:
    """Return as many groups of each source as there are, drawn with replacement."""
    by_source: dict[str, list[Group]] = defaultdict(list)
    for group in shares:
        by_source[group[0]].append(group)
    chosen = [group for own in by_source.values() for group in drawn.choices(own, k=len(own))]
    return [(group, shares[group]) for group in chosen]


def _shares(own: Sequence[Pair]) -> Iterator[tuple[float, float]]:
    """Yield each difference that some pairs of a group are about, with the share of those in order."""
    for gap in GAPS:
        about = math.log1p(gap)
        near = [measured for predicted, measured in own if about / WINDOW <= predicted <= about * WINDOW]
        if near:
            yield gap, fmean(0.5 if not measured else float(measured > 0) for measured in near)


def _times(same: Sequence[Step]) -> Pair:
    scored = [step.scored for step in same]
    return median(one.predicted for one in scored), median(one.measured for one in scored)


if __name__ == "__main__":
    main()
