"""The main line of an action: compute and blocking communication, in the order that a framework has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from foretrace.simulator.builder.groups import axis_of
from foretrace.simulator.builder.instances import Message
from foretrace.simulator.builder.merged import TakesNs, in_a_row, merges, whole
from foretrace.simulator.builder.program_builder import COMPUTE, HOST, STREAMS, Task, Template
from foretrace.simulator.builder.stages import Unit
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.engine.slowdown import MILLION
from foretrace.simulator.job import Job
from foretrace.simulator.program import Label, to_ns
from foretrace.simulator.workload.ops import Block, Comm, Op, Phase

KINDS: Final = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
"""Phase of a block that each kind of action goes through."""

EP: Final = STREAMS.index("ep")
ROUTES: Final = ("forward", "recompute")
"""Phases in which the host waits for the router to learn how many tokens go to each expert.

Megatron-LM ``moe/token_dispatcher.py``, ``cuda_sync_point``; ``experts.py``, ``tokens_per_expert.tolist()``.
"""


GRAPHED_STEP: Final = 0.05
"""Time of the host per operation of a step that is one CUDA graph, over that of eager code: it launches the
graph, not its kernels. The share is that of a compiled program (``frameworks/jax.toml``)."""


@dataclass(slots=True)
class _Piece:
    """Part of a phase that becomes one task: operations on end, or one communication.

    Attributes:
        waits: pieces of the phase that it waits for; -1 stands for what came before the phase.
        ops: its operations, if it computes.
        comm: its communication, if it communicates.
    """

    waits: tuple[int, ...]
    ops: list[Op] = field(default_factory=list)
    comm: Comm | None = None


class Launch(NamedTuple):
    """Time of the host for a task, in ns.

    *lead*: part that must pass before the device may start, so that it does not run out of kernels later.
    *rest*: part during which the device works already.
    """

    lead: int = 0
    rest: int = 0


@dataclass(frozen=True, slots=True)
class _Line:
    """A phase cut into tasks, with positions relative to its start, and what comes next has to wait for.

    ``launches`` is the time that the host takes to launch each task; ``waits_for_routes`` says whether the
    host has to wait for the device on the way. ``is_apart`` says whether all may be one task: each of them
    may be part of one, and what comes next waits for all. ``busy_ns`` and ``launches_ns`` are sums over them.
    """

    tasks: tuple[Task, ...]
    launches: tuple[Launch, ...]
    waits: tuple[tuple[int, ...], ...]
    tails: tuple[int, ...]
    waits_for_routes: bool
    is_apart: bool
    busy_ns: int
    launches_ns: int


class Pass(NamedTuple):
    """What is done with a unit: kind of the action, and what the job recomputes."""

    kind: str
    recompute: str


class OfHost(NamedTuple):
    """What the host has to do with an action in a unit.

    *waits*: it waits for the device on the way. *launches_ns*: how long it launches. *busy_ns*: how long the
    device computes.
    """

    waits: bool
    launches_ns: int
    busy_ns: int


class Chains:
    """Writes the phases of blocks into templates; equal phases of many layers are costed once.

    A compute task lasts as long as the device works. Launching takes time on the host, which runs ahead of
    the device; only an action in which it is the slower of the two, or has to wait for the device on the way,
    gets tasks on the ``host`` stream.

    *host*: its time per operation, over that of the device's ``launch_s``, and whether it waits for the
    router to learn where tokens go.
    """

    def __init__(self, compute: ComputeModel, host: tuple[float, bool] = (1.0, True)) -> None:
        self._compute = compute
        work, self._waits = host
        self._launch_s = work * compute.device.launch_s
        self._lines: dict[tuple[str, str, Phase], _Line] = {}
        self._found: dict[tuple[str, str, int], tuple[Phase, _Line]] = {}  # keyed by the identity of a phase
        # Blocks by identity, here and below: layers of a kind share them.
        self._blocks: dict[int, tuple[Block, ...]] = {}
        self._host: dict[tuple[int, Pass], OfHost] = {}
        self._near: dict[tuple[tuple[tuple[int, Pass], ...], TakesNs], Task | None] = {}
        self._wholes: dict[tuple[int, Pass, tuple[int, ...]], list[Task] | None] = {}
        self._labelled: dict[tuple[int, int], tuple[_Line, tuple[Task, ...]]] = {}

    def is_host_bound(self, passes: Iterable[tuple[Unit, Pass]], beside_ns: int = 0) -> bool:
        """Return whether the device may have to wait for the host in what is done with units.

        Launching, and what the host does *beside*, takes longer than computing, or the host waits for the
        device to say where tokens go, and is no longer ahead of it then.
        """
        for unit, action in passes:
            host = self.of_host(unit, action)
            if host.waits:
                return True
            beside_ns += host.launches_ns - host.busy_ns
        return beside_ns > 0

    def of_host(self, unit: Unit, action: Pass) -> OfHost:
        """Return what the host has to do with *action* in *unit*."""
        key = self._key(unit), action
        if key not in self._host:
            lines = [self._line(*phase) for phase in _phases(unit.blocks, *action)]
            waits = any(line.waits_for_routes for line in lines)
            self._host[key] = OfHost(
                waits, sum(line.launches_ns for line in lines), sum(line.busy_ns for line in lines)
            )
        return self._host[key]

    def _key(self, unit: Unit) -> int:
        self._blocks[id(unit.blocks)] = unit.blocks  # kept alive, as their id is in keys
        return id(unit.blocks)

    def units(
        self, template: Template, passes: Sequence[tuple[Unit, Pass]], beside: Sequence[int] = ()
    ) -> None:
        """Append *passes*, what is done with units in turn, to the main line of *template*.

        *template*: where to append; ``template.launches`` says whether the host's launches are written too.
        *beside*: tasks off the main line that the first task waits for too.
        """
        takes_ns = None if template.launches else template.takes_ns
        if takes_ns and (one := self._whole(passes, takes_ns)):
            template.then(one, beside)
            return
        for unit, action in passes:
            for block, phase in _phases(unit.blocks, *action):
                self._write(template, (block, phase, unit.layer), beside)
                beside = ()  # now behind the tails

    def _write(self, template: Template, what: tuple[Block, str, int], beside: Sequence[int]) -> None:
        """Append *what*, a phase of a block of a layer, to the main line of *template*."""
        block, phase, layer = what
        line, before = self._line(block, phase), (*template.tails, *beside)
        numbers: list[int] = []

        def placed(relative: tuple[int, ...]) -> list[int]:
            return [other for at in relative for other in (before if at < 0 else (numbers[at],))]

        for task, waits, launch in zip(self._of_layer(line, layer), line.waits, line.launches, strict=True):
            after = placed(waits)
            if template.launches and launch.lead:
                lead = Task(HOST, Label("host", "launch", block.name), launch.lead, layer=layer)
                after.append(template.add(lead, template.synchronized))
                template.synchronized = ()
                if launch.rest:
                    template.add(lead._replace(duration_ns=launch.rest), ())
            if template.launches and task.stream == EP and line.waits_for_routes:
                template.synchronized = tuple(after)
            numbers.append(template.add(task, after))
        template.tails = tuple(placed(line.tails))

    def _whole(self, passes: Sequence[tuple[Unit, Pass]], takes_ns: TakesNs) -> Task | None:
        """Return one task for *passes*, where communications take *takes_ns*; None if they are not one."""
        key = tuple((self._key(unit), action) for unit, action in passes), takes_ns
        if key not in self._near:
            each = {one: self._whole_unit(*one, takes_ns) for one in dict.fromkeys(key[0])}
            tasks = [task for one in key[0] for task in each[one] or ()]
            self._near[key] = in_a_row(tasks, takes_ns) if tasks and None not in each.values() else None
        return self._near[key]

    def _whole_unit(self, blocks: int, action: Pass, takes_ns: TakesNs) -> list[Task] | None:
        """Return the one task for *action* in *blocks*, if it does anything; None if it takes several."""
        lines = [self._line(*phase) for phase in _phases(self._blocks[blocks], *action)]
        lines = [line for line in lines if line.tasks]
        # By what its communications take: most pipeline ranks have the same.
        took_ns = (takes_ns(task.message) for line in lines for task in line.tasks if task.message)
        key = blocks, action, tuple(took_ns)
        if key not in self._wholes:
            is_one = all(line.is_apart for line in lines)
            each = [whole(line.tasks, line.waits, takes_ns) for line in lines] if is_one else []
            self._wholes[key] = [in_a_row(each, takes_ns)] if each else each if is_one else None
        return self._wholes[key]

    def _of_layer(self, line: _Line, layer: int) -> tuple[Task, ...]:
        key = id(line), layer
        if key not in self._labelled:
            self._labelled[key] = line, tuple(task._replace(layer=layer) for task in line.tasks)
        return self._labelled[key][1]

    def _line(self, block: Block, phase: str) -> _Line:
        """Return *phase* of *block*; layers that are alike mostly share the very same phases."""
        content = block.phases[phase]
        # By identity first: to hash a phase is to hash every operation in it.
        near = block.name, phase, id(content)
        if near not in self._found:
            self._found[near] = content, self._line_of(block.name, phase, content)
        return self._found[near][1]

    def _line_of(self, name: str, phase: str, content: Phase) -> _Line:
        key = name, phase, content
        if key not in self._lines:
            pieces, tails = _pieces(content)
            tasks = tuple(self._task(name, phase, piece) for piece in pieces)
            launches = tuple(
                self._launch(piece.ops)
                if piece.comm is None
                else Launch(to_ns(piece.comm.launches * self._launch_s))
                for piece in pieces
            )
            waits_for_routes = self._waits and phase in ROUTES and any(task.stream == EP for task in tasks)
            waits = tuple(piece.waits for piece in pieces)
            last = set(range(len(tasks))).difference(at for piece in pieces for at in piece.waits)
            is_apart = set(tails) == last != set() and all(map(merges, tasks))
            self._lines[key] = _Line(
                tasks,
                launches,
                waits,
                tails,
                waits_for_routes,
                is_apart,
                busy_ns=sum(task.duration_ns for task in tasks),
                launches_ns=sum(map(sum, launches)),
            )
        return self._lines[key]

    def _launch(self, ops: Sequence[Op]) -> Launch:
        """Return the time of the host for *ops*, which a device that waits for it works off meanwhile.

        The device starts so late that each operation is there when those before it have ended: the largest
        difference between when the host has launched one and when the device would come to it. What takes the
        host long is to prepare an operation, and all members of a group, before the first kernel is called.
        """
        launched_s = done_s = lead_s = 0.0
        for op in ops:
            launched_s += op.n_launches * self._launch_s
            lead_s = max(lead_s, launched_s - done_s)
            done_s += self._compute.op_s(op)
        lead_ns = to_ns(lead_s)
        return Launch(lead_ns, to_ns(launched_s) - lead_ns)

    def _memory_bound(self, ops: Sequence[Op]) -> int:
        """Return the share of the time of *ops* that memory bandwidth decides, in parts per million."""
        alone_s = [self._compute.op_s(op) for op in ops]
        bound_s = sum(s for op, s in zip(ops, alone_s, strict=True) if op.kind == "memory")
        return round(MILLION * bound_s / sum(alone_s)) if bound_s else 0

    def _task(self, name: str, phase: str, piece: _Piece) -> Task:
        comm = piece.comm
        if comm is not None:
            axis = axis_of(comm.axis)
            label = Label("collective", comm.kind, name, axis, comm.dtype)
            message = Message(
                *(comm.kind, comm.axis, comm.size_bytes, comm.dtype),
                top_k=comm.top_k,
                max_nodes=comm.max_nodes,
            )
            return Task(STREAMS.index(axis), label, message=message)
        return Task(
            COMPUTE,
            Label("compute", phase, name, "", piece.ops[0].dtype),
            duration_ns=to_ns(sum(self._compute.op_s(op) for op in piece.ops)),
            flops=sum(op.flops for op in piece.ops),
            bytes_moved=sum(op.bytes_moved for op in piece.ops),
            memory_bound=self._memory_bound(piece.ops),
        )


def host_of(job: Job) -> tuple[float, bool]:
    """Return the time of the host per operation in *job*, and whether it waits for routes.

    Experts that are filled to their capacity get as many tokens whatever the router says.
    """
    return host_work(job), "step" not in job.profile.graphed and not job.capacity_factor


def host_work(job: Job) -> float:
    """Return the time of the host per operation in *job*, over that of the device's ``launch_s``.

    >>> from foretrace.simulator.config import job_from
    >>> where = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 64, "global_batch": 64, "tp": 8}
    >>> [round(host_work(job_from({**where, "pp": pp, "framework": "nanotron"})), 2) for pp in (1, 2)]
    [2.1, 9.45]
    """
    profile, layout = job.profile, job.layout
    if "step" in profile.graphed:
        return GRAPHED_STEP
    leaves = layout.pp > 1 and layout.world_size > job.most_ranks_per_node
    return profile.host_work * (1 + profile.host_per_tensor_rank * (layout.tp - 1) * leaves)


def _phases(blocks: Sequence[Block], action: str, recompute: str) -> list[tuple[Block, str]]:
    """Return the phases that *action* goes through in *blocks* of a unit, in order.

    Forward goes through the blocks in order, backward in reverse. With full recomputation the whole layer is
    computed again before its backward (Megatron-LM ``--recompute-granularity full``, one layer per
    checkpoint); with selective, the core of attention just before the backward of its block.
    """
    if action == "F":
        return [(block, "forward") for block in blocks]
    back = [(block, KINDS[action]) for block in reversed(blocks)]
    if action == "W" or recompute == "none":
        return back
    if recompute == "full":
        return [*((block, "recompute") for block in blocks), *back]
    return [(block, phase) for block, last in back for phase in ("recompute", last)]


def _pieces(items: Iterable[Op | Comm]) -> tuple[list[_Piece], tuple[int, ...]]:
    """Cut a phase into pieces, and return with them what comes after the phase has to wait for.

    A communication waits for what was before it. What follows waits for it, except for its ``overlap_ops``:
    they run beside it, and only what comes after them waits.
    """
    pieces: list[_Piece] = []
    tails: tuple[int, ...] = (-1,)
    beside: dict[int, int] = {}  # communication -> operations that may still run beside it
    is_open = False  # whether the last piece takes more operations
    for item in items:
        due = tuple(at for at, left in beside.items() if left == 0)
        if isinstance(item, Comm):
            pieces.append(_Piece((*tails, *due), comm=item))
            is_open = False
            if item.overlap_ops:
                beside[len(pieces) - 1] = item.overlap_ops
            else:
                tails = (len(pieces) - 1,)
            continue
        if due or not is_open:
            pieces.append(_Piece((*tails, *due)))
            tails, is_open = (len(pieces) - 1,), True
        pieces[-1].ops.append(item)
        beside = {at: left - 1 for at, left in beside.items() if at not in due}
    return pieces, (*tails, *beside)
