"""The event engine, on SimPy: the readable specification of the semantics of a program.

Every stream of every rank is a process that runs its tasks in order, like a CUDA stream. A communication is
a rendezvous: the last participant to arrive starts the transfer, and all leave together when it ends. The
order depends on nothing but the program, so the same program always gives the same timeline.

If communications occupy part of the GPUs that they run on (``Transfer.processors`` and ``Transfer.memory``),
concurrent compute slows down, as described in ``simulator/engine/slowdown.py``.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
from simpy import Environment, Event

from foretrace.simulator.engine.changes import Change, Throttle, without_links
from foretrace.simulator.engine.deadlock import NEVER, explain
from foretrace.simulator.engine.gpus import Gpus
from foretrace.simulator.engine.spans import spans
from foretrace.simulator.errors import ProgramError
from foretrace.simulator.program import Int64Array, Program, transfer_ns

NAME: Final = "event"
"""Name of this engine in summaries."""


def run(program: Program, changes: Sequence[Change | Throttle] = ()) -> pa.Table:
    """Return the timeline of *program*: one row per task, and one per rank and step.

    Args:
        program: the program to run.
        changes: changes of the speed of GPUs during the run.

    Raises:
        ProgramError: the program cannot run to its end: a cycle, or a participant that never arrives.
        EngineError: a link changes, which this engine does not simulate.
    """
    start_ns, end_ns = times(program, changes)
    return spans(program, start_ns, end_ns)


def times(program: Program, changes: Sequence[Change | Throttle] = ()) -> tuple[Int64Array, Int64Array]:
    """Return when each task of *program* starts (a communication: arrives) and ends, in ns.

    Raises:
        ProgramError: as ``run``.
    """
    return Clock(program, changes).times()


class Clock:
    """A program prepared to be run many times, with different durations each time.

    Args:
        program: the program to run.
        changes: changes of the speed of GPUs during the run.

    Attributes:
        duration_ns: compute time of each task in the program itself; shape ``(n_tasks,)``.
        transfer_ns: time of each communication there, once all have arrived; shape ``(n_instances,)``.
    """

    def __init__(self, program: Program, changes: Sequence[Change | Throttle] = ()) -> None:
        self._program = program
        self._throttles = without_links(NAME, changes)
        self.duration_ns = program.duration_ns
        self.transfer_ns = transfer_ns(program)

    def times(
        self, duration_ns: Int64Array | None = None, transfer_ns: Int64Array | None = None
    ) -> tuple[Int64Array, Int64Array]:
        """Return start and end of every task; durations default to those of the program.

        Raises:
            ProgramError: the program cannot run to its end: a cycle, or a participant that never arrives.
        """
        program = replace(self._program, duration_ns=self.duration_ns if duration_ns is None else duration_ns)
        total_ns = self.transfer_ns if transfer_ns is None else transfer_ns
        return finish(State(Environment(), program, total_ns, self._throttles))


def finish(state: State) -> tuple[Int64Array, Int64Array]:
    """Run every stream to its end and return start and end of every task, in ns.

    Raises:
        ProgramError: the program cannot run to its end: a cycle, or a participant that never arrives.
    """
    program, env = state.program, state.env
    for tasks in _streams(program):
        env.process(state.stream(tasks))
    env.run()
    start_ns, end_ns = np.array(state.start_ns, np.int64), np.array(state.end_ns, np.int64)
    if program.n_tasks and end_ns.min() == NEVER:
        raise ProgramError(explain(program, start_ns, end_ns))
    return start_ns, end_ns


class State:
    """State shared by the streams: which tasks have ended, which wait for which, and who has arrived."""

    def __init__(
        self,
        env: Environment,
        program: Program,
        total_ns: Int64Array,
        throttles: Sequence[Throttle] = (),
    ) -> None:
        self.env = env
        self._gpus = Gpus(env, program, throttles) if throttles or program.shares_gpus else None
        self.program = program
        self.start_ns = [NEVER] * program.n_tasks
        self.end_ns = [NEVER] * program.n_tasks
        self._duration_ns: list[int] = program.duration_ns.tolist()
        self._instance: list[int] = program.instance.tolist()
        self._waits_for = _cross_stream(program)
        self._waiters: dict[int, Event] = {}
        self._missing: list[int] = program.instance_participants.tolist()
        self.transfer_ns_of: list[int] = total_ns.tolist()
        self._met: dict[int, Event] = {}

    def stream(self, tasks: list[int]) -> Generator[Event, None, None]:
        """Run *tasks* in order: wait for inputs, occupy the stream, release dependent tasks."""
        env, start_ns, end_ns, gpus = self.env, self.start_ns, self.end_ns, self._gpus
        duration_ns, instance, waits_for, waiters = (
            *(self._duration_ns, self._instance, self._waits_for, self._waiters),
        )
        for task in tasks:
            for other in waits_for.get(task, ()):
                if end_ns[other] == NEVER:
                    yield waiters.setdefault(other, env.event())
            start_ns[task] = int(env.now)
            if instance[task] >= 0:
                yield self._arrive(task, instance[task])
                if gpus:
                    gpus.end(task, instance[task])
            elif duration_ns[task] and gpus and gpus.slows(task):
                yield from gpus.compute(task, duration_ns[task])
            elif duration_ns[task]:
                yield env.timeout(duration_ns[task])
            end_ns[task] = int(env.now)
            if task in waiters:
                waiters.pop(task).succeed()

    def _arrive(self, task: int, instance: int) -> Event:
        """Return the event that ends communication *instance*; the last to arrive starts it."""
        self._missing[instance] -= 1
        if self._gpus:
            self._gpus.launch(task, instance)
        if self._missing[instance]:
            return self._met.setdefault(instance, self.env.event())
        if self._gpus:
            self._gpus.move(instance)
        done = self.carry(instance)
        if instance in self._met:
            done.callbacks.append(self._met.pop(instance).trigger)
        return done

    def carry(self, instance: int) -> Event:
        """Return the event at which the bytes of *instance* have arrived, if it starts now."""
        return self.env.timeout(self.transfer_ns_of[instance])


def _streams(program: Program) -> list[list[int]]:
    """Return the tasks of every ``(rank, stream)`` in order of index."""
    lane = program.rank.astype(np.int64) * len(program.streams) + program.stream
    order = np.argsort(lane, kind="stable")
    cuts = np.flatnonzero(np.diff(lane[order])) + 1
    return [tasks.tolist() for tasks in np.split(order, cuts) if len(tasks)]


def _cross_stream(program: Program) -> dict[int, list[int]]:
    """Return the dependencies of each task, except those implied by the order of its stream."""
    task = np.repeat(np.arange(program.n_tasks), np.diff(program.dep_start))
    lane = program.rank.astype(np.int64) * len(program.streams) + program.stream
    implied = (lane[task] == lane[program.deps]) & (program.deps < task)
    found: dict[int, list[int]] = {}
    for waiter, other in zip(task[~implied].tolist(), program.deps[~implied].tolist(), strict=True):
        found.setdefault(waiter, []).append(other)
    return found
