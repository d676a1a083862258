"""Whether the right layout is chosen: in every group that shares model, machine, GPUs and batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from foretrace.simulator.validate.ranking import kendall_tau, regret
from foretrace.simulator.validate.scores import Scored
from foretrace.simulator.validate.steps_run import Step

LEAST_CHOICE: Final = 3
"""Fewest layouts in a group: below this there is not much to choose from."""


class Choice(NamedTuple):
    """One group of layouts.

    Attributes:
        source: who measured it.
        what: model, number of GPUs and batch, in words.
        layouts: number of layouts to choose from.
        tau: Kendall's tau of predicted and measured times; None if one of them is all ties.
        regret: by how much the layout that is predicted to be fastest is slower than the fastest, as a share.
        chosen: that layout, in words.
        fastest: the layout that was.
    """

    source: str
    what: str
    layouts: int
    tau: float | None
    regret: float
    chosen: str
    fastest: str


def groups(steps: Iterable[Step]) -> list[Choice]:
    """Return every group of at least ``LEAST_CHOICE`` layouts, by source, model, GPUs and batch.

    A layout that was measured several times, for example in several releases, counts once, with its medians.
    """
    found: dict[tuple[str, ...], dict[tuple[str, ...], list[Scored]]] = defaultdict(dict)
    for step in steps:
        found[step.choice].setdefault(step.layout, []).append(step.scored)
    large = {key: list(layouts.values()) for key, layouts in found.items() if len(layouts) >= LEAST_CHOICE}
    return [_choice(key, layouts) for key, layouts in sorted(large.items())]


def choices(steps: Iterable[Step]) -> dict[str, Any]:
    """Return how well layouts are ordered, in all groups, in those of each source, and in each.

    Kendall's tau and ``regret_mean`` are means over groups, ``regret_median`` is the median.
    """
    found = groups(steps)
    sources = {name: [one for one in found if one.source == name] for name in {one.source for one in found}}
    return {
        "choice_groups": len(found),
        **_summary(found),
        "choices_by_source": {
            name: {"groups": len(own), **_summary(own)} for name, own in sorted(sources.items())
        },
        "choices": [one._asdict() for one in found],
    }


def _choice(key: tuple[str, ...], layouts: Sequence[Sequence[Scored]]) -> Choice:
    predicted = [median(row.predicted for row in same) for same in layouts]
    measured = [median(row.measured for row in same) for same in layouts]
    source, model, n_layers, _, _, n_gpus, batch, *_ = key
    return Choice(
        source=source,
        what=f"{model}, {n_layers} layers, {n_gpus} GPUs, batch {batch}",
        layouts=len(layouts),
        tau=kendall_tau(predicted, measured),
        regret=regret(predicted, measured),
        chosen=layouts[predicted.index(min(predicted))][0].what,
        fastest=layouts[measured.index(min(measured))][0].what,
    )


def _summary(found: Sequence[Choice]) -> dict[str, float | None]:
    taus = [one.tau for one in found if one.tau is not None]
    regrets = [one.regret for one in found]
    return {
        "kendall_tau": fmean(taus) if taus else None,
        "regret_median": median(regrets) if regrets else None,
        "regret_mean": fmean(regrets) if regrets else None,
    }
