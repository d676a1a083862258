"""Remembers errors that only a rehearsal raises, in case the script catches them.

If a script continues after ``except Exception``, or ends with its own exit status, the work after the error
would be missing from the rehearsal without a message.
"""

from __future__ import annotations

from typing import Any, Final

from foretrace.tracer.rehearse.errors import Finished, RehearsalError
from foretrace.tracer.rehearse.words import is_of_fakes, place

CAUGHT: Final = "the script has caught an error of an operator, so work after it may be missing: {}"
"""Note about an error that a real run may have too."""


MOST_RAISED: Final = 1000
"""Errors after which a script that catches them is said to try again for ever."""

AGAIN: Final = "the script has caught {n_times:,} errors without a step, the last one {what}"
"""Ends a rehearsal of a script that tries again for ever, as after every error."""


class Failures:
    """Errors raised while the script of one rank ran, in order.

    Args:
        session: the rehearsal, which gets a note about errors that the script has caught.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._of_operators: list[Exception] = []
        self._n_before = len(RehearsalError.raised)
        RehearsalError.most = self._n_before + MOST_RAISED

    def add(self, error: Exception) -> None:
        """Note that an operator raised *error*; the same error may be noted several times.

        Raises:
            RehearsalError: there is no end of them.
        """
        if _is_for_the_script(error):
            return
        self._of_operators.append(error)
        if len(self._of_operators) >= MOST_RAISED:
            what = f"{type(error).__name__}: {_short(error)}"
            raise RehearsalError(AGAIN.format(n_times=MOST_RAISED, what=what)) from error

    def refusal(self) -> Exception | None:
        """Return the first error that a real run would not have, whether or not the script has caught it."""
        refused = [error for error in self._of_operators if is_of_fakes(error)]
        found = next(iter([*RehearsalError.raised[self._n_before :], *refused]), None)
        if found is not None:
            RehearsalError.most = float("inf")  # it is about to be said
        return found

    def step_ended(self) -> None:
        """A step ends, so the script has caught all errors raised before.

        Raises:
            Finished: it has caught an error that must end the rehearsal.
        """
        if self.refusal() is not None:
            raise Finished
        for error in self._of_operators:
            said = f"{place(error)}: {type(error).__name__}: {_short(error)}"
            self._session.warn(CAUGHT.format(said[:200]))
        self._of_operators.clear()


def _short(error: Exception) -> str:
    return " ".join(str(error).split())


def _is_for_the_script(error: Exception) -> bool:
    """Whether scripts may continue after *error*: the device is full."""
    import torch

    return isinstance(error, torch.OutOfMemoryError)
