"""What calibration on one run is worth, however "one run of each cluster" is read, and what bounds it.

    python benchmarks/best_factors.py steps.csv

For each of ``measured.judge.READINGS``: the score of all runs but one per cluster as they are
predicted; calibrated on the middle run; on two and three, evenly over predicted times; each on all others;
on a run drawn at random; on the run that is the best for it in hindsight; and with the best factor, or two
(computing and communicating), that there are. The last three know every label. Nobody can calibrate like
this, so they say what one run could reach at most.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, pstdev
from typing import Final

import numpy as np
from measured.judge import (
    COLUMNS,
    READINGS,
    Step,
    after,
    after_some,
    evenly,
    is_main,
    middle,
    run_rows,
    score,
    with_factors,
)
from measured.table import read_table
from published import table_parser

from foretrace.simulator.recorded.one_time import Factors
from foretrace.traces.report.format import format_share

FACTORS: Final = np.linspace(-0.6, 0.6, 241)
"""Logarithms of the factors that are tried: half per cents."""

RATIOS: Final = tuple(float(ratio) for ratio in np.geomspace(0.25, 4.0, 33))
"""Factors on communication over those on computing that are tried."""

DRAWS: Final = 20
"""How often a run of each cluster is drawn; the draws are the same every time (``SEED``)."""

SEED: Final = 1

HINDSIGHT: Final = 60
"""Most runs of a cluster that are tried for the best one, or left out in turn, evenly by predicted time."""

Cluster = list[Step]


def main() -> None:
    """Print the table."""
    parser = table_parser(__doc__)
    parser.add_argument("--least", type=int, default=1, help="Only clusters of at least so many runs.")
    args = parser.parse_args()
    found = run_rows(read_table(args.table, COLUMNS), args.workers)
    steps = [step for step in found if isinstance(step, Step) and is_main(step)]
    print(
        "| a cluster is a | how many | before | middle run | two runs | three | all others "
        "| any run | best run | one factor | two |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, key in READINGS.items():
        groups: dict[object, Cluster] = defaultdict(list)
        for step in steps:
            groups[key(step)].append(step)
        some = [runs for runs in groups.values() if len(runs) >= args.least]
        print(f"| {name} | {len(some)} | " + " | ".join(_figures(some)) + " |")


def _figures(clusters: Sequence[Cluster]) -> list[str]:
    draw = random.Random(SEED)
    drawn = [_score(clusters, draw.choice) for _ in range(DRAWS)]
    return [
        format_share(score(one for runs in clusters for one in runs if one is not middle(runs)) or 0.0),
        format_share(_score(clusters, middle)),
        *(format_share(_of_several(clusters, n)) for n in (2, 3)),
        format_share(_of_others(clusters)),
        f"{format_share(fmean(drawn))} ± {100 * pstdev(drawn):.1f}",
        format_share(_score(clusters, _best)),
        format_share(_bound(clusters, (1.0,))),
        format_share(_bound(clusters, RATIOS)),
    ]


def _score(clusters: Iterable[Cluster], chosen: Callable[[Cluster], Step]) -> float:
    """Return the score of all runs but the *chosen* one of each cluster, calibrated on that one."""
    return score(step for runs in clusters for step in after(runs, chosen(runs))) or 0.0


def _of_several(clusters: Iterable[Cluster], n: int) -> float:
    """Return the score of all runs but *n* of each cluster, evenly over predicted times, calibrated on those.

    Of clusters with at least one run beside them.
    """
    found = []
    for runs in clusters:
        ordered = sorted(runs, key=lambda step: (step.scored.predicted, step.scored.id))
        found += after_some(ordered, evenly(ordered, n))
    return score(found) or 0.0


def _of_others(clusters: Iterable[Cluster]) -> float:
    """Return the score of all runs, each calibrated on the others of its cluster."""
    found = []
    for runs in clusters:
        some = evenly(sorted(runs, key=lambda step: (step.scored.predicted, step.scored.id)), HINDSIGHT)
        for one in some if len(some) > 1 else ():
            found += after_some(some, [other for other in some if other is not one])
    return score(found) or 0.0


def _best(runs: Cluster) -> Step:
    """Return the one of *runs* on which to calibrate, in hindsight."""
    some = evenly(sorted(runs, key=lambda step: step.scored.predicted), HINDSIGHT)
    return min(some, key=lambda one: score(after(runs, one)) or 0.0)


def _bound(clusters: Iterable[Cluster], ratios: Sequence[float]) -> float:
    """Return the score of all runs but the middle one of each cluster with the best factors for each."""
    return score(step for runs in clusters for step in _at_best(runs, ratios)) or 0.0


def _at_best(runs: Cluster, ratios: Sequence[float]) -> Cluster:
    """Return all *runs* but the middle one with the factors that are the best for them together."""
    rest = [step for step in runs if step is not middle(runs)]
    tried = [_best_factor(rest, ratio) for ratio in ratios] if rest else []
    if not tried:
        return []
    _, factors = min(tried)
    return [with_factors(step, factors) for step in rest]


def _best_factor(rest: Cluster, ratio: float) -> tuple[float, Factors]:
    """Return the factors in this *ratio* that are the best for *rest*, behind their error."""
    families: dict[str, list[float]] = defaultdict(list)
    for step in rest:
        predicted_s = step.curve.at(communication=ratio)
        families[step.scored.family].append(math.log(predicted_s / step.scored.measured))
    errors = sum(np.median(np.abs(np.array(own)[:, None] + FACTORS), axis=0) for own in families.values())
    at = int(np.argmin(errors))
    compute = math.exp(FACTORS[at])
    return float(np.min(errors)), Factors(compute, compute * ratio)


if __name__ == "__main__":
    main()
