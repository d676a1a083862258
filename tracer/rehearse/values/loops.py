"""Loops of a script, from its source: which surround a line, whether they end by themselves, and by what.

This module does not import torch.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import linecache
from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import FrameType, ModuleType
from typing import Any, Final, NamedTuple, TypeGuard

from foretrace.tracer.rehearse.words import is_library

PLAIN: Final = (bool, int, float, str, bytes, type(None))
"""Types of values that are compared to see whether a loop has got anywhere."""

OF_NUMBERS: Final = frozenset(
    {"abs", "all", "any", "cpu", "detach", "float", "item", "items", "keys", "max", "mean", "min", "norm"}
    | {"numel", "size", "std", "sum", "tolist", "values", "var"}
)
"""Methods whose results change only if what they are called on does."""

HIDES: Final = frozenset({"filter", "map", "max", "min", "reduce", "sorted", "starmap", "sum"})
"""Functions that loop where no line says so."""

COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

MOST_VALUES: Final = 256
"""Values of a list or the like that are compared."""


class _UnknownError(Exception):
    """It cannot be said whether a loop gets anywhere."""


class Loop(NamedTuple):
    """A loop around a line.

    Attributes:
        line: where it begins.
        goes_over: what a ``for`` goes over, None for a ``while``.
        target: what a ``for`` assigns.
        exits: conditions that end it.
        is_open: whether something else may end it, as an error that is caught outside.
    """

    line: int
    goes_over: ast.expr | None
    target: ast.expr | None
    exits: tuple[ast.expr, ...]
    is_open: bool


class Standing(NamedTuple):
    """Where the loops around a line stand.

    Attributes:
        name: file of the innermost loop that does not end by itself.
        line: where that loop begins.
        states: file, line and state of every loop: the element at which one is that ends by itself, or what
            the conditions that end another depend on.
    """

    name: str
    line: int
    states: tuple[tuple[str, int, Any], ...]


def standing(frame: FrameType | None) -> Standing | None:
    """Return where the loops around *frame* stand; None if that cannot be said, or if all end by themselves.

    Args:
        frame: the innermost; its callers are looked at, too.
    """
    states, endless = [], None
    try:
        while frame is not None:
            name = frame.f_code.co_filename
            for loop in () if is_library(name) else around(name, frame.f_lineno):
                ends = loop.goes_over is not None and not _is_endless(loop.goes_over, frame)
                if not ends and endless is None:
                    endless = (name, loop.line)
                states.append((name, loop.line, _element(loop, frame) if ends else _exits(loop, frame)))
            frame = frame.f_back
    except _UnknownError:
        return None
    return None if endless is None else Standing(*endless, tuple(states))


@lru_cache(maxsize=4096)
def around(name: str, line: int) -> tuple[Loop, ...]:
    """Return the loops around *line* of the file *name*, in the same function, the innermost first."""
    found: list[Loop] = []
    for node in _nodes(name):
        if not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.clear()
        elif isinstance(node, ast.While | ast.For) and _is_inside(node, line):
            found.append(_loop(node))
        elif isinstance(node, COMPREHENSIONS) or _hides(node):
            found.append(Loop(line, ast.Tuple([], ast.Load()), None, (), is_open=True))
    return tuple(reversed(found))


def _hides(node: Any) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in HIDES


def _is_inside(node: ast.While | ast.For, line: int) -> bool:
    """Whether a loop repeats *line*: what a ``for`` goes over is made once."""
    first = node.body[0].lineno if isinstance(node, ast.For) else node.lineno
    return first <= line <= (node.body[-1].end_lineno or node.lineno)


@lru_cache(maxsize=64)
def _nodes(name: str) -> tuple[Any, ...]:
    """Return what is in a file and has lines, outer before inner."""
    try:
        tree = ast.parse("".join(linecache.getlines(name)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(node for node in ast.walk(tree) if hasattr(node, "lineno") and hasattr(node, "end_lineno"))


def _loop(node: ast.While | ast.For) -> Loop:
    ends, is_open = [], False
    for one, handles in _own(node.body, handles=False):
        if isinstance(one, ast.If) and any(map(_leaves, (*one.body, *one.orelse))):
            ends.append(one.test)
        is_open = is_open or (handles and _leaves(one))
    if isinstance(node, ast.For):
        return Loop(node.lineno, node.iter, node.target, tuple(ends), is_open)
    return Loop(node.lineno, None, None, (node.test, *ends), is_open)


def _own(body: list[ast.stmt], *, handles: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield the statements of a loop, not those of functions in it, and whether they handle an error."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        yield node, handles
        for name in ("body", "orelse", "finalbody"):
            yield from _own(getattr(node, name, []), handles=handles)
        for handler in getattr(node, "handlers", []):
            yield from _own(handler.body, handles=True)


def _leaves(node: ast.stmt) -> bool:
    return isinstance(node, ast.Break | ast.Return | ast.Raise)


def _element(loop: Loop, frame: FrameType) -> Any:
    """Return which element a loop that ends by itself is at."""
    if loop.target is None:
        raise _UnknownError
    names = [one.id for one in ast.walk(loop.target) if isinstance(one, ast.Name)]
    values = [_named(name, frame) for name in names]
    if any(isinstance(value, int | str) for value in values):
        return tuple(value for value in values if isinstance(value, PLAIN))
    if values and all(hasattr(value, "named_parameters") for value in values):
        return tuple(map(id, values))  # modules live longer than the loop
    raise _UnknownError


def _exits(loop: Loop, frame: FrameType) -> Any:
    """Return the values on which it depends whether a loop ends."""
    if loop.is_open or not (ends := [one for one in loop.exits if not isinstance(one, ast.Constant)]):
        raise _UnknownError
    return tuple(value for one in ends for value in _values(one, frame))


def _values(node: ast.expr, frame: FrameType) -> Iterator[Any]:
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and not _is_of_numbers(one.func, frame):
            raise _UnknownError
        if isinstance(one, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            raise _UnknownError
        if isinstance(one, ast.Name | ast.Attribute):
            yield _state(_looked_up(one, frame))


def _is_of_numbers(function: ast.expr, frame: FrameType) -> bool:
    """Whether what a *function* returns follows from its arguments."""
    if _is_of_model(function, frame):
        return True
    if isinstance(function, ast.Name):
        return function.id not in frame.f_globals and hasattr(builtins, function.id) and function.id != "next"
    if not isinstance(function, ast.Attribute):
        return False
    root = _looked_up(function.value, frame) if isinstance(function.value, ast.Name | ast.Attribute) else None
    if isinstance(root, ModuleType):
        return root.__name__.partition(".")[0] in {"math", "numpy", "torch"}
    return function.attr in OF_NUMBERS


def _is_of_model(node: ast.expr, frame: FrameType) -> bool:
    """Whether *node* is, or is made of, a tensor or a model, whose weights change in steps."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        found = _looked_up(node, frame)
        if hasattr(found, "named_parameters"):
            return True
        node = node.func if isinstance(node, ast.Call) else node.value
    found = _looked_up(node, frame)
    return hasattr(found, "named_parameters") or hasattr(found, "untyped_storage")


def _looked_up(node: ast.expr, frame: FrameType) -> Any:
    """Return the value of a name, or of what it holds; None if that would run code."""
    if isinstance(node, ast.Name):
        return _named(node.id, frame)
    if isinstance(node, ast.Attribute):
        owner = _looked_up(node.value, frame)
        return getattr(owner, "__dict__", {}).get(node.attr)
    return None


def _named(name: str, frame: FrameType) -> Any:
    spaces: tuple[Mapping[str, Any], ...] = (frame.f_locals, frame.f_globals)
    return next((space[name] for space in spaces if name in space), None)


def _state(value: Any) -> Any:
    """Return of a *value* what would tell that it has changed; None of what has no plain values."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        return tuple(map(_state, itertools.islice(itertools.chain(value, value.values()), MOST_VALUES))), len(
            value
        )
    if isinstance(value, list | tuple):
        return tuple(map(_state, value[:MOST_VALUES])), len(value)
    return len(value) if isinstance(value, set | frozenset | deque) else None


def _is_endless(node: ast.expr, frame: FrameType) -> bool:
    """Whether what a ``for`` goes over has no end, as ``itertools.cycle``."""
    if _is_around(node):
        return _is_endless(node.args[0], frame)
    if isinstance(node, ast.Call):
        made = _looked_up(node.func, frame)
        return made in {itertools.cycle, itertools.count} if isinstance(made, type) else False
    return _goes_on(_looked_up(node, frame))


def _is_around(node: ast.expr) -> TypeGuard[ast.Call]:
    """Whether *node* is a call of a function that goes over what it is given."""
    is_named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and bool(node.args)
    return is_named and node.func.id in {"enumerate", "iter", "tqdm"}  # type: ignore[attr-defined]


def _goes_on(value: Any) -> bool:
    inner = getattr(value, "__dict__", {}).get("iterable")  # of tqdm
    return isinstance(value, itertools.cycle | itertools.count) or (inner is not None and _goes_on(inner))
