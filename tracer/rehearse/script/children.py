"""Processes that a script starts itself, one per GPU: what that of this rank runs is run in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final

from tracer.rehearse.ranks.launchers import on_node

if TYPE_CHECKING:
    from tracer.rehearse.session import RehearsalSession

JOINING: Final = "init_process_group"
"""What a process calls that trains with others."""

DEPTH: Final = 4
"""Functions of the script that call each other on the way to ``JOINING``, at most."""


def install(session: RehearsalSession) -> None:
    """Let a script that starts a process per GPU run what that of this rank would, in this one."""
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
    """Return which process of those that a script starts is this rank's: of the *whole* world, or a node."""
    return session.rank if whole else on_node()[0]


def _processes(session: RehearsalSession) -> None:
    """Do the same for processes that are started one by one, of which others are taken to have ended."""
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
    """Whether what *process* is to run gets to ``JOINING``, by names of functions of the script."""
    is_own = type(process).run is not BaseProcess.run
    told = (*process._args, *process._kwargs.values())  # noqa: SLF001
    return any(
        _names_joining(function)
        for function in (type(process).run if is_own else process._target, *told)  # noqa: SLF001
        if isinstance(function, FunctionType)
    )


def _names_joining(function: FunctionType) -> bool:
    """Whether *function*, or one that it names in up to ``DEPTH`` steps, names ``JOINING``."""
    seen, last = {function.__code__}, [function]
    for _ in range(DEPTH + 1):
        named = [(one, set(_names(one.__code__))) for one in last]
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


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that *code* and the functions within it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


class _Over:
    """What a process says of a program that has ended well, or runs in place of this one."""

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
    """Children that have come to their end."""

    processes: tuple[Any, ...] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Say that all have ended."""
        del timeout, grace_period
        return True
