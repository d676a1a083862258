"""Storages of a compiled call, and when each of them takes memory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from foretrace.tracer.rehearse.events.tape import Tape
from foretrace.tracer.rehearse.gpu.memory import Memory

TAKEN, GIVEN_BACK = range(2)
"""What happens to memory: of two things at one operator, the first comes first."""


class Stored:
    """The storage of a tensor that is not counted yet.

    Args:
        memory: counts it later.
        storage: the storage.
        category: what it is for.
        at: number of the operator of a forward that makes it, -1: a backward does.

    Attributes:
        number: of it in ``Memory``.
        n_bytes: that it takes.
        category, at: as given.
        written: number of the operator at which it is written, -1: it is not.
        last: number of the last one that reads it.
        storage: refers to it as long as eager mode holds it.
        is_back: whether a backward makes it.
        is_counted: whether it was counted for other reasons when it died.
    """

    __slots__ = (
        *("at", "category", "is_back", "is_counted", "last", "n_bytes", "number"),
        *("storage", "written"),
    )

    def __init__(self, memory: Memory, storage: Any, category: str, at: int) -> None:
        self.number = number = memory.number_of(storage)
        self.n_bytes, self.category = memory.unwritten.get(number, 0), category
        self.at, self.written, self.last, self.is_back = at, -1, at, at < 0
        self.is_counted = False

        def died(_: Any) -> None:
            self.is_counted = number not in memory.unwritten

        self.storage = weakref.ref(storage, died)


class Step(NamedTuple):
    """Memory is taken, or given back.

    Attributes:
        at: number of the operator of the call.
        what: ``TAKEN`` or ``GIVEN_BACK``.
        of: the storage that takes it, None: one that eager mode does not make, or does not hold.
        n_bytes: how much.
        category: what it is for.
        users: storages for which it is held after the call; of an *of* that stays itself, that.
    """

    at: int
    what: int
    of: Stored | None
    n_bytes: int
    category: str
    users: Sequence[Any]


def steps_of(one: Stored, *, is_held: bool) -> list[Step]:
    """Return when the memory of *one* is taken, and given back unless it *is_held* after the call."""
    written = one.at if one.written < 0 and is_held else one.written
    if written < 0 or one.is_counted:
        return []
    begin = Step(written, TAKEN, one, one.n_bytes, one.category, [one] if is_held else [])
    return [begin] if is_held else [begin, begin._replace(at=max(one.last, written), what=GIVEN_BACK)]


def replay(memory: Memory, tape: Tape, rows: Sequence[int], steps: Iterable[Step]) -> None:
    """Count *memory* as *steps* say, also in what the operators of the call have noted.

    Args:
        memory: counts.
        tape: has the operators.
        rows: of each operator of the call, the number of the event that follows it.
        steps: what happens.
    """
    before, ends, tokens = memory.total, [*rows, tape.next_number], dict[int, int]()
    ordered = sorted(steps, key=lambda step: step[:2])
    for n, step in enumerate(ordered):
        if step.what == GIVEN_BACK:
            memory.free(tokens.pop(id(step.of)))
        elif step.of is not None and step.users:
            memory.write(step.of.number)
        else:
            number = memory.hold(step.n_bytes, step.category)
            tokens[id(step.of)] = number
            if step.of is None:
                hold_for(step.users, functools.partial(memory.free, number))
        following = ordered[n + 1].at if n + 1 < len(ordered) else len(rows)
        if following > step.at:
            tape.add_bytes(ends[step.at], ends[following], memory.total - before)


def hold_for(users: Iterable[Any], free: Callable[[], None]) -> None:
    """Call *free* once all *users* have gone."""
    waiting = [weakref.finalize(one, lambda: gone()) for one in users]  # noqa: PLW0108 - not there yet

    def gone() -> None:
        if not any(one.alive for one in waiting):
            free()


def stays(storage: Any, users: Iterable[Any]) -> None:
    """Let *storage* be there as long as *users* are."""
    for one in users if storage is not None else ():
        weakref.finalize(one, _nothing, storage)


def _nothing(storage: Any) -> None:
    del storage
