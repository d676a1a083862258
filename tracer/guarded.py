"""What stands between our hooks and the training: nothing that is wrong with us may reach it."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, Final, Protocol, TypeVar

_Result = TypeVar("_Result")


def is_interrupt(error: BaseException) -> bool:
    """Whether a handler of signals has raised *error*, which only happened to run while code of ours did.

    Python calls a handler with the number of the signal and the frame that it has interrupted, in which the
    handler then seems to be called: no other function is given its caller's frame behind a number.
    """
    trace = error.__traceback__
    while trace is not None:
        caller, given = trace.tb_frame.f_back, list(_arguments(trace.tb_frame))
        if caller is not None and any(
            isinstance(number, int) and frame is caller for number, frame in pairwise(given)
        ):
            return True
        trace = trace.tb_next
    return False


def _arguments(frame: FrameType) -> Iterator[Any]:
    """Yield what the function that runs in *frame* was given by position."""
    code, values = frame.f_code, frame.f_locals
    yield from (values.get(name) for name in code.co_varnames[: code.co_argcount])
    if code.co_flags & inspect.CO_VARARGS:
        yield from values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())


OURS: Final = f"{Path(__file__).parent}{os.sep}"  # where the files of the recorder lie


def take_out(error: BaseException | None) -> None:
    """Take calls of ours out of the traceback of *error* and of those before it: the training's are left."""
    todo, seen = [error], set[int]()
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        todo += [one.__cause__, one.__context__]
        trace, kept = one.__traceback__, list[TracebackType]()
        while trace is not None:
            if not trace.tb_frame.f_code.co_filename.startswith(OURS):
                kept.append(trace)
            trace = trace.tb_next
        for last in reversed(kept):
            trace = TracebackType(trace, last.tb_frame, last.tb_lasti, last.tb_lineno)
        one.__traceback__ = trace


class Guards(Protocol):
    """What makes hooks of functions: a recording, or a rehearsal."""

    def guarded(self, name: str, function: Callable[..., _Result], /) -> Callable[..., _Result | None]:
        """Return *function* as hook *name*."""


class Guarded:
    """Hooks that can be switched off: the first exception inside of one does so, and is told."""

    def __init__(self) -> None:
        self.disabled: set[str] = set()  # names of the hooks that are switched off
        self.warnings: list[str] = []  # what is to be told of the run

    def guarded(self, name: str, function: Callable[..., _Result]) -> Callable[..., _Result | None]:
        """Return *function* as hook *name*: it returns None and does nothing once the hook is off.

        What a handler of signals raises meanwhile is the training's: it is passed on, and the hook stays.
        """
        disabled = self.disabled

        @functools.wraps(function)
        def safe(*args: Any, **kwargs: Any) -> _Result | None:
            if name in disabled:
                return None
            try:
                return function(*args, **kwargs)
            except Exception as error:  # the training goes on, whatever is wrong with us
                if is_interrupt(error):
                    raise
                self.disable(name, error)
                return None

        return safe

    def disable(self, name: str, error: Exception) -> None:
        """Switch hook *name* off, for good: *error* was raised inside of it."""
        self.stop(name, f"{type(error).__name__}: {error}")

    def stop(self, name: str, reason: str) -> None:
        """Switch hook *name* off, for good, and say why."""
        self.switch_off(name)
        self.warn(f"recording of {name} stopped: {reason}")

    def warn(self, warning: str) -> None:
        """Add a warning to the run, once."""
        if warning not in self.warnings:
            self.warnings.append(warning)

    def switch_off(self, *names: str) -> None:
        """Switch hooks off, for good."""
        self.disabled.update(names)


class Hook(Protocol):
    """Something that watches the training and can be taken away again."""

    def remove(self) -> None:
        """Leave the training as it was."""


class Replacements:
    """Functions of torch that functions of ours stand for until they are given back."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        """Put what *around* makes of the function *name* of *owner* in its place, if there is such a one."""
        original = getattr(owner, name, None)
        if original is None:
            return
        made = functools.wraps(original)(around(original))
        is_static = isinstance(vars(owner).get(name), staticmethod)
        setattr(owner, name, staticmethod(made) if is_static else made)
        self._made.append((owner, name, staticmethod(original) if is_static else original, made))

    def remove(self) -> None:
        """Give the functions back as they were, but for those that somebody has replaced since."""
        for owner, name, original, made in self._made:
            if getattr(owner, name) is made:
                setattr(owner, name, original)


def everywhere(original: Any, made: Any, name: str = "") -> None:
    """Put *made* in the place of a function or class, *original*, in every module that has it, as *name*.

    Without a *name* under whatever name: that takes 20 ms where all of torch is loaded.
    """
    for module in [*sys.modules.values()]:
        if not issubclass(type(module), ModuleType):  # some libraries put objects there
            continue
        for one in (name,) if name else [*vars(module)]:
            if vars(module).get(one) is original:  # getattr would import what some values stand for
                setattr(module, one, made)


def between(before: Callable[..., Any], after: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what puts a function between two calls, neither of which may raise.

    Args:
        before: called with what the function is called with.
        after: called with what *before* has returned, however the function has ended.
    """

    def around(original: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            state = before(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                after(state)

        return function

    return around
