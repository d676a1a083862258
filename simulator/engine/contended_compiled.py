"""The contended engine on numba: links shared max-min fairly, for programs of many transfers.

The same rules as ``simulator/engine/contended.py`` and ``simulator/network/fluid.py``, to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from simulator.engine.changes import WAYS, Change, Throttle, of_gpus, of_links
from simulator.engine.fair import Ways
from simulator.engine.spans import spans
from simulator.engine.together import Together, compiling
from simulator.program import Int64Array, Program, transfer_ns

__all__ = ["NAME", "Clock", "compiling", "loads", "run", "times"]

NAME = "contended-compiled"
"""Name of this engine in summaries."""


def run(program: Program, changes: Sequence[Change | Throttle] = ()) -> pa.Table:
    """Return the timeline of *program*: one row per task, and one per rank and step.

    Args:
        program: what to run.
        changes: what happens to links and GPUs meanwhile.

    Raises:
        ProgramError: the program cannot run to its end: a cycle, a participant that never arrives, or a link
            that is down for good.
    """
    start_ns, end_ns = times(program, changes)
    return spans(program, start_ns, end_ns)


def times(program: Program, changes: Sequence[Change | Throttle] = ()) -> tuple[Int64Array, Int64Array]:
    """Return when each task of *program* starts (a communication: arrives) and ends, in ns.

    Raises:
        ProgramError: the program cannot run to its end.
    """
    return Clock(program, changes).times()


class Clock:
    """A program made ready to be run many times, with other durations each time.

    Args:
        program: what to run.
        changes: what happens to links and GPUs meanwhile.

    Attributes:
        duration_ns: compute time of each task in the program itself; shape ``(n_tasks,)``.
        transfer_ns: time of each communication there, if alone; shape ``(n_instances,)``.
    """

    def __init__(self, program: Program, changes: Sequence[Change | Throttle] = ()) -> None:
        self.duration_ns = program.duration_ns
        self.transfer_ns = transfer_ns(program)
        self._together = Together(program, [*of_links(changes), *of_gpus(changes)], loads(program))

    def times(
        self, duration_ns: Int64Array | None = None, transfer_ns: Int64Array | None = None
    ) -> tuple[Int64Array, Int64Array]:
        """Return start and end of every task; durations that are left out are those of the program.

        Raises:
            ProgramError: the program cannot run to its end.
        """
        return self._together.times(
            self.duration_ns if duration_ns is None else duration_ns,
            self.transfer_ns if transfer_ns is None else transfer_ns,
        )


def loads(program: Program) -> Ways:
    """Return what each communication fills of which links, as CSR over communications.

    A link is ``len(WAYS) * rank`` plus its place in ``WAYS``. Sending uses the ways out, receiving the ways
    in, a collective both.
    """
    kinds = [label.kind for label in program.labels]
    tasks = np.flatnonzero(program.instance >= 0)
    tasks = tasks[np.argsort(program.instance[tasks], kind="stable")]
    is_in = np.array([kind != "send" for kind in kinds], np.bool_)[program.label[tasks]]
    is_out = np.array([kind != "recv" for kind in kinds], np.bool_)[program.label[tasks]]
    shares = np.array([(t.near, t.far) for t in program.transfers], np.float64).reshape(-1, 2)
    share = shares[program.instance_transfer[program.instance[tasks]]]
    load = np.stack([share[:, 0] * is_in, share[:, 0] * is_out, share[:, 1] * is_in, share[:, 1] * is_out], 1)
    link = program.rank[tasks].astype(np.int64)[:, None] * len(WAYS) + np.arange(len(WAYS))
    used = load > 0
    counts = np.zeros(program.n_instances, np.int64)
    np.add.at(counts, program.instance[tasks], used.sum(axis=1))
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]), link[used], load[used]
