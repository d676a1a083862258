"""Recordings that begin when their process joins its process group, and end with it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.guarded import is_interrupt
from foretrace.tracer.meeting import Meeting
from foretrace.tracer.run_directory import REFUSED

if TYPE_CHECKING:
    from foretrace.tracer.record import Recording

_expecting: Final[list[Recording]] = []
"""Recordings that begin with the process group."""

FOLLOWED: Final = "_foretrace"
"""Attribute of torch's function that joins a process group, once that is seen."""

_meeting: Final = Meeting()
"""Where this process meets the other ranks."""


def expect(recording: Recording, module: Any = None) -> None:
    """Have *recording* begin whenever this process calls ``init_process_group`` and end with the group.

    Args:
        recording: what to begin, until `forget` is told.
        module: ``torch.distributed.distributed_c10d``, while torch is being imported; None imports it.
    """
    follow(module)
    _expecting.append(recording)


def follow(module: Any = None) -> None:
    """See whatever process group this process joins and leaves from now on; *module* as for `expect`."""
    module = module or import_module("torch.distributed.distributed_c10d")
    joins, leaves = module.init_process_group, module.destroy_process_group
    if hasattr(joins, FOLLOWED):
        return

    @functools.wraps(joins)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        _meeting.join(joins, args, kwargs)
        for recording in tuple(_expecting):
            begin_now(recording)

    @functools.wraps(leaves)
    def destroy_process_group(group: Any = None) -> None:
        if group is None or group is module.group.WORLD:
            for recording in tuple(_expecting):
                recording.leave_group()
            _meeting.leave()
        leaves(group)

    setattr(init_process_group, FOLLOWED, True)
    _replace((joins, init_process_group), (leaves, destroy_process_group))


def _replace(*replaced: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
    """Put the second of each pair of functions in the place of the first, in every module that names it.

    A ``with`` block may begin long after a script, or ``torch.distributed.device_mesh``, has imported them.
    """
    for module in [*sys.modules.values()]:
        if not issubclass(type(module), ModuleType):  # some libraries put objects there
            continue
        for name, value in [*vars(module).items()]:
            for before, after in replaced:
                if value is before:  # and nothing else is asked of it: some values import what they stand for
                    setattr(module, name, after)


def forget(recording: Recording) -> None:
    """Expect no process group any more for *recording*."""
    if recording in _expecting:
        _expecting.remove(recording)


def begin_now(recording: Recording) -> None:
    """Begin *recording* unless it has begun or ended, and see that it ends with the process; never raises."""
    try:
        if not recording.begin_if_due():
            return
    except Exception as error:  # the training goes on without a recording
        if is_interrupt(error):
            raise
        why = first_line(error)
        sys.stderr.write(f"foretrace: not recording: {why}\n")
        with contextlib.suppress(OSError):  # for the end of the command, far below that line
            (recording.target / REFUSED).write_text(why, encoding="utf-8")
        return
    atexit.register(recording.leave)
    _note_uncaught(recording)


def _note_uncaught(recording: Recording) -> None:
    """Have an uncaught exception noted in the run, and then shown as ever."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        recording.note_error(error)
        shown(kind, error, trace)

    sys.excepthook = hook


def first_line(error: BaseException) -> str:
    """Return the first line of what *error* says."""
    return str(error).strip().partition("\n")[0]
