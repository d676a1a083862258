"""Makes programs fast: a template per kind of action, copied once per micro-batch by NumPy.

A ``Template`` is the tasks of one action (a forward, a backward, an optimizer step) with dependencies among
themselves. ``ProgramBuilder.place`` puts one behind what its rank does already; ``build`` turns all that was
placed into the arrays of a ``Program``, numbers the communications and joins their participants.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from simulator.build_instances import Answers, Message, communications
from simulator.program import Int32Array, Int64Array, Label, Program

STREAMS: Final = (
    *("compute", "tp", "cp", "ep", "dp", "pp.send", "pp.recv", "host"),
    *(
        f"pp.{kind}.{what}.{where}"
        for kind in ("send", "recv")
        for what in ("activations", "gradients")
        for where in ("next", "prev")
    ),
)
"""In-order queues of a rank. One per axis: NCCL runs the collectives of a communicator in order.

With one stage per rank all messages of a direction share a queue. With several, or with overlapped p2p, what
goes to and comes from each neighbour has queues of its own: sender and receiver need not come to it in the
same order, and a message that nobody takes yet must not hold up another.
"""

COMPUTE: Final = STREAMS.index("compute")
DP: Final = STREAMS.index("dp")
HOST: Final = STREAMS.index("host")


class Task(NamedTuple):
    """One task of a template.

    Attributes:
        stream: index into ``STREAMS``.
        label: what it is.
        duration_ns: compute time, 0 for communications.
        message: the communication it takes part in, if any.
        layer: transformer layer, -1 if none.
        flops, bytes_moved: work, 0 if none.
    """

    stream: int
    label: Label
    duration_ns: int = 0
    message: Message | None = None
    layer: int = -1
    flops: int = 0
    bytes_moved: int = 0


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
        waits = np.array(template.waits, np.int64).reshape(-1, 2)
        self.waits = waits[waits[:, 1] >= 0]
        self.on_tails = waits[waits[:, 1] == Template.BEFORE, 0]
        self.on_gradients = waits[waits[:, 1] == Template.GRADIENTS, 0]
        self.on_earlier = waits[waits[:, 1] == Template.EARLIER, 0]
        self.tails = np.array(template.tails, np.int64)
        on_dp = np.flatnonzero(self.stream == DP)
        self.last_dp = int(on_dp[-1]) if len(on_dp) else -1


class _Placed(NamedTuple):
    """A template at its place in the program."""

    arrays: _Arrays
    rank: int
    stage: int
    virtual_stage: int
    microbatch: int
    step: int


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
        sizes = np.array([placed.arrays.n for placed in self._placed], np.int64)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        rank = self._repeat("rank", sizes)
        message = self._joined32("message")
        step, microbatch = self._repeat("step", sizes), self._repeat("microbatch", sizes)
        batch = step.astype(np.int64) << 32 | (microbatch + 1)
        found = communications(rank, message, batch, list(self._messages), self._costs)
        dep_start, deps = self._dependencies(offsets)
        return Program(
            rank=rank,
            stream=self._joined32("stream"),
            label=self._joined32("label"),
            duration_ns=self._joined64("duration_ns"),
            microbatch=microbatch,
            layer=self._joined32("layer"),
            stage=self._repeat("stage", sizes),
            virtual_stage=self._repeat("virtual_stage", sizes),
            step=step,
            flops=self._joined64("flops"),
            bytes_moved=self._joined64("bytes_moved"),
            dep_start=dep_start,
            deps=deps,
            streams=STREAMS,
            labels=tuple(self._labels),
            uneven=tuple(sorted(self._costs.uneven)),
            **found._asdict(),
        )

    def _repeat(self, field: str, sizes: Int64Array) -> Int32Array:
        """Return *field* of every placed template, once per task."""
        return np.repeat(np.array([getattr(placed, field) for placed in self._placed], np.int32), sizes)

    def _joined32(self, field: str) -> Int32Array:
        """Return the arrays *field* of all placed templates, one behind the other."""
        return np.concatenate([np.empty(0, np.int32), *(getattr(p.arrays, field) for p in self._placed)])

    def _joined64(self, field: str) -> Int64Array:
        """Return the arrays *field* of all placed templates, one behind the other."""
        return np.concatenate([np.empty(0, np.int64), *(getattr(p.arrays, field) for p in self._placed)])

    def _dependencies(self, offsets: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the dependencies of all tasks as CSR, each once."""
        n_tasks = int(offsets[-1])
        found = [np.empty(0, np.int64)]
        tails: dict[int, Int64Array] = defaultdict(lambda: np.empty(0, np.int64))
        earlier: dict[int, Int64Array] = defaultdict(lambda: np.empty(0, np.int64))
        gradients: dict[int, Int64Array] = defaultdict(lambda: np.empty(0, np.int64))
        for placed, offset in zip(self._placed, offsets[:-1].tolist(), strict=True):
            arrays, rank = placed.arrays, placed.rank
            found.append((arrays.waits[:, 0] + offset) * n_tasks + arrays.waits[:, 1] + offset)
            for waiting, others in (
                (arrays.on_tails, tails[rank]),
                (arrays.on_gradients, gradients[rank]),
                (arrays.on_earlier, earlier[rank]),
            ):
                found.append(np.add.outer((waiting + offset) * n_tasks, others).ravel())
            own = arrays.tails[arrays.tails >= 0] + offset
            earlier[rank] = tails[rank]
            tails[rank] = own if len(own) == len(arrays.tails) else np.concatenate([tails[rank], own])
            if arrays.last_dp >= 0:
                gradients[rank] = np.array([arrays.last_dp + offset], np.int64)
        edges = np.unique(np.concatenate(found))
        counts = np.bincount(edges // n_tasks, minlength=n_tasks) if n_tasks else edges
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]), edges % max(n_tasks, 1)


def _number(message: Message | None, messages: dict[Message, int]) -> int:
    """Return the number of *message*, a new one if it is new, or -1 for none."""
    return -1 if message is None else messages.setdefault(message, len(messages))
