"""From a job to a program: the tasks of each rank in a step, their order and their dependencies.

The rules and the framework that each one follows are in docs/simulation.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from foretrace.simulator.builder.groups import Groups
from foretrace.simulator.builder.instances import Costs, Message, Network
from foretrace.simulator.builder.line import amax_scope
from foretrace.simulator.builder.program_builder import Place, ProgramBuilder
from foretrace.simulator.builder.stages import check_work, job_plan
from foretrace.simulator.builder.templates import Templates
from foretrace.simulator.compute.timing import ComputeModel
from foretrace.simulator.job import Job
from foretrace.simulator.network.occupancy import occupied
from foretrace.simulator.program import Program, Transfer
from foretrace.simulator.schedules import Action, has_two_copies, held_stages
from foretrace.traces.layout import Coord, Layout

# Which ranks must behave alike, so that one of them can be simulated for all.


def representatives(layout: Layout, special: Iterable[int] = ()) -> tuple[int, ...]:
    """Return for every rank the one that stands for it.

    Ranks with the same pipeline coordinate do the same, unless one is *special*: then its data, context and
    tensor coordinates are kept apart from the others along each axis. What remains is a smaller grid in which
    every group has a member of each kind, so that who waits for whom is the same as in the whole grid. Expert
    groups lie across two axes; with them and a special rank, ``dp`` and ``cp`` are kept as they are, and
    ``tp`` too if experts are cut over another number of ranks.

    >>> representatives(Layout(pp=2, dp=3))
    (0, 0, 0, 3, 3, 3)
    >>> representatives(Layout(dp=4, tp=2), special=[3])
    (0, 1, 2, 3, 0, 1, 0, 1)
    """
    coords = [layout.coord(rank) for rank in special]
    kept: dict[str, NDArray[np.int64]] = {}
    for axis in ("dp", "cp", "tp"):
        size = getattr(layout, axis)
        apart = {getattr(coord, axis) for coord in coords}
        if coords and (layout.expert_tp or (layout.ep > 1 and axis != "tp")):
            apart = set(range(size))
        ordinary = next((at for at in range(size) if at not in apart), 0)
        kept[axis] = np.array([at if at in apart else ordinary for at in range(size)])
    pp, dp, cp, tp = np.ix_(np.arange(layout.pp), kept["dp"], kept["cp"], kept["tp"])
    ranks = layout.rank(
        cast("Any", Coord(cast("Any", pp), cast("Any", dp), cast("Any", cp), cast("Any", tp)))
    )
    return tuple(cast("Any", ranks).ravel().tolist())


def build(
    job: Job,
    network: Network,
    compute: ComputeModel,
    *,
    folded: bool = True,
    groups: Groups | None = None,
    special: Sequence[int] = (),
    others: Sequence[ComputeModel] = (),
    kind_of: Callable[[int], int] = lambda _: 0,
) -> Program:
    """Return the program of *job*.

    Args:
        job: the job to run.
        network: costs of communications.
        compute: durations of operations, on the first kind of GPU of the machine.
        folded: simulate one rank for all that behave alike; otherwise all.
        groups: the process groups of the job if they are already known.
        special: ranks that behave differently from the others of their pipeline rank, such as stragglers.
        others: durations on the other kinds of GPU, as ``Job.kinds`` has them.
        kind_of: the kind that a rank is on.

    Raises ScheduleError if the schedule does not allow these stages and micro-batches. Raises JobError if
    there are more stages than layers.
    """
    groups = groups or job_groups(job)
    check_work(job)
    orders = job_plan(job)
    each = zip(job.kinds, (compute, *others), strict=True)
    kinds = [Templates(one, groups, timing, orders) for one, timing in each]
    stands_for = representatives(job.layout, special)
    builder = ProgramBuilder(Costs(groups, network, folded=folded, takes=_takes(job)))
    for pp, actions in enumerate(orders):
        for rank in groups.of_pipeline_rank(pp):
            if folded and stands_for[rank] != rank:
                continue
            templates = kinds[kind_of(rank)]
            for step in range(job.n_steps):
                _place_step(builder, templates, rank, (pp, actions), step)
    return builder.build()


def _takes(job: Job) -> Callable[[Transfer, Message, int], Transfer]:
    """Return a function that adds to the cost of a message how much of the GPUs of *job* it occupies."""
    own = job.profile.dispatch_processors

    def takes(transfer: Transfer, message: Message, n_ranks: int) -> Transfer:
        found = (
            occupied(transfer, message, n_ranks, kind.device, job.overlap_slowdown, dispatch_processors=own)
            for kind in job.cluster.kinds
        )
        return max(found, key=lambda one: (one.processors, one.memory))

    return takes


def job_groups(job: Job) -> Groups:
    """Return the process groups of *job*."""
    return Groups(
        job.layout,
        two_copies=has_two_copies(job.schedule),
        shard_ranks=job.shard_ranks,
        whole_stages=amax_scope(job) == "stage",
    )


def _place_step(
    builder: ProgramBuilder, templates: Templates, rank: int, does: tuple[int, Sequence[Action]], step: int
) -> None:
    """Place one optimizer step of *rank*: what its pipeline rank *does* in order, then the update."""
    pp, actions = does
    stages = held_stages(actions)
    virtual_stage = {stage: at for at, stage in enumerate(stages)}
    paired = templates.pairs
    places = [Place(action.stage, virtual_stage[action.stage], action.microbatch) for action in actions]
    todo = iter(zip(actions, templates.visits[pp], places, strict=True))
    for action, visit, place in todo:
        if action in paired:
            _, back, second = next(todo)
            builder.place(templates.pair(visit, back), rank, place, step=step, second=second)
        else:
            builder.place(templates.action(visit), rank, place, step=step)
    builder.place(templates.update(stages), rank, Place(stages[0]), step=step)
    if templates.saves(step):
        builder.place(templates.checkpoint(stages), rank, Place(stages[0]), step=step)
