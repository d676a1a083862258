"""Errors a user can cause with a rehearsal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from foretrace.tracer.errors import RecordError


class RehearsalError(RecordError):
    """A script cannot be rehearsed as it is; the message says which part of it, and what to do.

    Args:
        missed: ranks whose messages were needed before, and that had not been rehearsed.

    Raises:
        Finished: there are as many, because the script catches them, and tries again for ever.
    """

    raised: ClassVar[list[RehearsalError]] = []  # those of this process, for a script may catch them
    most: ClassVar[float] = float("inf")  # how many there may be

    def __init__(self, *args: object, missed: Sequence[int] = ()) -> None:
        super().__init__(*args)
        self.missed = tuple(missed)
        self.raised.append(self)
        if len(self.raised) >= self.most:
            raise Finished


class UnlikeError(RehearsalError):
    """Micro-batches that were taken to be alike are not: all have to be run. Nobody sees it."""


class AwaitedError(RehearsalError):
    """What another rank has told this one is needed, and that one is still to be rehearsed. Nobody sees it.

    Args:
        rank: who that is.

    Attributes:
        n_left: how much this rank has told others so far.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is to be rehearsed first")
        self.rank, self.n_left = rank, 0


class UnroutedError(RehearsalError):
    """The script reads what its routers choose, of which nothing but even shares is known. Nobody sees it."""


class Finished(BaseException):
    """All steps that were asked for have been rehearsed: the script need not go on. Not an error."""
