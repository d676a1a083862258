"""A schedule as a program of its own: one task per action, whatever an action is made of.

It follows the same rules for receives and sends as the program of a whole job, and is so small that thousands
of layouts can be run in a second: what a stage takes and what a message takes are filled in afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from simulator.build_instances import Message
from simulator.build_pipeline import Pipeline
from simulator.program import Int64Array, Label, Program, Transfer
from simulator.program_builder import COMPUTE, ProgramBuilder, Task, Template
from simulator.schedules import ACTION_KINDS, plan

LABELS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
"""Kind in the timeline of each kind of action."""


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleProgram:
    """A program whose durations are still to be filled in.

    Attributes:
        program: the tasks; all durations are 0.
        n_stages: stages of the model.
        cell: for each task that computes, where its duration stands in an array of shape
            ``(len(ACTION_KINDS), n_stages)`` made flat; -1 for the others; shape ``(n_tasks,)``.
        link: for each transfer, where its duration stands in an array of shape ``(n_ranks, n_ranks)`` from
            sender to receiver, made flat; shape ``(n_instances,)``.
    """

    program: Program
    n_stages: int
    cell: Int64Array
    link: Int64Array

    def durations(self, action_ns: Int64Array) -> Int64Array:
        """Return the duration of each task, if an action takes ``action_ns[kind, stage]``."""
        return np.append(action_ns.ravel(), 0)[self.cell]

    def transfers(self, link_ns: Int64Array) -> Int64Array:
        """Return the duration of each transfer, if one from *a* to *b* takes ``link_ns[a, b]``."""
        return link_ns.ravel()[self.link]

    def with_times(self, action_ns: Int64Array, link_ns: Int64Array) -> Program:
        """Return the program with its durations filled in, for any engine to run."""
        transfers = tuple(Transfer(0, int(ns)) for ns in link_ns.ravel())
        return replace(
            self.program,
            duration_ns=self.durations(action_ns),
            transfers=transfers,
            instance_transfer=self.link.astype(np.int32),
        )


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
        return Transfer(source * self._n_ranks + destination, 0)


@lru_cache(maxsize=256)
def schedule_program(
    name: str,
    n_ranks: int,
    n_microbatches: int,
    virtual_stages: int | None = None,
    *,
    overlap_p2p: bool | None = None,
) -> ScheduleProgram:
    """Return the program of a schedule.

    Args:
        name: schedule, as for ``simulator.schedules.plan``.
        n_ranks: pipeline ranks.
        n_microbatches: micro-batches of a step.
        virtual_stages: stages per rank; None: what the schedule has by default.
        overlap_p2p: as ``Job.overlap_p2p``.

    Raises:
        ScheduleError: the schedule does not allow these sizes.
    """
    orders = plan(name, n_ranks, n_microbatches, virtual_stages)
    pipeline = Pipeline(orders, 0, "", overlap_p2p=overlap_p2p)
    builder = ProgramBuilder(_Links(n_ranks))
    templates: dict[object, Template] = {}
    for pp, actions in enumerate(orders):
        for action, full in zip(actions, pipeline.visits[pp], strict=True):
            visit = full._replace(is_last=False)
            if visit not in templates:
                template = templates[visit] = Template()
                task = Task(COMPUTE, Label("compute", LABELS[action.kind], "stage"))
                pipeline.write(template, visit, partial(template.then, task))
            builder.place(templates[visit], pp, stage=action.stage, microbatch=action.microbatch)
    program = builder.build()
    links = np.array([transfer.latency_ns for transfer in program.transfers], np.int64)
    return ScheduleProgram(
        program, pipeline.n_stages, _cells(program, pipeline.n_stages), links[program.instance_transfer]
    )


def _cells(program: Program, n_stages: int) -> Int64Array:
    """Return where the duration of each task stands, -1 for transfers."""
    kinds = [LABELS[kind] for kind in ACTION_KINDS]
    row = np.array([kinds.index(label.kind) if label.kind in kinds else -1 for label in program.labels])
    rows = row[program.label]
    return np.where(rows >= 0, rows * n_stages + program.stage, -1).astype(np.int64)
