"""Takes the records of the hooks and writes them, as spans on the common clock, while training goes on.

Hooks only append to a queue. A thread of its own takes what is settled, gives every span a stream on which it
overlaps nothing, and appends a batch to the span file: a process that is killed loses what the last
``FLUSH_S`` brought.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from foretrace.tracer.device_works import DeviceTimes
from foretrace.tracer.records import Communication, Segment, StepWindow
from foretrace.tracer.stamps import GATE, Resolver
from foretrace.traces.timeline import DEFAULTS, TIMELINE
from foretrace.traces.writer import SpanWriter

MIN_GLUE_NS: Final = 20_000
"""Shortest own time of a module that only calls others which is worth a span: below, it is the host's
overhead of calling a module, some microseconds each."""

COLUMNS: Final = (
    "stream", "category", "kind", "name", "start_ns", "duration_ns", "step", "microbatch", "layer", "stage",
    "virtual_stage", "axis", "group", "sequence", "peer", "size_bytes", "dtype", "is_bound",
)  # fmt: skip
"""Columns of a row, in order."""

Row = tuple[Any, ...]


def table(rows: Sequence[Row], rank: int) -> pa.Table:
    """Return a timeline of *rows*, one at least, in its very types, so that nothing has to be cast."""
    columns = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    return pa.table([_array(field, columns, len(rows), rank) for field in TIMELINE], schema=TIMELINE)


def _array(field: pa.Field, columns: dict[str, tuple[Any, ...]], n: int, rank: int) -> pa.Array:
    """Return one column, with its default where the rows do not have it."""
    if field.name not in columns:
        return pa.repeat(pa.scalar(rank if field.name == "rank" else DEFAULTS[field.name], field.type), n)
    values = columns[field.name]
    if not pa.types.is_dictionary(field.type):
        return pa.array(np.asarray(values, field.type.to_pandas_dtype()), field.type)
    index: dict[str, int] = {}
    numbers = np.array([index.setdefault(one, len(index)) for one in values], np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(numbers), pa.array(list(index), pa.string()))


def segment_row(s: Segment, start_ns: int, duration_ns: int) -> Row:
    """Return the row of a piece of compute time."""
    return (
        s.stream, "compute", s.kind, s.block.name, start_ns, duration_ns, s.step, s.microbatch,
        s.block.layer, s.stage, s.virtual_stage, "", -1, -1, -1, 0, "", False,
    )  # fmt: skip


def step_row(s: StepWindow, start_ns: int, duration_ns: int) -> Row:
    """Return the row of the window of a step or of a phase; numbers are in their column only.

    Each label is kept, so that none holds a number.
    """
    # A name with a number in it would grow the dictionary with each step, and each batch stores it whole: 2.7
    # GB after 20,000 batches of a step each, 24 MB without.
    category, kind = ("phase", s.phase) if s.phase else ("step", "step")
    step = -1 if s.phase and not s.is_inside else s.step
    return (
        category, category, kind, kind, start_ns, duration_ns, step, -1, -1,
        -1, -1, "", -1, -1, -1, 0, "", False,
    )  # fmt: skip


def communication_row(c: Communication, stream: str, start_ns: int, duration_ns: int) -> Row:
    """Return the row of a communication that has ended."""
    step, stage, virtual_stage, microbatch = c.position
    category = "p2p" if c.is_p2p else "collective"
    return (
        stream, category, c.kind, c.block.name or c.kind, start_ns, duration_ns, step, microbatch,
        c.block.layer, stage, virtual_stage, c.group.axis, c.group.id, c.sequence, c.peer,
        c.size_bytes, c.dtype, c.is_bound,
    )  # fmt: skip


GLOO_THREADS: Final = 2  # worker threads of a gloo process group (``ProcessGroupGloo::Options::threads``)


class Streams:
    """Streams on which communications of one rank overlap nothing; placed in the order of their issue.

    A gloo group has two threads: two collectives run at once, a third arrives when one of them is done.
    Transfers wait for nothing but their peer. When one on a GPU ran, ``tracer.device_works`` has found out.
    """

    def __init__(self) -> None:
        self._workers: dict[int, list[int]] = {}
        self._free_ns: defaultdict[str, list[int]] = defaultdict(list)

    def place(self, communication: Communication, issued_ns: int, end_ns: int) -> tuple[str, int, int]:
        """Return the stream, the start and the end of a communication."""
        axis = communication.group.axis
        name = f"{axis}.{communication.kind}" if communication.is_p2p else axis
        if not communication.is_p2p and communication.device < 0:
            issued_ns = self._worked(communication, issued_ns, end_ns)
        return self._stream(name, issued_ns, end_ns), issued_ns, end_ns

    def _worked(self, communication: Communication, issued_ns: int, end_ns: int) -> int:
        """Return from when the first worker of the group that was free was busy with it."""
        group = communication.group
        n_workers = GLOO_THREADS if group.on_gloo else 1
        busy_until_ns = self._workers.setdefault(group.id, [0] * n_workers)
        first = min(range(n_workers), key=busy_until_ns.__getitem__)
        started_ns = min(max(issued_ns, busy_until_ns[first]), end_ns)
        if not (group.on_gloo and communication.kind == "reduce_scatter"):  # its end is that of its waiter
            busy_until_ns[first] = max(end_ns, busy_until_ns[first])
        return started_ns

    def _stream(self, name: str, start_ns: int, end_ns: int) -> str:
        """Return the first stream of *name* that is free at *start_ns*: ``dp``, ``dp.1``, ..."""
        free_ns = self._free_ns[name]
        number = next((i for i, free in enumerate(free_ns) if free <= start_ns), len(free_ns))
        # Behind the last stream this adds one.
        free_ns[number : number + 1] = [end_ns]
        return name if not number else f"{name}.{number}"


MOST_UNDER_WAY: Final = 65_536  # communications that are followed at once: some 40 MB

MOST_BEHIND: Final = 1024
"""Communications that wait for one before them: with more of them, what has ended passes what has not."""

Line = tuple[int, int, str, bool]


class UnderWay:
    """Communications of one rank that have no span yet; used on the thread that writes.

    Streams are given in the order of issue within a group. So a communication waits for those that its group
    has issued before it, for no others and for not too many: one that takes long holds up no other group.

    Iterating yields them, oldest first.

    Attributes:
        n_left: how many had not ended when the recording did.
        n_beyond: how many came while as many as are followed were under way.
    """

    def __init__(self, times: DeviceTimes, most: int = MOST_UNDER_WAY) -> None:
        self._times, self._most = times, most
        self._lines: defaultdict[Line, deque[tuple[int, Communication]]] = defaultdict(deque)
        self._numbers = itertools.count()
        self.n_kept = 0  # how many are followed
        self.n_left = self.n_beyond = 0

    def __iter__(self) -> Iterator[Communication]:
        return (one for _, one in heapq.merge(*self._lines.values()))

    def add(self, communication: Communication) -> None:
        """Take a communication that was issued after those which were added before."""
        if self.n_kept >= self._most:
            self.n_beyond += 1
            return
        self.n_kept += 1
        self._lines[_line(communication)].append((next(self._numbers), communication))

    def take(self, *, last: bool) -> Iterator[tuple[Communication, int, int]]:
        """Yield what has ended, when it began and when it ended, in the order of issue within a group.

        On a processor it began when it was issued, as far as is known here.
        """
        for line in self._lines.values():
            may_pass = last or len(line) > MOST_BEHIND
            for _ in range(len(line)):
                _, one = line[0]
                times = self._times.of(one, last=last)
                if times is not None:
                    line.popleft()
                    self.n_kept -= 1
                    yield one, *times
                elif may_pass:
                    self.n_left += last
                    if last and one.launch is not None:
                        one.launch.work = None  # it keeps the memory of its tensors
                    # Behind the others; once each was looked at, the line is in its order again.
                    line.rotate(-1)
                else:
                    break


def _line(communication: Communication) -> Line:
    """Return what tells communications that wait for each other from others.

    A group may run tensors of the processor on gloo and those of a GPU on NCCL, one at a time. A transfer
    between processors waits for its peer only.
    """
    if communication.device >= 0:
        return communication.group.id, -1, "", True
    direction = communication.kind if communication.is_p2p else ""
    return communication.group.id, communication.peer, direction, False


FLUSH_S: Final = 1.0  # seconds between two batches

MOST_RECORDS: Final = 500_000
"""Records that may wait to be written, as while a file system does not answer: some 100 MB."""

DEVICE_S: Final = 5.0
"""How long the end of a recording waits for a device, which is through with its work as a rule."""

Record = Segment | StepWindow | Communication


class Sink:
    """Writes records in the background, once started; what is told on the thread that writes must not raise.

    Attributes:
        heard: called with each batch of spans that is written, on the writing thread; must not raise.
        thread_id: identifier of the thread that writes, by which its processor time can be asked for.
    """

    def __init__(
        self,
        writer: SpanWriter,
        shift_ns: int,
        moments: Resolver,
        times: DeviceTimes,
        *,
        beside: Callable[[], None],
        failed: Callable[[Exception], None],
        flush_s: float = FLUSH_S,
        has_step: Callable[[int], bool] = lambda step: True,
        seen: Callable[[Communication], Any] = lambda one: None,
    ) -> None:
        self._has_step, self._seen = has_step, seen
        self._times, self._under_way = times, UnderWay(times)
        self.n_lost = 0  # records that came when too many waited to be written
        self.heard: list[Callable[[pa.Table], None]] = []
        self._writer = writer
        self._shift_ns = shift_ns
        self._beside = beside
        self._failed = failed
        self._records: deque[Record] = deque()
        self._moments = moments
        self._computed_ns: dict[str, int] = {}
        self._streams = Streams()
        self._stopping = threading.Event()
        self._flush_s = flush_s
        self._thread: threading.Thread | None = None
        self.thread_id = 0

    def start(self) -> None:
        """Begin to write, now that all whom it tells are there."""
        self._thread = threading.Thread(target=self._run, name="foretrace-writer", daemon=True)
        self._thread.start()
        self.thread_id = self._thread.ident or 0

    @property
    def n_spans(self) -> int:
        """Spans that were written."""
        return self._writer.n_spans

    @property
    def dropped(self) -> dict[str, int]:
        """What is in no span, by reason."""
        found = {
            "communications under way when the recording ended": self._under_way.n_left,
            "communications behind too many under way": self._under_way.n_beyond,
            "records that came faster than they could be written": self.n_lost,
        }
        return {reason: n for reason, n in found.items() if n}

    def put(self, record: Record) -> None:
        """Hand over one record; a communication as soon as it is issued."""
        if len(self._records) < MOST_RECORDS:
            self._records.append(record)
        else:
            self.n_lost += 1

    def under_way(self) -> Iterator[Communication]:
        """Yield what has been issued and is not written yet, oldest first; for the writing thread."""
        yield from self._under_way
        # A copy, as the training goes on to add records.
        yield from (record for record in list(self._records) if isinstance(record, Communication))

    def close(self, timeout_s: float = 30.0) -> None:
        """Have what is left written and the file finished, on the thread that writes."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self._failed(TimeoutError(f"a batch was not written within {timeout_s:.0f} s"))
                return
            self._thread = None  # it knows the excepthook, and that of torch the process groups

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._flush_s):
                self._flush()
                self._beside()
            self._follow_device()
            self._flush(last=True)
            self._writer.close()
        except Exception as error:  # a full disk must not end the training; the stream has a prefix
            self._failed(error)

    def _follow_device(self) -> None:
        """Give a device some time to come to the last stamps; it may hang in a collective, we may not."""
        until = time.monotonic() + DEVICE_S
        while time.monotonic() < until:
            self._flush(closing=True)
            if self._is_through():
                return
            time.sleep(0.01)

    def _is_through(self) -> bool:
        """Whether nothing of a device is open."""
        with GATE.asking() as may_ask:
            ends = [one.end for one in list(self._records) if isinstance(one, Segment | StepWindow)]
            is_open = any(one.device >= 0 for one in self.under_way())
            return may_ask and not is_open and self._moments.knows(*ends)

    def _flush(self, *, closing: bool = False, last: bool = False) -> None:
        with GATE.asking() as may_ask:
            if not may_ask:
                return
            self._times.recorder.look(self._under_way.n_kept, closing=closing)
            # First: on its way through the queue it takes the communications off, too.
            rows = list(self._settled_rows(last=last))
            rows += self._communication_rows(last=last)
        if rows:
            made = table(rows, self._writer.rank)
            self._writer.append_table(made)
            for hear in self.heard:
                hear(made)

    def _settled_rows(self, *, last: bool) -> Iterator[Row]:
        """Yield the pieces and windows that are settled at the head of the queue; communications wait."""
        records, moments, ns = self._records, self._moments, self._moments.ns
        while records:
            record = records[0]
            if isinstance(record, Communication):
                self._under_way.add(record)
            elif moments.knows(record.start, record.end):
                # Asked of steps that are left out, too: their events are used again.
                yield from self._settled(record, ns(record.start), ns(record.end))
            elif not last:
                break  # on a device that never came to it: neither did the training
            records.popleft()

    def _settled(self, one: Segment | StepWindow, start_ns: int, end_ns: int) -> Iterator[Row]:
        """Yield the row of *one*, if it is recorded and worth a span."""
        if not self._has_step(one.step):
            return
        if isinstance(one, StepWindow):
            yield step_row(one, start_ns + self._shift_ns, end_ns - start_ns)
            return
        before_ns = self._computed_ns.get(one.stream, 0)  # pieces of a stream overlap nothing
        start_ns = max(start_ns, before_ns)
        self._computed_ns[one.stream] = max(end_ns, before_ns)
        if end_ns - start_ns >= (MIN_GLUE_NS if one.block.is_glue else 1):
            yield segment_row(one, start_ns + self._shift_ns, end_ns - start_ns)

    def _communication_rows(self, *, last: bool) -> Iterator[Row]:
        """Yield the communications that have ended, in the order of their issue within a group."""
        for one, began_ns, ended_ns in self._under_way.take(last=last):
            # Of all steps, recorded or not: c10d counts all calls, too.
            self._seen(one)
            stream, start_ns, end_ns = self._streams.place(one, began_ns, ended_ns)
            if self._has_step(one.position[0]):
                yield communication_row(one, stream, start_ns + self._shift_ns, max(end_ns - start_ns, 0))
