"""GPUs of the event engine that compute and communicate at once, or throttle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence

from simpy import Environment, Event

from foretrace.simulator.engine.changes import Throttle
from foretrace.simulator.engine.slowdown import due_ns, slowdown
from foretrace.simulator.program import Program


class Gpus:
    """What communication leaves of every GPU, and how fast it is.

    Args:
        env: the clock.
        program: what runs.
        throttles: what happens to GPUs meanwhile.
    """

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
            end_ns = due_ns(since_ns, left_ns, factor)
            yield env.timeout(end_ns - since_ns) | self._changed.setdefault(rank, env.event())
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
