"""How recorded processes end, noted by the process that has started them.

Only the parent of a process learns its exit status, and a process that is killed says nothing itself. The
launchers of torch, of Accelerate, Lightning and DeepSpeed, and ``multiprocessing`` are programs in Python, in
which the ``sitecustomize`` of a recording runs, too. There the status that ``os.waitpid`` returns is noted
beside what the child has recorded, as well as the signals that the launcher itself has sent: torchrun ends
all other ranks once one has failed, and these have not failed first.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from foretrace.tracer.guarded import is_interrupt

_sent: dict[int, int] = {}
"""The first signal that this process has sent to each other one, by its number or that of its group."""


def watch(run: str) -> None:
    """Note from now on how children of this process end that record themselves.

    Args:
        run: the run directory of the command; other attempts are beside it.
    """
    # Whoever imports subprocess or multiprocessing after this finds these functions: both look them up in os.
    os.waitpid = _then(os.waitpid, lambda _, found: _reaped(run, *found))
    for name in ("kill", "killpg"):
        if hasattr(os, name):
            setattr(os, name, _then(getattr(os, name), lambda given, _: _signalled(*given)))


def _then(original: Callable[..., Any], note: Callable[[tuple[Any, ...], Any], None]) -> Callable[..., Any]:
    """Return *original*, after which *note* is told its arguments and its result, and may fail unseen."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            note(args, result)
        except Exception as error:  # the launcher goes on, whatever is wrong with us
            if is_interrupt(error):
                raise
        return result

    return function


def _signalled(number: int, signal: int) -> None:
    if signal:
        _sent.setdefault(abs(number), int(signal))


def _reaped(run: str, pid: int, status: int) -> None:
    """Write how child *pid* has ended beside the sidecar of its rank, if it has one and did not end well."""
    if not pid or not (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
        return
    sent, code = _sent.pop(pid, 0), os.waitstatus_to_exitcode(status)
    if not code:
        return
    path = Path(run)
    for file in path.parent.glob(f"{glob.escape(path.name)}*/ranks/rank-?????.json"):
        with suppress(OSError, ValueError, AttributeError):
            text = file.read_text(encoding="utf-8")
            # A look at the text spares the launcher of many ranks from parsing the sidecars of all of them.
            if f'"pid": {pid},' not in text:
                continue
            for one in json.loads(text)["processes"].values():
                if (one["host"], one["pid"]) == (socket.gethostname(), pid):
                    said = {"status": code, "signal_sent": sent}
                    file.with_suffix(".ended.json").write_text(json.dumps(said) + "\n", encoding="utf-8")
