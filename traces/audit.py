"""What a recording says of itself: how much of it the flight recorder of c10d, torch's own, confirms.

Each rank compares what it has recorded when its recording ends (``foretrace.tracer.audit``) and writes the
result into its sidecar; here the results of the ranks become one, and words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

SHOWN_DIFFERENCES: Final = 6  # differences that a person reads; all are in the JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Calls of one sort."""

    recorded: int = 0  # calls that were recorded, in steps that were left out, too
    compared: int = 0  # those of which c10d's flight recorder holds an entry of the same kind and size
    counted: int = 0  # those of which only the number agrees with c10d's

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            recorded=self.recorded + other.recorded,
            compared=self.compared + other.compared,
            counted=self.counted + other.counted,
        )

    def words(self, sort: str) -> str:
        """Return how many calls of *sort* are confirmed, e.g. ``"3 of 4 collectives confirmed by c10d"``."""
        by_number = f"{self.counted:,} of {self.recorded:,} {sort} confirmed by c10d by their number only"
        if self.counted and not self.compared:
            return by_number
        compared = f"{self.compared:,} of {self.recorded:,} {sort} confirmed by c10d"
        return f"{compared}, {self.counted:,} more by their number only" if self.counted else compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What c10d says of the calls that were recorded."""

    collectives: Tally = field(default_factory=Tally)  # the collectives
    transfers: Tally = field(default_factory=Tally)  # the sides of point-to-point transfers
    # what is not confirmed, or by its number only, and why; how many there are of it
    reasons: Mapping[str, int] = field(default_factory=dict)
    differences: tuple[str, ...] = ()  # what was recorded otherwise than c10d holds it, in words

    def lines(self) -> list[str]:
        """Return what a person should read: what is confirmed, what is not and why, and what differs."""
        sorts = (("collectives", self.collectives), ("transfers", self.transfers))
        found = [tally.words(sort) for sort, tally in sorts if tally.recorded]
        found += [f"{n:,} {why if n > 1 else _singular(why)}" for why, n in self.reasons.items()]
        shown = [f"differs from c10d: {text}" for text in self.differences[:SHOWN_DIFFERENCES]]
        if (n_more := len(self.differences) - len(shown)) > 0:
            shown.append(f"differs from c10d: {n_more} more, see --json")
        return ["; ".join(found), *shown] if found else shown


def joined(audits: Iterable[Audit | None], n_ranks: int) -> Audit | None:
    """Return the audits of all ranks as one, None if no rank has made one.

    Args:
        audits: by rank, None where the recording of a rank did not come to its end.
        n_ranks: ranks that were recorded; what those without an audit recorded is unknown.
    """
    made = [audit for audit in audits if audit is not None]
    if not made:
        return None
    reasons: Counter[str] = Counter()
    for audit in made:
        reasons.update(audit.reasons)
    if n_ranks > len(made):
        reasons["ranks that ended before the comparison"] = n_ranks - len(made)
    return Audit(
        collectives=sum((audit.collectives for audit in made), Tally()),
        transfers=sum((audit.transfers for audit in made), Tally()),
        reasons=dict(reasons),
        differences=tuple(text for audit in made for text in audit.differences),
    )


def _singular(reason: str) -> str:
    """Return a reason, which begins with a noun for several, for one."""
    noun, _, rest = reason.partition(" ")
    return f"{noun.removesuffix('s')} {rest}"
