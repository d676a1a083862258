"""What one rehearsed rank issues, as tasks: operations that follow each other on a stream become one.

The order of CUDA: a stream works in order; an event that was recorded stands for all that its stream had been
given by then; whoever waits for it goes on after that. A collective starts on the stream of its group when
the stream that issued it has come so far; one that is not asynchronous holds that stream up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from foretrace.simulator.engine.slowdown import MILLION
from foretrace.simulator.program import Label, to_ns
from foretrace.simulator.rehearsed.works import Priced
from foretrace.traces.layout import Group
from foretrace.traces.rehearsal import (
    COMMUNICATION,
    HOST_KINDS,
    MARK,
    ON_HOST,
    OP,
    OUTSIDE,
    WAIT,
    WAIT_MARK,
    RankTables,
)

# What all ranks of an all-to-all send each other, from what those that were rehearsed send and get.


class Splits(NamedTuple):
    """Bytes of one rank in an all-to-all, by place in the group.

    *received*: from each.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]


def splits_of(message: Mapping[str, Any]) -> Splits | None:
    """Return how uneven an all-to-all is, None if it is even or something else."""
    found = Splits(tuple(message["sent_bytes"]), tuple(message["received_bytes"]))
    return found if found.sent else None


def even(size_bytes: int, n_ranks: int) -> Splits:
    """Return the splits of a rank that sends *size_bytes*, as much to each of *n_ranks*, and gets as much."""
    each = (size_bytes // n_ranks,) * n_ranks
    return Splits(each, each)


def sent_bytes(
    ranks: Sequence[int], known: Mapping[int, Splits], stands_for: Sequence[int]
) -> list[list[int]]:
    """Return what each of *ranks* sends to each of them; shape ``(n, n)``.

    What a rehearsed rank sends and gets is as it says; where two that were rehearsed do not agree, as where
    this rank was told to be the one with the fullest experts, the larger counts. Of ranks that were not, one
    sends to another in proportion to what the rank that stands for it sends to the other, and gets from it.
    That is so where all send alike, as to experts that all routers choose alike, and on their way back, where
    all get alike.

    *stands_for*: index rank, value the rehearsed rank that stands for it.

    >>> sent_bytes((4, 5), {4: Splits((9, 3), (9, 7))}, [0] * 4 + [4, 4])
    [[9, 3], [7, 2]]
    """
    first = next(iter(known))
    rows = []
    for place, rank in enumerate(ranks):
        stands = rank if rank in known else stands_for[rank]
        stands = stands if stands in known else first
        row = list(known[rank].sent) if rank in known else _alike(known[stands], ranks.index(stands), place)
        for other, to in enumerate(ranks):
            if to in known:
                got = known[to].received[place]
                row[other] = max(row[other], got) if rank in known else got
        rows.append(row)
    return rows


def _alike(splits: Splits, own: int, place: int) -> list[int]:
    """Return what the rank at *place* sends to each, if the one at *own* with *splits* stands for it."""
    got, kept = splits.received[place], max(splits.sent[own], splits.received[own])
    return [round(sent * got / kept) if kept else max(sent, got) for sent in splits.sent]


"""Kinds of events."""

COPIES: Final = {"to_host": "from the device", "to_device": "to the device", "input": "to the device"}
"""Names of the copies over the link to the host; ``input`` are those of what has never been on the device."""

INPUT: Final = "input."
"""How operators begin that copy such."""

PROCESSOR: Final = -1
"""Number, among those of streams, of what the host computes in the order in which it is asked to."""

SHARDING: Final = "fsdp."
"""How operators begin that split what was gathered and join gradients: ``copy``, as in every simulation."""


class Meeting(NamedTuple):
    """A communication as one rank takes part in it.

    Attributes:
        kind: kind of the collective or transfer.
        sequence: number within the group, or within the pair and direction.
        size_bytes: as in the timeline.
        peer: other rank of a transfer, -1 for a collective.
        splits: of an uneven all-to-all, None of all else.
    """

    kind: str
    group: int
    sequence: int
    size_bytes: int
    peer: int
    splits: Splits | None = None


class RankTask(NamedTuple):
    """A task of one rank; see ``simulator.program.Program``.

    Attributes:
        place: row of the places of the rank.
        after: tasks of this rank that it waits for, by number.
        meeting: the communication that it takes part in, None if none.
        memory_bound: in parts per million of its time.
        allocated_bytes: most memory in use while it was issued.
    """

    stream: str
    label: Label
    place: int
    duration_ns: int
    after: tuple[int, ...]
    meeting: Meeting | None = None
    flops: int = 0
    bytes_moved: int = 0
    memory_bound: int = 0
    allocated_bytes: int = 0


class _Open:
    """Operations on a stream that become one task; all of them are *of* one kind, ``""`` for compute."""

    __slots__ = (
        "after",
        "allocated",
        "bound_s",
        "bytes_moved",
        "dtype",
        "flops",
        "kernels",
        "of",
        "place",
        "seconds",
    )

    def __init__(self, place: int, after: tuple[int, ...], dtype: str, of: str) -> None:
        self.place, self.after, self.dtype, self.of = place, after, dtype, of
        self.seconds = self.bound_s = 0.0
        self.flops = self.bytes_moved = self.kernels = self.allocated = 0


class RankWriter:
    """Turns the events of a rank into tasks.

    Args:
        steps: the steps to keep; those before were to warm up.
        launch_s: time of the host per kernel by place, None if the device is always the slower of the two.
        pipeline: ranks of its pipeline: transfers with them are along ``pp``, in whichever group they are.
        pauses: by event of a trace, how long the host did something else before it, in ns; None where there
            is no trace. Operations of a trace are tasks of their own.

    *places*: rows of the places of the rank.
    """

    def __init__(
        self,
        tables: RankTables,
        priced: Priced,
        groups: Mapping[int, Group],
        steps: range,
        *,
        launch_s: Sequence[float] | None = None,
        pipeline: Sequence[int] = (),
        pauses: Mapping[int, int] | None = None,
    ) -> None:
        self.tasks: list[RankTask] = []
        self.places = tables.places.to_pylist()
        self._priced, self._groups, self._launch_s = priced, groups, launch_s
        self._messages, self._pipeline = tables.messages.to_pylist(), frozenset(pipeline)
        self._splits = [splits_of(message) for message in self._messages]
        self._pauses = pauses
        self._kept = [row["step"] in steps for row in self.places]
        self._open: dict[int, _Open] = {}
        self._tail: dict[int, tuple[int, ...]] = {}
        self._pending: dict[int, dict[int, None]] = {}
        self._marks: dict[int, tuple[int, ...]] = {}
        self._ended: dict[int, int] = {}
        self._streams: dict[object, str] = {}
        self._named: Counter[str] = Counter()
        self._host: tuple[int, ...] = ()
        self._write(tables)

    def _write(self, tables: RankTables) -> None:
        events = tables.events
        columns = [events[name].to_numpy().tolist() for name in events.column_names]
        for number, (what, item, place, stream, other, allocated) in enumerate(zip(*columns, strict=True)):
            if not self._kept[place] and what != WAIT:  # a step may begin with transfers that were asked for
                continue
            if self._pauses and (pause_ns := self._pauses.get(number)):
                self._pause(pause_ns, place)
            if what == OP:
                self._operation(stream, item, place, allocated)
            elif what == COMMUNICATION:
                self._ended[number] = self._communication(stream, item, place, other, allocated)
            elif what == WAIT:
                # What began before the steps that are kept has no task to wait for.
                if other in self._ended:
                    self._pending.setdefault(stream, {})[self._ended[other]] = None
            elif what == MARK:
                # What the stream has been given so far, not what is done: as an event of CUDA.
                self._marks[item] = self._reached(stream)
            elif what == WAIT_MARK:
                self._pending.setdefault(stream, {}).update(dict.fromkeys(self._marks.get(item, ())))
            # The last kind, a wait of the host, counts only where the host has a time of its own.
            elif self._launch_s is not None or ON_HOST in self._priced.kinds:
                self._host = tuple(dict.fromkeys((*self._host, *self._reached(stream))))
        for stream in list(self._open):
            self._close(stream)

    def _operation(self, stream: int, work: int, place: int, allocated: int) -> None:
        priced = self._priced
        of = "copy" if priced.names[work].startswith(SHARDING) else ""
        of = priced.kinds[work] if priced.kinds[work] in HOST_KINDS else of
        of = "input" if priced.names[work].startswith(INPUT) else of
        if of == ON_HOST:
            stream = self._turn_to_host()
        else:
            self._leave_host()
        found = self._open.get(stream)
        # Work of another place or kind is a task of its own, as is all of a trace, which times each operator.
        is_same = found is not None and found.place == place and found.of == of
        # Where something is pending, what follows must not run together with what came before it.
        if found is None or not is_same or self._pending.get(stream) or self._pauses is not None:
            self._close(stream)
            found = self._open[stream] = _Open(place, self._after(stream), priced.dtypes[work], of)
        seconds = priced.seconds[work]
        found.seconds += seconds
        found.bound_s += seconds if priced.bound[work] else 0.0
        found.flops += priced.flops[work]
        found.bytes_moved += priced.bytes_moved[work]
        found.kernels += priced.kernels[work]
        found.allocated = max(found.allocated, allocated)

    def _turn_to_host(self) -> int:
        """Let the host compute from here on; return the number of its queue."""
        self._pending.setdefault(PROCESSOR, {}).update(dict.fromkeys(self._host))
        self._host = ()
        return PROCESSOR

    def _leave_host(self) -> None:
        """Let what is issued from here on wait until the host is done with what it computes."""
        # Everything that is open ends here, so that what comes next waits for the host.
        if PROCESSOR in self._open:
            for stream in list(self._open):
                self._close(stream)

    def _after(self, stream: int, *, keep: bool = False) -> tuple[int, ...]:
        """Return what comes next on *stream* has to wait for; what was pending is so no more, unless kept."""
        pending = self._pending.get(stream, {})
        tails = (*self._tail.get(stream, ()), *self._tail.get(PROCESSOR, ()))
        # Each once, and in their order, which a set would not keep.
        after = tuple(dict.fromkeys((*tails, *pending)))
        # A stream that is only asked how far it has come goes on waiting itself.
        if not keep:
            self._pending.pop(stream, None)
        return after

    def _reached(self, stream: int) -> tuple[int, ...]:
        """Return what has to be done for *stream* to have come as far as it has been given work."""
        self._close(stream)
        return self._after(stream, keep=True)

    def _close(self, stream: int) -> None:
        """Make a task of the operations that are open on *stream*."""
        found = self._open.pop(stream, None)
        if found is None:
            return
        on_host = found.of == ON_HOST
        after = (*found.after, *(() if on_host else self._launch(found.kernels, found.place)))
        # Stream 0 is the default one; what runs on another is beside it.
        on_device = stream == 0 and found.of not in COPIES
        name = "host" if on_host else "compute" if on_device else self._stream(("side", stream), "copy")
        task = RankTask(
            stream=name,
            label=self._label(found),
            place=found.place,
            duration_ns=to_ns(found.seconds),
            after=after,
            flops=found.flops,
            bytes_moved=found.bytes_moved,
            memory_bound=round(MILLION * found.bound_s / found.seconds) if found.seconds else 0,
            allocated_bytes=found.allocated,
        )
        self._tail[stream] = (self._add(task),)

    def _label(self, found: _Open) -> Label:
        """Return what a task of operations is."""
        place = self.places[found.place]
        if found.of == ON_HOST:
            what = place["name"] if place["name"] in OUTSIDE else place["kind"]
            return Label("host", place["kind"], f"{what} on the host", "", found.dtype)
        if found.of in COPIES:
            kind = "input" if found.of == "input" else "offload"
            return Label("copy", kind, COPIES[found.of], "", found.dtype)
        return Label("compute", found.of or place["kind"], place["name"] or place["kind"], "", found.dtype)

    def _pause(self, ns: int, place: int) -> None:
        """Let the host do something else than to launch, which nothing tells the reason of."""
        # Open operations were issued before the pause, and must not go on after it.
        for stream in list(self._open):
            self._close(stream)
        task = RankTask("host", Label("host", "pause", "pause of the host"), place, ns, self._host)
        self._host = (self._add(task),)

    def _launch(self, kernels: int, place: int) -> tuple[int, ...]:
        """Add the time that the host takes to launch *kernels*, where it counts."""
        if self._launch_s is None:
            return ()
        label = Label("host", "launch", self.places[place]["name"] or "launch")
        task = RankTask("host", label, place, to_ns(kernels * self._launch_s[place]), self._host)
        # The launch waits for these, and so does whoever waits for the launch.
        self._host = ()
        return (self._add(task),)

    def _communication(self, stream: int, item: int, place: int, sequence: int, allocated: int) -> int:
        message = self._messages[item]
        self._leave_host()
        self._close(stream)
        # The issuing stream of an asynchronous collective goes on and keeps what it waits for.
        after = (*self._after(stream, keep=message["is_async"]), *self._launch(1, place))
        kind, is_p2p = message["kind"], message["peer"] >= 0
        axis = self._groups[message["group"]].axis if message["group"] in self._groups else ""
        key: tuple[Any, ...] = (message["group"],)
        if is_p2p:
            axis = "pp" if message["peer"] in self._pipeline else axis
            key = (message["group"], kind, message["peer"], message["name"])
        task = RankTask(
            stream=self._stream(key, f"{axis}.{kind}" if is_p2p else axis),
            label=Label("p2p" if is_p2p else "collective", kind, message["name"], axis, message["dtype"]),
            place=place,
            duration_ns=0,
            after=after,
            meeting=Meeting(
                kind, message["group"], sequence, message["size_bytes"], message["peer"], self._splits[item]
            ),
            allocated_bytes=allocated,
        )
        number = self._add(task)
        if not message["is_async"]:
            self._tail[stream] = (number,)
        return number

    def _stream(self, key: object, name: str) -> str:
        """Return the stream of *key*: ``dp`` for the first of its kind, then ``dp.1``, ..."""
        if key not in self._streams:
            # The number of others of the same name, so that the first one goes without.
            self._streams[key] = f"{name}#{self._named[name]}"
            self._named[name] += 1
        base, _, number = self._streams[key].partition("#")
        return base if number == "0" else f"{base}.{number}"

    def _add(self, task: RankTask) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1
