"""Reads Chakra execution traces: graphs of nodes with durations, in JSON or as length-delimited protobuf.

A graph says what depends on what and how long it took, not when it ran. The nodes are laid out as early as
their dependencies and their processor allow: the host runs one at a time, the device runs one at a time,
communication has a stream of its own. What it asks of its rank is written beside, as a rehearsal: a workload
of ASTRA-sim, which says no durations, is simulated from that. PyTorch's own execution traces (``nodes``) hold
no durations either: ``read_graph``.
Schema: https://github.com/mlcommons/chakra, ``schema/protobuf/et_def.proto``.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pyarrow as pa

from foretrace.tracer.errors import IngestError
from foretrace.tracer.ingest.events import array_bytes, elements, product_flops, text, whole
from foretrace.tracer.ingest.groups import MOST_RANKS, TraceGroups, placed, whole_bytes
from foretrace.tracer.ingest.kernels import UNKNOWN, collective_kind, dtype, kernel
from foretrace.tracer.ingest.notes import COLLECTIVE
from foretrace.tracer.ingest.protobuf import fields, packed, text_of, varint
from foretrace.tracer.ingest.recording import Recording, Rows
from foretrace.tracer.ingest.sources import Progress, Source, rank_in_name, read_json, read_whole
from foretrace.tracer.rehearse.tape.works import Work
from foretrace.traces import rehearsal
from foretrace.traces.layout import Group

_DATA_DEPENDENCY: Final = 5
"""Field of the dependencies that order nodes, as Chakra's feeder does; field 4 says who called whom."""

_COLLECTIVES: Final = ("all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all",
                       "reduce_scatter", "reduce_scatter", "barrier")  # fmt: skip
"""Values of the attribute ``comm_type``, in order."""

_LONGEST_US: Final = 10**12


_READ: Final = (
    *("is_cpu_op", "num_ops", "tensor_size", "pg_name", "involved_dim"),
    *("comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag"),
)
"""Attributes that are read; others are counted by name."""

_MOST_NAMES: Final = 32  # attributes that are counted under a name of their own

_METADATA: Final = 1
_RANK: Final = re.compile(r"\.(\d{1,6})\.et\b")  # what ASTRA-sim calls the file of a rank


def shared(sources: Sequence[Source], groups: Sequence[Source]) -> dict[str, Any]:
    """Return what all *sources* have in common, for ``read``: the number of ranks, members of groups by name.

    *groups*: files of ASTRA-sim with communicator groups.

    Raises:
        IngestError: one of those cannot be read.
    """
    ranks = [_rank(source.name) for source in sources]
    members: dict[str, Any] = {}
    for source in groups:
        members |= read_json(read_whole(source), source.name)
    return {"n_ranks": max(len(sources), *(1 + (rank or 0) for rank in ranks)), "members": members}


def _rank(name: str) -> int | None:
    found = _RANK.search(name)
    return int(found[1]) if found else rank_in_name(name)


def read(
    source: Source,
    progress: Progress | None = None,
    *,
    n_ranks: int = 1,
    members: Mapping[str, Any] | None = None,
) -> Recording:
    """Read a Chakra graph, lay its nodes out in time, and tell what work it is.

    Args:
        source: the graph of a rank.
        progress: told of bytes that are read.
        n_ranks: ranks of the job, as far as the names of its files tell.
        members: ranks of each group by its name, where another file tells them.

    Raises:
        IngestError: it cannot be read, holds no work, or its dependencies go round in a circle.
    """
    data = read_whole(source, progress)
    result = Recording(name=source.name, spans=pa.table({}), rank=_rank(source.name))
    document = read_json(data, source.name) if data.lstrip()[:1] == b"{" else None
    if document is not None and _is_timeless(document):
        read_graph(document["nodes"], result)
        return result
    header = Node()
    if document is not None:
        nodes = _from_json(document, result)
    else:
        nodes = _from_protobuf(data, source.name, header)
    nodes = _in_order(nodes, source.name, result)
    groups = TraceGroups(-1 if result.rank is None else result.rank, n_ranks)
    for name, ranks in {**_members(header), **(members or {})}.items():
        groups.configure(name, "", ranks)
    met = _met(nodes, groups, result)
    if met is not None:
        result.issued = issued(nodes, met)
    has_times = any(node.duration_ns for node in nodes.values())
    if not has_times and (met is None or not result.issued or not len(result.issued.tables.events)):
        said = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} and no duration"
        raise IngestError(f"{source.name} holds {said}, nor any work: no timeline, and nothing to simulate")
    result.spans = _laid_out(nodes, met or {}, result, drawn=not has_times)
    result.groups, result.world_size = tuple(groups.known.values()), groups.world_size
    if has_times:
        result.evidence["start"] = (
            "dependencies and durations: as early as they allow; the file has no start times"
        )
    else:
        result.facts["times"] = "none"
    result.lost = +result.lost
    return result


def _is_timeless(document: Mapping[str, Any]) -> bool:
    """Whether a graph is an execution trace of PyTorch, in which no node says how long it took."""
    nodes = document.get("nodes")
    if not isinstance(nodes, list) or not nodes or "workload_graph" in document:
        return False
    keys = ("runtime", "duration_micros")
    return not any(whole(node.get(key)) for node in nodes if isinstance(node, dict) for key in keys)


def _from_json(document: Mapping[str, Any], result: Recording) -> dict[int, Node]:
    listed = document.get("workload_graph", document.get("nodes"))
    nodes: dict[int, Node] = {}
    for said in listed if isinstance(listed, list) else ():
        number = whole(said.get("Id", said.get("id"))) if isinstance(said, dict) else None
        if number is None:
            result.lost["node without a number"] += 1
            continue
        runtime = whole(said.get("runtime", said.get("duration_micros"))) or 0
        depends = _numbers(said, "data_deps", "dataDeps")
        nodes[number] = Node(
            name=text(said.get("Name", said.get("name", ""))),
            kind=whole(said.get("NodeType", said.get("type"))) or 0,
            before=depends,
            duration_ns=max(0, min(runtime, _LONGEST_US)) * 1000,
            said={name: said[name] for name in _READ if isinstance(said.get(name), int | str)},
        )
    return nodes


def _numbers(said: Mapping[str, Any], *names: str) -> list[int]:
    found: list[Any] = next((said[name] for name in names if isinstance(said.get(name), list)), [])
    return [number for number in map(whole, found) if number is not None]


def _members(header: Node) -> dict[str, Any]:
    """Return the ranks of groups by name, if the metadata of the file have them, as our own export writes."""
    try:
        said = json.loads(header.said.get("groups") or "{}")
    except (TypeError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _from_protobuf(data: bytes, name: str, header: Node) -> dict[int, Node]:
    """Return the nodes of the protobuf form: metadata, then a message per node, each after its length.

    *header* gets the attributes of the metadata.
    """
    nodes: dict[int, Node] = {}
    try:
        at = 0
        first = True
        while at < len(data):
            size, at = varint(data, at)
            if size > len(data) - at:
                raise IndexError
            if not first:
                number, node = _node(data[at : at + size])
                nodes[number] = node
            else:
                for tag, value in fields(data[at : at + size]):
                    if tag == 2 and isinstance(value, bytes):
                        _attribute(value, header)
            first = False
            at += size
    except (IndexError, ValueError) as error:
        raise IngestError(f"{name} is not a Chakra trace, or ends in the middle of a node") from error
    return nodes


def _node(data: bytes) -> tuple[int, Node]:
    node, number = Node(), 0
    for tag, value in fields(data):
        if isinstance(value, int):
            number = value if tag == 1 else number
            node.kind = value if tag == 3 else node.kind
            node.duration_ns = min(value, _LONGEST_US) * 1000 if tag == 7 else node.duration_ns
            node.before += [value] if tag == _DATA_DEPENDENCY else []
        elif tag == 2:
            node.name = value.decode("utf-8", "replace")
        elif tag == _DATA_DEPENDENCY:
            node.before += packed(value)
        elif tag == 10:
            _attribute(value, node)
        elif tag == 8 and node.kind == _METADATA:
            node.said["inputs"] = text_of(dict(fields(value)).get(1, b"")) if isinstance(value, bytes) else ""
    return number, node


def _attribute(data: bytes, node: Node) -> None:
    """Take over an attribute: name in field 1, a documentation in 2, the value in whichever its type has."""
    name = ""
    given: int | str = 0
    for tag, value in fields(data):
        if tag == 1 and isinstance(value, bytes):
            name = text(value.decode("utf-8", "replace"))
        elif tag > 2:
            given = value if isinstance(value, int) else value.decode("utf-8", "replace")
    node.said[name] = given


def _collective(number: int | None) -> str:
    return _COLLECTIVES[number] if number is not None and 0 <= number < len(_COLLECTIVES) else ""


def _in_order(nodes: dict[int, Node], name: str, result: Recording) -> dict[int, Node]:
    """Return *nodes*, each behind those that it depends on; note what is left out of them."""
    waits = {number: sum(other in nodes for other in node.before) for number, node in nodes.items()}
    after: defaultdict[int, list[int]] = defaultdict(list)
    for number, node in nodes.items():
        for other in node.before:
            if other in nodes:
                after[other].append(number)
            else:
                result.lost["dependency on a node that is not there"] += 1
        for unread in sorted(node.said.keys() - {*_READ, "inputs"}):
            key = f"attribute {unread[:40]}, which is not read"
            is_known = key in result.lost or len(result.lost) < _MOST_NAMES
            result.lost[key if is_known else "further attributes, which are not read"] += 1
    ready = deque(sorted(number for number, count in waits.items() if not count))
    found: dict[int, Node] = {}
    while ready:
        number = ready.popleft()
        found[number] = nodes[number]
        for later in after[number]:
            waits[later] -= 1
            if not waits[later]:
                ready.append(later)
    if len(found) < len(nodes):
        raise IngestError(f"{name}: {len(nodes) - len(found)} nodes wait for one another in a circle")
    return found


def _met(nodes: Mapping[int, Node], groups: TraceGroups, result: Recording) -> dict[int, Met] | None:
    """Return what is known of each communication; None, with a warning, where some are of nobody knows whom.

    A group without a name, or called 0, is of all ranks, as in ASTRA-sim.
    """
    for node in nodes.values():
        if node.kind == _METADATA:
            # A list of one text, as Python writes it: ASTRA-sim cuts off as much.
            listed = [text(node.said.get("inputs", ""))[2:-2]]
            _configure(groups, {"name": "process_group:init", "inputs": listed})
    rows = [(number, node, _row(node)) for number, node in nodes.items()]
    sides = {"send": "comm_dst", "recv": "comm_src"}
    peers = {number: node.size(sides[row["kind"]]) for number, node, row in rows if row["category"] == "p2p"}
    groups.world_size = max(groups.world_size, *(peer + 1 for peer in peers.values() if peer < MOST_RANKS), 1)
    found: dict[int, Met] = {}
    for number, node, row in rows:
        if row["category"] not in {"collective", "p2p"}:
            continue
        name, is_everyone = (
            str(node.said.get("pg_name", "")),
            "\0" not in str(node.said.get("involved_dim", "")),
        )
        group = groups.of({"Process Group Name": name}) if name in groups.configured else None
        if group is None and name in {"", "0"} and is_everyone:
            group = groups.add("", "", tuple(range(groups.world_size)))
        peer = peers.get(number, -1)
        if group is None or peer >= MOST_RANKS:
            who = f"group {text(name)[:40]!r}" if is_everyone else "a group of some dimensions (involved_dim)"
            who = who if peer < MOST_RANKS else f"rank {peer}"
            result.warnings.append(
                f"no work for a simulator: nothing says who {who} is; a file of communicator groups of "
                "ASTRA-sim beside would"
            )
            return None
        found[number] = Met(row["kind"], group, peer)
    return found


def _laid_out(
    nodes: Mapping[int, Node], met: Mapping[int, Met], result: Recording, *, drawn: bool
) -> pa.Table:
    """Return the timeline of *nodes*, each as early as its dependencies and its stream allow.

    *drawn*: nodes have no durations, and are drawn equally long.
    """
    ended: dict[int, int] = {}
    free: defaultdict[str, int] = defaultdict(int)
    rows = Rows()
    for number, node in nodes.items():
        row = _row(node)
        took = DRAWN_NS if drawn and node.kind > _METADATA else node.duration_ns
        begun = max([free[row["stream"]], *(ended[other] for other in node.before if other in ended)])
        ended[number] = begun + took
        if number in met:
            one = met[number]
            row |= placed(one.group) | {"peer": one.peer, "size_bytes": one.size_bytes(node)}
            if not took:
                result.lost["communication without a duration, which a simulation has"] += 1
        if took:
            free[row["stream"]] = ended[number]
            rows.add({"group": -1, "peer": -1, **row, "start_ns": begun, "duration_ns": took})
    return rows.table()


def _row(node: Node) -> dict[str, Any]:
    what = kernel("kernel", node.name)
    if node.kind in {_SEND, _RECV, _COLLECTIVE} or (what.category == "collective" and not node.on_host):
        transfer = {_SEND: "send", _RECV: "recv"}.get(node.kind)
        told = _collective(whole(node.said.get("comm_type"))) or collective_kind(node.name)
        kind = transfer or (
            told if told != UNKNOWN else what.kind if what.category == "collective" else UNKNOWN
        )
        row = {"stream": "communication", "category": "p2p" if transfer else "collective", "kind": kind}
        return row | {"name": what.name, "size_bytes": node.size("comm_size"), "flops": 0, "axis": "unknown"}
    stream, category = ("host", "host") if node.on_host else ("compute", what.category)
    kind = "operator" if node.on_host else what.kind
    row = {"stream": stream, "category": category, "kind": kind, "name": what.name}
    return row | {"size_bytes": 0, "flops": node.size("num_ops"), "axis": ""}


# Execution traces of PyTorch, schemas 1.0.1 to 1.1.1 (``torch.profiler.ExecutionTraceObserver``), have no
# times. Every operator that calls no other is drawn ``DRAWN_NS`` long, in the order of the calls: counts,
# sizes, FLOPs and order are the file's, no time is. The run says so, and analyses make no claim in time.

DRAWN_NS: Final = 1000  # length of an operator in a run without times


def read_graph(nodes: list[Any], result: Recording) -> None:
    """Put the timeline of *nodes*, of an execution trace, into *result*."""
    said = [node for node in nodes if isinstance(node, dict) and whole(node.get("id")) is not None]
    result.lost["node without a number"] += len(nodes) - len(said)
    callers = {whole(node.get("ctrl_deps", node.get("parent"))) for node in said}
    groups = _groups(said, -1 if result.rank is None else result.rank)
    rows = Rows()
    numbers: Counter[int] = Counter()
    for node in sorted(said, key=lambda one: int(one["id"])):
        if whole(node["id"]) in callers or text(node.get("name", "")).startswith(("[", "##")):
            continue
        row = _graph_row(node, groups)
        row["sequence"] = numbers[row["group"]] if row["group"] >= 0 else -1
        numbers[row["group"]] += 1
        rows.add(row | {"start_ns": len(rows) * DRAWN_NS, "duration_ns": DRAWN_NS})
    result.spans = rows.table()
    result.groups = tuple(groups.known.values())
    result.world_size = groups.world_size or None
    result.facts["times"] = "none"
    result.evidence["order"] = "order of the calls; an operator that calls others is not drawn"
    result.lost = +result.lost


def _graph_row(node: Mapping[str, Any], groups: TraceGroups) -> dict[str, Any]:
    name = text(node.get("name", ""))[:160]
    shapes, kinds = _tensors(node, "input")
    label, width = dtype(_inner(kinds[0])) if kinds else ("", 0)
    if name.startswith(COLLECTIVE):
        group = groups.of({"Process Group Name": "0", "Group size": groups.world_size or None})
        kind = collective_kind(name)
        given_bytes = array_bytes(sum(elements(shape) for shape in shapes), width)
        return {
            "stream": "communication",
            "category": "collective" if kind != UNKNOWN else "host",
            "kind": kind if kind != UNKNOWN else "operator",
            "name": name,
            **placed(group),
            "size_bytes": whole_bytes(kind, given_bytes, group),
            "flops": 0,
            "dtype": label,
        }
    tid = whole(_told(node, "tid")) or 0
    row = {"stream": f"host {tid}", "category": "host", "kind": "operator", "name": name, "axis": ""}
    return row | {"group": -1, "size_bytes": 0, "flops": product_flops(name, shapes), "dtype": label}


def _told(node: Mapping[str, Any], name: str) -> Any:
    """Return an attribute, in the node itself (1.0.1) or in its list of attributes (later)."""
    if name in node:
        return node[name]
    listed = node.get("attrs")
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, dict) and one.get("name") == name:
            return one.get("value")
    return None


def _tensors(node: Mapping[str, Any], side: str) -> tuple[list[Any], list[str]]:
    """Return shapes and types of the inputs, of either generation of the schema."""
    told = node.get(f"{side}s")
    shapes = told.get("shapes") if isinstance(told, dict) else node.get(f"{side}_shapes")
    kinds = told.get("types") if isinstance(told, dict) else node.get(f"{side}_types")
    return (
        shapes if isinstance(shapes, list) else [],
        [text(kind) for kind in kinds] if isinstance(kinds, list) else [],
    )


def _inner(kind: str) -> str:
    """Return the element type of a tensor, or of the first tensor of a list of them.

    >>> _inner("GenericList[Tensor(float),Tensor(float)]")
    'float'
    """
    found = re.search(r"Tensor\(([^)]*)\)", kind)
    return found[1] if found else ""


def _groups(nodes: list[dict[str, Any]], rank: int) -> TraceGroups:
    groups = TraceGroups(rank, 0)
    for node in nodes:
        if _configure(groups, node):
            break
    return groups


def _configure(groups: TraceGroups, node: Mapping[str, Any]) -> bool:
    """Note the groups that *node* lists, if it is the one that does."""
    if "process_group:init" not in text(node.get("name", "")):
        return False
    told = node.get("inputs")
    values = told.get("values") if isinstance(told, dict) else told
    try:
        listed = json.loads(text(values[0])) if isinstance(values, list) and values else []
    except (ValueError, RecursionError):  # cut off by the observer
        return True
    for one in listed if isinstance(listed, list) else ():
        size = (whole(one.get("group_size")) if isinstance(one, dict) else 0) or 0
        if 0 < size < MOST_RANKS:
            members = one.get("ranks") or list(range(size))
            groups.configure(one.get("pg_name", ""), one.get("pg_desc", ""), members, size)
    return True


# What a graph of nodes asks of its rank, as a rehearsal: work for a simulator, with or without durations.
#
# Nodes follow one another as ASTRA-sim issues them: computation one at a time, each communication when what
# it depends on is done (astra-sim/workload/Workload.cc). A send lets what depends on it go on as soon as it
# is issued: it is in a buffer then, there as with NCCL. The size of a gather is what a rank gives
# (collective_algorithm/Ring.cc), here that of the whole.

LOAD, STORE, COMPUTE, _SEND, _RECV, _COLLECTIVE = range(2, 8)
"""Types of nodes; 0 and 1 are of none and of metadata."""

DTYPE: Final = "bf16"  # what a graph computes in, which no node says

CUBES: Final = f"FLOPs of nodes without shapes are priced as products of cubes in {DTYPE}, or by their bytes"

COPIES: Final = {LOAD: (rehearsal.TO_DEVICE, 32_766), STORE: (rehearsal.TO_HOST, 32_767)}
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


def issued(nodes: Mapping[int, Node], met: Mapping[int, Met]) -> rehearsal.Issued:
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
        self._works: rehearsal.Distinct[Work] = rehearsal.Distinct()
        self._messages: rehearsal.Distinct[rehearsal.Message] = rehearsal.Distinct()
        self._places: rehearsal.Distinct[rehearsal.Place] = rehearsal.Distinct()
        self._sequence: Counter[tuple[int, ...]] = Counter()
        # Work that only other work of the device depends on needs no mark: a stream keeps its order.
        self._marked = {
            other for node in nodes.values() if node.kind != COMPUTE or node.on_host for other in node.before
        }

    def written(self) -> rehearsal.Issued:
        for number, node in self._nodes.items():
            self._write(number, node)
        tables = rehearsal.RankTables(
            rehearsal.table_of(self._events, rehearsal.EVENTS),
            self._works.table(rehearsal.WORKS),
            self._messages.table(rehearsal.MESSAGES),
            self._places.table(rehearsal.PLACES),
        )
        cubes = any(work.kind == "gemm" for work in self._works.listed)
        measured = rehearsal.table_of(self._measured, rehearsal.MEASURED)
        return rehearsal.Issued(tables, measured, {"steps": 1, "note": CUBES if cubes else ""})

    def _write(self, number: int, node: Node) -> None:
        waits = tuple(dict.fromkeys(one for other in node.before for one in self._done.get(other, ())))
        met = self._met.get(number)
        work = None if met else _work(node)
        if met is None and work is None:
            self._done[number] = waits  # it takes no time: what depends on it waits for what it waits for
            return
        place = self._places.number(rehearsal.Place("kernel", node.name, stage=-1, virtual_stage=-1))
        stream = 1 + number % STREAMS if met else COPIES[node.kind][1] if node.kind in COPIES else 0
        self._wait(waits, stream, place, on_host=node.on_host and not met)
        at = len(self._events)
        if met is not None:
            item = self._messages.number(_message(node, met))
            key = (met.group.id, met.peer, node.kind, node.size("comm_tag"))
            # Sends and receives meet by their tags, whichever order they are issued in.
            order = self._sequence[key] + (node.size("comm_tag") << 32)
            self._sequence[key] += 1
            self._events.append((rehearsal.COMMUNICATION, item, place, stream, order, 0))
            self._done[number] = waits if node.kind == _SEND else (_Done(rehearsal.WAIT, at, stream),)
            return
        assert work is not None  # noqa: S101 - one of the two, as above
        self._events.append((rehearsal.OP, self._works.number(work), place, stream, -1, 0))
        if node.duration_ns:
            self._measured.append((at, 0, node.duration_ns, 0, 0))
        if number in self._marked and not node.on_host:
            self._events.append((rehearsal.MARK, number % (1 << 31), place, stream, -1, 0))
            self._done[number] = (_Done(rehearsal.WAIT_MARK, number % (1 << 31), stream),)

    def _wait(self, waits: Sequence[_Done], stream: int, place: int, *, on_host: bool) -> None:
        for one in waits:
            if on_host:
                self._events.append((rehearsal.HOST_WAIT, -1, place, one.stream, -1, 0))
            elif one.what == rehearsal.WAIT:
                self._events.append((rehearsal.WAIT, -1, place, stream, one.number, 0))
            elif one.stream != stream:
                self._events.append((rehearsal.WAIT_MARK, one.number, place, stream, -1, 0))


def _work(node: Node) -> Work | None:
    """Return the work of *node*; None if the node takes no time.

    Floating-point operations are priced as a product of cubes of as many, and never below their bytes; what
    says neither takes the time that the file says.
    """
    flops, moved = node.size("num_ops"), node.size("tensor_size")
    if node.kind in COPIES:
        kind = COPIES[node.kind][0]
    else:
        kind = rehearsal.ON_HOST if node.on_host else "gemm" if flops else "memory"
    is_known = not node.on_host and bool(flops or moved)
    if not is_known and not node.duration_ns:
        return None
    side = max(round((flops / 2) ** (1 / 3)), 1) if kind == "gemm" else 0
    said = "" if is_known else f"{node.duration_ns} ns"  # of one name and another length: another work
    return Work(
        "compute", kind, said, DTYPE, flops, moved, m=side, n=side, k=side, kernels=0, is_known=is_known
    )


def _message(node: Node, met: Met) -> rehearsal.Message:
    # Transfers of a pair with one tag share a stream: the name is theirs, not that of the node.
    tag = f" {node.size('comm_tag')}" if node.size("comm_tag") else ""
    name = met.kind + tag if met.peer >= 0 else node.name
    return rehearsal.Message(
        met.kind, met.group.id, met.size_bytes(node), "", met.peer, is_async=False, name=name
    )
