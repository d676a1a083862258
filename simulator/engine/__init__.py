"""Engines: they give a program its clock. All of them answer ``run(program)`` with a timeline.

``event`` and ``compiled`` give the same one; ``contended`` adds that transfers on the same links slow each
other down, and ``contended-compiled`` gives the same as that.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Final

from foretrace.simulator.errors import EngineError

ENGINES: Final = ("auto", "event", "compiled", "contended", "contended-compiled")
"""Names of engines: on SimPy, on numba, or the one that is sooner done; both again with shared links."""

ONE_BY_ONE: Final = ("auto", "event", "compiled")
"""Engines in which a communication takes as long as it would alone."""

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

    Raises EngineError if no engine has that name, or if it needs a package that is not installed.
    """
    if name not in ENGINES:
        raise EngineError(f"engine {name!r}: one of {', '.join(ENGINES)}")
    if name.endswith("compiled"):
        require_numba(f"the {name} engine", f", or --engine {'event' if name == 'compiled' else 'contended'}")
    if name == "auto":
        fast = n_tasks >= WORTH_LOADING and not why_not_compiled()
        name = ("contended-compiled" if fast else "contended") if links else "compiled" if fast else "event"
    engine = import_module(f"{__name__}.{name.replace('-', '_')}")
    if name.endswith("compiled"):
        part = import_module(f"{__name__}.together") if queue else engine
        if words := part.compiling():
            tell(words)
    return engine


def require_numba(what: str, otherwise: str = "") -> None:
    """Raise EngineError, in words, if *what* needs numba and it is not installed, or not to be loaded here.

    Whoever tries many jobs and leaves out the impossible ones asks before the first: that an engine is
    missing says nothing about a job.

    *what*: what is asked for, e.g. ``"a search"``. *otherwise*: what to do instead, if anything.
    """
    if why := why_not_compiled():
        raise EngineError(f"{what} needs numba{why}{otherwise}")


def why_not_compiled() -> str:
    """Return why the compiled engines cannot be used, as what follows the word numba; empty if they can."""
    if find_spec("numba") is None:
        return ": pip install numba"
    # numba obeys such a file, also about the folders of compiled code to load, whoever has put it there.
    if Path(_OBEYED).is_file():
        return f", which obeys {Path(_OBEYED).absolute()}, that may have it run any code: start elsewhere"
    return ""


_OBEYED: Final = ".numba_config.yaml"
