"""Every pair of options: both run together, or are refused together in one line that says why.

Jobs are put together out of pairs that have not been tried. One that runs settles all of its pairs. One that
is refused is taken apart into smaller ones, until a single pair is refused; jobs after that leave it out.
Figures alone are predicted: most pairs have their timelines among the products of ``test_every_option.py``.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, Final

from tests.simulator.crossed_options import CONVENTIONS, NEEDS, OPTIONS, outcome

Choice = tuple[str, Any]
Pair = frozenset[Choice]

AT_ONCE: Final = 9
"""Options that a job is given at first."""

TRIES: Final = 30
"""Choices among which the one that brings most new pairs is taken."""

USUAL: Final[Mapping[str, Any]] = {
    **{name: values[0] for name, values in OPTIONS.items()},
    "framework": "megatron",
    "schedule": "1f1b",
}
CHOICES: Final[tuple[Choice, ...]] = (
    *((name, value) for name, values in OPTIONS.items() for value in values if value != USUAL[name]),
    *((f"conventions.{name}", value) for name, values in CONVENTIONS.items() for value in values),
)


def settings(choices: Iterable[Choice]) -> dict[str, Any]:
    """Return *choices* as settings of a job, with what they need unless they say so themselves."""
    chosen = dict(choices)
    found: dict[str, Any] = {}
    for name in chosen:
        found.update(NEEDS.get(name, {}))
    conventions: dict[str, Any] = {}
    for name, value in chosen.items():
        where, _, convention = name.partition(".")
        if convention:
            conventions[convention] = value
        else:
            found[where] = value
    return {**found, "conventions": conventions}


def pairs_of(choices: Iterable[Choice]) -> set[Pair]:
    """Return all pairs of *choices*."""
    return {frozenset(pair) for pair in combinations(choices, 2)}


class Settled:
    """What became of pairs: those that are open, those that ran, and why others were refused."""

    def __init__(self) -> None:
        self.open = {pair for pair in pairs_of(CHOICES) if len({name for name, _ in pair}) == 2}
        self.ran: set[Pair] = set()
        self.refused: dict[Pair, str] = {}

    def job(self, draw: random.Random) -> list[Choice]:
        """Return choices with many open pairs and none that is refused, the first pair being open."""
        found = list(min(self.open, key=str))
        while len(found) < AT_ONCE:
            taken = {name for name, _ in found}
            allowed = [
                one
                for one in draw.sample(CHOICES, TRIES)
                if one[0] not in taken and not any(frozenset((one, other)) in self.refused for other in found)
            ]
            new = {one: sum(frozenset((one, other)) in self.open for other in found) for one in allowed}
            best = max(allowed, key=lambda one: new[one], default=None)
            if best is None or not new[best]:
                break
            found.append(best)
        return found

    def settle(self, choices: Sequence[Choice]) -> None:
        """Run *choices*, in parts that have every pair between them if they are refused together."""
        pairs = pairs_of(choices) & self.open
        if not pairs:
            return
        why = outcome(settings(choices), only_figures=True)
        if not why:
            self.ran |= pairs
            self.open -= pairs
        elif len(choices) == 2:
            self.refused[pairs.pop()] = why
            self.open -= set(self.refused)
        else:
            thirds = [choices[at::3] for at in range(3)] if len(choices) > 3 else [[one] for one in choices]
            for one, other in combinations(thirds, 2):
                self.settle([*one, *other])


def test_every_pair_of_options_runs_or_is_refused_in_one_line() -> None:
    settled, draw = Settled(), random.Random(0)
    while settled.open:
        settled.settle(settled.job(draw))
    assert all(why != "refused without a word" and "\n" not in why for why in settled.refused.values())
    assert len(settled.refused) < len(settled.ran) / 10, settled.refused
