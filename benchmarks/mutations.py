"""Draws mistakes for product code, makes them one by one, and prints which of them no test finds.

python benchmarks/mutations.py topologies simulator/engine [-n 20] [--seed 0] [--files 10]

A mistake is another operator, comparison or constant, or a function that returns None. It is made in a copy
of the working tree. The tests that belong to a file are the files of tests nearest to it: those that import
it, then those that import what imports it; of equally near ones, those of its package, with words of its
name, and that name it most often. A mistake is found by a test that fails with it, or does not end, and
passes without it.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAIRS: tuple[tuple[type[ast.AST], type[ast.AST]], ...] = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or)),
)
SWAPPED = {**dict(PAIRS), **{other: one for one, other in PAIRS}, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}
"""What stands in place of an operator."""

IMPORTS = re.compile(r"(?:from ([\w.]+) )?import (\([^)]*\)|.*)|\"([\w.]+)\"")
"""Names of modules: a package and what is imported from it, or a text that is a name."""

TEST_S, TESTS_S = 120, 1200
"""Time after which a test, and all of them, count as not ending: they take seconds, on a busy machine."""


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
        if isinstance(node.value, float):  # one more of what is large would be the same
            changed.value = 2 * node.value + 1
    else:
        return ""
    return f"({ast.unparse(changed)})"


@cache
def modules() -> dict[str, Path]:
    """Return the files of ours, by the names under which they are imported."""
    found: dict[str, Path] = {}
    for folder in ("simulator", "tests", "topologies", "traces", "tracer", "src/foretrace"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts).removeprefix("src.").removesuffix(".__init__")
            found |= {name: path, f"foretrace.{name}": path}
    return found


@cache
def imported(path: Path) -> frozenset[Path]:
    """Return the files of ours that *path* imports, or names in a text: a script, or a list of modules."""
    names = []
    for package, listed, quoted in IMPORTS.findall(path.read_text(encoding="utf-8")):
        names += [quoted or package, *(f"{package}.{name}" for name in re.findall(r"\w+", listed))]
    return frozenset(modules()[name] for name in names if name in modules())


def nearest_tests(path: Path, most: int) -> list[Path]:
    """Return the files of tests that are nearest to *path*, at most so many."""
    package = path.relative_to(ROOT).parts[0]
    others = sorted({*modules().values()})
    near: list[Path] = []
    reached = {path}
    further = {path}

    def order(test: Path) -> tuple[bool, int, int]:
        said = re.findall(rf"\b{path.stem}\b", test.read_text(encoding="utf-8"))
        return package not in test.parts, -len(beginnings(path) & beginnings(test)), -len(said)

    while further and len(near) < most:
        further = {one for one in others if imported(one) & further} - reached
        near += sorted((one for one in sorted(further) if one.name.startswith("test_")), key=order)
        reached |= further
    return near[:most]


def beginnings(path: Path) -> set[str]:
    """Return how the words of a name begin: loaders and loaded are of one subject."""
    return {word[:4] for word in re.split("[/_]", str(path.relative_to(ROOT).with_suffix("")))}


def found_by(tree: Path, tests: Sequence[Path | str], compiled: Path) -> str:
    """Return which of *tests* fails first in the copy *tree*; empty if all pass.

    Numba keeps what it compiles in the folder *compiled*. It does not see that a function has changed that it
    compiled into one of another file.
    """
    hangs = ["-o", f"faulthandler_timeout={TEST_S}", "-o", "faulthandler_exit_on_timeout=true"]
    command = [sys.executable, "-m", "pytest", "-x", *hangs, *map(str, tests)]
    env = {**os.environ, "PYTHONPATH": str(tree / "src"), "NUMBA_CACHE_DIR": str(compiled)}
    with TemporaryFile("w+") as said:
        run = subprocess.Popen(command, cwd=tree, env=env, stdout=said, stderr=said, start_new_session=True)
        try:
            status = run.wait(TESTS_S)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        with suppress(ProcessLookupError):  # nothing that it has started is left
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        said.seek(0)
        first = re.search(r"^(?:FAILED|ERROR) (\S+)", said.read(), re.MULTILINE)
    if status in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
        return ""
    return first[1] if first else f"does not end ({status})"


def judged(tree: Path, one: Mistake, tests: Sequence[Path]) -> str:
    """Return what the *tests* say of a mistake in the copy *tree*."""
    path = tree / one.path.relative_to(ROOT)
    source = path.read_bytes()
    with TemporaryDirectory() as folder:
        compiled = Path(folder) if b"jit" in source else tree / ".compiled"
        path.write_bytes(source[: one.start] + one.new.encode() + source[one.end :])
        names = [test.relative_to(ROOT) for test in tests]
        test = found_by(tree, ["--cache-clear", *names], compiled) if tests else ""
        path.write_bytes(source)
    if not test:
        return "survives"
    # Only what failed, or all if that is not known.
    own = [name for name in names if test.startswith(str(name))] or names
    fails_without = found_by(tree, ["--last-failed", *own], tree / ".compiled")
    return f"undecided ({fails_without} fails without)" if fails_without else f"found by {test}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", help="folders of product code")
    parser.add_argument("-n", type=int, default=20, help="how many mistakes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=10, help="how many files of tests belong to one of code")
    given = parser.parse_args()
    files = sorted(path for folder in given.folders for path in (ROOT / folder).resolve().rglob("*.py"))
    drawn = random.Random(given.seed).sample([one for path in files for one in mistakes(path)], given.n)
    belonging = {one.path: nearest_tests(one.path, given.files) for one in drawn}
    said = []
    with TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "demo"))
        for one in drawn:
            said.append(judged(tree, one, belonging[one.path]))
            print(f"{one.path.relative_to(ROOT)}:{one.line}: {one.old} -> {one.new}: {said[-1]}", flush=True)
    decided = [answer for answer in said if not answer.startswith("undecided")]
    print(f"{decided.count('survives')} of {len(decided)} survive (seed {given.seed})")


if __name__ == "__main__":
    main()
