"""What calibration could do at most: the score with the best factors, chosen with every label in hand.

    python benchmarks/best_factors.py steps.csv

Nobody can calibrate like this. It bounds from below what one factor for each machine, two of them (computing
and communicating), or one for each model and precision on each machine can reach.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from published import table_parser

from simulator.validate.steps import COLUMNS
from simulator.validate.steps_run import Step, run_rows
from simulator.validate.steps_scores import is_main
from simulator.validate.table import read_table

FACTORS: Final = np.linspace(-0.6, 0.6, 241)
"""Logarithms of the factors that are tried: half per cents."""

RATIOS: Final = np.geomspace(0.25, 4.0, 33)
"""Factors on communication over those on computing that are tried."""


def main() -> None:
    """Print the three bounds."""
    args = table_parser(__doc__).parse_args()
    found = run_rows(read_table(args.table, COLUMNS), args.workers)
    machines: dict[str, dict[str, list[Step]]] = defaultdict(lambda: defaultdict(list))
    for step in found:
        if isinstance(step, Step) and is_main(step):
            machines[step.machine][step.scored.family].append(step)
    own = [list(families.values()) for families in machines.values()]
    alone = [[family] for families in own for family in families]
    print(f"one factor a machine: {score(own, (1.0,)):.1%}")
    print(f"two factors a machine, computing and communicating: {score(own, RATIOS):.1%}")
    print(f"one factor for each model and precision on each machine: {score(alone, (1.0,)):.1%}")


def score(groups: Sequence[Sequence[Sequence[Step]]], ratios: Iterable[float]) -> float:
    """Return the mean over families of the median error, with the best factors for each group of families."""
    tried = tuple(ratios)
    total = sum(min(_errors(families, ratio) for ratio in tried) for families in groups)
    return total / sum(map(len, groups))


def _errors(families: Sequence[Sequence[Step]], ratio: float) -> float:
    """Return the sum of the median errors of *families* with the best factor for all of them."""
    errors = np.zeros(len(FACTORS))
    for steps in families:
        times = [step.curve.at(communication=ratio) / step.scored.measured for step in steps]
        errors += np.median(np.abs(np.log(times)[:, None] - FACTORS), axis=0)
    return float(errors.min())


if __name__ == "__main__":
    main()
