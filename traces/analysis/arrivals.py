"""When each communication really began: the arrival of its last participant, found by joining ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretrace.traces.analysis.communications import Part, came_last, communications
from foretrace.traces.columns import Int64Array, int64
from foretrace.traces.run import Run


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The last arrival of every communication span of the stored ranks."""

    # by rank, for each span in stored order: time of the last arrival, within the span. For a span that is
    # not communication, or whose partners are not known, its own start
    last_ns: dict[int, Int64Array]
    like: dict[int, int]  # by rank, the first one that does the same and waits for the same times as it does
    n_joined: int  # number of spans that found at least one partner


def arrivals(run: Run) -> Arrivals:
    """Join the stored ranks of *run*; the result is kept with the run.

    A rank whose span ended before the last arrival did not wait for it, as a buffered send does not: the
    span counts from its own start. Clocks that differ by no more than their stated uncertainty are forgiven.
    """
    return run.derived(_arrivals)


def _arrivals(run: Run) -> Arrivals:
    joined = communications(run)
    latest, _ = came_last(joined.n_numbers, ((part, _meeting(part)) for part in joined))
    count = np.zeros(joined.n_numbers, np.int64)
    # Twice, as both clocks may be off by that much.
    slack_ns = 2 * max((clock.uncertainty_ns for clock in run.info.clock.values()), default=0)
    last_ns: dict[int, Int64Array] = {}
    like: dict[int, int] = {}
    same: dict[tuple[int, int], list[int]] = {}
    for part in joined:
        number = _meeting(part)
        meets = number >= 0
        came = part.start_ns.copy()
        came[meets] = latest[number[meets]]
        np.add.at(count, number[meets], 1)
        came = np.where(came <= part.end_ns + slack_ns, np.minimum(came, part.end_ns), part.start_ns)
        # Ranks of one hash are compared in full below: equal hashes may be chance.
        ranks = same.setdefault((run.like(part.rank), hash(came.tobytes())), [])
        first = next((one for one in ranks if np.array_equal(last_ns[one][part.rows], came)), part.rank)
        if first == part.rank:
            ranks.append(first)
            last_ns[first] = int64(run.spans([first], ["start_ns"]), "start_ns").copy()
            last_ns[first][part.rows] = came
        last_ns[part.rank], like[part.rank] = last_ns[first], first
    return Arrivals(last_ns, like, int(count[count > 1].sum()))


def _meeting(part: Part) -> Int64Array:
    """Return the number of each row of *part*; -1 for a transfer that does not say with whom."""
    return np.where(part.is_apart, -1, part.number)
