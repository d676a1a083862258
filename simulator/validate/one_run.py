"""What one measured run says about others: scores before and after calibrating on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean, median
from typing import Any, Final

from simulator.validate.calibrate import SPREADS, Factors, Spreads, fit
from simulator.validate.ranking import evenly
from simulator.validate.steps_run import Step
from simulator.validate.steps_scores import score, score_by

TURNS: Final = 6
"""Most runs of a model that take their turn as the one that was measured; the rest is predicted."""

CANDIDATES: Final = tuple(
    Spreads(*spreads, SPREADS.run) for spreads in product((0.022, 0.045, 0.09), (0.25, 0.5, 1.0))
)
"""Spreads among which those are chosen with which other runs of a model are predicted best."""


def calibrated(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the score of *steps* but one per machine, and but one per model, after calibrating on that one.

    The one is the middle of the runs by predicted time: neither the smallest nor the largest of what is
    planned. Its label has no part in the choice. What it tells holds for its model and precision: other
    models of its machine are predicted as before. A machine with one run has nothing left to score.
    """
    rest: list[Step] = []
    before: list[Step] = []
    used: dict[str, Any] = {}
    for name, runs in _by(steps, lambda step: step.machine).items():
        one = _middle(runs)
        factors = fit(one.curve, one.scored.measured)
        used[name] = {"id": one.scored.id, "rows": len(runs) - 1, **factors._asdict()}
        rest += [_with(step, factors) if _family(step) == _family(one) else step for step in _but(runs, one)]
        before += _but(runs, one)
    of_model: list[Step] = []
    of_model_before: list[Step] = []
    for runs in _by(steps, _family).values():
        one = _middle(runs)
        factors = fit(one.curve, one.scored.measured)
        of_model += [_with(step, factors) for step in _but(runs, one)]
        of_model_before += _but(runs, one)
    return {
        "calibrated_score": score(rest),
        "calibrated_before": score(before),
        "calibrated_score_by_class": score_by(rest, lambda step: step.scored.group),
        "calibrated_model_score": score(of_model),
        "calibrated_model_before": score(of_model_before),
        "calibration": used,
        "calibration_check": checked(steps),
    }


def checked(steps: Iterable[Step]) -> dict[str, Any]:
    """Return the score of models before and after calibrating on one run, whichever run that is.

    Each source in turn is taken to be unknown: the spreads are chosen on the others. Up to ``TURNS`` runs of
    each model, evenly over predicted times, take their turn as the one that was measured.
    """
    sources = _by(steps, lambda step: step.choice[0])
    before = {name: _turns(own, None) for name, own in sources.items()}
    after = {spreads: {name: _turns(own, spreads) for name, own in sources.items()} for spreads in CANDIDATES}
    chosen = {name: _best(after, [other for other in sources if other != name] or [name]) for name in sources}
    return {
        "before": _mean(before.values()),
        "after": _mean(after[spreads][name] for name, spreads in chosen.items()),
        "spreads": {name: spreads._asdict() for name, spreads in chosen.items()},
        "spreads_of_all": _best(after, sources)._asdict(),
    }


Medians = list[float]
"""Median error of each family that has two runs."""


def _turns(steps: Iterable[Step], spreads: Spreads | None) -> Medians:
    """Return the median error of each family over runs and turns; as it is predicted without *spreads*."""
    found = []
    for runs in _by(steps, _family).values():
        some = evenly(_ordered(runs), TURNS)
        errors = []
        for one in some if len(some) > 1 else ():
            factors = Factors(1.0, 1.0) if spreads is None else fit(one.curve, one.scored.measured, spreads)
            errors += [abs(_with(step, factors).scored.log_ratio) for step in _but(some, one)]
        found += [median(errors)] if errors else []
    return found


def _best(after: dict[Spreads, dict[str, Medians]], sources: Iterable[str]) -> Spreads:
    names = list(sources)
    return min(after, key=lambda spreads: _mean(after[spreads][name] for name in names) or 0.0)


def _mean(sources: Iterable[Medians]) -> float | None:
    """Return the mean over families of all *sources*; None if there is none."""
    medians = [one for own in sources for one in own]
    return fmean(medians) if medians else None


def _but(runs: Iterable[Step], one: Step) -> list[Step]:
    return [step for step in runs if step is not one]


def _with(step: Step, factors: Factors) -> Step:
    predicted = step.curve.at(compute=factors.compute, communication=factors.communication)
    return replace(step, scored=replace(step.scored, predicted=predicted))


def _family(step: Step) -> tuple[str, str]:
    return step.machine, step.scored.family


def _middle(runs: Sequence[Step]) -> Step:
    return _ordered(runs)[len(runs) // 2]


def _ordered(runs: Iterable[Step]) -> list[Step]:
    return sorted(runs, key=lambda step: (step.scored.predicted, step.scored.id))


def _by(steps: Iterable[Step], key: Callable[[Step], Any]) -> dict[Any, list[Step]]:
    found: dict[Any, list[Step]] = defaultdict(list)
    for step in steps:
        found[key(step)].append(step)
    return dict(sorted(found.items()))
