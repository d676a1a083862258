"""Compiling functions with numba, and keeping the result where that is possible.

What was compiled is kept beside the source, in the user's cache, or where ``NUMBA_CACHE_DIR`` says; numba
writes whole files under another name first, so that processes may compile at the same time. Where none of
these can be written (a read-only installation and no home directory), every process compiles for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit


def jit(function: Callable[..., Any], *, inline: str = "never") -> Any:
    """Return *function*, to be compiled when it is first called or loaded if that was done before.

    Args:
        function: what to compile.
        inline: ``"always"``: to be written into its callers.
    """
    try:
        return njit(cache=True, inline=inline)(function)
    except RuntimeError:  # numba found no place to keep it
        return njit(inline=inline)(function)


def words(compiled: Any, source: str) -> str:
    """Return what to tell before *compiled* is first called, empty if it is on disk already.

    Args:
        compiled: what ``jit`` made of a function.
        source: the file of that function.
    """
    path, folder = Path(source), compiled.stats.cache_path
    if not folder:
        return "compiling the engine (some seconds); NUMBA_CACHE_DIR can name a directory to keep it in"
    kept = Path(folder).glob(f"{path.stem}.*.nbi")
    if any(index.stat().st_mtime >= path.stat().st_mtime for index in kept):
        return ""
    return "compiling the engine, once (some seconds)"
