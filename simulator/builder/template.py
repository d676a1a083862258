"""Templates: the tasks of one action, written once and copied for every micro-batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from foretrace.simulator.builder.instances import Message
from foretrace.simulator.program import Label

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
        label: what it is.
        duration_ns: compute time, 0 for communications.
        message: the communication it takes part in, if any.
        layer: transformer layer, -1 if none.
        flops, bytes_moved: work, 0 if none.
        memory_bound: share of its time that memory bandwidth decides, in parts per million.
        part: 1 if it belongs to the second of two actions that share the template.
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
    """Stands for the last task of each of the rank's streams of gradients before this template."""

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
