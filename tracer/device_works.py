"""Communications of tensors of a GPU under way, and when each was complete: without waiting for any.

A collective on the stream that is current has an event before and one behind it. One that runs beside it, on
a stream of NCCL, is known by its ``Work``: when the training waits for that on a stream, an event behind the
wait tells the end, if the stream had to wait; if a hook finds it complete before, the work tells how long it
ran.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from foretrace.tracer import internals
from foretrace.tracer.clock import now_ns
from foretrace.tracer.records import Communication
from foretrace.tracer.stamps import GATE, Stamp, cuda_stamp


class DeviceWorks(ABC):
    """What is under way, on a GPU or not, and how what is on a GPU comes to its end.

    Attributes:
        by_work: communications under way by the identity of their work.
        by_storage: communications under way by the address of a tensor that they fill.
        loose: communications under way that nobody is known to wait for.
    """

    def __init__(self) -> None:
        self.by_work: dict[int, Communication] = {}
        self.by_storage: dict[int, Communication] = {}
        self.loose: deque[Communication] = deque()
        self._coalesced: list[Communication] = []
        self._is_collecting = False

    @abstractmethod
    def sweep(self) -> None:
        """See which of the communications that nobody has waited for are complete by now."""

    def follow(self, communication: Communication, work: Any) -> None:
        """Know *communication* by its work and by the tensors that it fills."""
        communication.work = work
        self.by_work[id(work)] = communication
        for one in (communication, *communication.batch):
            for storage in one.storages:
                if storage:  # empty tensors are nowhere, all of them
                    self.by_storage[storage] = communication

    def forget(self, communication: Communication) -> None:
        """Stop following *communication*."""
        work, communication.work = communication.work, None
        if work is not None and self.by_work.get(id(work)) is communication:
            del self.by_work[id(work)]
        for one in (communication, *communication.batch):
            for storage in one.storages:
                if self.by_storage.get(storage) is communication:
                    del self.by_storage[storage]

    def issued_on_device(self, communication: Communication, work: Any) -> None:
        """Follow *communication*, of tensors of a GPU, to its end.

        Args:
            communication: just issued.
            work: its ``Work``; None if it went to the stream that is current, or into a batch.
        """
        if isinstance(communication.start, int):  # captured into a graph: nothing runs
            communication.end = now_ns()
        elif self._is_collecting:
            self._coalesced.append(communication)
        elif work is None:
            communication.end = cuda_stamp(communication.device)
        else:
            self._keep(communication, work)

    def batch_begun(self) -> None:
        """What is issued from now on has no work of its own, but one for all."""
        self._is_collecting = True

    def batch_issued(self, work: Any) -> None:
        """Note the work of a batch, of all that were collected; None if it went to the current stream."""
        self._is_collecting = False
        batch, self._coalesced = self._coalesced, []
        if batch:
            last = batch.pop()
            last.batch = tuple(batch)
            if work is None:
                self._end_on_device(last, cuda_stamp(last.device))
            else:
                self._keep(last, work)

    def _keep(self, communication: Communication, work: Any) -> None:
        """Keep *work* until the training waits for it or it is found complete.

        Neither its future nor a stream of ours may wait for it, though each would tell its end exactly. A
        future records its tensors on a stream from torch's pool, so that their memory is free only when that
        stream has come there, and the stream may be one on which the training works. A second wait lets go of
        tensors that NCCL still reads.
        """
        self.follow(communication, work)
        if self.loose:
            self.sweep()
        self.loose.append(communication)

    def waited_on_device(self, communication: Communication) -> None:
        """The current stream has been made to wait for *communication*: it comes here when that has ended."""
        if not self._is_through(communication):
            self._end_on_device(communication, cuda_stamp(communication.device))

    def is_seen_to_on_device(self, communication: Communication, _: int) -> bool:
        """Whether *communication* of a GPU is complete, or somebody waits for it who will tell."""
        if communication.is_claimed or communication.work is None:
            return True
        if not self._is_through(communication):
            return False
        self.forget(communication)
        return True

    def _is_through(self, communication: Communication) -> bool:
        """Whether *communication* of a GPU is found complete; its work tells how long it took."""
        work = communication.work
        if work is None or GATE.is_capturing or not work.is_completed():
            return False
        self._end_on_device(communication, now_ns(), internals.device_ns(work))
        return True

    @staticmethod
    def _end_on_device(communication: Communication, end: Stamp, duration_ns: int | None = None) -> None:
        for one in (communication, *communication.batch):
            one.duration_ns = duration_ns
            one.end = end
