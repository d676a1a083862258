"""Errors a user can cause with a timeline, a run directory or a layout.

TraceError
├── LayoutError      the parallel degrees do not make a grid of ranks
├── TimelineError    a table is not a timeline
├── RunError         a run directory or file cannot be read or written
├── ReportError      a report cannot be written
├── ServeError       a server cannot be started
└── FigureError      a figure cannot be drawn of this run

Each message says what is wrong, the value, and what would work. Only the root command catches them.
"""

import os


def reason(error: BaseException) -> str:
    """Return what went wrong in one line, without the numbers and paths that libraries put around it."""
    if isinstance(error, OSError) and error.errno and "[errno " in str(error):  # pyarrow quotes the system
        return os.strerror(error.errno)
    if isinstance(error, UnicodeEncodeError):  # Arrow takes paths as UTF-8
        return "its path is not UTF-8 text"
    said = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return said.strip().partition("\n")[0] or type(error).__name__


class TraceError(ValueError):
    """Base of what a user can get wrong with timelines; shown as one line, exit status 2."""


class LeftoverWarning(UserWarning):
    """Files of a process that may have been killed, which nobody here can know."""


class LayoutError(TraceError):
    """The parallel degrees do not make a grid of ranks."""


class TimelineError(TraceError):
    """A table is not a timeline."""


class RunError(TraceError):
    """A run directory or file cannot be read or written."""


class ReportError(TraceError):
    """A report cannot be written."""


class ServeError(TraceError):
    """A server cannot be started."""


class FigureError(TraceError):
    """A figure cannot be drawn of this run."""
