"""Gives every communication a stream on which it overlaps nothing, as the timeline demands.

A gloo group has two threads: two collectives run at once, a third arrives when one of them is done. Transfers
wait for nothing but their peer. When one on a GPU ran, ``tracer.device_works`` has found out.
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
        self._workers: dict[int, list[int]] = {}
        self._free_ns: defaultdict[str, list[int]] = defaultdict(list)

    def place(self, communication: Communication, issued_ns: int, end_ns: int) -> tuple[str, int, int]:
        """Return the stream, the start and the end of a communication.

        Args:
            communication: what to place.
            issued_ns: when it was issued; on a GPU, when it began.
            end_ns: when it was complete.
        """
        axis = communication.group.axis
        name = f"{axis}.{communication.kind}" if communication.is_p2p else axis
        if not communication.is_p2p and communication.device < 0:
            issued_ns = self._worked(communication, issued_ns, end_ns)
        return self._stream(name, issued_ns, end_ns), issued_ns, end_ns

    def _worked(self, communication: Communication, issued_ns: int, end_ns: int) -> int:
        """Return from when the first worker of the group that was free was busy with it."""
        group = communication.group
        n_workers = GLOO_THREADS if group.on_gloo else 1
        busy_until_ns = self._workers.setdefault(group.id, [0] * n_workers)
        first = min(range(n_workers), key=busy_until_ns.__getitem__)
        started_ns = min(max(issued_ns, busy_until_ns[first]), end_ns)
        if not (group.on_gloo and communication.kind == "reduce_scatter"):  # its end is that of its waiter
            busy_until_ns[first] = max(end_ns, busy_until_ns[first])
        return started_ns

    def _stream(self, name: str, start_ns: int, end_ns: int) -> str:
        """Return the first stream of *name* that is free at *start_ns*: ``dp``, ``dp.1``, ..."""
        free_ns = self._free_ns[name]
        number = next((i for i, free in enumerate(free_ns) if free <= start_ns), len(free_ns))
        free_ns[number : number + 1] = [end_ns]
        return name if not number else f"{name}.{number}"
