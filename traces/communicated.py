"""Whether a step of one run communicates what a step of another does: kind, group, bytes, dtype, order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from foretrace.traces.columns import int64, is_one_of, labels
from foretrace.traces.layout import Group
from foretrace.traces.rehearsal import WHAT, RankTables
from foretrace.traces.report.format import format_si
from foretrace.traces.run import Run

COMMUNICATION: Final = ("collective", "p2p")  # categories of spans that are communication
NAMED: Final = ("category", "kind", "axis", "dtype")  # columns of names that say what a communication is


class Channel(NamedTuple):
    """What is in one order: the collectives of a group, or what a rank sends to, or gets from, another."""

    axis: str  # of the layout that it runs along
    ranks: tuple[int, ...]  # members of the group, () if the run does not say; of a pair, the other rank
    kind: str  # of a transfer of a pair; empty for collectives

    def words(self) -> str:
        """Return what a person calls it."""
        if self.kind:
            return f"with rank {self.ranks[0]}"
        members = ", ".join(map(str, self.ranks[:4])) + (", ..." if len(self.ranks) > 4 else "")
        return f"among ranks {members}" if self.ranks else f"along {self.axis}"


class Call(NamedTuple):
    """One communication; 0 bytes and an empty dtype are unknown, and equal anything."""

    kind: str
    size_bytes: int
    dtype: str

    def words(self) -> str:
        """Return what a person calls it."""
        size = f" of {format_si(self.size_bytes, 'B')}" if self.size_bytes else ""
        return f"{self.kind}{size}{f' {self.dtype}' if self.dtype else ''}"

    def equals(self, other: Call) -> bool:
        """Return whether nothing that both know is different."""
        return self == other or all(
            one == two or not one or not two for one, two in zip(self, other, strict=True)
        )


class Difference(NamedTuple):
    """The first communication of a channel that is not the same in both runs."""

    rank: int  # that takes part
    channel: Channel  # in whose order it is
    nth: int  # its place there, from 0
    # what it is in each run, None past the end
    a: Call | None
    b: Call | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicated:
    """What two steps communicate, rank by rank."""

    ranks: tuple[int, ...]  # those that were compared
    # how many communications of each kind there are, over these ranks
    a: Mapping[str, int]
    b: Mapping[str, int]
    differences: tuple[Difference, ...]  # of each channel in which the runs differ, the first
    # where they differ, another step that is the same: of which run, ``a`` or ``b``, and its number
    alike: tuple[str, int] | None = None

    def words(self, a: str = "a", b: str = "b") -> str:
        """Return the finding in a sentence, empty if there is none; *a* and *b* name the runs."""
        n_a, n_b = sum(self.a.values()), sum(self.b.values())
        if not n_a and not n_b:
            return ""
        where = f"on rank {self.ranks[0]}" if len(self.ranks) == 1 else f"on {len(self.ranks)} ranks"
        if not self.differences:
            what = "kind, group, bytes, dtype and order"
            return f"communication is the same in {a} and {b}: {n_a:,} {where}, by {what}"
        first = self.differences[0]
        calls = [one.words() if one else "nothing" for one in (first.a, first.b)]
        n_ranks = len({one.rank for one in self.differences})
        n_each = f"{n_a:,} in {a}, {n_b:,} in {b}"
        return (
            f"communication differs on {n_ranks} of {len(self.ranks)} ranks ({n_each}): first on rank "
            f"{first.rank} {first.channel.words()}, number {first.nth + 1} of the step is "
            f"{calls[0]} in {a}, {calls[1]} in {b}{self._alike(a, b)}"
        )

    def _alike(self, a: str, b: str) -> str:
        """Return the end of that sentence: which other step is the same."""
        if self.alike is None:
            return ""
        side, step = self.alike
        own, other = (a, b) if side == "a" else (b, a)
        return f"; step {step} of {own} communicates the same as {other}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "is_same": not self.differences,
            "ranks": list(self.ranks),
            "a": dict(self.a),
            "b": dict(self.b),
            "differences": [
                {
                    "rank": one.rank,
                    "axis": one.channel.axis,
                    "members": list(one.channel.ranks),
                    "nth": one.nth,
                    "a": one.a._asdict() if one.a else None,
                    "b": one.b._asdict() if one.b else None,
                }
                for one in self.differences
            ],
            "alike": None if self.alike is None else {"run": self.alike[0], "step": self.alike[1]},
        }


Channels = Mapping[Channel, list[Call]]


def channels(run: Run, spans: pa.Table, *, by_axis: bool = True) -> Channels:
    """Return what the *spans* of a step of one rank communicate, channel by channel, each in its order.

    Args:
        run: names the members of groups.
        spans: of the step.
        by_axis: whether what the same ranks tell each other along other axes is in an order of its own.
    """
    members = {group.id: group.ranks for group in run.info.groups}
    spans = spans.filter(pa.array(is_one_of(spans, "category", COMMUNICATION)))
    # By number, and where there is none, by start.
    order = np.lexsort([int64(spans, name) for name in ("start_ns", "sequence")])
    named = [[names[code] for code in codes[order]] for codes, names in (labels(spans, one) for one in NAMED)]
    numbers = [int64(spans, name)[order].tolist() for name in ("group", "peer", "size_bytes")]
    found: defaultdict[Channel, list[Call]] = defaultdict(list)
    # A step has thousands of communications, and few that differ: what a row means is worked out once.
    seen: dict[tuple[Any, ...], tuple[list[Call], Call]] = {}
    for row in zip(*named, *numbers, strict=True):
        if row not in seen:
            category, kind, axis, dtype, group, peer, size_bytes = row
            is_pair = category == "p2p"
            ranks = (peer,) if is_pair else members.get(group, ())
            axis = axis if by_axis else ""
            seen[row] = found[Channel(axis, ranks, kind if is_pair else "")], Call(kind, size_bytes, dtype)
        calls, call = seen[row]
        calls.append(call)
    return found


def issued(tables: RankTables, groups: Iterable[Group], step: int) -> Channels:
    """Return what a rehearsed rank communicates in *step*, as `channels` does without axes."""
    members = {group.id: group.ranks for group in groups}
    messages = tables.messages.to_pylist()
    in_step = np.array([place["step"] == step for place in tables.places.to_pylist()], np.bool_)
    events = tables.events
    is_own = int64(events, "what") == WHAT.index("communication")
    is_own &= in_step[int64(events, "place")]
    found: defaultdict[Channel, list[Call]] = defaultdict(list)
    for item in int64(events, "item")[is_own].tolist():
        one = messages[item]
        is_pair = one["peer"] >= 0
        ranks = (one["peer"],) if is_pair else members.get(one["group"], ())
        call = Call(one["kind"], one["size_bytes"], one["dtype"])
        found[Channel("", ranks, one["kind"] if is_pair else "")].append(call)
    return found


def compared(sides: Mapping[int, tuple[Channels, Channels]]) -> Communicated:
    """Return what the two *sides* of each rank communicate, and where they differ."""
    counts = [Counter[str](), Counter[str]()]
    for pair in sides.values():
        for count, side in zip(counts, pair, strict=True):
            count.update(call.kind for calls in side.values() for call in calls)
    differences = (one for rank, pair in sides.items() for one in _differences(rank, *pair))
    return Communicated(
        ranks=tuple(sides), a=dict(counts[0]), b=dict(counts[1]), differences=tuple(differences)
    )


def _differences(rank: int, ours: Channels, theirs: Channels) -> Iterator[Difference]:
    """Yield the first difference of each channel of *rank*."""
    for channel in dict.fromkeys((*ours, *theirs)):
        pairs = zip_longest(ours.get(channel, ()), theirs.get(channel, ()))
        for nth, (a, b) in enumerate(pairs):
            if a is not b and (a is None or b is None or not a.equals(b)):
                yield Difference(rank, channel, nth, a, b)
                break
