"""Draws mistakes for product code, makes them one by one, and prints which of them no test finds.

python benchmarks/mutations.py topologies simulator/engine [-n 20] [--seed 0] [--files 10]

A mistake is another operator, comparison or constant, or a function that returns None. It is made in a copy
of the working tree. The tests that belong to it are the files of tests nearest to it: those that have rare
words in common with the function that it is in, less so the more imports are between the two, and the
examples in the docstrings of its own file. A mistake is found by a test that fails with it, or does not end,
and passes without it.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
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
    """The bytes of a file from *start* to *end*, what is there instead, and the text of the function."""

    path: Path
    line: int
    start: int
    end: int
    old: str
    new: str
    within: str


def mistakes(path: Path) -> Iterator[Mistake]:
    """Yield every mistake that can be made in a file."""
    source = path.read_bytes()
    starts = [0, *(at + 1 for at, byte in enumerate(source) if byte == ord("\n"))]
    text = source.decode()
    waiting: list[tuple[ast.AST, str]] = [(ast.parse(source), text)]
    while waiting:
        node, within = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            within = ast.get_source_segment(text, node) or within
        # Parts of texts have no places of their own, and arguments and decorators decide no result.
        decorators = getattr(node, "decorator_list", ())
        children = [one for one in ast.iter_child_nodes(node) if one not in decorators]
        waiting += [(one, within) for one in children if not isinstance(one, ast.JoinedStr | ast.arg)]
        if isinstance(node, ast.expr | ast.Return) and (new := instead(node)):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            yield Mistake(path, node.lineno, start, end, ast.unparse(node), new, within)


def instead(node: ast.expr | ast.Return) -> str:
    """Return what may stand in place of *node*; empty if nothing is wrong enough."""
    if isinstance(node, ast.Return):
        # What is false is mostly asked no more than whether it is.
        return "return None" if node.value and ast.unparse(node.value) not in {"None", "False"} else ""
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
    beside = [path.with_name(name) for name in names if name.endswith(".py")]
    found = [modules()[name] for name in names if name in modules()]
    return frozenset([*found, *(one for one in beside if one.is_file())])


@cache
def words(text: str) -> frozenset[str]:
    """Return the words of a text, without short ones."""
    return frozenset(word.lower() for word in re.findall("[A-Za-z]{3,}", text))


@cache
def said() -> dict[Path, frozenset[str]]:
    """Return the words of each file of tests and of the scripts that it starts."""
    tests = [path for path in sorted({*modules().values()}) if path.name.startswith("test_")]
    found = {}
    for test in tests:
        own = [test, *(one for one in imported(test) if "tests" in one.parts and one not in tests)]
        found[test] = words(" ".join([test.stem, *(one.read_text("utf-8") for one in own)]))
    return found


@cache
def rarity() -> dict[str, float]:
    """Return how much it says that two texts have a word in common."""
    counts = Counter(word for found in said().values() for word in found)
    return {word: math.log(len(said()) / count) ** 2 for word, count in counts.items()}


def nearest_tests(one: Mistake, most: int) -> list[Path]:
    """Return the files of tests that are nearest to a mistake, at most so many, behind its own examples."""
    reached = {one.path: 0}
    further = {one.path}
    while further:
        further = {other for other in modules().values() if imported(other) & further} - {*reached}
        reached |= dict.fromkeys(further, max(reached.values()) + 1)
    about = words(f"{one.path.stem} {one.within}")

    def nearness(test: Path) -> float:
        # Long files of tests have many words of anything.
        length = sum(rarity()[word] for word in said()[test])
        return sum(rarity()[word] for word in about & said()[test]) / math.pow(length, 0.25) / reached[test]

    near = sorted((test for test in said() if test in reached), key=nearness, reverse=True)
    own = ROOT / "src" / "foretrace" / one.path.relative_to(ROOT)  # as the suite has it
    return [own, *near[:most]] if ">>> " in one.path.read_text("utf-8") and own.exists() else near[:most]


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
    answers = []
    with TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "demo"))
        for one in drawn:
            answers.append(judged(tree, one, nearest_tests(one, given.files)))
            place = f"{one.path.relative_to(ROOT)}:{one.line}"
            print(f"{place}: {one.old} -> {one.new}: {answers[-1]}", flush=True)
    decided = [answer for answer in answers if not answer.startswith("undecided")]
    print(f"{decided.count('survives')} of {len(decided)} survive (seed {given.seed})")


if __name__ == "__main__":
    main()
