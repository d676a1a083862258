"""The main line of an action: compute and blocking communication in the order of a framework."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from simulator.build_instances import Message
from simulator.build_stages import Unit
from simulator.compute import ComputeModel
from simulator.ops import Block, Comm, Op, Phase
from simulator.program import Label
from simulator.program_builder import COMPUTE, STREAMS, Task, Template

KINDS: Final = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
"""Phase of a block that each kind of action goes through."""


@dataclass(slots=True)
class _Piece:
    """Part of a phase that becomes one task: operations on end, or one communication.

    Attributes:
        waits: pieces of the phase that it waits for; -1 stands for what was before the phase.
        ops: its operations, if it computes.
        comm: its communication, if it communicates.
    """

    waits: tuple[int, ...]
    ops: list[Op] = field(default_factory=list)
    comm: Comm | None = None


@dataclass(frozen=True, slots=True)
class _Line:
    """A phase cut into tasks, with positions relative to its start, and what comes next has to wait for."""

    tasks: tuple[Task, ...]
    waits: tuple[tuple[int, ...], ...]
    tails: tuple[int, ...]


class Chains:
    """Writes the phases of blocks into templates; equal phases of many layers are costed once.

    Args:
        compute: how long operations take.
    """

    def __init__(self, compute: ComputeModel) -> None:
        self._compute = compute
        self._lines: dict[tuple[str, str, Phase], _Line] = {}

    def write(self, template: Template, block: Block, phase: str, beside: Iterable[int] = ()) -> None:
        """Append *phase* of *block* to the main line of *template*.

        Args:
            template: where to.
            block: whose phase.
            phase: one of ``simulator.ops.PHASES``.
            beside: tasks off the main line that the first task waits for too.
        """
        line = self._line(block.name, phase, block.phases[phase])
        first, before = len(template.tasks), (*template.tails, *beside)

        def placed(relative: tuple[int, ...]) -> list[int]:
            return [other for at in relative for other in (before if at < 0 else (first + at,))]

        for task, waits in zip(line.tasks, line.waits, strict=True):
            template.add(task._replace(layer=block.layer), placed(waits))
        template.tails = tuple(placed(line.tails))

    def unit(
        self, template: Template, unit: Unit, action: str, *, recompute: str, beside: Iterable[int] = ()
    ) -> None:
        """Append what *action* does in *unit*.

        Forward goes through the blocks in order, backward in reverse. With full recomputation the whole layer
        is computed again before its backward (Megatron-LM ``--recompute-granularity full``, one layer per
        checkpoint); with selective, the core of a block just before the backward of that block.

        Args:
            template: where to.
            unit: embedding, layer or head.
            action: kind of the action, a key of ``KINDS``.
            recompute: as in the job.
            beside: tasks off the main line that the first task waits for too.
        """
        if action == "F":
            phases = [(block, "forward") for block in unit.blocks]
        else:
            phases = [(block, KINDS[action]) for block in reversed(unit.blocks)]
            if action != "W" and recompute == "full":
                phases = [*((block, "recompute") for block in unit.blocks), *phases]
            elif action != "W":
                phases = [(block, phase) for block, last in phases for phase in ("recompute", last)]
        for block, phase in phases:
            self.write(template, block, phase, beside)
            beside = ()  # now behind the tails

    def _line(self, name: str, phase: str, items: Phase) -> _Line:
        key = (name, phase, items)
        if key not in self._lines:
            pieces, tails = _pieces(items)
            tasks = tuple(self._task(name, phase, piece) for piece in pieces)
            self._lines[key] = _Line(tasks, tuple(piece.waits for piece in pieces), tails)
        return self._lines[key]

    def _task(self, name: str, phase: str, piece: _Piece) -> Task:
        comm = piece.comm
        if comm is not None:
            label = Label("collective", comm.kind, name, comm.axis, comm.dtype)
            message = Message(comm.kind, comm.axis, comm.size_bytes, comm.dtype)
            return Task(STREAMS.index(comm.axis), label, message=message)
        return Task(
            COMPUTE,
            Label("compute", phase, name, "", piece.ops[0].dtype),
            duration_ns=self._compute.duration_ns(piece.ops),
            flops=sum(op.flops for op in piece.ops),
            bytes_moved=sum(op.bytes_moved for op in piece.ops),
        )


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
