"""Records what a rank issues, one small row per event, in order; and whose work is being issued."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from foretrace.tracer.lane import NOBODY
from foretrace.tracer.records import Block, Position
from foretrace.tracer.rehearse.device.driver import Driver
from foretrace.tracer.rehearse.tape.works import Work
from foretrace.tracer.stamps import Stamp
from foretrace.traces.rehearsal import (
    COMMUNICATION,
    EVENTS,
    HOST_WAIT,
    MARK,
    MESSAGES,
    OP,
    OUTSIDE,
    PLACES,
    WAIT,
    WAIT_MARK,
    WORKS,
    Distinct,
    Message,
    Place,
    RankTables,
)

# Whose work is being issued: the owner on top of a stack, as the recorder's lane, without a clock.


SETUP: Final = "setup"
"""Kind of what is issued before the training begins."""

LOSS, INPUT, GRADIENTS = map(Block, OUTSIDE)

BETWEEN: Final = {"forward": ("forward", LOSS), "optimizer": ("forward", INPUT)}
"""Who issues what comes after a forward, or after an optimizer, outside of both."""

AFTER_BACKWARD: Final = ("optimizer", GRADIENTS)
"""Who issues what comes after a backward: mostly clipping."""


class IssueLane(threading.local):
    """A stack of blocks with the interface of ``tracer.lane.Lane``; remembers no time. Each thread has one.

    Attributes:
        stream: CUDA stream on which things are issued now.
        n_backwards: backward passes that run, one inside the other.
        applies: whether the function of autograd that runs is differentiated, None outside of any.
    """

    device: Any = None
    _trainer: threading.Thread | None = None
    """The thread whose calls of modules count, of all lanes: the first one, or the first that called one."""

    def move_to(self, device: object) -> None:
        """Do nothing: ``gpu.streams`` says which stream is the current one."""

    def __init__(self) -> None:
        self._stack: list[tuple[str, Block]] = []
        self.owner: tuple[str, Block] = (SETUP, NOBODY)  # kind and block of the top
        self.trains = True  # whether this is not a pass of a model without gradients, as in an evaluation
        self.stream = self.n_backwards = 0
        self.modules: list[Any] = []  # those that are called, the outermost first
        self.applies: bool | None = None

    @property
    def depth(self) -> int:
        """How many owners are on the stack."""
        return len(self._stack)

    @property
    def block(self) -> Block:
        """The block that issues now."""
        return self.owner[1]

    def own(self) -> None:
        """A backward pass begins; it may be in another thread than the forward, beside it."""

    def is_own(self) -> bool:
        """Whether this thread trains: the first one does, and another where that one calls no model."""
        me = threading.current_thread()
        trainer = IssueLane._trainer
        if me is not trainer and (trainer is None or not trainer.is_alive() or me is threading.main_thread()):
            IssueLane._trainer = trainer = me
        return me is trainer

    def push(self, kind: str, block: Block) -> int:
        """Let *block* issue from now on; return what ``pop`` takes to undo it."""
        self._stack.append((kind, block))
        self.owner = (kind, block)
        return len(self._stack) - 1

    def pop(self, depth: int) -> None:
        """Give the turn back to who had it before the ``push`` that returned *depth*."""
        if depth < len(self._stack):
            kind = self._stack[depth][0]
            del self._stack[depth:]
            self.owner = self._stack[-1] if self._stack else BETWEEN.get(kind, AFTER_BACKWARD)

    def replace(self, kind: str, block: Block) -> None:
        """Let *block* issue in place of the present owner."""
        if self._stack:
            self._stack[-1] = self.owner = (kind, block)

    def follow(self) -> None:
        """The model is called from outside: there is no clock that would have to follow its stream."""

    def stamp(self) -> Stamp:
        """Return a moment; there is only one."""
        return 0

    def pause(self) -> bool:
        """Say that nothing is paused: waiting is written down as such."""
        return False

    def resume(self, is_paused: bool | None) -> None:  # noqa: FBT001 - what pause has returned
        """Undo ``pause``."""


# Streams and events of the rehearsed GPU, as its driver has noted them, on the tape of a rank.


class Streams:
    """What streams wait for.

    Args:
        tape: where it is written down.
        lane: told the current stream of its thread.
        driver: notes what is asked of streams and events.
    """

    def __init__(self, tape: Tape, lane: IssueLane, driver: Driver) -> None:
        self._tape, self._lane, self._driver = tape, lane, driver
        self._marks: dict[int, int] = {}
        for _ in driver.take():  # of what was imported
            pass

    def follow(self) -> None:
        """Write down what has happened to streams and events since the last call."""
        self._lane.stream = self._driver.stream(-1)  # of this thread, as PyTorch keeps it
        # All of them at once: the wait of the host, below, comes back here and would take the rest first.
        for entry in [*self._driver.take()]:
            if entry.kind == "record":
                self._marks[entry.number] = self._tape.mark(entry.stream)
            # Nothing waits for an event that was never recorded, as in CUDA.
            elif entry.kind == "wait" and entry.number in self._marks:
                self._tape.note(WAIT_MARK, self._marks[entry.number], stream=entry.stream)
            elif entry.kind.startswith("synchronize"):
                self._tape.note(HOST_WAIT)


_COLUMNS: Final = len(EVENTS)

_PlaceKey = tuple[tuple[str, Block], int, int, int, bool]
"""What a place depends on: owner, step, stage, micro-batch, and whether the pass trains."""


class Tape:
    """The events of a rank.

    Args:
        lane: knows the block that issues now, and its stream.
        position: step and micro-batch of the rank.

    Attributes:
        follow: brings what streams did up to now; called before an event that depends on it.
        n_marks: marks so far.
        n_repeated: events that ``repeat`` has appended.
    """

    def __init__(self, lane: IssueLane, position: Position) -> None:
        self.allocated_bytes = 0  # memory in use now
        self.follow: Callable[[], None] = lambda: None
        self.n_marks = self.n_repeated = 0
        self._n_forgotten = 0
        self._lane = lane
        self._position = position
        self._events, self._forgotten = array("q"), array("q")
        self._works: Distinct[Work] = Distinct()
        self._messages: Distinct[Message] = Distinct()
        self._places: Distinct[Place] = Distinct()
        self._known: dict[_PlaceKey, int] = {}

    @property
    def n_events(self) -> int:
        """Events so far."""
        return len(self._events) // _COLUMNS

    @property
    def n_distinct(self) -> int:
        """Distinct operations, communications and places so far."""
        return sum(len(one.listed) for one in (self._works, self._messages, self._places))

    def start_again(self) -> None:
        """Forget the events of earlier steps; the numbers of events continue.

        Events of the present step stay: a pipeline may issue transfers before its first forward.
        """
        steps = [place.step for place in self._places.listed]
        keep, now = self.n_events, self._position.step
        while keep and steps[self._events[(keep - 1) * _COLUMNS + 2]] == now:
            keep -= 1
        self._n_forgotten += keep
        self._forgotten = self._events[: keep * _COLUMNS]
        del self._events[: keep * _COLUMNS]

    def take_back(self) -> None:
        """Restore the events that were forgotten last: no other step followed."""
        self._n_forgotten -= len(self._forgotten) // _COLUMNS
        self._events = self._forgotten + self._events
        self._forgotten = array("q")

    def leave_out(self, kind: str, names: frozenset[str]) -> None:
        """Remove the operations *names* in work of this *kind*; other events keep their numbers."""
        works = [work.name in names for work in self._works.listed]
        places = [place.kind == kind for place in self._places.listed]
        events = self._events
        for at in range(0, len(events), _COLUMNS):
            if events[at] == OP and works[events[at + 1]] and places[events[at + 2]]:
                # A mark that nobody waits for takes no time, and keeps the numbers of the events behind it.
                events[at], events[at + 1] = MARK, -1

    def trains_nothing(self, first: int, end: int) -> None:
        """Mark the events of this step from *first* to before *end* as a pass that trains nothing."""
        events, others = self._events, dict[int, int]()
        begin = max(first - self._n_forgotten, 0) * _COLUMNS
        # Column 2 of an event is its place.
        for at in range(begin + 2, (end - self._n_forgotten) * _COLUMNS, _COLUMNS):
            if (place := events[at]) not in others:
                others[place] = self._places.number(self._places.listed[place]._replace(trains=False))
            events[at] = others[place]

    @property
    def next_number(self) -> int:
        """The number that the next event will have."""
        return self._n_forgotten + self.n_events

    def rows_from(self, number: int) -> npt.NDArray[np.int64]:
        """Return the events from *number* on; shape ``(n, 6)``, columns of ``EVENTS``."""
        found = self._events[max(number - self._n_forgotten, 0) * _COLUMNS :]
        return np.array(found, np.int64).reshape(-1, _COLUMNS)

    def repeat(self, rows: npt.NDArray[np.int64]) -> None:
        """Append copies of earlier events, with other numbers."""
        # As bytes, without a Python number for each of them.
        self._events.frombytes(np.ascontiguousarray(rows, np.int64).tobytes())
        self.n_repeated += len(rows)

    def moved(self, places: npt.NDArray[np.int64], microbatch: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the same *places* in another micro-batch of this step."""
        known, where = np.unique(places, return_inverse=True)
        others = [
            self._places.number(self._places.listed[place]._replace(microbatch=microbatch))
            for place in known.tolist()
        ]
        return np.array(others, np.int64)[where.reshape(-1)]

    def message(self, number: int) -> Message:
        """Return one of the distinct communications."""
        return self._messages.listed[number]

    def place(self, number: int) -> Place:
        """Return one of the distinct places."""
        return self._places.listed[number]

    def number_of(self, work: Work) -> int:
        """Return the number of *work*, which ``op`` takes."""
        return self._works.number(work)

    def work(self, number: int) -> Work:
        """Return the work with this *number*."""
        return self._works.listed[number]

    def op(self, number: int) -> None:
        """Record the launch of a kernel; *number* is that of its work."""
        # Streams are followed already: the watcher does so before each operator.
        self._events.extend((OP, number, self._place(), self._lane.stream, -1, self.allocated_bytes))

    def communication(self, message: Message, sequence: int, position: Position | None = None) -> int:
        """Record a communication; return its event number."""
        self.follow()
        item = self._messages.number(message)
        place = self._place(position)
        self._events.extend((COMMUNICATION, item, place, self._lane.stream, sequence, self.allocated_bytes))
        return self.next_number - 1

    def note(self, what: int, item: int = -1, number: int = -1, stream: int | None = None) -> None:
        """Record an event that orders streams or holds the host."""
        # With a stream it is ``Streams.follow`` itself that calls.
        if stream is None:
            self.follow()
        on = self._lane.stream if stream is None else stream
        self._events.extend((what, item, self._place(), on, number, self.allocated_bytes))

    def add_bytes(self, first: int, end: int, n_bytes: int) -> None:
        """Let *n_bytes* more have been in use at the events from number *first* to before *end*."""
        start = max(first - self._n_forgotten, 0)
        for at in range(start * _COLUMNS, (end - self._n_forgotten) * _COLUMNS, _COLUMNS):
            self._events[at + _COLUMNS - 1] += n_bytes

    def mark(self, stream: int | None = None) -> int:
        """Record a CUDA event; return its number."""
        number, self.n_marks = self.n_marks, self.n_marks + 1
        self.note(MARK, number, stream=stream)
        return number

    def tables(self) -> RankTables:
        """Return all events, with the tables that they refer to."""
        columns = np.array(self._events, np.int64).reshape(-1, _COLUMNS)
        waits = columns[:, 0] == WAIT
        columns[waits, 4] -= self._n_forgotten  # below 0: for a forgotten event; it waits for nothing
        events = pa.table(
            [pa.array(columns[:, at]).cast(field.type) for at, field in enumerate(EVENTS)], schema=EVENTS
        )
        works, messages = self._works.table(WORKS), self._messages.table(MESSAGES)
        return RankTables(events, works, messages, self._places.table(PLACES))

    def _place(self, at: Position | None = None) -> int:
        at = at or self._position
        # Asked for each event: a Place is made for a new key only.
        key = (self._lane.owner, at.step, at.stage, at.microbatch, self._lane.trains)
        found = self._known.get(key)
        return self._met(key, at) if found is None else found

    def _met(self, key: _PlaceKey, at: Position) -> int:
        kind, block = self._lane.owner
        numbers = (at.step, at.microbatch, at.stage, at.virtual_stage)
        place = Place(kind, block.name, block.layer, *numbers, self._lane.trains)
        self._known[key] = number = self._places.number(place)
        return number
