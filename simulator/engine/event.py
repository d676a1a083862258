"""The event engine, on SimPy: the readable specification of the semantics of a program.

Every stream of every rank is a process that runs its tasks in order, like a CUDA stream. A communication is
a rendezvous: the last participant to arrive starts the transfer, and all leave together when it ends. The
order depends on nothing but the program, so the same program always gives the same timeline.

If communications occupy part of the GPUs that they run on (``Transfer.processors`` and ``Transfer.memory``),
concurrent compute slows down, as described in ``simulator/engine/slowdown.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from simpy import Environment, Event

from foretrace.simulator.engine import clock
from foretrace.simulator.engine.changes import Above, Change, Throttle, without_links
from foretrace.simulator.engine.deadlock import NEVER, explain
from foretrace.simulator.engine.slowdown import due_ns, slowdown
from foretrace.simulator.errors import ProgramError
from foretrace.simulator.program import Int64Array, Program

# GPUs of the event engine that compute and communicate at once, or throttle.


class Gpus:
    """What communication leaves of every GPU, and how fast it is."""

    def __init__(self, env: Environment, program: Program, throttles: Sequence[Throttle]) -> None:
        self._env = env
        self._rank: list[int] = program.rank.tolist()
        self._bound: list[int] = program.slowed.tolist()
        self._taken = [(transfer.processors, transfer.memory) for transfer in program.transfers]
        self._transfer: list[int] = program.instance_transfer.tolist()
        self._members: dict[int, list[int]] = defaultdict(list)
        for task, instance in enumerate(program.instance.tolist()):
            self._members[instance].append(task)
        self._processors: dict[int, int] = defaultdict(int)
        self._memory: dict[int, int] = defaultdict(int)
        self._factor: dict[int, float] = defaultdict(lambda: 1.0)
        self._changed: dict[int, Event] = {}
        for throttle in throttles:
            env.process(self._throttle(throttle))

    def slows(self, task: int) -> bool:
        """Return whether *task* takes longer when its GPU communicates or throttles."""
        return self._bound[task] >= 0

    def compute(self, task: int, duration_ns: int) -> Generator[Event, None, None]:
        """Compute *task*, which takes *duration_ns* on a GPU that does nothing else."""
        env, rank, left_ns = self._env, self._rank[task], float(duration_ns)
        while True:
            factor = self._factor[rank] * slowdown(
                self._bound[task], self._processors[rank], self._memory[rank]
            )
            since_ns = int(env.now)
            # Rounded as in the compiled engine, for both to agree to the nanosecond.
            end_ns = due_ns(since_ns, left_ns, factor)
            # One event for all that compute on this GPU: whoever changes its pace tells all of them at once.
            yield env.timeout(end_ns - since_ns) | self._changed.setdefault(rank, env.event())
            # Both may happen at the same moment; what is due then is over, whatever changed.
            if env.now >= end_ns:
                return
            left_ns -= (int(env.now) - since_ns) / factor

    def launch(self, task: int, instance: int) -> None:
        """Let the kernels of communication *instance* hold processors of the GPU of *task*."""
        if processors := self._taken[self._transfer[instance]][0]:
            self._processors[self._rank[task]] += processors
            self._note(self._rank[task])

    def move(self, instance: int) -> None:
        """Let the bytes of *instance* take memory bandwidth of all who take part."""
        if memory := self._taken[self._transfer[instance]][1]:
            for task in self._members[instance]:
                self._memory[self._rank[task]] += memory
                self._note(self._rank[task])

    def end(self, task: int, instance: int) -> None:
        """Take back what *instance* holds of the GPU of *task*."""
        processors, memory = self._taken[self._transfer[instance]]
        if processors or memory:
            self._processors[self._rank[task]] -= processors
            self._memory[self._rank[task]] -= memory
            self._note(self._rank[task])

    def _throttle(self, throttle: Throttle) -> Generator[Event, None, None]:
        yield self._env.timeout(throttle.at_ns)
        self._factor[throttle.rank] = throttle.factor
        self._note(throttle.rank)

    def _note(self, rank: int) -> None:
        """Tell who computes on *rank* that it now goes faster or more slowly."""
        if rank in self._changed:
            self._changed.pop(rank).succeed()


NAME: Final = "event"
"""Name of this engine in summaries."""


class Clock(clock.Clock):
    """See ``clock.Clock``; links do not change here."""

    def _prepare(self, program: Program, changes: Sequence[Change | Throttle], above: Above | None) -> None:
        self._program, self._throttles = program, without_links(NAME, changes, above)

    def _run(self, duration_ns: Int64Array, transfer_ns: Int64Array) -> clock.Times:
        program = replace(self._program, duration_ns=duration_ns)
        return finish(State(Environment(), program, transfer_ns, self._throttles))


run, times = clock.entries(Clock)


def finish(state: State) -> tuple[Int64Array, Int64Array]:
    """Run every stream to its end and return start and end of every task, in ns.

    Raises ProgramError if the program cannot run to its end: a cycle, or a participant that never arrives.
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
        # Names of this function: looked up once, not for every task.
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
        # Who came before waits for an event of its own, which *done* triggers.
        if instance in self._met:
            done.callbacks.append(self._met.pop(instance).trigger)
        return done

    def carry(self, instance: int) -> Event:
        """Return the event at which the bytes of *instance* have arrived, if it starts now."""
        return self.env.timeout(self.transfer_ns_of[instance])


def _streams(program: Program) -> list[list[int]]:
    """Return the tasks of every ``(rank, stream)`` in order of index."""
    lane = program.rank.astype(np.int64) * len(program.streams) + program.stream
    # Stable: tasks of one stream stay in their order.
    order = np.argsort(lane, kind="stable")
    cuts = np.flatnonzero(np.diff(lane[order])) + 1
    return [tasks.tolist() for tasks in np.split(order, cuts) if len(tasks)]


def _cross_stream(program: Program) -> dict[int, list[int]]:
    """Return the dependencies of each task, except those implied by the order of its stream."""
    task = np.repeat(np.arange(program.n_tasks), np.diff(program.dep_start))
    lane = program.rank.astype(np.int64) * len(program.streams) + program.stream
    # A dependency on a later task of the own stream is no order but a cycle, and has to be found.
    implied = (lane[task] == lane[program.deps]) & (program.deps < task)
    found: dict[int, list[int]] = {}
    for waiter, other in zip(task[~implied].tolist(), program.deps[~implied].tolist(), strict=True):
        found.setdefault(waiter, []).append(other)
    return found
