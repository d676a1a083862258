"""Compares what was recorded with a witness: what c10d itself keeps of its calls.

c10d has two records of its own. Its *flight recorder* is a ring of the last calls of a process, 2,000 unless
``TORCH_FR_BUFFER_SIZE`` says otherwise, with kinds and sizes; of gloo it holds no transfers. And gloo numbers
the calls of a group, transfers included. Both are read twice, when a recording begins and when it ends:
nothing is switched on for this, and the training pays nothing.

The calls of a group are compared with the ring one by one and in order. A backend may carry out one call as
several of another kind, as gloo does a reduce-scatter as all-reduces. Their bytes add up to those of the
call: so it is enough to know the kinds.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final, NamedTuple

from foretrace.tracer import internals
from foretrace.tracer.groups import Groups
from foretrace.tracer.ingest.kernels import UNKNOWN, collective_kind, dtype
from foretrace.tracer.records import Communication
from foretrace.traces.info import Audit, Tally, joined_audits

KEPT: Final = 4096
"""Calls of one line that are kept: more than the flight recorder holds, unless it was told to hold more."""

MOST_PASSED: Final = 256  # calls that are passed in search of one that was recorded and is held

PARTS: Final[Mapping[tuple[str, str], str]] = {
    ("gloo", "reduce_scatter"): "all_reduce",
    ("nccl", "reduce_scatter"): "reduce",
    ("nccl", "all_gather"): "broadcast",
}
"""By backend and kind of a call, of what kind the calls are as which it may be carried out."""

_PEERS: Final = re.compile(r" \d+(?:->|<-)(\d+)")  # how NCCL names the ranks of a transfer, its own first

_NO_RING: Final = "collectives in no flight recorder, as this torch has none for {} or it is off"
_OLDER: Final = "collectives older than what c10d's flight recorder holds"
_BARRIERS: Final = "barriers without an entry in c10d's flight recorder"
_UNCOUNTED: Final = "calls not confirmed, as c10d does not tell their number"
_DIFFERS: Final = "calls not confirmed, as c10d counts another number"


class Line(NamedTuple):
    """Calls whose order c10d keeps: the collectives of a group, or its transfers with a peer."""

    group: str
    backend: str
    kind: str = ""
    peer: int = -1


class Call(NamedTuple):
    """One recorded call; its number is that within its group, or within the transfers of a pair."""

    number: int
    kind: str
    size_bytes: int
    is_written: bool = True


class Entry(NamedTuple):
    """One call as c10d holds it; a size that it does not tell is -1."""

    number: int
    kind: str
    size_bytes: int


@dataclass(slots=True)
class Ring:
    """What a flight recorder holds of the calls of this recording."""

    is_whole: bool  # whether no entry has been overwritten
    lines: defaultdict[Line, list[Entry]] = field(default_factory=lambda: defaultdict(list))  # its entries
    # by group and backend, how many calls of whatever sort there have been up to the last entry
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)


@dataclass(slots=True)
class Compared:
    """What came out of comparing calls with entries."""

    same: list[Call] = field(default_factory=list)  # calls that were recorded as c10d holds them
    n_beyond: int = 0  # entries that carried out one of them beside the first
    missed: list[Entry] = field(default_factory=list)  # entries of which no call was recorded
    unheld: list[Call] = field(default_factory=list)  # calls without an entry
    # calls, and the entries of another size at their place
    resized: list[tuple[Call, Entry]] = field(default_factory=list)

    def differences(self, group: str) -> Iterator[str]:
        """Yield in words what was recorded otherwise than c10d holds it, by kind."""
        for text, found in (
            ("c10d counts {} of {} more than recorded, first at its sequence {}", self.missed),
            ("{} of {} recorded that c10d does not hold, first at sequence {}", self.unheld),
        ):
            numbers: defaultdict[str, list[int]] = defaultdict(list)
            for number, kind, *_ in found:
                numbers[kind].append(number)
            for kind, at in numbers.items():
                yield text.format(_several(len(at), kind), group, min(at))
        if self.resized:
            call, entry = min(self.resized)
            yield (
                f"{_several(len(self.resized), call.kind)} of {group} of another size than c10d holds, "
                f"first at sequence {call.number}: {call.size_bytes:,} bytes recorded, "
                f"{entry.size_bytes:,} held"
            )


def compare(calls: Sequence[Call], entries: Sequence[Entry], backend: str, *, is_whole: bool) -> Compared:
    """Compare the calls of a line with what c10d holds, both in the order of their issue.

    Args:
        calls: what was recorded.
        entries: what c10d holds.
        backend: what has carried out the calls.
        is_whole: c10d holds all; else only the last, and calls before them are in no list of the result.
    """
    found = Compared()
    step = 1 if is_whole else -1  # from the end that both have
    calls, entries = calls[::step], entries[::step]

    def covers(i: int, j: int) -> int:
        """Return how many entries from *j* on are what became of call *i*, 0 if they are not."""
        call = calls[i]
        if entries[j].kind == call.kind and entries[j].size_bytes in (-1, call.size_bytes):
            return 1
        total = 0
        for at in range(j, len(entries)):
            if entries[at].kind != PARTS.get((backend, call.kind)) or total > call.size_bytes:
                break
            total += entries[at].size_bytes
            if total == call.size_bytes:
                return at - j + 1
        return 0

    def goes_on(i: int, j: int) -> bool:
        """Whether call *i* and entry *j* are alike, or both lists are over."""
        if i < len(calls) and j < len(entries):
            return covers(i, j) > 0
        return i == len(calls) and j == len(entries)

    def passed(i: int, j: int) -> tuple[int, int]:
        """Return how many calls or entries to pass until they are alike; one of each if they never are."""
        for n in range(1, MOST_PASSED):
            if j + n < len(entries) and covers(i, j + n):
                return 0, n
            if i + n < len(calls) and covers(i + n, j):
                return n, 0
        return 1, 1

    i = j = 0
    while i < len(calls) and j < len(entries):
        if n := covers(i, j):
            found.same.append(calls[i])
            found.n_beyond += n - 1
            i, j = i + 1, j + n
        elif calls[i].kind == entries[j].kind and goes_on(i + 1, j + 1):
            found.resized.append((calls[i], entries[j]))
            i, j = i + 1, j + 1
        else:
            n_calls, n_entries = passed(i, j)
            found.unheld += calls[i : i + n_calls]
            found.missed += entries[j : j + n_entries]
            i, j = i + n_calls, j + n_entries
    found.missed += entries[j:]
    # Of a ring that has overwritten entries, calls that are left over are older than all that it holds.
    if is_whole:
        found.unheld += calls[i:]
    return found


class Auditor:
    """Keeps the last calls of a recording, and compares them with c10d when it ends."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._calls: defaultdict[Line, deque[Call]] = defaultdict(lambda: deque(maxlen=KEPT))
        # Calls that are no longer kept are counted all the same.
        self._n_added: Counter[Line] = Counter()
        self._n_written: Counter[Line] = Counter()
        self._kinds: set[tuple[str, str, str]] = set()
        # What c10d has held and counted so far is not of this recording.
        before = internals.flight_recorders()
        self._last_ids = [max((entry["record_id"] for entry in entries), default=-1) for entries in before]
        self._numbers = self._numbers_of([self._ring(entries, -1) for entries in before])

    def add(self, one: Communication, *, is_written: bool = True) -> None:
        """Keep *one*, which is about to be written, or has not ended; on the writing thread."""
        backend = "gloo" if one.device < 0 or one.group.gpu_on_gloo else "nccl"
        line = Line(one.group.name, backend, *((one.kind, one.peer) if one.is_p2p else ()))
        self._calls[line].append(Call(one.sequence, one.kind, one.size_bytes, is_written))
        self._kinds.add((line.group, backend, one.kind))
        self._n_added[line] += 1
        self._n_written[line] += is_written

    def audit(self, rank: int) -> Audit | None:
        """Return what c10d confirms of the calls, None if there were none; *rank* is the own global rank."""
        recorders = zip(internals.flight_recorders(), self._last_ids, strict=True)
        rings = [self._ring(entries, last_id) for entries, last_id in recorders]
        numbers = self._numbers_of(rings)
        lines: defaultdict[tuple[str, str], list[Line]] = defaultdict(list)
        for line in sorted({*self._n_added, *(line for ring in rings for line in ring.lines)}):
            lines[line.group, line.backend].append(line)
        audits = []
        for key, own in lines.items():
            # There is one recorder for each kind of backend.
            ring = next((ring for ring in rings if key[1] in {line.backend for line in ring.lines}), None)
            number = numbers[key] - self._numbers.get(key, 0) if key in numbers else None
            audits.append(self._audited(own, ring, number))
        found = joined_audits(audits, len(audits))
        if found is None:
            return None
        return replace(found, differences=tuple(f"rank {rank}: {text}" for text in found.differences))

    def _audited(self, lines: Sequence[Line], ring: Ring | None, number: int | None) -> Audit:
        """Return what c10d confirms of the calls of one group on one backend, which are those of *lines*.

        *ring* is the flight recorder that holds calls of the backend, if one does; *number* is how many calls
        the backend has counted in the recording, None if it does not tell.
        """
        group, backend, *_ = lines[0]
        tallies, reasons = {True: Tally(), False: Tally()}, Counter[str]()
        left = {True: 0, False: 0}
        differences: list[str] = []
        kinds = {kind for name, own, kind in self._kinds if (name, own) == (group, backend)}
        n_expected = n_barriers = 0
        for line in lines:
            is_p2p, found = bool(line.kind), Compared()
            if ring is not None and not (is_p2p and backend == "gloo"):
                # Calls come here as they end. Their numbers have the order of their issue.
                found = compare(sorted(self._calls[line]), ring.lines[line], backend, is_whole=ring.is_whole)
            # Gloo carries out a monitored barrier by transfers, which its flight recorder does not hold.
            unheld = [call for call in found.unheld if call.kind != "barrier"]
            n_barriers += len(found.unheld) - len(unheld)
            n_same = sum(call.is_written for call in found.same)
            n_other = sum(call.is_written for call in (*found.unheld, *(call for call, _ in found.resized)))
            tallies[is_p2p] += Tally(recorded=self._n_written[line], compared=n_same)
            # What is neither confirmed nor different can only be confirmed by its number.
            left[is_p2p] += self._n_written[line] - n_same - n_other
            n_expected += self._n_added[line] + len(found.missed) - len(unheld) + found.n_beyond
            found.unheld = unheld
            differences += found.differences(self._shown(group))
        reasons[_BARRIERS] = n_barriers
        reasons[_OLDER if ring else _NO_RING.format(backend)] = left[False]
        several = {"barrier", *(kind for own, kind in PARTS if own == backend)}
        # A barrier, and a kind of PARTS, may be several calls to the backend: only the ring tells how many.
        is_vague = backend != "gloo" or n_barriers > 0 or bool(left[False] and several & kinds)
        if number == n_expected:
            tallies = {is_p2p: replace(tally, counted=left[is_p2p]) for is_p2p, tally in tallies.items()}
        elif number is None or is_vague:
            reasons[_UNCOUNTED] = sum(left.values())
        else:
            reasons[_DIFFERS] = sum(left.values())
            which = "more than recorded" if number > n_expected else "fewer than recorded"
            n_calls = _several(abs(number - n_expected), "call")
            differences.append(f"c10d counts {n_calls} of {self._shown(group)} {which}")
        return Audit(
            collectives=tallies[False],
            transfers=tallies[True],
            reasons={why: n for why, n in reasons.items() if n},
            differences=tuple(differences),
        )

    def _shown(self, group: str) -> str:
        """Return what a person calls the group that torch calls *group*."""
        info = self._groups.named(group)
        axis = f"group {group}" if info is None else info.axis
        return axis if axis.startswith("group ") else f"group {axis}"

    def _numbers_of(self, rings: Iterable[Ring]) -> dict[tuple[str, str], int]:
        """Return by group and backend how many calls c10d has counted: by its backend, else by *rings*."""
        found = {key: number for ring in rings for key, number in ring.numbers.items()}
        # Gloo's own number counts transfers, too, which its ring does not hold.
        return found | {(group, "gloo"): number for group, number in internals.call_numbers().items()}

    def _ring(self, entries: Sequence[Mapping[str, Any]], last_id: int) -> Ring:
        """Return what a flight recorder holds behind the entry *last_id*."""
        ids = [entry["record_id"] for entry in entries]
        # The first entry of this recording must still be held, or be the next to come. Else entries are gone,
        # or the recorder was reset.
        ring = Ring(is_whole=not ids or min(ids) <= last_id + 1 <= max(ids) + 1)  # it may have been reset
        for entry in entries:
            group, name = entry["process_group"][0], entry["profiling_name"]
            backend, _, what = name.partition(":")
            kind, is_p2p = collective_kind(name), entry["is_p2p"]
            is_batch = kind == UNKNOWN and not entry["input_sizes"]  # its calls have entries of their own
            if entry["record_id"] <= last_id or not group or is_batch:  # a group without a name is c10d's own
                continue
            info = self._groups.named(group)
            peer = (kind, _peer(name, () if info is None else info.ranks)) if is_p2p else ()
            n_ranks = 1 if info is None else len(info.ranks)
            number = entry["p2p_seq_id" if is_p2p else "collective_seq_id"]
            one = Entry(number, what if kind == UNKNOWN else kind, _size_bytes(entry, kind, n_ranks))
            ring.lines[Line(group, backend, *peer)].append(one)
            ring.numbers[group, backend] = entry["op_id"]
        return ring


def _peer(name: str, ranks: Sequence[int]) -> int:
    """Return the global rank of the other side of the transfer *name*, -1 if it is not told."""
    found = _PEERS.search(name)
    return ranks[int(found[1])] if found and int(found[1]) < len(ranks) else -1


def _size_bytes(entry: Mapping[str, Any], kind: str, n_ranks: int) -> int:
    """Return the size of the array of an entry as `Operator.size` has it, -1 if it is not told."""
    sizes: dict[str, int] = {}
    for way in ("input", "output"):
        shapes, types = entry[f"{way}_sizes"], [dtype(name)[1] for name in entry[f"{way}_dtypes"]]
        if 0 in types or len(types) < len(shapes):
            return -1
        sizes[way] = sum(prod(shape) * width for shape, width in zip(shapes, types, strict=False))
    if kind == "barrier":
        return 0  # NCCL sends an element
    if kind == "scatter":  # the part of a rank is the smaller side, and c10d may call it input or output
        return n_ranks * min((size for size in sizes.values() if size), default=0)
    return sizes["input"] * (n_ranks if kind in ("all_gather", "gather") else 1)


def _several(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' if n > 1 else ''}"
