"""Makes programs fast: a template per kind of action, copied once per micro-batch by NumPy.

A ``Template`` is the tasks of one action (a forward, a backward, an optimizer step) with dependencies among
themselves. ``ProgramBuilder.place`` puts one behind what its rank does already; ``build`` turns all that was
placed into the arrays of a ``Program``, numbers the communications and joins their participants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from foretrace.simulator.builder.instances import Answers, Message, communications
from foretrace.simulator.errors import JobError
from foretrace.simulator.program import Inside, Int32Array, Int64Array, Label, Program

# Templates as arrays, and the tasks outside of a template that it waits for.

MOST: Final = {"ns": 2**53, "FLOPs": 2**62, "bytes": 2**62}
"""Most of a unit in one operation: 64 bits hold it, and the times of a thousand in a row."""


class TemplateArrays:
    """A template as arrays, with labels and messages as numbers."""

    def __init__(
        self,
        template: Template,
        labels: dict[Label, int],
        messages: dict[Message, int],
        insides: list[Inside],
    ) -> None:
        tasks = template.tasks
        self.n = len(tasks)
        self.stream = np.array([task.stream for task in tasks], np.int32)
        self.label = np.array([labels.setdefault(task.label, len(labels)) for task in tasks], np.int32)
        self.duration_ns = _in_64_bits("ns", [task.duration_ns for task in tasks])
        self.message = np.array([_number(task.message, messages) for task in tasks], np.int32)
        self.layer = np.array([task.layer for task in tasks], np.int32)
        self.flops = _in_64_bits("FLOPs", [task.flops for task in tasks])
        self.bytes_moved = _in_64_bits("bytes", [task.bytes_moved for task in tasks])
        self.memory_bound = np.array([task.memory_bound for task in tasks], np.int32)
        self.part = np.array([task.part for task in tasks], np.int32)
        self.merged = np.array([_listed(task.inside, insides) for task in tasks], np.int32)
        self.waits = template.waits
        self.waits_outside = any(other < 0 for _, other in template.waits)
        self.tails = template.tails
        self.last_dp, self.last_copies = (_last(tasks, stream) for stream in (DP, DP_COPIES))

    def dependencies(self, outside: Outside) -> tuple[Int64Array, Int64Array]:
        """Return how many others each task waits for, and which, each once and relative to the first task."""
        stands_for = {
            Template.BEFORE: outside.tails,
            Template.GRADIENTS: outside.gradients + outside.copies,
            Template.EARLIER: outside.earlier,
        }
        found = sorted({(task, at) for task, other in self.waits for at in stands_for.get(other, (other,))})
        edges = np.array(found, np.int64).reshape(-1, 2)
        return np.bincount(edges[:, 0], minlength=self.n), edges[:, 1]


class Outside(NamedTuple):
    """The tasks before a template that it may wait for, numbered relative to its first task."""

    tails: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    earlier: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()

    def further(self, n: int) -> Outside:
        """Return the same tasks as seen from *n* tasks further on."""
        return Outside(*(tuple([at - n for at in found]) for found in self))

    def after(self, arrays: TemplateArrays) -> Outside:
        """Return the ``Outside`` of the template that follows *arrays*, whose own is this one."""
        moved = self.further(arrays.n)
        own = tuple([at - arrays.n for at in arrays.tails if at >= 0])
        return Outside(
            tails=own if len(own) == len(arrays.tails) else moved.tails + own,
            gradients=(arrays.last_dp - arrays.n,) if arrays.last_dp >= 0 else moved.gradients,
            earlier=moved.tails,
            copies=(arrays.last_copies - arrays.n,) if arrays.last_copies >= 0 else moved.copies,
        )


class Waits:
    """What a sequence of templates waits for; equal cases are worked out once and shared.

    *found*: for each different case, as ``TemplateArrays.dependencies`` has it.
    """

    def __init__(self) -> None:
        self.found: list[tuple[Int64Array, Int64Array]] = []
        self._cases: dict[tuple[int, Outside], int] = {}
        self._outsides: list[Outside] = [Outside()]
        self._numbers: dict[Outside, int] = {Outside(): 0}
        self._steps: dict[tuple[int, int], tuple[int, int]] = {}
        self._behind: dict[int, tuple[int, int]] = {}

    def case(self, arrays: TemplateArrays, rank: int, offset: int) -> int:
        """Return the place in ``found`` of *arrays*, the next template of *rank*, from task *offset* on."""
        outside, end = self._behind.get(rank, (0, offset))
        if end != offset:
            outside = self._number(self._outsides[outside].further(offset - end))
        step = (id(arrays), outside)
        if step not in self._steps:
            self._steps[step] = (
                self._case(arrays, outside),
                self._number(self._outsides[outside].after(arrays)),
            )
        case, behind = self._steps[step]
        self._behind[rank] = (behind, offset + arrays.n)
        return case

    def _case(self, arrays: TemplateArrays, outside: int) -> int:
        key = (id(arrays), self._outsides[outside] if arrays.waits_outside else Outside())
        if key not in self._cases:
            self._cases[key] = len(self.found)
            self.found.append(arrays.dependencies(key[1]))
        return self._cases[key]

    def _number(self, outside: Outside) -> int:
        if outside not in self._numbers:
            self._numbers[outside] = len(self._outsides)
            self._outsides.append(outside)
        return self._numbers[outside]


def gathered(lengths: Sequence[int], which: Sequence[int], sizes: Int64Array) -> Int64Array:
    """Return the positions of a sequence of parts within the array that holds each distinct part once.

    >>> gathered([2, 3], [1, 0, 1], np.array([3, 2, 3])).tolist()
    [2, 3, 4, 0, 1, 2, 3, 4]
    """
    begins = np.cumsum(lengths, dtype=np.int64) - np.array(lengths, np.int64)
    shift = (begins[which] if len(which) else begins) - (np.cumsum(sizes) - sizes)
    found: Int64Array = np.arange(int(sizes.sum()), dtype=np.int64) + np.repeat(shift, sizes)
    return found


def _last(tasks: Sequence[Task], stream: int) -> int:
    """Return the place of the last of *tasks* on *stream*, -1 if there is none."""
    return max((at for at, task in enumerate(tasks) if task.stream == stream), default=-1)


def _number(message: Message | None, messages: dict[Message, int]) -> int:
    """Return the number of *message*, a new one if it is new, or -1 for none."""
    return -1 if message is None else messages.setdefault(message, len(messages))


def _listed(inside: Inside | None, insides: list[Inside]) -> int:
    """Append *inside* to *insides* and return its place, or -1 for none."""
    if inside is None:
        return -1
    insides.append(inside)
    return len(insides) - 1


def _in_64_bits(unit: str, values: Sequence[int]) -> Int64Array:
    """Return *values* as an array. Raises JobError if one is beyond what a timeline counts."""
    if (most := max(values, default=0)) > MOST[unit]:
        raise JobError(
            f"an operation of {most:.2g} {unit} is beyond what a timeline counts: a shorter seq_len, a "
            "smaller micro_batch or more ranks would work"
        )
    return np.array(values, np.int64)


# Templates: the tasks of one action, written once and copied for every micro-batch.

STREAMS: Final = (
    *("compute", "tp", "cp", "ep", "dp", "pp.send", "pp.recv", "host"),
    *(
        f"pp.{kind}.{what}.{where}"
        for kind in ("send", "recv")
        for what in ("activations", "gradients")
        for where in ("next", "prev")
    ),
    "copy",
    "dp.copies",
)
"""In-order queues of a rank. One per axis: NCCL runs the collectives of a communicator in order.

The sum of gradients over copies of shards (HSDP) has a communicator of its own, and so a queue of its own.

With one stage per rank all messages of a direction share a queue. With several, or with overlapped p2p, what
goes to and comes from each neighbour has queues of its own: sender and receiver need not come to it in the
same order, and a message that nobody takes yet must not hold up another.
"""

COMPUTE: Final = STREAMS.index("compute")
DP: Final = STREAMS.index("dp")
HOST: Final = STREAMS.index("host")
COPY: Final = STREAMS.index("copy")
DP_COPIES: Final = STREAMS.index("dp.copies")


class Task(NamedTuple):
    """One task of a template.

    Attributes:
        stream: index into ``STREAMS``.
        duration_ns: compute time, 0 for communications.
        message: the communication it takes part in, if any.
        layer: transformer layer, -1 if none.
        flops, bytes_moved: work, 0 if none.
        memory_bound: share of its time that memory bandwidth decides, in parts per million.
        part: 1 if it belongs to the second of two actions that share the template.
        inside: what it is made of if it stands for several tasks in a row.
    """

    stream: int
    label: Label
    duration_ns: int = 0
    message: Message | None = None
    layer: int = -1
    flops: int = 0
    bytes_moved: int = 0
    memory_bound: int = 0
    part: int = 0
    inside: Inside | None = None


class Template:
    """The tasks of one action and what they wait for, to be written once and placed many times.

    Attributes:
        tasks: the tasks, in the order of their streams.
        waits: pairs of a task and one that it waits for, ``BEFORE``, ``GRADIENTS`` or ``EARLIER``.
        tails: what whatever comes next on the rank has to wait for; at first ``(BEFORE,)``.
        launches: whether the host's launching of kernels is written out as tasks.
        synchronized: what the host waits for before its next launch.
        takes_ns: how long a communication of the main line takes, if phases are to be single tasks.
    """

    BEFORE: Final = -1
    """Stands for the tails of what was placed before on the same rank."""

    GRADIENTS: Final = -2
    """Stands for the last task of each of the rank's streams of gradients before this template."""

    EARLIER: Final = -3
    """Stands for the tails before what was placed last on the same rank: it waits one template less."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.waits: list[tuple[int, int]] = []
        self.tails: tuple[int, ...] = (self.BEFORE,)
        self.launches = False
        self.takes_ns: Callable[[Message], int] | None = None
        self.synchronized: tuple[int, ...] = ()

    def add(self, task: Task, after: Iterable[int]) -> int:
        """Append *task*, which waits for the tasks *after*; return its number."""
        number = len(self.tasks)
        self.tasks.append(task)
        self.waits += [(number, other) for other in after]
        return number

    def then(self, task: Task, beside: Iterable[int] = ()) -> int:
        """Append *task* to the main line: after the tails and *beside*; it becomes the tail."""
        number = self.add(task, (*self.tails, *beside))
        self.tails = (number,)
        return number


__all__ = [
    "COMPUTE",
    "COPY",
    "DP",
    "DP_COPIES",
    "HOST",
    "STREAMS",
    "Place",
    "ProgramBuilder",
    "Task",
    "Template",
]


class Place(NamedTuple):
    """Where the tasks of an action belong in the timeline.

    *stage*, *virtual_stage*, *microbatch*: as in the timeline.
    """

    stage: int = -1
    virtual_stage: int = -1
    microbatch: int = -1


NOWHERE: Final = Place()
"""Place of tasks that belong to no action."""


class _Placed(NamedTuple):
    """A template at its place in the program: that of its first action, and of its second."""

    arrays: TemplateArrays
    rank: int
    step: int
    first: Place
    second: Place


class ProgramBuilder:
    """Collects placed templates and makes a program of them.

    *costs*: what a communication costs and which group carries it.
    """

    def __init__(self, costs: Answers) -> None:
        self._costs = costs
        self._labels: dict[Label, int] = {}
        self._messages: dict[Message, int] = {}
        self._insides: list[Inside] = []
        self._arrays: dict[int, tuple[Template, TemplateArrays]] = {}
        self._placed: list[_Placed] = []

    def place(
        self,
        template: Template,
        rank: int,
        at: Place = NOWHERE,
        *,
        step: int = 0,
        second: Place | None = None,
    ) -> None:
        """Put *template* behind all that *rank* does so far. Place ranks one after the other.

        *template*: tasks of an action, or of two. *at*: where those of the first action belong. *second*:
        where those of the second action belong.
        """
        if id(template) not in self._arrays:
            arrays = TemplateArrays(template, self._labels, self._messages, self._insides)
            self._arrays[id(template)] = (template, arrays)
        arrays = self._arrays[id(template)][1]
        if arrays.n:
            self._placed.append(_Placed(arrays, rank, step, at, second or at))

    def build(self) -> Program:
        """Return the program of everything that was placed."""
        numbers: dict[int, int] = {}
        which = [numbers.setdefault(id(placed.arrays), len(numbers)) for placed in self._placed]
        written = list({id(placed.arrays): placed.arrays for placed in self._placed}.values())
        sizes = np.array([placed.arrays.n for placed in self._placed], np.int64)
        source = gathered([arrays.n for arrays in written], which, sizes)

        def column(field: str, dtype: type[np.generic]) -> Any:
            parts = [getattr(arrays, field) for arrays in written]
            return np.concatenate([np.empty(0, dtype), *parts])[source]

        rank, step = (
            np.repeat(np.array([placed[at] for placed in self._placed], np.int32), sizes) for at in (1, 2)
        )
        stage, virtual_stage, microbatch = self._places(sizes, column("part", np.int32))
        # One number for step and micro-batch; + 1, because work outside of micro-batches has -1.
        batch = step.astype(np.int64) << 32 | (microbatch + 1)
        found = communications(rank, column("message", np.int32), batch, list(self._messages), self._costs)
        dep_start, deps = self._dependencies(sizes)
        return Program(
            rank=rank,
            stream=column("stream", np.int32),
            label=column("label", np.int32),
            duration_ns=column("duration_ns", np.int64),
            microbatch=microbatch,
            layer=column("layer", np.int32),
            stage=stage,
            virtual_stage=virtual_stage,
            step=step,
            flops=column("flops", np.int64),
            bytes_moved=column("bytes_moved", np.int64),
            memory_bound=column("memory_bound", np.int32),
            merged=column("merged", np.int32) if self._insides else None,
            insides=tuple(self._insides),
            dep_start=dep_start,
            deps=deps,
            streams=STREAMS,
            labels=tuple(self._labels),
            uneven=tuple(sorted(self._costs.uneven)),
            **found._asdict(),
        )

    def _places(self, sizes: Int64Array, part: Int32Array) -> Iterator[Int32Array]:
        """Yield stage, virtual stage and micro-batch of every task."""
        firsts, seconds = (
            np.array([placed[at] for placed in self._placed], np.int32).reshape(-1, 3) for at in (3, 4)
        )
        for first, second in zip(firsts.T, seconds.T, strict=True):
            own = np.repeat(first, sizes)
            yield np.where(part, np.repeat(second, sizes), own) if (first != second).any() else own

    def _dependencies(self, sizes: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the dependencies of all tasks as CSR, each once and in order.

        What a template waits for outside of itself lies as far before it as the last time in most cases, so
        that few different ones have to be worked out.
        """
        offsets = np.cumsum(sizes) - sizes
        waits = Waits()
        which = [
            waits.case(placed.arrays, placed.rank, offset)
            for placed, offset in zip(self._placed, offsets.tolist(), strict=True)
        ]
        found = waits.found
        empty = np.empty(0, np.int64)
        counts = np.concatenate([empty, *(counts for counts, _ in found)])
        deps = np.concatenate([empty, *(deps for _, deps in found)])
        n_edges = np.array([len(deps) for _, deps in found], np.int64)[which] if which else empty
        dep_start = np.zeros(int(sizes.sum()) + 1, np.int64)
        np.cumsum(counts[gathered([len(counts) for counts, _ in found], which, sizes)], out=dep_start[1:])
        own_deps = deps[gathered([len(deps) for _, deps in found], which, n_edges)]
        return dep_start, own_deps + np.repeat(offsets, n_edges)
