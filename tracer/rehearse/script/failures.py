"""Keeps what a script must not catch: errors that a rehearsal raises, and no real run.

A script that goes on behind ``except Exception``, or ends with a status of its own, would have a rehearsal of
what is left: steps without what came after the error.
"""

from __future__ import annotations

from typing import Any, Final

from tracer.rehearse.errors import Finished, RehearsalError
from tracer.rehearse.words import is_of_fakes, place

CAUGHT: Final = "the script has caught an error of an operator, what was to come after it is not there: {}"
"""What to say of errors that a real run may have, too."""


class Failures:
    """Errors that were raised under the script of one rank, in order.

    Args:
        session: told of those that the script has caught.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._of_operators: list[Exception] = []
        self._n_before = len(RehearsalError.raised)

    def add(self, error: Exception) -> None:
        """Note that an operator has ended with *error*; it may come by several times."""
        if not _is_for_the_script(error):
            self._of_operators.append(error)

    def refusal(self) -> Exception | None:
        """Return the first error that no real run has, whether or not the script has caught it."""
        refused = [error for error in self._of_operators if is_of_fakes(error)]
        return next(iter([*RehearsalError.raised[self._n_before :], *refused]), None)

    def step_ended(self) -> None:
        """The script has come to the end of a step, so that it has caught what was raised before.

        Raises:
            Finished: it has caught what ends the rehearsal.
        """
        if self.refusal() is not None:
            raise Finished
        for error in self._of_operators:
            words = " ".join(str(error).split())
            self._session.warn(CAUGHT.format(f"{place(error)}: {type(error).__name__}: {words}"[:200]))
        self._of_operators.clear()


def _is_for_the_script(error: Exception) -> bool:
    """Whether *error* is one that scripts are written to go on behind: a full device."""
    import torch

    return isinstance(error, torch.OutOfMemoryError)
