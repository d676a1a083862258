"""What one measured run says about the others of its machine: scores before and after calibrating on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, Final

from simulator.validate.calibrate import SPREADS, Factors, Spreads, fit
from simulator.validate.steps_run import Step
from simulator.validate.steps_scores import score, score_by

TURNS: Final = 12
"""Most runs of a machine that take their turn as the one that was measured."""

NORMAL: Final = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution."""

Runs = dict[str, list[Step]]


def calibrated(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the score of *steps* but one per machine, and but one per model, after calibrating on that one.

    The one is the middle of the runs by predicted time: neither the smallest nor the largest of what is
    planned. Its label has no part in the choice. A machine with one run has nothing left to score.
    """
    rest: list[Step] = []
    before: list[Step] = []
    used: dict[str, Any] = {}
    for name, runs in _by(steps, lambda step: step.machine).items():
        one = _middle(runs)
        factors = fit(one.curve, one.scored.measured)
        trust = {same: SPREADS.trust(same_model=same) for same in (True, False)}
        used[name] = {"id": one.scored.id, "rows": len(runs) - 1, **factors._asdict()}
        rest += _others(runs, one, factors, trust)
        before += _but(runs, one)
    of_model: list[Step] = []
    of_model_before: list[Step] = []
    for runs in _by(steps, _family).values():
        one = _middle(runs)
        trust = {True: SPREADS.trust(same_model=True)}
        of_model += _others(runs, one, fit(one.curve, one.scored.measured), trust)
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
    """Return the score before and after calibrating, machine by machine and whichever run is taken.

    Each machine in turn is taken to be unknown: how far to trust a run is learnt on the others. Of its own
    runs up to ``TURNS``, evenly over predicted times, take their turn as the one that was measured.
    """
    machines = _by(steps, lambda step: step.machine)
    before: list[Step] = []
    after: list[Step] = []
    for name, runs in machines.items():
        spreads = spreads_of(other for key, other in machines.items() if key != name)
        trust = {same: spreads.trust(same_model=same) for same in (True, False)}
        ordered = _ordered(runs)
        for one in ordered[:: max(1, len(ordered) // TURNS)]:
            before += _but(runs, one)
            after += _others(runs, one, fit(one.curve, one.scored.measured), trust)
    return {"before": score(before), "after": score(after), "machines": len(machines)}


def spreads_of(machines: Iterable[Sequence[Step]]) -> Spreads:
    """Return the spreads in the runs of *machines*: nested analysis of variance, each model counting once.

    Runs of a model spread as their median deviation says, so that single cold steps do not decide.
    Without two runs of a model, two models of a machine or two machines, that part is as in ``SPREADS``.
    """
    runs, models, whole = [], [], []
    for own in machines:
        families = [[step.scored.log_ratio for step in same] for same in _by(own, _family).values()]
        runs += [_typical(errors) ** 2 for errors in families if len(errors) > 1]
        medians = [median(errors) for errors in families]
        middle = fmean(medians)
        models += [_variance(medians, middle)] * len(medians) if len(medians) > 1 else []
        whole.append((middle**2, len(medians)))
    run = fmean(runs) if runs else SPREADS.run**2
    model = fmean(models) if models else SPREADS.model**2
    machine = fmean(square - model / n for square, n in whole) if len(whole) > 1 else SPREADS.machine**2
    return Spreads(max(machine, 0.0) ** 0.5, model**0.5, run**0.5)


def _typical(errors: Sequence[float]) -> float:
    """Return the standard deviation that the middle half of *errors* speaks of."""
    middle = median(errors)
    return NORMAL * median(abs(error - middle) for error in errors)


def _variance(values: Sequence[float], middle: float) -> float:
    return sum((value - middle) ** 2 for value in values) / (len(values) - 1)


def _others(runs: Iterable[Step], one: Step, factors: Factors, trust: dict[bool, float]) -> list[Step]:
    """Return *runs* but *one*, predicted anew with as much of *factors* as each is trusted to share."""
    found = {same: factors.trusted(share) for same, share in trust.items()}
    return [_with(step, found[_family(step) == _family(one)]) for step in _but(runs, one)]


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
