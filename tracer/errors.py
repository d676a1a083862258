"""Errors a user can cause while recording, or while taking over what another tool has recorded.

RecordError
├── LaunchError   the command to record cannot be started
└── IngestError   a trace of another tool cannot be read

Each message says what is wrong, the value, and what would work. Only the root command catches them.
"""

from importlib.util import find_spec


class RecordError(ValueError):
    """Base of what a user can get wrong with recording; shown as one line, exit status 2."""


class LaunchError(RecordError):
    """The command to record cannot be started."""


class IngestError(RecordError):
    """A trace of another tool cannot be read."""


def need_torch(what: str) -> None:
    """Raise RecordError if torch is not installed, which *what* needs."""
    if find_spec("torch") is None:
        raise RecordError(f"{what} needs torch: pip install torch")
