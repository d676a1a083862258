"""What an asynchronous communication of a rehearsal hands back: waiting for it is written down."""

from __future__ import annotations

from typing import Any

from tracer.rehearse.tape import WAIT


def work_class(dist: Any, tape: Any) -> Any:
    """Return the class of works whose waits are written down."""

    class RehearsedWork(dist.Work):  # type: ignore[misc]
        """A communication that nobody carries out."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

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
            """Return a future that is done."""
            import torch

            future: Any = torch.futures.Future()
            future.set_result([])
            return future

    return RehearsedWork
