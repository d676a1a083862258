"""Scores of simulated steps, and between which shares of a prediction measured times lie."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any, Final

from foretrace.simulator.validate.errors import errors
from foretrace.simulator.validate.scores import spreads
from foretrace.simulator.validate.steps_job import size_names
from foretrace.simulator.validate.steps_run import Step

COMPLETE: Final = ("A", "A-")
"""Levels of rows that say everything, or all but what their notes state."""


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
    by_size = score_by(main, lambda step: step.size)
    clean = [step for step in steps if not step.stress and not step.slow]
    return {
        "score_by_gpu": score_by(main, lambda step: step.device),
        "score_by_size": {name: by_size[name] for name in size_names() if name in by_size},
        "score_by_class_and_gpu": score_by(main, lambda step: f"{step.scored.group} · {step.device}"),
        "score_by_level": score_by(clean, lambda step: step.level),
        "incomplete_score": score(step for step in clean if step.level not in COMPLETE),
        "stress_score": score(step for step in steps if step.stress),
        "stress_rows": sum(step.stress for step in steps),
        "with_slow_score": score(step for step in steps if step.level in COMPLETE and not step.stress),
        "slow_rows": sum(step.slow for step in steps),
        "assumed": dict(Counter(words for step in steps for words in step.assumed).most_common()),
        "errors": errors((step.scored, (step.scored.group, step.device)) for step in main),
    }


def score_by(steps: Iterable[Step], key: Callable[[Step], str]) -> dict[str, float]:
    """Return the score of each set of *steps* that agree in *key*, by name."""
    found: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        found[key(step)].append(step)
    return {name: value for name, same in sorted(found.items()) if (value := score(same)) is not None}
