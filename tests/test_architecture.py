"""Who may import whom: the table of docs/architecture.md, section 1, held against every module.

Read from the syntax tree, so that an import inside a function counts too, and nothing is executed.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FRONT = Path(__file__).parents[1] / "src" / "foretrace"
PACKAGES = ("simulator", "tracer", "topologies", "traces")

TRACES = {"door", "numpy", "pyarrow"}
SIMULATOR = {"door", "topologies", "traces", "numpy", "pyarrow"}
TRACER = {"door", "traces", "numpy", "pyarrow", "torch"}
COMMAND = {"click", "rich", "interrupts"}

MAY_IMPORT: dict[str, set[str]] = {
    "": set(),
    "__main__": {"cli", "interrupts"},
    "cli": {*PACKAGES, *COMMAND, "door", "foretrace"},
    "door": {"yaml"},
    "topologies": {"door", "networkx"},
    "traces": TRACES,
    "traces.figures": TRACES | {"plotly"},
    "simulator": SIMULATOR,
    "simulator.engine": SIMULATOR | {"simpy", "numba"},
    "tracer": TRACER,
    "tracer.rehearse.world.launchers": TRACER | {"accelerate"},
}
"""Longest prefix wins; the standard library and a module's own package are always allowed."""

TERMINAL = ("cli", "console", "flags", "render")
"""Last words of modules that talk to a terminal: they may import what that takes, too."""

ONLY_INSIDE_FUNCTIONS = {"torch"}
"""Loaded when it is used, never by importing a module of ours."""


def modules() -> Iterator[tuple[str, Path]]:
    """Yield the name and path of every module of ours."""
    for folder in (FRONT, *(FRONT / package for package in PACKAGES)):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(FRONT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(source: str) -> Iterator[tuple[str, bool]]:
    """Yield the full name of everything *source* imports, and whether importing the module imports it."""
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(source), True)]
    while waiting:
        node, at_import = waiting.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module or '.'}.{alias.name}", at_import) for alias in node.names)
            if node.level:
                yield "relative", at_import
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_typing_only(node)
        waiting += [(child, at_import and not inside) for child in ast.iter_child_nodes(node) if holds(child)]


def holds(node: ast.AST) -> bool:
    """Return whether *node* may be an import or have one in it, as no expression has."""
    return isinstance(node, ast.stmt | ast.excepthandler | ast.match_case)


def _is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def violations(module: str, source: str) -> list[str]:
    """Return what *source*, as the module of that name, may not import, in words."""
    prefixes = [name for name in MAY_IMPORT if name in ("", module) or module.startswith(f"{name}.")]
    allowed = MAY_IMPORT[max(prefixes, key=len)]
    if module.rpartition(".")[2].split("_")[-1] in TERMINAL:
        allowed = allowed | COMMAND
    own = module.partition(".")[0]
    found = []
    for full, at_import in imports(source):
        if not module and not at_import:  # the front door loads what it names when it is asked for
            continue
        name = full.removeprefix("foretrace.")
        package = name.partition(".")[0]
        if package in PACKAGES and name == full:
            found.append(f"{module} imports {full}: it is called foretrace.{full}")
        elif package not in allowed | {own} and package not in sys.stdlib_module_names:
            found.append(f"{module} imports {full}")
        elif package in ONLY_INSIDE_FUNCTIONS and at_import:
            found.append(f"{module} imports {full} when it is imported itself")
        elif package in PACKAGES and _is_cli(name) and not (package == own and _is_cli(module)):
            found.append(f"{module} imports {full}: only a cli of its package imports a cli")
    return found


def _is_cli(name: str) -> bool:
    return any(part == "cli" or part.endswith("_cli") for part in name.split("."))


@pytest.mark.parametrize(("module", "path"), [pytest.param(*found, id=found[0]) for found in modules()])
def test_a_module_imports_only_what_its_package_may(module: str, path: Path) -> None:
    assert violations(module, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("simulator.builder.step", "import torch"),
        ("simulator.builder.step", "def build():\n    import torch"),
        ("simulator.builder.step", "import foretrace.tracer.record"),
        ("simulator.builder.step", "from foretrace.tracer import record"),
        ("simulator.builder.step", "from . import errors"),
        ("simulator.builder.step", "import simpy"),
        ("", "from foretrace.traces.store import open_run"),
        ("simulator.builder.step", "from foretrace.simulator.cli import simulate"),
        ("simulator.builder.step", "import foretrace"),
        ("simulator.enginer", "import simpy"),
        ("tracer.record", "from foretrace.simulator.job import Job"),
        ("tracer.record", "import foretrace.topologies"),
        ("tracer.record", "import traces.store"),
        ("tracer.record", "import torch"),
        ("tracer.record", "class Hook:\n    import torch.distributed"),
        ("tracer.record", "try:\n    from torch import nn\nexcept ImportError:\n    pass"),
        ("topologies.cluster", "from foretrace.traces.layout import Layout"),
        ("traces.analysis.metrics", "import plotly.graph_objects as go"),
        ("traces.analysis.metrics", "from foretrace.simulator import job"),
        ("traces.analysis.metrics", "import click"),
        ("traces.report.html", "from foretrace.traces.report.cli import report"),
    ],
)
def test_the_table_forbids(module: str, source: str) -> None:
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("simulator.engine.event", "import simpy"),
        ("simulator.cli", "import click, rich.table\nfrom foretrace.simulator.builder.step import build"),
        ("tracer.record", "def record():\n    import torch"),
        ("tracer.record", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("traces.figures", "import plotly.graph_objects as go"),
        ("traces", "import numpy, pyarrow.fs, json"),
        ("cli", "import click\nfrom foretrace.tracer.errors import RecordError"),
    ],
)
def test_the_table_allows(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_importing_everything_loads_no_torch() -> None:
    names = [f"foretrace.{name}".removesuffix(".") for name, _ in modules() if name != "__main__"]
    script = (
        "import importlib, sys; [*map(importlib.import_module, sys.argv[1:])]; print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FRONT.parent)
    assert (done.stdout.strip(), done.stderr) == ("False", "")
