"""``foretrace validate steps``: predicted against measured times of a training step."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from simulator.errors import TableError
from simulator.validate.calibrate import Factors, fit
from simulator.validate.ranking import kendall_tau, quantile, regret
from simulator.validate.scores import Failed, Scored, Validation, spreads
from simulator.validate.steps_run import Step, run_rows
from simulator.validate.table import read_table

COLUMNS: Final = ("id", "model", "hardware", "world_size", "tp", "pp", "dp", "seq_len", "step_time_s")
COMPLETE: Final = ("A", "A-")
"""Levels of rows that say everything, or all but what their notes state."""

LEAST_CHOICE: Final = 3
"""Fewest layouts to choose from that make a group."""

CALIBRATIONS: Final = ("one-run",)

LIKELY: Final = (0.1, 0.9)
"""Quantiles between which a measured time is likely to be: 8 in 10."""


def validate_steps(
    table: str | Path,
    *,
    calibrate: str | None = None,
    workers: int | None = None,
    tell: Callable[[int, int], None] = lambda *_: None,
) -> Validation:
    """Return the step time of every row of *table*, predicted and measured, in s.

    The rows of the validation, and so its score, are those of level A and A- that are flagged neither as
    stress nor as slow. Everything else is scored beside it, in ``extra``. Rows that cannot be simulated are
    failures whatever their level.

    Args:
        table: CSV or Parquet, with the columns that docs/accuracy.md lists.
        calibrate: ``"one-run"``: also fit two factors per machine on one of its rows, and score the others.
        workers: processes; as many as there are processors if left out.
        tell: told how many rows more are done, and of how many.

    Raises:
        TableError: the table cannot be read or lacks a column, or *calibrate* is unknown.
        EngineError: numba is not installed.
    """
    if calibrate is not None and calibrate not in CALIBRATIONS:
        raise TableError(f"calibrate={calibrate!r}: one of {', '.join(CALIBRATIONS)}")
    rows = read_table(table, COLUMNS)
    found = run_rows(rows, workers or os.cpu_count() or 1, lambda done: tell(done, len(rows)))
    steps = [one for one in found if isinstance(one, Step)]
    main = [step for step in steps if is_main(step)]
    extra = {"rows": len(rows), **sections(steps), **choices(main)}
    if calibrate:
        extra |= calibrated(main)
    return Validation(
        kind="steps",
        table=str(table),
        unit="s",
        rows=[step.scored for step in main],
        failures=[one for one in found if isinstance(one, Failed)],
        extra=extra,
    )


def is_main(step: Step) -> bool:
    """Return whether *step* counts in the score."""
    return step.level in COMPLETE and not step.stress and not step.slow


def score(steps: Iterable[Step]) -> float | None:
    """Return the mean over families of the median error; None without rows."""
    medians = [found.median_error for found in spreads((step.scored for step in steps), "family")]
    return fmean(medians) if medians else None


def sections(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the scores of *steps* by what they are, and what had to be assumed."""
    main = [step for step in steps if is_main(step)]
    clean = [step for step in steps if not step.stress and not step.slow]
    return {
        "score_by_gpu": _by(main, lambda step: step.device),
        "score_by_size": _by(main, lambda step: step.size),
        "score_by_class_and_gpu": _by(main, lambda step: f"{step.scored.group} · {step.device}"),
        "score_by_level": _by(clean, lambda step: step.level),
        "incomplete_score": score(step for step in clean if step.level not in COMPLETE),
        "stress_score": score(step for step in steps if step.stress),
        "stress_rows": sum(step.stress for step in steps),
        "with_slow_score": score(step for step in steps if step.level in COMPLETE and not step.stress),
        "slow_rows": sum(step.slow for step in steps),
        "assumed": dict(Counter(words for step in steps for words in step.assumed).most_common()),
        "errors": errors(main),
    }


def errors(steps: Sequence[Step]) -> dict[str, dict[str, float]]:
    """Return between which shares of a prediction measured times lie, by class, by class and GPU, and in all.

    ``low`` and ``high`` are the quantiles ``LIKELY`` of measured over predicted. Families count the same,
    however many rows they have.
    """
    found: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        for name in ("all", step.scored.group, f"{step.scored.group} · {step.device}"):
            found[name].append(step)
    return {name: _errors(same) for name, same in sorted(found.items())}


def _errors(steps: Sequence[Step]) -> dict[str, float]:
    sizes = Counter(step.scored.family for step in steps)
    weighted = [(-step.scored.log_ratio, 1 / sizes[step.scored.family]) for step in steps]
    low, high = (math.exp(quantile(weighted, share)) for share in LIKELY)
    return {"families": len(sizes), "rows": len(steps), "low": low, "high": high}


def choices(steps: Iterable[Step]) -> dict[str, Any]:
    """Return how well layouts are ordered in each group that shares model, machine, GPUs and batch.

    A layout that was measured several times, in several releases for one, counts once, with the medians.
    Kendall's tau is the mean over groups, regret the median.
    """
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[Scored]]] = defaultdict(dict)
    for step in steps:
        groups[step.choice].setdefault(step.layout, []).append(step.scored)
    taus, regrets = [], []
    for layouts in groups.values():
        if len(layouts) < LEAST_CHOICE:
            continue
        predicted = [median(row.predicted for row in same) for same in layouts.values()]
        measured = [median(row.measured for row in same) for same in layouts.values()]
        regrets.append(regret(predicted, measured))
        if (tau := kendall_tau(predicted, measured)) is not None:
            taus.append(tau)
    return {
        "choice_groups": len(regrets),
        "kendall_tau": fmean(taus) if taus else None,
        "regret_median": median(regrets) if regrets else None,
        "regret_mean": fmean(regrets) if regrets else None,
    }


def calibrated(steps: Iterable[Step]) -> dict[str, Any]:
    """Return the score of *steps* but one per machine, after fitting two factors on that one.

    The one is the middle of the machine's runs by predicted time: neither the smallest nor the largest of
    what is planned. Its label has no part in the choice. A machine with one row has nothing left to score.
    """
    machines: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        machines[step.machine].append(step)
    rest: list[Step] = []
    used: dict[str, Any] = {}
    for name, same in sorted(machines.items()):
        one = sorted(same, key=lambda step: (step.scored.predicted, step.scored.id))[len(same) // 2]
        factors = fit(one.curve, one.scored.measured)
        used[name] = {"id": one.scored.id, "rows": len(same) - 1, **factors._asdict()}
        rest += [_with(step, factors) for step in same if step is not one]
    return {
        "calibrated_score": score(rest),
        "calibrated_score_by_class": _by(rest, lambda step: step.scored.group),
        "calibration": used,
    }


def _with(step: Step, factors: Factors) -> Step:
    predicted = step.curve.at(compute=factors.compute, communication=factors.communication)
    return replace(step, scored=replace(step.scored, predicted=predicted))


def _by(steps: Iterable[Step], key: Callable[[Step], str]) -> dict[str, float]:
    """Return the score of each set of *steps* that agree in *key*, by name."""
    found: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        found[key(step)].append(step)
    return {name: value for name, same in sorted(found.items()) if (value := score(same)) is not None}
