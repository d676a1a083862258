"""Checks of numbers that are unknown, and hold: they are finite, and neither end the script nor only print.

This module does not import torch.
"""

from __future__ import annotations

import ast
import linecache
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from types import CodeType
from typing import Any, Final

# Checks whether unknown numbers are finite: they are, as in a training that goes well.


NEVER: Final = frozenset({"aten.isnan", "aten.isinf", "aten.isposinf", "aten.isneginf"})
"""Operators that are true of numbers that are not finite only."""

COMPARED: Final[Mapping[str, Callable[[float, float], bool]]] = {
    f"aten.{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
"""Operators by which numbers are compared: with themselves, or with infinity."""

NEGATES: Final = frozenset({"aten.logical_not", "aten.bitwise_not"})
BOTH: Final = frozenset({"aten.mul", "aten.logical_and", "aten.bitwise_and", "aten.all", "aten._is_all_true"})
EITHER: Final = frozenset({"aten.logical_or", "aten.bitwise_or", "aten.any", "aten._is_any_true"})

JOINS: Final = NEGATES | BOTH | EITHER
"""Operators on truths: the truth of their results follows from that of all elements of their operands."""

CHECKS: Final = NEVER | frozenset(COMPARED)


def truth_of(name: str, args: Sequence[Any], known: Sequence[Any]) -> float | None:
    """Return whether the check *name* of *args* is true (1) or false (0) for finite numbers.

    None if it is no such check. Comparing a number with itself, or with infinity, is such a check: *known* is
    what each of *args* is, or what all elements of a tensor are.
    """
    if name in NEVER:
        return 0.0
    if name not in COMPARED or len(args) < 2:
        return None
    one, other = args[:2]
    if one is other or are_same(one, other):
        return float(COMPARED[name](0.0, 0.0))
    ends = [value if isinstance(value, float) and math.isinf(value) else 0.0 for value in known]
    return float(COMPARED[name](*ends)) if any(ends) else None


def joined(name: str, truths: Sequence[float | None]) -> float | None:
    """Return the result of *name* on operands that are these *truths* (1, 0, None: unknown); None if unknown.

    >>> joined("aten.any", [0.0]), joined("aten.mul", [1.0, None]), joined("aten.logical_or", [1.0, None])
    (0.0, None, 1.0)
    """
    if name in NEGATES:
        return None if truths[0] not in {0.0, 1.0} else 1.0 - float(truths[0] or 0.0)
    decides = 0.0 if name in BOTH else 1.0
    if decides in truths:
        return decides
    return 1.0 - decides if all(truth == 1.0 - decides for truth in truths) else None


def are_same(one: Any, other: Any) -> bool:
    """Whether two tensors are the same elements of the same storage, as two selections of one loss."""
    if not (hasattr(one, "untyped_storage") and hasattr(other, "untyped_storage")):
        return False
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata  # noqa: SLF001 - tells storages apart
        and one.storage_offset() == other.storage_offset()
        and (one.shape, one.stride()) == (other.shape, other.stride())
    )


# What the source of a script says of a number that it reads: whether it decides anything, and how it must.


HOLDS: Final = "a check that would end the script, or print"
"""Why a script is told what it asks in such a line."""

ADDS: Final = frozenset({"add", "append", "extend", "insert", "update"})
"""Methods by which a container gets what they are given."""


@lru_cache(maxsize=1024)
def passing(name: str, line: int) -> bool | None:
    """Return the answer by which the condition in *line* of a file neither ends the script nor prints.

    None if the line is in no such check, or if it has several conditions that could be meant.
    """
    for test, wanted in _checks(name):
        if _covers(test, line):
            found = set(_truths(test, line, wanted=wanted))
            return found.pop() if len(found) == 1 else None
    return None


@lru_cache(maxsize=64)
def _checks(name: str) -> tuple[tuple[ast.expr, bool], ...]:
    """Return what the checks of a file ask, each with the truth that does not end the script."""
    return tuple(_found(_tree(name)))


def _found(tree: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.test, True
        # One branch of the two raises: the answer is the one that leads to the other.
        elif isinstance(node, ast.If) and _ends(node.body) != _ends(node.orelse):
            yield node.test, _ends(node.orelse)
        elif isinstance(node, ast.If) and not node.orelse and all(map(_prints, node.body)):
            yield node.test, False


def _prints(one: ast.stmt) -> bool:
    """Whether the statement only prints: what a script prints changes nothing of what it trains."""
    call = one.value if isinstance(one, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print"


def _ends(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Raise)


def _covers(node: ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _truths(test: ast.expr, line: int, *, wanted: bool) -> Iterator[bool]:
    """Yield the truths that parts of *test* on *line* need so that it is as *wanted*."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _truths(test.operand, line, wanted=not wanted)
    elif isinstance(test, ast.BoolOp):
        for one in test.values:
            yield from _truths(one, line, wanted=wanted)
    elif _covers(test, line):
        yield wanted


PICKS: Final = {"min": operator.lt, "max": operator.gt}
"""Functions that pick one of their arguments, and how each is compared with the one to be picked before."""


@lru_cache(maxsize=1024)
def picking(code: CodeType, at: int) -> Callable[[Any, Any], bool] | None:
    """Return by what comparison a number is picked where instruction *at* of *code* calls ``PICKS``.

    None if it calls nothing of these, or picks by another key.
    """
    where = next(islice(code.co_positions(), at // 2, None))
    for node in ast.walk(_tree(code.co_filename)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in PICKS:
            is_it = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == where
            if is_it and not any(one.arg == "key" for one in node.keywords):
                return PICKS[node.func.id]
    return None


TENSORS: Final = frozenset({"tensor", "as_tensor", "new_tensor", "Tensor", "FloatTensor", "DoubleTensor"})
"""Functions of torch that make a tensor of numbers."""


@lru_cache(maxsize=1024)
def may_decide(name: str, line: int) -> bool:
    """Whether a number that is made in *line* of the file *name* may decide what is done there.

    It does if a condition, a comparison, an index or a whole number is made of it, or of something that it is
    given to, parameters included. In a tensor that it is put into, it is as unknown as before.
    """
    nodes = [*ast.walk(_tree(name))]
    uses = [use for node in nodes for use in _uses(node)]
    if any(isinstance(one, ast.Call) and _covers(one, line) for use in uses for one in ast.walk(use)):
        return True
    if _is_put(nodes, line):
        return False
    given = [one for node in nodes for one in _given(node)] + [*_passed(nodes)]
    makers = _plain(nodes, line)
    found = {
        one
        for node, names in given
        if _covers(node, line) and (not makers or any(part in makers for part in ast.walk(node)))
        for one in names
    }
    # Until no further name gets something that is made of these.
    n_before = -1
    while len(found) > n_before:
        n_before = len(found)
        found |= {one for node, names in given if not found.isdisjoint(_named(node)) for one in names}
    return any(not found.isdisjoint(_decisive(use)) for use in uses)


def _is_put(nodes: Sequence[ast.AST], line: int) -> bool:
    """Whether every ``float(...)`` in *line* is, as it is, an element of a new tensor."""
    calls, made = (
        [one for one in nodes if isinstance(one, ast.Call) and _covers(one, line)],
        _plain(nodes, line),
    )
    tensors = [one for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr in TENSORS]
    put = {id(element) for tensor in tensors for one in tensor.args[:1] for element in _elements(one)}
    return bool(made) and all(id(one) in put for one in made)


def _plain(nodes: Sequence[ast.AST], line: int) -> list[ast.Call]:
    """Return the calls ``float(...)`` in *line*."""
    calls = (one for one in nodes if isinstance(one, ast.Call) and _covers(one, line))
    return [one for one in calls if isinstance(one.func, ast.Name) and one.func.id == "float"]


def _elements(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.List | ast.Tuple):
        return [element for one in node.elts for element in _elements(one)]
    return [node]


def _uses(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what decides something in *node*."""
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        yield node.test
    elif isinstance(node, ast.Compare):
        yield node
    elif isinstance(node, ast.Subscript):
        yield node.slice
    elif isinstance(node, ast.comprehension):
        yield from node.ifs
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"int", "range"}:
        yield from node.args


# What is known by which name. A variable is that of its function; an attribute is the same in all objects.

FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@lru_cache(maxsize=64)
def _tree(name: str) -> ast.Module:
    """Return the source of a file as a tree, an empty one where it has none. Names have a ``label`` there."""
    try:
        tree = ast.parse("".join(linecache.getlines(name)))
    except (SyntaxError, ValueError):
        tree = ast.Module([], [])
    _label(tree, [])
    return tree


def _label(node: ast.AST, scopes: list[tuple[int, set[str]]]) -> None:
    """Give names under *node* labels of their variables; *scopes*: lines and names of functions around it."""
    if isinstance(node, FUNCTIONS):
        if not isinstance(node, ast.Lambda):
            node.label = _variable(node.name, scopes)  # type: ignore[union-attr]  # of ours
        scopes = [*scopes, (node.lineno, set(_bound(node)))]
    elif isinstance(node, ast.Name):
        node.label = _variable(node.id, scopes)  # type: ignore[attr-defined]
    elif isinstance(node, ast.arg):
        node.label = _variable(node.arg, scopes)  # type: ignore[attr-defined]
    elif isinstance(node, ast.Attribute):
        node.label = f".{node.attr}"  # type: ignore[attr-defined]
    for one in ast.iter_child_nodes(node):
        _label(one, scopes)


def _variable(name: str, scopes: Sequence[tuple[int, set[str]]]) -> str:
    """Return the label of the variable *name*, which is that of the innermost function that binds it."""
    return next((f"{line}:{name}" for line, bound in reversed(scopes) if name in bound), name)


def _bound(function: ast.AST) -> Iterator[str]:
    """Yield the names that *function* binds, parameters included, but for those of functions in it."""
    inner = [*ast.iter_child_nodes(function)]
    outside = {
        name for one in ast.walk(function) if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names
    }
    while inner:
        one = inner.pop()
        name = ""
        if isinstance(one, ast.arg):
            name = one.arg
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            name = one.id
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = one.name
        if name and name not in outside:
            yield name
        if not isinstance(one, FUNCTIONS):
            inner += ast.iter_child_nodes(one)


def _given(node: ast.AST) -> Iterator[tuple[Any, set[str]]]:
    """Yield expressions in *node*, and the names by which what they make is known."""
    if isinstance(node, ast.Assign):
        yield node.value, {one for target in node.targets for one in _own(target)}
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.value, _own(node.target)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ADDS:
        yield node, _own(node.func.value)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for one in ast.walk(node):
            if isinstance(one, ast.Return) and one.value is not None:
                yield one.value, {_of(node), f".{node.name}"}


def _passed(nodes: Sequence[ast.AST]) -> Iterator[tuple[Any, set[str]]]:
    """Yield what calls give to functions and classes of the same file, and the names of it there."""
    known: dict[str, list[tuple[list[str], set[str]]]] = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            known.setdefault(node.name, []).append(_parameters(node))
        elif isinstance(node, ast.ClassDef):
            fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
            known.setdefault(node.name, []).append(([f".{ast.unparse(one)}" for one in fields], set()))
            made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
            known[node.name] += map(_parameters, made)
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        for places, rest in known.get(name, ()):
            is_plain = not any(isinstance(one, ast.Starred) for one in call.args)
            for at, one in enumerate(call.args):
                yield one, {places[at]} if is_plain and at < len(places) else rest | {*places}
            for keyword in call.keywords:
                named = {one for one in places if one.lstrip("0123456789:.") == keyword.arg}
                yield keyword.value, named or rest | {*places}


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[list[str], set[str]]:
    """Return the parameters of *function* in order, but for the object, and those that take the rest."""
    args = function.args
    places = [_of(one) for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    is_method = bool(places) and places[0].rpartition(":")[2] in {"self", "cls"}
    return places[is_method:], {_of(one) for one in (args.vararg, args.kwarg) if one is not None}


def _own(target: ast.AST) -> set[str]:
    """Return the names of what is assigned: of an attribute its own, of an element that of its container."""
    if isinstance(target, ast.Tuple | ast.List):
        return {name for one in target.elts for name in _own(one)}
    while isinstance(target, ast.Subscript | ast.Starred):
        target = target.value
    return {_of(target)} if isinstance(target, ast.Attribute) else _named(target)


KINDS: Final = frozenset({"isinstance", "issubclass", "hasattr", "callable"})
"""Functions whose answer depends on what kind of thing they are given, not on a number."""


def _decisive(use: ast.expr) -> set[str]:
    """Return the names in what decides something, but for those of which only the kind is asked."""
    if isinstance(use, ast.Call) and isinstance(use.func, ast.Name) and use.func.id in KINDS:
        return set()
    if isinstance(use, ast.Compare) and all(isinstance(one, ast.Is | ast.IsNot) for one in use.ops):
        return set()
    own = {_of(use)} if isinstance(use, ast.Name | ast.Attribute) else set()
    return own.union(*map(_decisive, ast.iter_child_nodes(use)))  # type: ignore[arg-type]  # of any kind


def _named(node: ast.AST) -> set[str]:
    """Return the names, and those of attributes, in *node*."""
    return {_of(one) for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute)}


def _of(node: ast.AST) -> str:
    label: str = node.label  # type: ignore[attr-defined]
    return label
