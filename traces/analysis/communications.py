"""Which spans of which ranks are one communication.

A collective is known by ``(group, sequence)``, a point-to-point transfer by ``(group, sender, receiver,
sequence)``: its two ends are the ``send`` of one rank and the ``recv`` of the other. What is in one order,
the collectives of a group or the transfers of a pair in one direction, is a *channel*.

Ranks are read one after the other, and what ranks have in common is held once, so that a run of hundreds of
ranks needs a few numbers per communication beside its spans, and not per span.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretrace.traces.columns import BoolArray, Int64Array, distinct, factorized, int64, is_one_of
from foretrace.traces.run import Run

COMMUNICATION = ("collective", "p2p")  # categories of spans that several ranks take part in


class Part(NamedTuple):
    """The communication spans of one rank, in stored order; arrays have shape ``(n_rows,)``."""

    rank: int  # whose they are
    rows: NDArray[np.intp]  # their rows in its spans
    # when they run
    start_ns: Int64Array
    end_ns: Int64Array
    number: Int64Array  # the communication that each takes part in, -1 if only it does
    slot: Int64Array  # channel of each, as the rank counts its own by their first use; -1 where ``number`` is
    channels: Int64Array  # number of the channel in each slot
    is_apart: BoolArray  # a transfer that does not say with whom


@dataclass(frozen=True, slots=True)
class Communications:
    """The communications of the stored ranks.

    They are numbered channel by channel and in each by sequence, with numbers in between that nobody has.
    """

    n_numbers: int  # numbers are below this
    # group, sender and receiver of each channel, -1 in collectives; ascending, shape ``(n, 3)``
    channels: Int64Array
    channel: Int64Array  # of each number, shape ``(n_numbers,)``
    _run: Run
    _slots: dict[int, _Slots]
    _code: dict[int, Int64Array]
    _base: Int64Array

    def __iter__(self) -> Iterator[Part]:
        """Yield the part of each stored rank, in order."""
        return map(self.of, self._run.stored_ranks)

    def of(self, rank: int) -> Part:
        """Return the part of the stored *rank*."""
        own, one = self._run.once(_own, rank), self._slots[rank]
        known, number = one.slot >= 0, np.full(len(one.slot), -1, np.int64)
        code = self._code[self._run.like(rank)]
        number[known] = self._base[one.channels[one.slot[known]]] + code[known]
        return Part(rank, own.rows, own.start_ns, own.end_ns, number, one.slot, one.channels, one.is_apart)

    def code(self, part: Part) -> Int64Array:
        """Return which communication of its channel each row of *part* is, the same on all its ranks."""
        return self._code[self._run.like(part.rank)]


def communications(run: Run, *, by_step: bool = False) -> Communications:
    """Return the communications of the stored ranks; kept with the run.

    Args:
        run: an open run.
        by_step: tell apart what has one number in two steps, and join only what names its group.
    """
    return run.derived(_in_steps if by_step else _all)


def came_last(n_numbers: int, parts: Iterable[tuple[Part, Int64Array]]) -> tuple[Int64Array, Int64Array]:
    """Return by number when the last one came, and its rank: of several, the highest.

    Args:
        n_numbers: numbers are below this.
        parts: of each rank, in order, and the number of each of its rows; -1 for one that does not count.

    Returns:
        times, the smallest int64 where nobody came, and ranks, -1 there; shapes ``(n_numbers,)``.
    """
    last_ns, rank = np.full(n_numbers, np.iinfo(np.int64).min), np.full(n_numbers, -1, np.int64)
    for part, numbers in parts:
        rows = np.flatnonzero(numbers >= 0)
        number, start_ns = numbers[rows], part.start_ns[rows]
        np.maximum.at(last_ns, number, start_ns)
        rank[number[start_ns == last_ns[number]]] = part.rank  # until one comes later, or as late
    return last_ns, rank


@dataclass(frozen=True, slots=True)
class _Own:
    """What communication spans say without saying who takes part."""

    rows: NDArray[np.intp]
    start_ns: Int64Array
    end_ns: Int64Array
    sequence: Int64Array
    step: Int64Array
    is_p2p: BoolArray
    is_send: BoolArray


@dataclass(frozen=True, slots=True)
class _Slots:
    """The channels of one rank: slot by row; row of first use, key and number by slot."""

    slot: Int64Array
    first: NDArray[np.intp]
    keys: Int64Array
    channels: Int64Array
    is_apart: BoolArray


def _own(table: pa.Table) -> _Own:
    rows = np.flatnonzero(is_one_of(table, "category", COMMUNICATION))
    start = int64(table, "start_ns")[rows]
    return _Own(
        rows=rows,
        start_ns=start,
        end_ns=start + int64(table, "duration_ns")[rows],
        sequence=int64(table, "sequence")[rows],
        step=int64(table, "step")[rows],
        is_p2p=is_one_of(table, "category", ("p2p",))[rows],
        is_send=is_one_of(table, "kind", ("send",))[rows],
    )


def _all(run: Run) -> Communications:
    return _numbered(run, by_step=False)


def _in_steps(run: Run) -> Communications:
    return _numbered(run, by_step=True)


def _numbered(run: Run, *, by_step: bool) -> Communications:
    slots: dict[int, _Slots] = {}
    for rank in run.stored_ranks:
        slots[rank] = _slots(run, rank, slots.get(run.like(rank)), by_step=by_step)
    keys, place = np.unique(np.concatenate([one.keys for one in slots.values()]), axis=0, return_inverse=True)
    done = 0
    # Slots of each rank get the numbers that their channels have in the run.
    for one in slots.values():
        # NumPy 2.0 returns places in the shape of the keys, other versions as a plain array.
        one.channels[:] = place.reshape(-1)[done : done + len(one.channels)]
        done += len(one.channels)
    code = _codes({rank: run.once(_own, rank) for rank in slots if run.like(rank) == rank}, by_step=by_step)
    low, high = np.full(len(keys), np.iinfo(np.int64).max), np.full(len(keys), -1, np.int64)
    for rank, one in slots.items():
        known = one.slot >= 0
        channel, of_rank = one.channels[one.slot[known]], code[run.like(rank)][known]
        np.minimum.at(low, channel, of_rank)
        np.maximum.at(high, channel, of_rank)
    width = high - low + 1
    return Communications(
        n_numbers=int(width.sum()),
        channels=keys,
        channel=np.repeat(np.arange(len(keys)), width),
        _run=run,
        _slots=slots,
        _code=code,
        # What to add to the code of a communication within its channel to get its number.
        _base=np.cumsum(width) - width - low,
    )


def _codes(own: dict[int, _Own], *, by_step: bool) -> dict[int, Int64Array]:
    """Return a number for the sequence of each row, or for its sequence and step, in their order."""
    sequences = distinct(np.concatenate([one.sequence for one in own.values()]))
    steps = distinct(np.concatenate([one.step for one in own.values()])) if by_step else np.zeros(1, np.int64)
    code = {}
    for rank, one in own.items():
        step = np.searchsorted(steps, one.step) if by_step else 0
        code[rank] = np.searchsorted(sequences, one.sequence) * len(steps) + step
    if not by_step:
        return code
    used = distinct(np.concatenate(list(code.values())))
    return {rank: np.searchsorted(used, numbers) for rank, numbers in code.items()}


def _slots(run: Run, rank: int, known: _Slots | None, *, by_step: bool) -> _Slots:
    """Return the channels of *rank*; where they are used as those *known* are, with the same arrays."""
    own = run.once(_own, rank)
    table = run.spans([rank], ["group", "peer"])
    group, peer = int64(table, "group")[own.rows], int64(table, "peer")[own.rows]
    is_pair = own.is_p2p & (peer >= 0)
    keys = np.stack(
        [
            group,
            np.where(is_pair, np.where(own.is_send, rank, peer), -1),
            np.where(is_pair, np.where(own.is_send, peer, rank), -1),
        ],
        axis=1,
    )
    joins = (own.sequence >= 0) & ((group >= 0) if by_step else (group >= 0) | is_pair)
    is_apart = own.is_p2p & ~is_pair
    if known is not None and _used_alike(known, keys, joins) and (known.is_apart == is_apart).all():
        found = keys[known.first]
        return _Slots(known.slot, known.first, found, np.empty(len(found), np.int64), known.is_apart)
    rows = np.flatnonzero(joins)
    slot = np.full(len(joins), -1, np.int64)
    number = factorized(*keys[rows].T)
    _, first = np.unique(number, return_index=True)
    # Numbers by value become numbers by first use.
    turn = np.argsort(first)
    slot[rows] = np.argsort(turn)[number]
    first = rows[first[turn]]
    return _Slots(slot, first, keys[first], np.empty(len(first), np.int64), is_apart)


def _used_alike(known: _Slots, keys: Int64Array, joins: BoolArray) -> bool:
    """Return whether *keys* are those of one channel for each slot that is *known*."""
    if not np.array_equal(joins, known.slot >= 0):
        return False
    found = keys[known.first]
    if not len(found):
        return True
    same = (found[known.slot] == keys).all(axis=1) | ~joins
    return bool(same.all()) and len(np.unique(found, axis=0)) == len(found)


# When each communication really began: the arrival of its last participant, found by joining ranks.


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
