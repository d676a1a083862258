"""Says in one line why a script cannot be rehearsed: which part of it, which operator, and what to do."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from foretrace.tracer.rehearse.blame import may_come_of_numbers
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.hints import OWN_CLASS, STUB, hint

DEPENDS: Final = frozenset({"DataDependentOutputException", "DynamicOutputShapeException"})
"""Errors of fake tensors where an operator needs numbers."""

UNSUPPORTED: Final = frozenset({"UnsupportedOperatorException", "UnsupportedFakeTensorException"})
"""Errors of fake tensors where nobody has said what an operator makes."""

OURS: Final = str(Path(__file__).parents[1]) + os.sep
STANDARD: Final = str(Path(os.__file__).parent) + os.sep
LIBRARIES: Final = ("/site-packages/torch/", "/dist-packages/torch/", "/typing_extensions.py")
"""Parts of the paths of files that are not of a script; ``STANDARD`` is where those of Python are."""

INSTALLED: Final = "-packages" + os.sep
"""Part of the path of a file of a library that is installed."""

FIRST_VALUES: Final = "/torch/nn/init.py"
"""End of the path of the file whose functions give parameters their first values."""

NO_STEPS: Final = (
    "no optimizer of torch.optim stepped: the whole script counts as one step, because nothing marks its end"
)
"""What to say of a script that updates its parameters by its own hand."""

LONG: Final = 8
"""Letters from which a number is said with four digits."""

MOST_LETTERS: Final = 500
"""Most letters of an error's words that are said."""


def _behind(error: ModuleNotFoundError) -> BaseException:
    """Return what kept a module from being imported: a library may raise another error about it.

    That is the first in the chain of *error* that names a missing module; without one, what began it.
    """
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    named = (cause for cause in causes if isinstance(cause, ModuleNotFoundError) and cause.name)
    return next(named, causes[-1])


def ending(error: BaseException, spec: Mapping[str, Any], told: Sequence[str] = ()) -> str:
    """Return what to say of an *error* that has ended the script, or that the script has caught.

    Args:
        error: that was raised.
        spec: as ``explain`` takes it.
        told: as ``explain`` takes it.
    """
    if isinstance(error, SystemExit):
        if isinstance(caught := error.__cause__ or error.__context__, Exception):
            return f"{ending(caught, spec, told)}; the script caught that, and ended with {error.code}"
        return f"the script ended with {error.code}{_said(spec['log'])}; its output is in {spec['log']}"
    if not isinstance(error, RehearsalError):
        return explain(error, spec, told)
    where, words = place(error), str(error)
    return words if words.startswith(f"{where} ") or error.__traceback__ is None else f"{where}: {words}"


def _said(log: str) -> str:
    """Return the last line of the output in the file *log*, as of ``argparse``, in a part of a sentence."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    lines = Path(log).read_text(encoding="utf-8", errors="replace").split("\n") if Path(log).is_file() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f" ({last})" if last else ""


def explain(error: BaseException, spec: Mapping[str, Any], told: Sequence[str] = ()) -> str:
    """Return what went wrong, for a person who knows the script.

    Args:
        error: what was raised.
        spec: what was to be done; ``log`` names the file that has the whole story.
        told: what the script was told of numbers that nobody has, which may be why.
    """
    kind, where = type(error).__name__, place(error)
    if kind in DEPENDS:
        operator = getattr(error, "func", "an operator")
        return (
            f"{where}: {operator} needs values, which a rehearsal does not have; say in a stub file what "
            f"it returns ({STUB})"
        )
    if is_of_fakes(error):
        operator = _operator(error)
        return (
            f"{where}: the output of the custom operator {operator} is not described; in a stub file "
            f'({STUB}): @torch.library.register_fake("{operator}") def _(x, ...): return torch.empty_like(x)'
        )
    words = _short(error) or _line(error)
    if words.startswith("'FakeTensor'"):
        words = f"{words}: {OWN_CLASS}" if _has_own_classes() else words.replace("FakeTensor", "Tensor", 1)
    if isinstance(error, ModuleNotFoundError):
        return _not_imported(_behind(error), where, spec)
    if any(frame.f_code.co_filename.endswith("cpp_extension.py") for frame, _ in _frames(error)):
        return (
            f"{where}: an extension cannot be compiled here ({words}); in a stub file ({STUB}), put what "
            "stands for it in place of torch.utils.cpp_extension.load"
        )
    if remedy := hint(error, words, spec):
        return f"{where}: {remedy}"
    if (root := _root(error)) is not error:
        words += f" (from {type(root).__name__}: {_short(root)})"
    is_why = bool(told) and may_come_of_numbers(error)
    why = f"; before that, {told[-1]} (if that is why, say it in a stub file: {STUB})" if is_why else ""
    return f"{where}: {kind}: {words}{why}; its output is in {spec['log']}"


def _short(error: BaseException) -> str:
    """Return the words of *error* in one line, cut where they are too long to be read."""
    words = " ".join(str(error).split())
    return words if len(words) <= MOST_LETTERS else f"{words[: MOST_LETTERS - 3]}..."


def _not_imported(cause: BaseException, where: str, spec: Mapping[str, Any]) -> str:
    """Return what to say of a module that could not be imported because of *cause*."""
    if not isinstance(cause, ModuleNotFoundError):
        return explain(cause, spec)
    words = _short(cause)
    lacking = f"{cause.name} is not installed here: install it" if cause.name else f"{words}; install it"
    return f"{where}: {lacking}, or put a stand-in for it into sys.modules in a stub file ({STUB})"


def _line(error: BaseException) -> str:
    """Return the line of the script that raised *error*, which says nothing itself, as a plain assertion."""
    frames = [one for one in _frames(error) if not is_library(one[0].f_code.co_filename)]
    return linecache.getline(frames[-1][0].f_code.co_filename, frames[-1][1]).strip()[:200] if frames else ""


def _root(error: BaseException) -> BaseException:
    """Return what began *error*, which may be raised from another: a pipeline says that a stage failed."""
    seen = [error]
    while (cause := seen[-1].__cause__) is not None and cause not in seen:
        seen.append(cause)
    return seen[-1]


def _has_own_classes() -> bool:
    """Whether there are classes of tensors that are not torch's."""
    import torch

    found: list[type] = [torch.Tensor]
    while found:
        one = found.pop()
        if not one.__module__.startswith(("torch", "tracer.")):
            return True
        found += one.__subclasses__()
    return False


def is_of_fakes(error: BaseException) -> bool:
    """Whether *error* is one that no real run has: its tensors have numbers, and operators make them."""
    is_unsaid = "fake impl" in str(error) or "register_fake" in str(error)
    return is_unsaid or type(error).__name__ in DEPENDS | UNSUPPORTED


def _operator(error: BaseException) -> str:
    """Return the operator that *error* is about as ``namespace::name``."""
    schema = getattr(getattr(error, "func", None), "_schema", None)
    if schema is not None:
        return str(schema.name)
    found = re.search(r"\w+::\w+", str(error))
    return found[0] if found else "of the script"


def place(error: BaseException) -> str:
    """Return the innermost module of the script's that ran, and the line of it or of the script.

    Of an error in an installed library, that is the script's line that led there, and the library's.
    """
    frames = [frame for frame in _frames(error) if not is_library(frame[0].f_code.co_filename)]
    modules = [found for frame, _ in frames if (found := _module(frame))]
    if not frames:
        if isinstance(error, SyntaxError) and error.filename:
            return f"{Path(error.filename).name}:{error.lineno}"
        return "before the script"
    own = [one for one in frames if INSTALLED not in one[0].f_code.co_filename]
    line = _named(*frames[-1])
    if own and own[-1] is not frames[-1]:
        line = f"{_named(*own[-1])}, in {line}"
    return f"{modules[-1]} at {line}" if modules else line


def _named(frame: FrameType, number: int) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{number}"


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    found = error.__traceback__
    while found is not None:
        yield found.tb_frame, found.tb_lineno
        found = found.tb_next


def is_library(name: str) -> bool:
    """Whether the file *name* is Python's, torch's or ours, not one of a script or another library."""
    is_standard = name.startswith(STANDARD) and INSTALLED not in name
    return is_standard or name.startswith((OURS, "<")) or any(part in name for part in LIBRARIES)


def _module(frame: FrameType) -> str:
    """Return the class of the module whose method a frame is, empty if it is none's.

    A function that is given a module first, as one that trains it, is no method of it.
    """
    code = frame.f_code
    is_function = code.co_qualname == code.co_name or code.co_qualname.endswith(f"<locals>.{code.co_name}")
    names = () if is_function else code.co_varnames[:1]  # mostly "self"
    owner = frame.f_locals.get(names[0]) if names else None
    return type(owner).__name__ if hasattr(owner, "named_parameters") else ""


def number(value: complex) -> str:
    """Return a number as a person says it: as it is if it is short, else four digits of it.

    >>> number(1.0), number(True), number(2.6139293370023936e16)
    ('1.0', 'True', '2.614e+16')
    """
    return f"{value:.4g}" if isinstance(value, float) and len(repr(value)) > LONG else str(value)


def amount(tensor: Any) -> str:
    """Return in words how many numbers *tensor* has."""
    return "a number" if tensor.numel() == 1 else f"{tensor.numel():,} numbers"


def asked_at() -> tuple[str, int]:
    """Return file and line of the innermost frame, from the caller's caller on, that is a script's."""
    frame = sys._getframe(2)  # noqa: SLF001 - no other way is as fast
    while frame is not None and frame.f_back is not None:
        if not is_library(frame.f_code.co_filename):
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def is_first_value() -> bool:
    """Whether ``torch.nn.init`` asks, which gives parameters their first values: of these nothing depends."""
    frame = sys._getframe(2)  # noqa: SLF001 - no other way is as fast
    while frame is not None and is_library(name := frame.f_code.co_filename):
        if name.endswith(FIRST_VALUES):
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None ends the walk
    return False


def asker() -> str:
    """Return the innermost line of a script's as a person names it."""
    name, line = asked_at()
    return f"{Path(name).name}:{line}"
