"""What an asynchronous communication of a rehearsal hands back: waiting for it is written down."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

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


def work_class(dist: Any, tape: Any) -> Any:
    """Return the class of works whose waits are written down."""

    class RehearsedWork(dist.Work):  # type: ignore[misc]
        """A communication that nobody carries out."""

        def __init__(self, number: int, outputs: Sequence[Any] = ()) -> None:
            super().__init__()
            self.number = number
            self._outputs = [weakref.ref(output) for output in outputs]

        def wait(self, timeout: Any = None) -> bool:
            """Let the current stream wait."""
            del timeout
            if self.number >= 0:
                tape.note(WAIT, number=self.number)
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
