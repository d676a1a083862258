"""The event engine with links that are shared: transfers under way at once slow each other down.

Every rank has a way into its node and a way out of it, in both directions. A transfer fills a share of them
while its bytes flow (``Transfer.near`` and ``Transfer.far``); where several would fill one beyond its width,
they share it max-min fairly (``simulator/network/fluid.py``). What a rank's ways are worth when all ranks
communicate alike, oversubscription included, is in the network's answer already. Latency is not slowed.

Where nothing meets on a link the timeline is that of the event engine, to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import pyarrow as pa
from simpy import Environment, Event

from foretrace.simulator.engine import clock
from foretrace.simulator.engine.changes import Above, Change, Throttle, of_gpus, of_links
from foretrace.simulator.engine.event import State, finish
from foretrace.simulator.engine.filled import Filled, filled, loads
from foretrace.simulator.engine.spans import spans
from foretrace.simulator.network.fluid import Fluid
from foretrace.simulator.program import Int64Array, Program, transfer_ns

NAME: Final = "contended"
"""Name of this engine in summaries."""


class Clock(clock.Clock):
    """See ``clock.Clock``; on SimPy, with shared links."""

    def _prepare(self, program: Program, changes: Sequence[Change | Throttle], above: Above | None) -> None:
        self._program, self._changes, self._above = program, changes, above

    def _run(self, duration_ns: Int64Array, transfer_ns: Int64Array) -> clock.Times:
        program = replace(self._program, duration_ns=duration_ns)
        return finish(_Shared(program, transfer_ns, self._changes, self._above))


run, times = clock.entries(Clock)


def watched(
    program: Program, changes: Sequence[Change | Throttle] = (), above: Above | None = None
) -> tuple[pa.Table, Filled]:
    """Return the timeline, and how full every link was when.

    Raises ProgramError if the program cannot run to its end.
    """
    state = _Shared(program, transfer_ns(program), changes, above, watched=True)
    start_ns, end_ns = finish(state)
    return spans(program, start_ns, end_ns), filled(state.fluid.spans)


class _Shared(State):
    """The streams' common state, with links between them."""

    def __init__(
        self,
        program: Program,
        total_ns: Int64Array,
        changes: Sequence[Change | Throttle] = (),
        above: Above | None = None,
        *,
        watched: bool = False,
    ) -> None:
        super().__init__(Environment(), program, total_ns, of_gpus(changes))
        self.fluid = Fluid(watched=watched)
        (first, link, share), names = loads(program, changes, above)
        parts = [(names[at], part) for at, part in zip(link.tolist(), share.tolist(), strict=True)]
        self._loads = [dict(parts[at:end]) for at, end in pairwise(first.tolist())]
        self._done: dict[int, Event] = {}
        self._changed = self.env.event()
        self.env.process(self._tick())
        for change in of_links(changes):
            self.env.process(self._change(change))

    def carry(self, instance: int) -> Event:
        """Return the event at which the bytes of *instance* have arrived, if it sets off now."""
        # Bytes that fill no shared link cannot be held up: their whole time is known.
        if not self._loads[instance]:
            return super().carry(instance)
        self._done[instance] = self.env.event()
        self.env.process(self._flow(instance))
        return self._done[instance]

    def _flow(self, instance: int) -> Generator[Event, None, None]:
        """Wait for the latency of *instance*, then let its bytes flow."""
        transfer = self.program.transfers[self.program.instance_transfer[instance]]
        total_ns = self.transfer_ns_of[instance]
        # Stragglers and jitter change whole times, and may make one shorter than its latency.
        latency_ns = min(transfer.latency_ns, total_ns)
        yield self.env.timeout(latency_ns)
        # To now first: the fluid takes a start only at its own time.
        self._catch_up()
        self.fluid.start(instance, total_ns - latency_ns, self._loads[instance])
        self._wake()

    def _change(self, change: Change) -> Generator[Event, None, None]:
        """Change the capacity of a link when its time comes."""
        yield self.env.timeout(change.at_ns)
        self._catch_up()
        self.fluid.set_capacity(change.way, change.capacity)
        self._wake()

    def _tick(self) -> Generator[Event, None, None]:
        """End transfers as they come due; start anew whenever the traffic changes."""
        while True:
            end_ns = self.fluid.next_end_ns()
            # A new event each time: an event of SimPy happens once.
            self._changed = self.env.event()
            if end_ns is None:
                yield self._changed
            else:
                yield self._changed | self.env.timeout(end_ns - int(self.env.now))
            self._catch_up()

    def _catch_up(self) -> None:
        """Move the fluid to now, and tell those whose bytes have arrived."""
        for instance in self.fluid.advance(int(self.env.now)):
            self._done.pop(int(str(instance))).succeed()

    def _wake(self) -> None:
        # Several things may happen at the same moment, and one has told already.
        if not self._changed.triggered:
            self._changed.succeed()
