"""What all verbs of ``foretrace validate`` share: scored rows, failed rows, and the score of a table."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Final

WORST: Final = 10
"""Number of worst rows that are listed by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One measured row and what was predicted for it, in the same unit.

    Attributes:
        id: what the row is called in its table.
        family: rows that say the same thing, so that a large scan counts once; as a person would read it.
        group: class of the family in the second table, e.g. ``"gemm"``.
        by: what the prediction was made with, e.g. ``"ring/simple"``; empty where there is but one way.
    """

    id: str
    family: str
    group: str
    what: str
    predicted: float
    measured: float
    by: str = ""

    @property
    def log_ratio(self) -> float:
        """``ln(predicted / measured)``: above zero where the prediction is too high."""
        return math.log(self.predicted / self.measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """One row that could not be predicted, and why."""

    id: str
    family: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How far a set of rows is off; errors are ``|ln(predicted / measured)|``.

    *median_error*, *mean_error*, *p90_error*: median, mean and 90th percentile of the errors.
    *bias*: median of the signed log ratio.
    """

    name: str
    n: int
    median_error: float
    mean_error: float
    p90_error: float
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """A table, predicted row by row.

    *kind*: ``"kernels"``, ``"memory"``, ... *extra*: further figures of this kind of table, as plain JSON
    types.
    """

    kind: str
    table: str
    unit: str
    rows: Sequence[Scored]
    failures: Sequence[Failed]
    notes: Sequence[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def families(self) -> list[Spread]:
        """Every family, the worst first."""
        return sorted(spreads(self.rows, "family"), key=lambda found: -found.median_error)

    @property
    def groups(self) -> list[Spread]:
        """Every group of families, over all its rows, by name."""
        return sorted(spreads(self.rows, "group"), key=lambda found: found.name)

    @property
    def score(self) -> float | None:
        """Mean over families of the median error; None if no row could be predicted."""
        # A family counts once, however many rows it has.
        return fmean(found.median_error for found in self.families) if self.rows else None

    def score_by_group(self) -> dict[str, float]:
        """Return the score of each group on its own: the mean over its families of their medians."""
        found: dict[str, list[Scored]] = defaultdict(list)
        for row in self.rows:
            found[row.group].append(row)
        return {
            name: fmean(spread.median_error for spread in spreads(rows, "family"))
            for name, rows in sorted(found.items())
        }

    def worst(self, n: int = WORST) -> list[Scored]:
        """Return the *n* rows that are furthest off."""
        return sorted(self.rows, key=lambda row: -abs(row.log_ratio))[:n]

    def document(self, n_worst: int = WORST) -> dict[str, Any]:
        """Return everything as plain JSON types: what ``--json`` prints."""
        return {
            "kind": self.kind,
            "table": self.table,
            "unit": self.unit,
            "score": self.score,
            "score_by_class": self.score_by_group(),
            "rows": len(self.rows) + len(self.failures),
            "predicted": len(self.rows),
            "failures": len(self.failures),
            "failure_reasons": reasons(self.failures),
            "classes": [_spread(found) for found in self.groups],
            "families": [_spread(found) for found in self.families],
            "worst": [
                {
                    "id": row.id,
                    "family": row.family,
                    "what": row.what,
                    "predicted": row.predicted,
                    "measured": row.measured,
                    "log_ratio": row.log_ratio,
                }
                for row in self.worst(n_worst)
            ],
            "notes": list(self.notes),
            **self.extra,
        }


def spreads(rows: Iterable[Scored], key: str) -> list[Spread]:
    """Return the spread of each set of *rows* that agree in the attribute *key*."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        found[getattr(row, key)].append(row.log_ratio)
    return [_measure(name, ratios) for name, ratios in found.items()]


def reasons(failures: Iterable[Failed]) -> dict[str, int]:
    """Return how many rows failed for each reason, the most frequent first."""
    found: dict[str, int] = defaultdict(int)
    for failed in failures:
        found[failed.reason] += 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _measure(name: str, ratios: Sequence[float]) -> Spread:
    errors = sorted(abs(ratio) for ratio in ratios)
    return Spread(
        name=name,
        n=len(errors),
        median_error=median(errors),
        mean_error=fmean(errors),
        # The nearest rank, without interpolation: at least 9 in 10 are as near.
        p90_error=errors[math.ceil(0.9 * len(errors)) - 1],
        bias=median(ratios),
    )


def _spread(found: Spread) -> dict[str, Any]:
    return {name: getattr(found, name) for name in Spread.__slots__}
