"""What an asynchronous communication of a rehearsal hands back: waiting for it is written down."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from tracer.rehearse.tape import WAIT


class RehearsedFuture:
    """What becomes of a communication: what is to follow it is done when somebody waits.

    Args:
        wait: waits for the communication.
        result: its results, in place of which comes what each follower returns.
    """

    def __init__(self, wait: Callable[[], Any], result: Any) -> None:
        self._wait, self._result = wait, result

    def then(self, follower: Callable[[Any], Any]) -> RehearsedFuture:
        """Return a future of what *follower* makes of this one."""

        def wait() -> None:
            self.wait()
            following._result = follower(self)

        following = RehearsedFuture(wait, None)
        return following

    def wait(self) -> Any:
        """Wait once, and return the result."""
        self._wait()
        self._wait = lambda: None
        return self._result

    def value(self) -> Any:
        """Return the result."""
        return self._result

    def done(self) -> bool:
        """Say that it is."""
        return True


_MOST: Final = 4096
"""Works for which nobody has waited that are kept; more are never under way."""


def work_class(dist: Any, tape: Any) -> Any:
    """Return the class of works whose waits are written down.

    A work holds the tensors *held* until somebody waits for it, and its results as long as it lives, as those
    of NCCL do (``stashed_for_allocator_safety_`` and ``outputs_`` of ``WorkNCCL`` in ProcessGroupNCCL.cpp):
    a script that keeps its handles keeps the gradients behind them.
    """
    under_way: dict[int, Any] = {}

    class RehearsedWork(dist.Work):  # type: ignore[misc]
        """A communication that nobody carries out."""

        def __init__(self, number: int, outputs: Sequence[Any] = (), *, held: Sequence[Any] = ()) -> None:
            super().__init__()
            self.number = number
            self._outputs = [weakref.ref(output) for output in outputs]
            self._until_waited = held
            self._results: list[Any] = []
            under_way[id(self)] = self  # torch finds the Python object behind a work only while there is one
            if len(under_way) > _MOST:
                del under_way[next(iter(under_way))]

        def wait(self, timeout: Any = None) -> bool:
            """Let the current stream wait; from now on the work lives as long as the script keeps it."""
            del timeout
            if self.number >= 0:
                tape.note(WAIT, number=self.number)
            if self._until_waited:
                self._results = [output() for output in self._outputs]
                self._until_waited = ()
            under_way.pop(id(self), None)
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

    return RehearsedWork
