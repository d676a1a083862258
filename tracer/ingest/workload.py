"""What a graph of nodes asks of its rank, as a rehearsal: work for a simulator, with or without durations.

Nodes follow one another as ASTRA-sim issues them: computation one at a time, each communication when what it
depends on is done (astra-sim/workload/Workload.cc). A send lets what depends on it go on as soon as it is
issued: it is in a buffer then, there as with NCCL. The size of a gather is what a rank gives
(collective_algorithm/Ring.cc), here that of the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from foretrace.tracer.ingest.groups import whole_bytes
from foretrace.tracer.rehearse.tape.works import Work
from foretrace.traces.layout import Group
from foretrace.traces.rehearsal import (
    COMMUNICATION,
    EVENTS,
    HOST_WAIT,
    MARK,
    MEASURED,
    MESSAGES,
    ON_HOST,
    OP,
    PLACES,
    TO_DEVICE,
    TO_HOST,
    WAIT,
    WAIT_MARK,
    WORKS,
    Distinct,
    Issued,
    Message,
    Place,
    RankTables,
    table_of,
)

LOAD, STORE, COMPUTE, SEND, RECV, COLLECTIVE = range(2, 8)
"""Types of nodes; 0 and 1 are of none and of metadata."""

DTYPE: Final = "bf16"  # what a graph computes in, which no node says

CUBES: Final = f"FLOPs of nodes without shapes are priced as products of cubes in {DTYPE}, or by their bytes"

COPIES: Final = {LOAD: (TO_DEVICE, 32_766), STORE: (TO_HOST, 32_767)}
"""Kind of work of transfers from and to memory elsewhere, and the stream of each."""

STREAMS: Final = 32_000
"""Streams that communications are issued on, one each: none then waits for what another depends on."""


@dataclass(slots=True)
class Node:
    """One node of the graph; ``duration_ns`` 0 where it took no time, or says none.

    *said*: attributes by name.
    """

    name: str = ""
    kind: int = 0
    before: list[int] = field(default_factory=list)
    duration_ns: int = 0
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def on_host(self) -> bool:
        """Whether a processor does it."""
        return bool(self.said.get("is_cpu_op"))

    def size(self, name: str) -> int:
        """Return the attribute *name*, a count; 0 where there is none, or none that can be."""
        value = self.said.get(name, 0)
        return value if isinstance(value, int) and 0 < value < 1 << 62 else 0


class Met(NamedTuple):
    """A communication as the graph has it: its kind, its group, the other rank of a transfer or -1."""

    kind: str
    group: Group
    peer: int = -1

    def size_bytes(self, node: Node) -> int:
        """Return the size as in the timeline: of a gather the whole, not what a rank gives."""
        return whole_bytes(self.kind, node.size("comm_size"), self.group)


class _Done(NamedTuple):
    """What tells that a node is done: an event to wait for, or a mark, on its stream."""

    what: int
    number: int
    stream: int


def issued(nodes: Mapping[int, Node], met: Mapping[int, Met]) -> Issued:
    """Return what *nodes* ask of their rank, in an order that their dependencies allow.

    Args:
        nodes: by number, each behind what it depends on.
        met: by number, what is known of each communication.
    """
    return _Writer(nodes, met).written()


class _Writer:
    def __init__(self, nodes: Mapping[int, Node], met: Mapping[int, Met]) -> None:
        self._nodes, self._met = nodes, met
        self._events: list[tuple[int, ...]] = []
        self._measured: list[tuple[int, ...]] = []
        self._done: dict[int, tuple[_Done, ...]] = {}
        self._works: Distinct[Work] = Distinct()
        self._messages: Distinct[Message] = Distinct()
        self._places: Distinct[Place] = Distinct()
        self._sequence: Counter[tuple[int, ...]] = Counter()
        # Work that only other work of the device depends on needs no mark: a stream keeps its order.
        self._marked = {
            other for node in nodes.values() if node.kind != COMPUTE or node.on_host for other in node.before
        }

    def written(self) -> Issued:
        for number, node in self._nodes.items():
            self._write(number, node)
        tables = RankTables(
            table_of(self._events, EVENTS),
            self._works.table(WORKS),
            self._messages.table(MESSAGES),
            self._places.table(PLACES),
        )
        cubes = any(work.kind == "gemm" for work in self._works.listed)
        measured = table_of(self._measured, MEASURED)
        return Issued(tables, measured, {"steps": 1, "note": CUBES if cubes else ""})

    def _write(self, number: int, node: Node) -> None:
        waits = tuple(dict.fromkeys(one for other in node.before for one in self._done.get(other, ())))
        met = self._met.get(number)
        work = None if met else _work(node)
        if met is None and work is None:
            self._done[number] = waits  # it takes no time: what depends on it waits for what it waits for
            return
        place = self._places.number(Place("kernel", node.name, stage=-1, virtual_stage=-1))
        stream = 1 + number % STREAMS if met else COPIES[node.kind][1] if node.kind in COPIES else 0
        self._wait(waits, stream, place, on_host=node.on_host and not met)
        at = len(self._events)
        if met is not None:
            item = self._messages.number(_message(node, met))
            key = (met.group.id, met.peer, node.kind, node.size("comm_tag"))
            # Sends and receives meet by their tags, whichever order they are issued in.
            order = self._sequence[key] + (node.size("comm_tag") << 32)
            self._sequence[key] += 1
            self._events.append((COMMUNICATION, item, place, stream, order, 0))
            self._done[number] = waits if node.kind == SEND else (_Done(WAIT, at, stream),)
            return
        assert work is not None  # noqa: S101 - one of the two, as above
        self._events.append((OP, self._works.number(work), place, stream, -1, 0))
        if node.duration_ns:
            self._measured.append((at, 0, node.duration_ns, 0, 0))
        if number in self._marked and not node.on_host:
            self._events.append((MARK, number % (1 << 31), place, stream, -1, 0))
            self._done[number] = (_Done(WAIT_MARK, number % (1 << 31), stream),)

    def _wait(self, waits: Sequence[_Done], stream: int, place: int, *, on_host: bool) -> None:
        for one in waits:
            if on_host:
                self._events.append((HOST_WAIT, -1, place, one.stream, -1, 0))
            elif one.what == WAIT:
                self._events.append((WAIT, -1, place, stream, one.number, 0))
            elif one.stream != stream:
                self._events.append((WAIT_MARK, one.number, place, stream, -1, 0))


def _work(node: Node) -> Work | None:
    """Return the work of *node*; None if the node takes no time.

    Floating-point operations are priced as a product of cubes of as many, and never below their bytes; what
    says neither takes the time that the file says.
    """
    flops, moved = node.size("num_ops"), node.size("tensor_size")
    if node.kind in COPIES:
        kind = COPIES[node.kind][0]
    else:
        kind = ON_HOST if node.on_host else "gemm" if flops else "memory"
    is_known = not node.on_host and bool(flops or moved)
    if not is_known and not node.duration_ns:
        return None
    side = max(round((flops / 2) ** (1 / 3)), 1) if kind == "gemm" else 0
    said = "" if is_known else f"{node.duration_ns} ns"  # of one name and another length: another work
    return Work(
        "compute", kind, said, DTYPE, flops, moved, m=side, n=side, k=side, kernels=0, is_known=is_known
    )


def _message(node: Node, met: Met) -> Message:
    # Transfers of a pair with one tag share a stream: the name is theirs, not that of the node.
    tag = f" {node.size('comm_tag')}" if node.size("comm_tag") else ""
    name = met.kind + tag if met.peer >= 0 else node.name
    return Message(met.kind, met.group.id, met.size_bytes(node), "", met.peer, is_async=False, name=name)
