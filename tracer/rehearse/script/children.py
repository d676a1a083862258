"""Processes that a script starts itself, one per GPU: the one of this rank is run in the present process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.code_names import names_of
from foretrace.tracer.rehearse.ranks.launchers import on_node

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

JOINING: Final = "init_process_group"
"""Function that a process calls if it trains together with others."""

DEPTH: Final = 4
"""Longest chain of functions that is followed to find a call of ``JOINING``."""


def install(session: RehearsalSession) -> None:
    """Make a script that starts a process per GPU run the one of this rank in the present process."""
    import torch.multiprocessing

    def spawn(
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        nprocs: int = 1,
        join: Any = True,  # noqa: FBT002 - as torch has it
        *_: Any,
        **__: Any,
    ) -> Any:
        fn(_number(session, whole=nprocs == session.world_size), *args)
        return None if join else _Ended()

    for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        anywhere: Any = module
        anywhere.spawn = anywhere.start_processes = spawn
    _processes(session)


def _number(session: RehearsalSession, *, whole: bool) -> int:
    """Return the number of this rank's process among those of the *whole* world, or else of a node."""
    return session.rank if whole else on_node()[0]


def _processes(session: RehearsalSession) -> None:
    """Do the same for processes that are started one by one; those of other ranks count as ended."""
    n_started, anywhere = 0, BaseProcess
    original = anywhere.start

    def start(self: Any) -> None:
        nonlocal n_started
        if not _joins(self):
            original(self)
            return
        self._popen, number, n_started = _Over(), n_started, n_started + 1
        told = (*self._args, *self._kwargs.values())
        is_of_world = any(isinstance(one, int) and one == session.world_size for one in told)
        if number == _number(session, whole=is_of_world):
            self.run()

    anywhere.start = start  # type: ignore[method-assign]


def _joins(process: Any) -> bool:
    """Whether the target of *process* leads to a call of ``JOINING``, by the names in its code."""
    is_own = type(process).run is not BaseProcess.run
    told = (*process._args, *process._kwargs.values())  # noqa: SLF001
    return any(
        _names_joining(function)
        for function in (type(process).run if is_own else process._target, *told)  # noqa: SLF001
        if isinstance(function, FunctionType)
    )


def _names_joining(function: FunctionType) -> bool:
    """Whether *function*, or one that it leads to in up to ``DEPTH`` steps, uses the name ``JOINING``."""
    seen, last = {function.__code__}, [function]
    for _ in range(DEPTH + 1):
        named = [(one, set(names_of(one.__code__))) for one in last]
        if any(JOINING in names for _, names in named):
            return True
        others = [one.__globals__.get(name) for one, names in named for name in names]
        last = []
        for other in others:
            if not isinstance(other, FunctionType) or str(other.__module__).startswith("torch."):
                continue
            if other.__code__ not in seen:
                seen.add(other.__code__)
                last.append(other)
    return False


class _Over:
    """Handle of a process that has ended successfully, or that was run in the present process."""

    pid, returncode = os.getpid(), 0

    def poll(self, flag: int = 0) -> int:
        """Return how it ended."""
        del flag
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return how it ended."""
        del timeout
        return self.returncode

    def close(self) -> None:
        """Do nothing, as :meth:`terminate` and :meth:`kill`: it has ended."""

    terminate = kill = close


class _Ended:
    """Context of processes that have all ended."""

    processes: tuple[Any, ...] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Return that all have ended."""
        del timeout, grace_period
        return True

    def pids(self) -> list[int]:
        """Return the numbers of the processes that have not ended: there are none."""
        return []
