"""A schedule as a program of its own: one task per action, whatever an action is made of.

It follows the same rules for receives and sends as the program of a whole job, and is so small that thousands
of layouts can be run in a second: what a stage takes and what a message takes are filled in afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from foretrace.simulator.builder.instances import Message
from foretrace.simulator.builder.pipeline import Pipeline, Visit
from foretrace.simulator.builder.program_builder import COMPUTE, Place, ProgramBuilder, Task, Template
from foretrace.simulator.program import Int64Array, Label, Program, Transfer
from foretrace.simulator.schedules import ACTION_KINDS, pairs, plan

PAIR = "forward and backward"
"""Kind of the task of a pair; its name is the stage of the backward."""

FORWARD, BACKWARD = (ACTION_KINDS.index(kind) for kind in "FB")

LABELS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
"""Kind in the timeline of each kind of action."""


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleProgram:
    """A program whose durations are still to be filled in.

    Attributes:
        program: the tasks; all durations are 0.
        cell: for each task that computes, where its duration stands in an array of shape
            ``(len(ACTION_KINDS), n_stages)`` made flat, with one of shape ``(n_stages, n_stages)`` for pairs
            of a forward and a backward behind it; -1 for the others; shape ``(n_tasks,)``.
        link: for each transfer, where its duration stands in an array of shape ``(n_ranks, n_ranks)`` from
            sender to receiver, made flat; shape ``(n_instances,)``.
        pairs: stages of the forward and of the backward of every kind of pair.
        receives: whether an action of a kind and stage receives; shape ``(len(ACTION_KINDS), n_stages)``.
    """

    program: Program
    n_stages: int
    cell: Int64Array
    link: Int64Array
    pairs: tuple[tuple[int, int], ...]
    receives: NDArray[np.bool_]

    def durations(self, action_ns: Int64Array, pair_ns: Int64Array | None = None) -> Int64Array:
        """Return the duration of each task, if an action takes ``action_ns[kind, stage]``.

        A pair takes ``pair_ns[stage of the forward, stage of the backward]``; None: as long as both.
        """
        if pair_ns is None:
            pair_ns = action_ns[FORWARD][:, None] + action_ns[BACKWARD][None, :]
        # A last entry of 0 for transfers, whose cell is -1: the last.
        return np.concatenate([action_ns.ravel(), pair_ns.ravel(), [0]])[self.cell]

    def transfers(self, link_ns: Int64Array) -> Int64Array:
        """Return the duration of each transfer, if one from *a* to *b* takes ``link_ns[a, b]``."""
        return link_ns.ravel()[self.link]


class _Links:
    """Stands in for costs: names the link that carries a message instead of its time."""

    uneven: frozenset[str] = frozenset()

    def __init__(self, n_ranks: int) -> None:
        self._n_ranks = n_ranks

    def channel(self, rank: int, message: Message) -> tuple[int, int, int]:
        """Return ``(group, source, destination)``."""
        ends = (rank, message.peer_pp) if message.kind == "send" else (message.peer_pp, rank)
        return 0, *ends

    def transfer(self, rank: int, message: Message) -> Transfer:
        """Return the number of the link as if it were a time."""
        _, source, destination = self.channel(rank, message)
        # In place of a latency: it comes back as ``program.transfers``, and says which link.
        return Transfer(source * self._n_ranks + destination, 0)


@lru_cache(maxsize=256)
def schedule_program(
    name: str,
    n_ranks: int,
    n_microbatches: int,
    virtual_stages: int | None = None,
    *,
    overlap_p2p: bool | None = None,
    overlap_pairs: bool = True,
) -> ScheduleProgram:
    """Return the program of a schedule.

    Args:
        name: schedule, as for ``simulator.schedules.plan``.
        n_ranks: pipeline ranks.
        n_microbatches: micro-batches of a step.
        virtual_stages: stages per rank; None: what the schedule has by default.
        overlap_p2p: as ``Job.overlap_p2p``.
        overlap_pairs: as ``Job.overlap_pairs``.

    Raises ScheduleError if the schedule does not allow these sizes.
    """
    orders = plan(name, n_ranks, n_microbatches, virtual_stages)
    pipeline = Pipeline(orders, 0, "", overlap_p2p=overlap_p2p)
    builder = ProgramBuilder(_Links(n_ranks))
    together = pairs(name, n_ranks, n_microbatches, virtual_stages) if overlap_pairs else frozenset()
    templates: dict[tuple[Visit, ...], Template] = {}
    for pp, actions in enumerate(orders):
        todo = iter(zip(actions, pipeline.visits[pp], strict=True))
        for action, visit in todo:
            key: tuple[Visit, ...] = (visit,)
            second = None
            if together and action in together:
                other, other_visit = next(todo)
                key, second = (visit, other_visit), Place(other.stage, -1, other.microbatch)
            if key not in templates:
                # Visits that differ for data parallelism alone have the same template here.
                templates[key] = _written(pipeline, tuple(map(_bare, key)))
            builder.place(templates[key], pp, Place(action.stage, -1, action.microbatch), second=second)
    program = builder.build()
    links = np.array([transfer.latency_ns for transfer in program.transfers], np.int64)
    cells, kinds = _cells(program, pipeline.n_stages)
    receives = np.zeros((len(ACTION_KINDS), pipeline.n_stages), np.bool_)
    for visit in {visit for own in pipeline.visits for visit in own if visit.source is not None}:
        receives[ACTION_KINDS.index(visit.kind), visit.stage] = True
    link = links[program.instance_transfer]
    return ScheduleProgram(program, pipeline.n_stages, cells, link, kinds, receives)


def _bare(visit: Visit) -> Visit:
    """Return *visit* without what only matters to data parallelism."""
    return visit._replace(is_last=False, first=0)


def _written(pipeline: Pipeline, parts: tuple[Visit, ...]) -> Template:
    """Return the template of an action, or of two that run together: one task."""
    template = Template()
    if len(parts) == 1:
        task = Task(COMPUTE, Label("compute", LABELS[parts[0].kind], "stage"))
        pipeline.write(template, parts[0], partial(template.then, task))
    else:
        forward, backward = parts
        task = Task(COMPUTE, Label("compute", PAIR, f"{backward.stage}"))
        pipeline.write_pair(template, (forward, backward), partial(template.then, task))
    return template


def _cells(program: Program, n_stages: int) -> tuple[Int64Array, tuple[tuple[int, int], ...]]:
    """Return where the duration of each task stands, -1 for transfers; and the stages of pairs."""
    kinds = [LABELS[kind] for kind in ACTION_KINDS]
    begins = np.array(
        [
            kinds.index(label.kind) * n_stages if label.kind in kinds else len(kinds) * n_stages
            for label in program.labels
        ],
        np.int64,
    )
    behind = np.array([int(label.name) if label.kind == PAIR else 0 for label in program.labels], np.int64)
    is_pair = np.array([label.kind == PAIR for label in program.labels], np.bool_)[program.label]
    stage = program.stage.astype(np.int64)
    # Behind the single actions: a row for the stage of the forward, a column for that of the backward.
    cell = begins[program.label] + np.where(is_pair, stage * n_stages + behind[program.label], stage)
    found = {(int(a), int(b)) for a, b in zip(stage[is_pair], behind[program.label[is_pair]], strict=True)}
    return np.where(program.instance < 0, cell, -1).astype(np.int64), tuple(sorted(found))
