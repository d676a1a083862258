"""Gives every communication a stream on which it overlaps nothing, as the timeline demands.

NCCL runs the collectives of one group in the order of issue, one at a time: a collective arrives when the one
before it is done. A gloo group has two threads: two collectives run at once, a third waits for one of
them. Transfers wait for nothing but their peer.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from foretrace.tracer.records import Communication

GLOO_THREADS: Final = 2
"""Worker threads of a gloo process group (``ProcessGroupGloo::Options::threads``)."""


class Streams:
    """Streams of one rank; communications are placed in the order of their issue."""

    def __init__(self) -> None:
        self._workers: dict[tuple[int, int], list[int]] = {}
        self._free_ns: defaultdict[str, list[int]] = defaultdict(list)

    def place(self, communication: Communication, issued_ns: int, end_ns: int) -> tuple[str, int, int]:
        """Return the stream, the start and the end of a communication.

        Args:
            communication: what to place.
            issued_ns: when it was issued.
            end_ns: when it was complete, or found to be: then its work tells how long it has run.
        """
        axis = communication.group.axis
        if communication.is_p2p:
            return self._stream(f"{axis}.{communication.kind}", issued_ns, end_ns), issued_ns, end_ns
        started_ns, end_ns = self._worked(communication, issued_ns, end_ns)
        return self._stream(axis, started_ns, end_ns), started_ns, end_ns

    def _worked(self, communication: Communication, issued_ns: int, end_ns: int) -> tuple[int, int]:
        """Return from when to when the first worker of the group that was free was busy with it."""
        group = communication.group
        on_gloo = group.on_gloo and isinstance(communication.start, int)
        n_workers = GLOO_THREADS if on_gloo else 1
        busy_until_ns = self._workers.setdefault((group.id, n_workers), [0] * n_workers)
        first = min(range(n_workers), key=busy_until_ns.__getitem__)
        free_ns = busy_until_ns[first]
        if communication.duration_ns is not None:
            end_ns = min(end_ns, max(issued_ns, free_ns) + communication.duration_ns)
        started_ns = min(max(issued_ns, free_ns), end_ns)
        if not (on_gloo and communication.kind == "reduce_scatter"):  # its end is that of its waiter
            busy_until_ns[first] = max(end_ns, free_ns)
        return started_ns, end_ns

    def _stream(self, name: str, start_ns: int, end_ns: int) -> str:
        """Return the first stream of *name* that is free at *start_ns*: ``dp``, ``dp.1``, ..."""
        free_ns = self._free_ns[name]
        number = next((i for i, free in enumerate(free_ns) if free <= start_ns), len(free_ns))
        free_ns[number : number + 1] = [end_ns]
        return name if not number else f"{name}.{number}"
