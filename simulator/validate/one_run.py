"""What one measured run says about others: scores before and after calibrating on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, Final

from foretrace.simulator.validate.calibrate import SPREADS, Factors, Spreads, fit
from foretrace.simulator.validate.ranking import evenly
from foretrace.simulator.validate.steps_run import Step
from foretrace.simulator.validate.steps_scores import score, score_by

TURNS: Final = 6
"""Most runs of a model that take their turn as the one that was measured; the rest is predicted."""

CANDIDATES: Final = tuple(
    Spreads(*spreads, SPREADS.run) for spreads in product((0.022, 0.045, 0.09), (0.25, 0.5, 1.0))
)
"""Spreads among which those are chosen with which other runs of a model are predicted best."""


def _family(step: Step) -> tuple[str, str]:
    return step.machine, step.scored.family


READINGS: Final[Mapping[str, Callable[[Step], Hashable]]] = MappingProxyType(
    {
        "machine": lambda step: step.machine,
        "cluster": lambda step: step.cluster,
        "model": _family,
        "release": lambda step: (_family(step), step.release),
    }
)
"""What may be meant by the cluster of which one run is measured, from the widest to the narrowest.

A cluster is a machine with what runs on it: whose it is, its framework, its precision. The machine alone lets
one run in bf16 stand for runs in fp8 and of another framework. A model is one model on a machine; a release
one model with one version of the software, which is what a person has who times their own training.
"""


def calibrated(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the scores of *steps* but one per cluster, after calibrating on that one; and by each reading.

    The one is the middle of the runs by predicted time: neither the smallest nor the largest of what is
    planned. Its label has no part in the choice. What it tells holds for its model and precision: other
    models of its cluster are predicted as before. A cluster with one run has nothing left to score.
    """
    found: dict[str, Any] = {}
    for reading, key in READINGS.items():
        groups = list(_by(steps, key).values())
        name = "calibrated" if reading == "cluster" else f"calibrated_{reading}"
        found[f"{name}_score"] = score(step for runs in groups for step in after(runs, middle(runs)))
        found[f"{name}_before"] = score(step for runs in groups for step in _but(runs, middle(runs)))
        if reading == "cluster":
            rest = [step for runs in groups for step in after(runs, middle(runs))]
            found["calibrated_score_by_class"] = score_by(rest, lambda step: step.scored.group)
            found["calibration"] = dict(map(_used, groups))
    return {**found, "calibration_check": checked(steps)}


def after(runs: Iterable[Step], one: Step) -> list[Step]:
    """Return *runs* but *one*, those of its model and precision with the factors that it tells."""
    factors = fit(one.curve, one.scored.measured)
    return [
        with_factors(step, factors) if _family(step) == _family(one) else step for step in _but(runs, one)
    ]


def middle(runs: Iterable[Step]) -> Step:
    """Return the middle of *runs* by predicted time."""
    ordered = _ordered(runs)
    return ordered[len(ordered) // 2]


def _used(runs: Sequence[Step]) -> tuple[str, dict[str, Any]]:
    """Return the name of a cluster, and on which of its *runs* it was calibrated with what outcome."""
    one = middle(runs)
    factors = fit(one.curve, one.scored.measured)
    return " · ".join(one.cluster), {"id": one.scored.id, "rows": len(runs) - 1, **factors._asdict()}


def checked(steps: Iterable[Step]) -> dict[str, Any]:
    """Return the score of models before and after calibrating on one run, whichever run that is.

    Each source in turn is taken to be unknown: the spreads are chosen on the others. Up to ``TURNS`` runs of
    each model, evenly over predicted times, take their turn as the one that was measured.
    """
    sources = _by(steps, lambda step: step.choice[0])
    before = {name: _turns(own, None) for name, own in sources.items()}
    then = {spreads: {name: _turns(own, spreads) for name, own in sources.items()} for spreads in CANDIDATES}
    chosen = {name: _best(then, [other for other in sources if other != name] or [name]) for name in sources}
    return {
        "before": _mean(before.values()),
        "after": _mean(then[spreads][name] for name, spreads in chosen.items()),
        "spreads": {name: spreads._asdict() for name, spreads in chosen.items()},
        "spreads_of_all": _best(then, sources)._asdict(),
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
            errors += [abs(with_factors(step, factors).scored.log_ratio) for step in _but(some, one)]
        found += [median(errors)] if errors else []
    return found


def _best(then: dict[Spreads, dict[str, Medians]], sources: Iterable[str]) -> Spreads:
    names = list(sources)
    return min(then, key=lambda spreads: _mean(then[spreads][name] for name in names) or 0.0)


def _mean(sources: Iterable[Medians]) -> float | None:
    """Return the mean over families of all *sources*; None if there is none."""
    medians = [one for own in sources for one in own]
    return fmean(medians) if medians else None


def _but(runs: Iterable[Step], one: Step) -> list[Step]:
    return [step for step in runs if step is not one]


def with_factors(step: Step, factors: Factors) -> Step:
    """Return *step* as it is predicted with *factors*."""
    predicted = step.curve.at(compute=factors.compute, communication=factors.communication)
    return replace(step, scored=replace(step.scored, predicted=predicted))


def _ordered(runs: Iterable[Step]) -> list[Step]:
    return sorted(runs, key=lambda step: (step.scored.predicted, step.scored.id))


def _by(steps: Iterable[Step], key: Callable[[Step], Any]) -> dict[Any, list[Step]]:
    found: dict[Any, list[Step]] = defaultdict(list)
    for step in steps:
        found[key(step)].append(step)
    return dict(sorted(found.items()))
