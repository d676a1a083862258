"""From a job to a program: the tasks of each rank in a step, their order and their dependencies.

The rules and the framework that each one follows are in docs/simulation.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from foretrace.simulator.builder.groups import Groups
from foretrace.simulator.builder.instances import Costs, Message, Network
from foretrace.simulator.builder.line import amax_scope
from foretrace.simulator.builder.merged import NotSerialError, TakesNs, merged
from foretrace.simulator.builder.program_builder import Place, ProgramBuilder, Template
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
    merges: bool = False,
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
        merges: let one task stand for several in a row where that changes no time (``builder.merged``).

    Raises ScheduleError if the schedule does not allow these stages and micro-batches. Raises JobError if
    there are more stages than layers.
    """
    groups = groups or job_groups(job)
    check_work(job)
    orders = job_plan(job)
    stands_for = representatives(job.layout, special)
    costs = Costs(groups, network, folded=folded, takes=_takes(job))

    def program(alone: Alone | None) -> Program:
        builder, takes_ns = ProgramBuilder(costs), alone.takes_ns if alone else None
        each = zip(job.kinds, (compute, *others), strict=True)
        kinds = [Templates(one, groups, timing, orders, takes_ns) for one, timing in each]
        for pp, actions in enumerate(orders):
            for rank in groups.of_pipeline_rank(pp):
                if folded and stands_for[rank] != rank:
                    continue
                templates = kinds[kind_of(rank)]
                for step in range(job.n_steps):
                    for template, at, second in _does(templates, (pp, actions), step):
                        short = alone.merged(template, pp) if alone else template
                        builder.place(short, rank, at, step=step, second=second)
        return builder.build()

    # Where ranks of a pipeline rank differ, or share their device, what follows on one rank meets others.
    if merges and folded and not special and not others and not shares_gpus(job):
        with suppress(NotSerialError):
            return program(Alone(costs, groups))
    return program(None)


def shares_gpus(job: Job) -> bool:
    """Whether communications of *job* may slow its compute down."""
    return bool(job.overlap_slowdown or job.profile.dispatch_processors)


class Alone:
    """Makes one task of those that follow one another, where one rank stands for all of a pipeline rank."""

    def __init__(self, costs: Costs, groups: Groups) -> None:
        self._costs = costs
        self._groups = groups
        self._merged: dict[tuple[int, int], tuple[Template, Template]] = {}
        # One function for each pipeline rank: to those who remember answers it says whose they are.
        self.takes_ns = cache(self._takes_ns)

    def merged(self, template: Template, pp: int) -> Template:
        """Return *template* as pipeline rank *pp* has it, once. Raises NotSerialError if it cannot be."""
        if (id(template), pp) not in self._merged:
            self._merged[id(template), pp] = template, merged(template, self.takes_ns(pp))
        return self._merged[id(template), pp][1]

    def _takes_ns(self, pp: int) -> TakesNs:
        rank = self._groups.of_pipeline_rank(pp)[0]

        @cache
        def takes_ns(message: Message) -> int:
            transfer = self._costs.transfer(rank, message)
            return transfer.latency_ns + transfer.wire_ns

        return takes_ns


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
    return Groups(**_grouping(job))


def _grouping(job: Job) -> dict[str, Any]:
    """Return what the groups of *job* follow from."""
    return {
        "layout": job.layout,
        "two_copies": has_two_copies(job.schedule),
        "shard_ranks": job.shard_ranks,
        "whole_stages": amax_scope(job) == "stage",
    }


MOST_RANKS_KEPT: Final = 1 << 20
"""Ranks of all layouts together whose groups are kept."""


class RecentGroups:
    """The groups of jobs that follow each other, kept for layouts of so many ranks together.

    The oldest go: those of a million ranks take hundreds of megabytes.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Groups] = {}

    def of(self, job: Job) -> Groups:
        """Return the groups of *job*."""
        key = tuple(_grouping(job).values())
        if key not in self._kept:
            n_ranks = job.layout.world_size + sum(one.layout.world_size for one in self._kept.values())
            while self._kept and n_ranks > MOST_RANKS_KEPT:
                n_ranks -= self._kept.pop(next(iter(self._kept))).layout.world_size
            self._kept[key] = job_groups(job)
        return self._kept[key]


def _does(
    templates: Templates, does: tuple[int, Sequence[Action]], step: int
) -> Iterator[tuple[Template, Place, Place | None]]:
    """Yield one optimizer step of a rank: what its pipeline rank *does* in order, then the update.

    Of each its template, its place, and that of its second action if it has two.
    """
    pp, actions = does
    stages = held_stages(actions)
    virtual_stage = {stage: at for at, stage in enumerate(stages)}
    paired = templates.pairs
    places = [Place(action.stage, virtual_stage[action.stage], action.microbatch) for action in actions]
    todo = iter(zip(actions, templates.visits[pp], places, strict=True))
    for action, visit, at in todo:
        if action in paired:
            _, back, second = next(todo)
            yield templates.pair(visit, back), at, second
        else:
            yield templates.action(visit), at, None
    yield templates.update(stages), Place(stages[0]), None
    if templates.saves(step):
        yield templates.checkpoint(stages), Place(stages[0]), None
