"""Checks that end a script if they fail: if their numbers are unknown, the answer is the one that passes.

``if not (right >= left).all(): raise ValueError(...)`` and ``assert mask.any()`` hold in a training that goes
well. Such a check is found in the source of the line that asks. This module does not import torch.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache


@lru_cache(maxsize=1024)
def passing(name: str, line: int) -> bool | None:
    """Return the answer that does not end the script, for the condition in *line* of the file *name*.

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
    try:
        tree = ast.parse("".join(linecache.getlines(name)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(_found(tree))


def _found(tree: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.test, True
        elif isinstance(node, ast.If) and _ends(node.body) != _ends(node.orelse):
            yield node.test, _ends(node.orelse)


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
