"""What a rank has under way, on disk while it is: a hang never comes to a span, which is written when over.

``ranks/rank-00000.pending.json`` says how many collectives and transfers the rank has issued in each group,
which of them have not ended, and where its main thread is: section 7 of docs/timeline-format.md.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final

from foretrace.tracer.clock import now_ns
from foretrace.tracer.groups import Groups
from foretrace.tracer.records import Communication
from foretrace.tracer.stamps import GATE, Resolver
from foretrace.traces.timeline import FORMAT_VERSION
from foretrace.traces.writer import write_atomically

STALL_NS: Final = 1_000_000_000
"""Age of a communication, or of the last that was issued, from which on the file is written."""

EVERY_NS: Final = 10_000_000_000
"""Time after which it is written without a reason, as the process may be killed at any moment."""

MOST_LISTED: Final = 64
"""Communications under way that are listed; the oldest of them explain the others."""

MOST_FRAMES: Final = 16
"""Calls of the main thread that are listed."""


class Pending:
    """Writes what one rank has under way; called on the writing thread after each batch.

    Args:
        path: the run directory.
        rank: own global rank.
        groups: the process groups, which count what is issued.
        shift_ns: what to add to own time to get the time of the run.
        moments: tells when stamps were.
        under_way: yields the communications that are issued and not written as spans, oldest first.
        step: returns the optimizer step that the training is in.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        groups: Groups,
        shift_ns: int,
        moments: Resolver,
        *,
        under_way: Callable[[], Iterable[Communication]],
        step: Callable[[], int],
    ) -> None:
        self.path = path / "ranks" / f"rank-{rank:05d}.pending.json"
        self._rank, self._groups, self._shift_ns = rank, groups, shift_ns
        self._under_way, self._step = under_way, step
        self._moments = moments
        self._seen: object = None
        self._seen_ns = self._written_ns = now_ns()
        self._written: object = None

    def update(self) -> None:
        """Write the file if that tells something new about a rank that may hang.

        Raises:
            RunError: the file cannot be written.
        """
        with GATE.asking() as may_ask:
            if may_ask:
                self._update()

    def _update(self) -> None:
        now, counts = now_ns(), self._counts()
        found = self._unended(self._under_way())
        if counts != self._seen:
            self._seen, self._seen_ns = counts, now
        is_quiet = now - self._seen_ns > STALL_NS
        is_stalled = bool(found) and now - self._issued_ns(found[0], now) > STALL_NS
        is_due = now - self._written_ns > EVERY_NS
        if not (is_quiet or is_stalled or is_due):
            return
        state = (counts, [id(one) for one in found[:MOST_LISTED]], len(found))
        if state != self._written or is_due:  # nothing goes on: say until when this rank was alive
            self._write(found, counts)
            self._written, self._written_ns = state, now

    def close(self, left: Iterable[Communication]) -> None:
        """Write what will never end, or delete the file if there is nothing.

        Raises:
            RunError: the file cannot be written.
        """
        with GATE.asking() as may_ask:
            found = self._unended(left) if may_ask else list(left)
        if found:
            self._write(found, self._counts())
        else:
            self.path.unlink(missing_ok=True)

    def _counts(self) -> tuple[dict[str, int], list[list[int]]]:
        collectives, transfers = {}, []
        for group in self._groups.known():
            collectives[str(group.id)] = group.n_collectives
            transfers += [[group.id, *pair, n] for pair, n in list(group.n_transfers.items())]
        return collectives, transfers

    def _issued_ns(self, communication: Communication, now: int) -> int:
        """Return when *communication* was issued; *now* if a device has not come to it."""
        start = communication.start
        return self._moments.ns(start) if self._moments.knows(start) else now

    def _write(self, found: list[Communication], counts: tuple[dict[str, int], list[list[int]]]) -> None:
        collectives, transfers = counts
        document = {
            "format_version": FORMAT_VERSION,
            "rank": self._rank,
            "t_ns": now_ns() + self._shift_ns,
            "written": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": self._step(),
            "collectives": collectives,
            "transfers": transfers,
            "pending": [self._described(one) for one in found[:MOST_LISTED]],
            "n_pending": len(found),
            "stack": main_stack(),
        }
        write_atomically(self.path, json.dumps(document) + "\n")

    def _described(self, one: Communication) -> dict[str, Any]:
        """Return one communication in the columns of a timeline."""
        step, stage, virtual_stage, microbatch = one.position
        start = self._moments.ns(one.start) + self._shift_ns if self._moments.knows(one.start) else -1
        return {
            "category": "p2p" if one.is_p2p else "collective",
            "kind": one.kind,
            "name": one.block.name or one.kind,
            "axis": one.group.axis,
            "group": one.group.id,
            "sequence": one.sequence,
            "peer": one.peer,
            "size_bytes": one.size_bytes,
            "dtype": one.dtype,
            "step": step,
            "microbatch": microbatch,
            "layer": one.block.layer,
            "stage": stage,
            "virtual_stage": virtual_stage,
            "start_ns": start,
        }

    def _unended(self, communications: Iterable[Communication]) -> list[Communication]:
        return [one for one in communications if not self._moments.knows(one.end)]


def main_stack() -> list[str]:
    """Return where the main thread is, as ``file:line function``, innermost first, without frames of ours."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - public by its docs
    own = str(Path(__file__).parent)
    found: list[str] = []
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(own):
            found.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return list(islice(found, MOST_FRAMES))
