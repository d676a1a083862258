"""Prints which link sites that train apart need, beside what is published, all rows.

    python benchmarks/outer_steps.py

Reads ``tables/outer_steps.csv``: bandwidths at which DiLoCo and its streaming variant keep a share of the
rate, out of simulations by their authors, who look at every 1.2 times as wide a link. They have two workers,
send what ``bits`` says, and reduce layer by layer beside the last backward, two thirds of a step. Then, what
was measured.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from foretrace.simulator.outer import Meeting, ring_bytes
from foretrace.traces.report.format import format_share

TABLE: Final = Path(__file__).parent / "tables" / "outer_steps.csv"

BACKWARD: Final = 2 / 3
"""Share of a step that is its backward, beside which the published simulations send."""

MEASURED: Final = ((103, 95.7), (382, 85.6), (469, 83.0))
"""Seconds of a median all-reduce within the USA, with Europe, and with Asia, after 100 steps in 38 minutes,
and the utilisation in per cent. INTELLECT-1, Jaghouar et al. 2024, arXiv:2412.01152, table 2."""

STEPS_S: Final = 38 * 60
"""Those minutes."""


class Row(NamedTuple):
    """A published bandwidth and ours, in Gbit/s."""

    model: str
    method: str
    every: int
    percent: int
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predicted / self.published


def rows() -> Iterator[Row]:
    """Yield every row of the table."""
    for row in csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()):
        bits = 8 * ring_bytes(float(row["billion_params"]) * 1e9 * int(row["bits"]) / 8, 2)
        fragments, percent = int(row["fragments"]), int(row["utilisation_percent"])
        met = Meeting(
            every=int(row["every"]),
            fragments=fragments,
            overlap=int(row["overlap"]) + BACKWARD,
            step_s=float(row["step_s"]),
            wire_s=bits / fragments / 1e9,  # at 1 Gbit/s
        )
        slower = met.slower(percent / 100)
        if slower is None:
            raise SystemExit(f"{row}: no link is wide enough")
        names = (row["model"], row["method"])
        yield Row(*names, met.every, percent, float(row["gbit_per_s"]), 1 / slower)


def measured() -> Iterator[tuple[float, float]]:
    """Yield measured and predicted utilisation in per cent, given how long an exchange takes."""
    for seconds, percent in MEASURED:
        met = Meeting(every=100, step_s=STEPS_S / 100, wire_s=seconds)
        yield percent, 100 * met.utilisation


def main() -> None:
    """Print the tables."""
    groups: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in rows():
        groups[row.model, row.method, row.every].append(row)
    print(f"{'model':18} {'method':24} {'every':>5}  Gbit/s for 50, 80, 90, 95, 99 %: published, ours")
    for (model, method, every), found in groups.items():
        pairs = ", ".join(f"{row.published:g} {row.predicted:.3g}" for row in found)
        print(f"{model:18} {method:24} {every:5}  {pairs}")
    ratios = sorted(row.ratio for found in groups.values() for row in found)
    within = sum(1 / 1.5 <= ratio <= 1.5 for ratio in ratios) / len(ratios)
    print(
        f"{len(ratios)} rows: median ratio {median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}, "
        f"{format_share(within, '.0f')} within 1.5 times"
    )
    for published, predicted in measured():
        both = f"{format_share(published / 100)} measured, {format_share(predicted / 100)} predicted"
        print(f"INTELLECT-1: {both}")


if __name__ == "__main__":
    main()
