"""Draws mistakes for product code, makes them one by one, and prints which of them no test finds.

python benchmarks/mutations.py topologies simulator/engine [-n 20] [--seed 0] [--files 10]

A mistake is another operator, comparison or constant, or a function that returns None. It is made in a copy
of the working tree. The tests that belong to a file are those nearest to it in ``tests/<package>``: that
import it, then what imports it. They pass first, and find it by failing or taking five times as long.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAIRS: tuple[tuple[type[ast.AST], type[ast.AST]], ...] = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or)),
)
SWAPPED = {**dict(PAIRS), **{other: one for one, other in PAIRS}, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}
"""What stands in place of an operator."""


class Mistake(NamedTuple):
    """The bytes of a file from *start* to *end*, and what is there instead."""

    path: Path
    line: int
    start: int
    end: int
    old: str
    new: str


def mistakes(path: Path) -> Iterator[Mistake]:
    """Yield every mistake that can be made in a file."""
    source = path.read_bytes()
    starts = [0, *(at + 1 for at, byte in enumerate(source) if byte == ord("\n"))]
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        # Parts of texts have no places of their own, and arguments and decorators decide no result.
        decorators = getattr(node, "decorator_list", ())
        children = [one for one in ast.iter_child_nodes(node) if one not in decorators]
        waiting += [one for one in children if not isinstance(one, ast.JoinedStr | ast.arg)]
        if isinstance(node, ast.expr | ast.Return) and (new := instead(node)):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            yield Mistake(path, node.lineno, start, end, ast.unparse(node), new)


def instead(node: ast.expr | ast.Return) -> str:
    """Return what may stand in place of *node*; empty if nothing is wrong enough."""
    if isinstance(node, ast.Return):
        return "return None" if node.value and ast.unparse(node.value) != "None" else ""
    changed: Any = copy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        changed.ops = [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED:
        changed.op = SWAPPED[type(node.op)]()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        changed = node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        changed.value = not node.value if isinstance(node.value, bool) else node.value + 1
    else:
        return ""
    return f"({ast.unparse(changed)})"


@cache
def imported(path: Path) -> frozenset[Path]:
    """Return the files of ours that *path* imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [f"{name}.{alias.name}" for name in names for alias in getattr(node, "names", [])]
        for name in names:
            place = ROOT / name.removeprefix("foretrace.").replace(".", "/")
            found |= {one for one in (place.with_suffix(".py"), place / "__init__.py") if one.is_file()}
    return frozenset(found)


def nearest_tests(path: Path, most: int) -> list[Path]:
    """Return the files of tests of its package that are nearest to *path*, at most so many."""
    package = path.relative_to(ROOT).parts[0]
    tests = sorted((ROOT / "tests" / package).rglob("test_*.py"))
    others = [*(ROOT / package).rglob("*.py"), *(ROOT / "tests" / package).rglob("*.py")]
    near: list[Path] = []
    reached = {path}
    further = {path}
    while further and len(near) < most:
        near += [one for one in tests if one not in near and imported(one) & reached]
        further = {one for one in others if imported(one) & reached} - reached
        reached |= further
    return near[:most]


def failed(tree: Path, tests: list[Path], limit_s: float) -> bool:
    """Return whether *tests* fail in the copy *tree*, or take longer than *limit_s*."""
    command = [sys.executable, "-m", "pytest", "-x", *(str(one.relative_to(ROOT)) for one in tests)]
    env = {**os.environ, "PYTHONPATH": str(tree / "src")}
    try:
        subprocess.run(command, cwd=tree, env=env, capture_output=True, check=True, timeout=limit_s)
    except subprocess.SubprocessError:
        return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", help="folders of product code")
    parser.add_argument("-n", type=int, default=20, help="how many mistakes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=10, help="how many files of tests belong to one of code")
    given = parser.parse_args()
    files = sorted(path for folder in given.folders for path in (ROOT / folder).resolve().rglob("*.py"))
    drawn = random.Random(given.seed).sample([one for path in files for one in mistakes(path)], given.n)
    survivors, took_s = 0, dict[Path, float]()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "demo"))
        for one in drawn:
            name, tests = one.path.relative_to(ROOT), nearest_tests(one.path, given.files)
            since = time.monotonic()
            if one.path not in took_s and failed(tree, tests, 3600):
                sys.exit(f"{name}: its tests fail, or there are none: {' '.join(map(str, tests))}")
            took_s.setdefault(one.path, time.monotonic() - since)
            source = one.path.read_bytes()
            (tree / name).write_bytes(source[: one.start] + one.new.encode() + source[one.end :])
            said = "found" if failed(tree, tests, 5 * took_s[one.path]) else "survives"
            (tree / name).write_bytes(source)
            survivors += said == "survives"
            print(said, f"{name}:{one.line}: {one.old} -> {one.new}", flush=True)
    print(f"{survivors} of {given.n} survive (seed {given.seed})")


if __name__ == "__main__":
    main()
