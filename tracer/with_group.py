"""Recordings that begin when their process joins its process group, and end with it."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.guarded import is_interrupt
from foretrace.tracer.meeting import Meeting
from foretrace.tracer.run_directory import REFUSED

if TYPE_CHECKING:
    from foretrace.tracer.record import Recording

_expecting: Final[list[Recording]] = []
"""Recordings that begin with the process group."""

_torch: Final[dict[str, Callable[..., None]]] = {}
"""What torch does itself when a process joins a process group and leaves it."""

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
    if not _torch:
        module = module or import_module("torch.distributed.distributed_c10d")
        _torch["joins"] = _led(module.init_process_group, _to_joined)
        _torch["leaves"] = _led(module.destroy_process_group, _to_left)


def forget(recording: Recording) -> None:
    """Expect no process group any more for *recording*."""
    if recording in _expecting:
        _expecting.remove(recording)


def _led(function: Any, elsewhere: Callable[..., None]) -> Callable[..., None]:
    """Lead all calls of *function* to the code of *elsewhere*; return a function that does what it did.

    Whoever has imported *function* by its name, as ``torch.distributed.device_mesh`` or a script, is led
    there, too. What decorators of torch have put around it stays.
    """
    inner = inspect.unwrap(function)
    before = FunctionType(
        inner.__code__, inner.__globals__, inner.__name__, inner.__defaults__, inner.__closure__
    )
    before.__kwdefaults__ = inner.__kwdefaults__
    inner.__signature__ = inspect.signature(inner)
    inner.__code__ = elsewhere.__code__
    return before


def _to_joined(*args: Any, **kwargs: Any) -> None:
    """Stand in torch for ``init_process_group``, and see nothing of this module there."""
    from foretrace.tracer.with_group import joined

    joined(*args, **kwargs)


def _to_left(*args: Any, **kwargs: Any) -> None:
    """Stand in torch for ``destroy_process_group``."""
    from foretrace.tracer.with_group import left

    left(*args, **kwargs)


def joined(*args: Any, **kwargs: Any) -> None:
    """Join a process group as torch does, then begin what waits for that."""
    _meeting.join(_torch["joins"], args, kwargs)
    for recording in tuple(_expecting):
        begin_now(recording)


def left(group: Any = None) -> None:
    """End what has begun with the process group, if it is that which is left; then leave it as torch does."""
    import torch.distributed as dist

    if group is None or group is dist.group.WORLD:
        for recording in tuple(_expecting):
            recording.leave_group()
        _meeting.leave()
    _torch["leaves"](group)


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
