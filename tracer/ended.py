"""How recorded processes end, noted by the process that has started them.

Only the parent of a process learns its exit status, and a process that is killed says nothing itself. The
launchers of torch, of Accelerate, Lightning and DeepSpeed, and ``multiprocessing`` are programs in Python, in
which the ``sitecustomize`` of a recording runs, too. There the status that ``os.waitpid`` returns is noted
beside what the child has recorded, as well as the signals that the launcher itself has sent: torchrun ends
all other ranks once one has failed, and these have not failed first.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

_sent: defaultdict[int, set[int]] = defaultdict(set)
"""The signals that this process has sent to each other one, by its number or that of its group."""

_OLDER_S: Final = 60.0
"""How much older than a launcher a sidecar may look, on a file system with a clock of its own."""


def watch(run: str) -> None:
    """Note from now on how children of this process end that record themselves."""
    path, since_s = Path(run), time.time()
    # Whoever imports subprocess or multiprocessing after this finds these functions: both look them up in os.
    os.waitpid = _then(os.waitpid, lambda _, found: _reaped(path, since_s, *found))
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
            from foretrace.tracer.guarded import is_interrupt  # which processes that start none do not load

            if is_interrupt(error):
                raise
        return result

    return function


def _signalled(number: int, signal: int) -> None:
    # Signal 0 only asks whether there is such a process.
    if signal:
        _sent[abs(number)].add(int(signal))


def _reaped(path: Path, since_s: float, pid: int, status: int) -> None:
    if pid and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
        _note_end(path, since_s, pid, os.waitstatus_to_exitcode(status))


def _note_end(path: Path, since_s: float, pid: int, status: int) -> None:
    """Write how child *pid* has ended beside the sidecar of its rank, if it has one and did not end well."""
    from foretrace.tracer.run_directory import beside

    sent = sorted(_sent.pop(pid, ()))
    for folder in (path, *beside(path)) if status else ():
        for file in folder.glob("ranks/rank-?????.json"):
            with suppress(OSError, ValueError, AttributeError):
                text = file.read_text(encoding="utf-8")
                # A look at the text spares the launcher of many ranks from parsing the sidecars of all. The
                # number of a process may have been that of a rank of an older run.
                if f'"pid": {pid},' not in text or file.stat().st_mtime < since_s - _OLDER_S:
                    continue
                for one in json.loads(text)["processes"].values():
                    if (one["host"], one["pid"]) == (socket.gethostname(), pid):
                        from foretrace.door import sealed_text  # most children are no ranks

                        said = json.dumps({"status": status, "signals_sent": sent})
                        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
                        with os.fdopen(os.open(file.with_suffix(".ended.json"), flags, 0o666), "w") as target:
                            target.write(sealed_text(said))
