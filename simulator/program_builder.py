"""Makes programs fast: a template per kind of action, copied once per micro-batch by NumPy.

A ``Template`` is the tasks of one action (a forward, a backward, an optimizer step) with dependencies among
themselves. ``ProgramBuilder.place`` puts one behind what its rank does already; ``build`` turns all that was
placed into the arrays of a ``Program``, numbers the communications and joins their participants.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from simulator.build_instances import Answers, Message, communications
from simulator.program import Int64Array, Label, Program

STREAMS: Final = (
    *("compute", "tp", "cp", "ep", "dp", "pp.send", "pp.recv", "host"),
    *(
        f"pp.{kind}.{what}.{where}"
        for kind in ("send", "recv")
        for what in ("activations", "gradients")
        for where in ("next", "prev")
    ),
    "copy",
)
"""In-order queues of a rank. One per axis: NCCL runs the collectives of a communicator in order.

With one stage per rank all messages of a direction share a queue. With several, or with overlapped p2p, what
goes to and comes from each neighbour has queues of its own: sender and receiver need not come to it in the
same order, and a message that nobody takes yet must not hold up another.
"""

COMPUTE: Final = STREAMS.index("compute")
DP: Final = STREAMS.index("dp")
HOST: Final = STREAMS.index("host")
COPY: Final = STREAMS.index("copy")


class Task(NamedTuple):
    """One task of a template.

    Attributes:
        stream: index into ``STREAMS``.
        label: what it is.
        duration_ns: compute time, 0 for communications.
        message: the communication it takes part in, if any.
        layer: transformer layer, -1 if none.
        flops, bytes_moved: work, 0 if none.
        memory_bound: share of its time that memory bandwidth decides, in parts per million.
    """

    stream: int
    label: Label
    duration_ns: int = 0
    message: Message | None = None
    layer: int = -1
    flops: int = 0
    bytes_moved: int = 0
    memory_bound: int = 0


class Template:
    """The tasks of one action and what they wait for, to be written once and placed many times.

    Attributes:
        tasks: the tasks, in the order of their streams.
        waits: pairs of a task and one that it waits for, ``BEFORE``, ``GRADIENTS`` or ``EARLIER``.
        tails: what whatever comes next on the rank has to wait for; at first ``(BEFORE,)``.
        launches: whether the host's launching of kernels is written out as tasks.
        synchronized: what the host waits for before its next launch.
    """

    BEFORE: Final = -1
    """Stands for the tails of what was placed before on the same rank."""

    GRADIENTS: Final = -2
    """Stands for the last task of the rank's ``dp`` stream before this template."""

    EARLIER: Final = -3
    """Stands for the tails before what was placed last on the same rank: it waits one template less."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.waits: list[tuple[int, int]] = []
        self.tails: tuple[int, ...] = (self.BEFORE,)
        self.launches = False
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


class _Arrays:
    """A template as arrays, with labels and messages as numbers."""

    def __init__(self, template: Template, labels: dict[Label, int], messages: dict[Message, int]) -> None:
        tasks = template.tasks
        self.n = len(tasks)
        self.stream = np.array([task.stream for task in tasks], np.int32)
        self.label = np.array([labels.setdefault(task.label, len(labels)) for task in tasks], np.int32)
        self.duration_ns = np.array([task.duration_ns for task in tasks], np.int64)
        self.message = np.array([_number(task.message, messages) for task in tasks], np.int32)
        self.layer = np.array([task.layer for task in tasks], np.int32)
        self.flops = np.array([task.flops for task in tasks], np.int64)
        self.bytes_moved = np.array([task.bytes_moved for task in tasks], np.int64)
        self.memory_bound = np.array([task.memory_bound for task in tasks], np.int32)
        self.waits = template.waits
        self.waits_outside = any(other < 0 for _, other in template.waits)
        self.tails = template.tails
        self.last_dp = max((at for at, task in enumerate(tasks) if task.stream == DP), default=-1)

    def dependencies(self, outside: _Outside) -> tuple[Int64Array, Int64Array]:
        """Return how much each task waits for, and for what, each once, relative to the first task."""
        stands_for = {
            Template.BEFORE: outside.tails,
            Template.GRADIENTS: outside.gradients,
            Template.EARLIER: outside.earlier,
        }
        found = sorted({(task, at) for task, other in self.waits for at in stands_for.get(other, (other,))})
        edges = np.array(found, np.int64).reshape(-1, 2)
        return np.bincount(edges[:, 0], minlength=self.n), edges[:, 1]


class _Outside(NamedTuple):
    """What a template may wait for outside of itself: tasks, relative to its first one."""

    tails: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    earlier: tuple[int, ...] = ()


class _Placed(NamedTuple):
    """A template at its place in the program."""

    arrays: _Arrays
    rank: int
    stage: int
    virtual_stage: int
    microbatch: int
    step: int


class _Behind:
    """What a rank has done so far, as far as the next template may wait for it: numbers of tasks."""

    def __init__(self) -> None:
        self.now = _Outside()

    def relative(self, arrays: _Arrays, offset: int) -> _Outside:
        """Return what *arrays* finds if its first task is number *offset*; nothing if it does not ask."""
        if not arrays.waits_outside:
            return _Outside()
        return _Outside(*(tuple([at - offset for at in tasks]) for tasks in self.now))

    def add(self, arrays: _Arrays, offset: int) -> None:
        """Note that *arrays* has been placed at *offset*."""
        before = self.now
        own = tuple([at + offset for at in arrays.tails if at >= 0])
        self.now = _Outside(
            tails=own if len(own) == len(arrays.tails) else before.tails + own,
            gradients=(arrays.last_dp + offset,) if arrays.last_dp >= 0 else before.gradients,
            earlier=before.tails,
        )


class ProgramBuilder:
    """Collects placed templates and makes a program of them.

    Args:
        costs: what a communication costs and which group carries it.
    """

    def __init__(self, costs: Answers) -> None:
        self._costs = costs
        self._labels: dict[Label, int] = {}
        self._messages: dict[Message, int] = {}
        self._arrays: dict[int, tuple[Template, _Arrays]] = {}
        self._placed: list[_Placed] = []

    def place(
        self,
        template: Template,
        rank: int,
        *,
        stage: int = -1,
        virtual_stage: int = -1,
        microbatch: int = -1,
        step: int = 0,
    ) -> None:
        """Put *template* behind all that *rank* does so far. Place ranks one after the other."""
        if id(template) not in self._arrays:
            self._arrays[id(template)] = (template, _Arrays(template, self._labels, self._messages))
        arrays = self._arrays[id(template)][1]
        if arrays.n:
            self._placed.append(_Placed(arrays, rank, stage, virtual_stage, microbatch, step))

    def build(self) -> Program:
        """Return the program of everything that was placed."""
        numbers: dict[int, int] = {}
        which = [numbers.setdefault(id(placed.arrays), len(numbers)) for placed in self._placed]
        written = list({id(placed.arrays): placed.arrays for placed in self._placed}.values())
        sizes = np.array([placed.arrays.n for placed in self._placed], np.int64)
        source = _gathered([arrays.n for arrays in written], which, sizes)

        def column(field: str, dtype: type[np.generic]) -> Any:
            parts = [getattr(arrays, field) for arrays in written]
            return np.concatenate([np.empty(0, dtype), *parts])[source]

        rank, stage, virtual_stage, microbatch, step = (
            np.repeat(np.array([placed[at] for placed in self._placed], np.int32), sizes)
            for at in range(1, 6)
        )
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
            dep_start=dep_start,
            deps=deps,
            streams=STREAMS,
            labels=tuple(self._labels),
            uneven=tuple(sorted(self._costs.uneven)),
            **found._asdict(),
        )

    def _dependencies(self, sizes: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the dependencies of all tasks as CSR, each once and in order.

        What a template waits for outside of itself lies as far before it as the last time in most cases, so
        that few different ones have to be worked out.
        """
        offsets = np.cumsum(sizes) - sizes
        numbers: dict[tuple[int, _Outside], int] = {}
        found: list[tuple[Int64Array, Int64Array]] = []
        which: list[int] = []
        behind: dict[int, _Behind] = defaultdict(_Behind)
        for placed, offset in zip(self._placed, offsets.tolist(), strict=True):
            arrays, own = placed.arrays, behind[placed.rank]
            outside = own.relative(arrays, offset)
            key = (id(arrays), outside)
            if key not in numbers:
                numbers[key] = len(found)
                found.append(arrays.dependencies(outside))
            which.append(numbers[key])
            own.add(arrays, offset)
        empty = np.empty(0, np.int64)
        counts = np.concatenate([empty, *(counts for counts, _ in found)])
        deps = np.concatenate([empty, *(deps for _, deps in found)])
        n_edges = np.array([len(deps) for _, deps in found], np.int64)[which] if which else empty
        dep_start = np.zeros(int(sizes.sum()) + 1, np.int64)
        np.cumsum(counts[_gathered([len(counts) for counts, _ in found], which, sizes)], out=dep_start[1:])
        own_deps = deps[_gathered([len(deps) for _, deps in found], which, n_edges)]
        return dep_start, own_deps + np.repeat(offsets, n_edges)


def _gathered(lengths: Sequence[int], which: Sequence[int], sizes: Int64Array) -> Int64Array:
    """Return positions that put parts behind each other, if all distinct parts lie behind each other.

    Args:
        lengths: of each distinct part.
        which: the parts wanted, in order.
        sizes: their lengths.

    >>> _gathered([2, 3], [1, 0, 1], np.array([3, 2, 3])).tolist()
    [2, 3, 4, 0, 1, 2, 3, 4]
    """
    begins = np.cumsum(lengths, dtype=np.int64) - np.array(lengths, np.int64)
    shift = (begins[which] if len(which) else begins) - (np.cumsum(sizes) - sizes)
    found: Int64Array = np.arange(int(sizes.sum()), dtype=np.int64) + np.repeat(shift, sizes)
    return found


def _number(message: Message | None, messages: dict[Message, int]) -> int:
    """Return the number of *message*, a new one if it is new, or -1 for none."""
    return -1 if message is None else messages.setdefault(message, len(messages))
