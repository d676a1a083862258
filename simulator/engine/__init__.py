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

WORTH_LOADING: Final = 250_000
"""Tasks from which loading numba and compiled code (some 0.8 s) pays off, at 300,000 tasks/s on SimPy."""


def choose(
    name: str,
    n_tasks: int,
    tell: Callable[[str], None] = lambda _: None,
    *,
    queue: bool = False,
    links: bool = False,
) -> ModuleType:
    """Return the module of engine *name*: it has ``NAME``, ``run``, ``times`` and ``Clock``.

    Args:
        name: one of ``ENGINES``.
        n_tasks: size of the program, which decides for ``"auto"``.
        tell: told when something is about to be compiled.
        queue: whether GPUs are shared or something changes, so that the program needs a queue of events.
        links: whether links are to be shared by ``"auto"``.

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
        fast = has_numba and n_tasks >= WORTH_LOADING
        name = ("contended-compiled" if fast else "contended") if links else "compiled" if fast else "event"
    engine = import_module(f"{__name__}.{name.replace('-', '_')}")
    if name.endswith("compiled"):
        part = import_module(f"{__name__}.together") if queue else engine
        if words := part.compiling():
            tell(words)
    return engine
