"""Prints predicted power and energy beside what was measured of published trainings, all rows.

    python benchmarks/energy.py

Reads ``tables/energy.csv``. Rows of power say how well draws are known; rows of energy per token also how
well the step time is. Figures of power limits times hours are no measurements, and none is in the table.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from foretrace.simulator.config import job_from
from foretrace.simulator.energy import KWH_J, power
from foretrace.simulator.simulate import simulate

TABLE: Final = Path(__file__).parent / "tables" / "energy.csv"

POWER: Final = "W"
"""Quantity of rows that do not depend on how long a step takes."""


class Row(NamedTuple):
    """A figure of a training, measured and predicted with its range.

    Attributes:
        run: the training.
        what: quantity, and what it covers.
        published, predicted: the figure.
        low, high: where the prediction lies.
    """

    run: str
    what: str
    published: float
    predicted: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predicted / self.published

    @property
    def is_within(self) -> bool:
        """Whether the published figure is in the range of the prediction."""
        return self.low <= self.published <= self.high


def rows() -> Iterator[Row]:
    """Yield every row of the table with its prediction."""
    for row in csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()):
        settings = tomllib.loads(f"of = {{{row['settings']}}}")["of"]
        job = job_from({**settings, "cluster": row["cluster"]})
        summary = simulate(job, only_figures=True, covers_unsaid=False).summary
        machine = {"name": job.cluster.name, **job.cluster.powers()}
        drawn = power(machine, summary["shares"], summary["memory_bound_share"])
        if drawn is None:
            raise SystemExit(f"{row['run']}: no power limit is known of {job.cluster.name}")
        watts = drawn.gpu if row["covers"] == "board" else drawn.total
        if row["quantity"] == POWER:
            found = watts.times(job.cluster.gpus_per_node if row["covers"] == "node" else 1)
        else:
            found = watts.times(1e9 / summary["tokens_per_s_per_gpu"] / KWH_J)
        what = f"{row['quantity']} per {row['covers']}" if row["quantity"] == POWER else row["quantity"]
        yield Row(row["run"], what, float(row["published"]), found.likely, found.low, found.high)


def main() -> None:
    """Print the table."""
    found = list(rows())
    print(f"{'training':28} {'what':14} {'measured':>9} {'predicted':>9} {'ratio':>6}  range")
    for row in found:
        outside = "" if row.is_within else "  outside"
        print(
            f"{row.run:28} {row.what:14} {row.published:9,.1f} {row.predicted:9,.1f} {row.ratio:6.2f}  "
            f"{row.low:,.0f} to {row.high:,.0f}{outside}"
        )
    ratios = [row.ratio for row in found if row.what.startswith(POWER)]
    extent = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"power, {len(ratios)} rows: median ratio {median(ratios):.2f}, {extent}")


if __name__ == "__main__":
    main()
