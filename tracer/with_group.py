"""A recording that begins when its process joins its process group, and ends with it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tracer.guarded import is_interrupt
from tracer.run_directory import REFUSED

if TYPE_CHECKING:
    from tracer.record import Recording


def begin_with_group(recording: Recording) -> None:
    """Begin *recording* when this process calls ``init_process_group``; end it when the process does."""
    from torch.distributed import distributed_c10d

    recording.awaits_group = True
    before = distributed_c10d.init_process_group
    wrap_init(distributed_c10d, recording)
    import torch.distributed as dist

    if dist.init_process_group is before:
        dist.init_process_group = distributed_c10d.init_process_group


def wrap_init(module: Any, recording: Recording) -> None:
    """Let *recording* live from ``init_process_group`` to ``destroy_process_group`` of *module*.

    Args:
        module: ``torch.distributed.distributed_c10d``, perhaps while it is being imported.
        recording: what to begin.
    """
    init, destroy = module.init_process_group, module.destroy_process_group

    def beginning(inner: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(inner)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            inner(*args, **kwargs)
            begin_now(recording)

        return init_process_group

    def destroy_process_group(group: Any = None) -> None:
        if group is None:
            recording.end()
        destroy(group)

    if not _replaced_inside(init, beginning):
        module.init_process_group = beginning(init)
    module.destroy_process_group = functools.wraps(destroy)(destroy_process_group)


def _replaced_inside(function: Any, make: Callable[[Any], Any]) -> bool:
    """Replace what a decorator of torch has *function* call; return whether there is one.

    Whoever has imported *function* by its name, as ``torch.distributed.device_mesh`` has, calls it so, too.
    """
    inner = getattr(function, "__wrapped__", None)
    for cell in getattr(function, "__closure__", None) or ():
        if inner is not None and cell.cell_contents is inner:
            cell.cell_contents = function.__wrapped__ = make(inner)
            return True
    return False


def begin_now(recording: Recording) -> None:
    """Begin *recording* unless it has begun or ended, and see that it ends with the process; never raises."""
    if recording.session is not None or recording.is_over:
        return
    recording.awaits_group = False
    try:
        recording.begin()
    except Exception as error:  # the training goes on without a recording
        if is_interrupt(error):
            raise
        why = first_line(error)
        sys.stderr.write(f"foretrace: not recording: {why}\n")
        with contextlib.suppress(OSError):  # for the end of the command, far below that line
            (recording.path / REFUSED).write_text(why, encoding="utf-8")
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
