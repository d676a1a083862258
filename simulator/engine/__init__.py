"""Engines: they give a program its clock. All of them answer ``run(program)`` with a timeline.

``event`` and ``compiled`` give the same one; ``contended`` adds that transfers on the same links slow each
other down, and ``contended-compiled`` gives the same as that.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Final

from simulator.errors import EngineError

ENGINES: Final = ("auto", "event", "compiled", "contended", "contended-compiled")
"""Names of engines: on SimPy, on numba, or the one that is sooner done; both again with shared links."""

WORTH_LOADING: Final = 50_000
"""Tasks from which loading numba and compiled code (about 0.2 s) pays off, at 300,000 tasks/s on SimPy."""


def choose(name: str, n_tasks: int, tell: Callable[[str], None] = lambda _: None) -> ModuleType:
    """Return the module of engine *name*: it has ``NAME``, ``run(program)`` and ``times(program)``.

    Args:
        name: one of ``ENGINES``.
        n_tasks: size of the program, which decides for ``"auto"``.
        tell: told when something is about to be compiled.

    Raises:
        EngineError: no engine of that name, or it needs a package that is not installed.
    """
    if name not in ENGINES:
        raise EngineError(f"engine {name!r}: one of {', '.join(ENGINES)}")
    has_numba = find_spec("numba") is not None
    if name.endswith("compiled") and not has_numba:
        other = "event" if name == "compiled" else "contended"
        raise EngineError(
            f"the {name} engine needs numba: pip install 'foretrace[fast]', or --engine {other}"
        )
    if name == "auto":
        name = "compiled" if has_numba and n_tasks >= WORTH_LOADING else "event"
    engine = import_module(f"{__name__}.{name.replace('-', '_')}")
    if name.endswith("compiled") and not engine.is_compiled():
        tell("compiling the engine, once (some seconds)")
    return engine
