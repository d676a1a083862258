"""What an asynchronous communication of a rehearsal hands back: waiting for it is written down."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from foretrace.tracer.rehearse.events.tape import WAIT


class RehearsedFuture:
    """What becomes of a communication.

    Args:
        wait: lets the current stream wait for it.
        result: its results.

    Attributes:
        stream: on which is issued what follows communications, made when it is needed.
    """

    stream: ClassVar[Any] = None

    def __init__(self, wait: Callable[[], Any], result: Any) -> None:
        self._wait, self._result = wait, result

    def then(self, follower: Callable[[Any], Any]) -> RehearsedFuture:
        """Return a future of what *follower* makes of this one.

        It is called at once, on a stream of its own that waits for the communication, as torch calls what is
        to follow one of NCCL: such a future is complete as soon as its kernel is queued (``workEnqueue`` of
        ProcessGroupNCCL.cpp, ``invokeCallback`` of ivalue_inl.h). So it is done whether or not anybody waits.
        """
        import torch

        gpu: Any = torch.cuda
        if RehearsedFuture.stream is None:
            RehearsedFuture.stream = gpu.Stream()
        with gpu.stream(RehearsedFuture.stream):
            self._wait()
            result = follower(self)
            return RehearsedFuture(RehearsedFuture.stream.record_event().wait, result)

    def add_done_callback(self, follower: Callable[[Any], Any]) -> None:
        """Have *follower* called as ``then`` does."""
        self.then(follower)

    def wait(self) -> Any:
        """Let the current stream wait, and return the result."""
        self._wait()
        return self._result

    def value(self) -> Any:
        """Return the result."""
        return self._result

    def done(self) -> bool:
        """Say that it is."""
        return True


def install_futures() -> None:
    """Let ``torch.futures`` wait for these futures, too: its own functions take those of C++ only."""
    import torch

    anywhere: Any = torch.futures
    collect = anywhere.collect_all

    def collected(futures: Sequence[Any]) -> Any:
        if not any(isinstance(one, RehearsedFuture) for one in futures):
            return collect(futures)
        return RehearsedFuture(lambda: [one.wait() for one in futures], list(futures))

    def waited(futures: Sequence[Any]) -> list[Any]:
        return [one.wait() for one in futures]

    anywhere.collect_all, anywhere.wait_all = collected, waited


_MOST: Final = 4096
"""Works for which nobody has waited that are kept; more are never under way."""


def work_class(dist: Any, tape: Any) -> Any:
    """Return the class of works of torch, ``dist.Work``, whose waits are written down on *tape*."""
    return type("RehearsedWork", (_Waited, dist.Work), {"tape": tape, "under_way": {}})


class _Waited:
    """A communication that nobody carries out.

    It holds the tensors *held* until somebody waits for it, and its results as long as it lives, as those of
    NCCL do (``stashed_for_allocator_safety_`` and ``outputs_`` of ``WorkNCCL`` in ProcessGroupNCCL.cpp): a
    script that keeps its handles keeps the gradients behind them.

    Args:
        number: of its event, -1 if nobody is to wait for it.
        outputs: its results.
        held: see above.

    Attributes:
        tape: where waits are written down.
        under_way: works for which nobody has waited: torch finds the Python object behind a work only while
            there is one.
    """

    tape: Any
    under_way: ClassVar[dict[int, Any]]

    def __init__(self, number: int, outputs: Sequence[Any] = (), *, held: Sequence[Any] = ()) -> None:
        super().__init__()
        self.number = number
        self._outputs = [weakref.ref(output) for output in outputs]
        self._until_waited = held
        self._results: list[Any] = []
        self.under_way[id(self)] = self
        if len(self.under_way) > _MOST:
            del self.under_way[next(iter(self.under_way))]

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait; from now on the work lives as long as the script keeps it."""
        del timeout
        if self.number >= 0:
            self.tape.note(WAIT, number=self.number)
        if self._until_waited:
            self._results = [output() for output in self._outputs]
            self._until_waited = ()
        self.under_way.pop(id(self), None)
        return True

    def is_completed(self) -> bool:
        """Say that it is done."""
        return True

    def is_success(self) -> bool:
        """Say that it went well."""
        return True

    def synchronize(self) -> None:
        """Let the current stream wait."""
        self.wait()

    def get_future(self) -> Any:
        """Return what becomes of the communication; its results are there already."""
        return RehearsedFuture(self.wait, [output() for output in self._outputs])
