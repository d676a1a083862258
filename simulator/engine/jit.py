"""Compiling functions with numba, and keeping the result where that is possible.

What was compiled is kept beside the source, in the user's cache, or where ``NUMBA_CACHE_DIR`` says; numba
writes whole files under another name first, so that processes may compile at the same time. Where none of
these can be written (a read-only installation and no home directory), or others can write to it, every
process compiles for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import njit

from foretrace.traces.private import is_private

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(function: Function, *, inline: str = "never") -> Function:
    """Return *function*, to be compiled when it is first called or loaded if that was done before.

    With *inline* ``"always"`` it is written into its callers.
    """
    compiled: Function
    try:
        kept = njit(cache=True, inline=inline)(function)
        if _is_ours(Path(kept.stats.cache_path)):
            compiled = kept
            return compiled
    except RuntimeError:  # numba found no place to keep it
        pass
    compiled = njit(inline=inline)(function)
    return compiled


@cache
def _is_ours(folder: Path) -> bool:
    """Return whether nobody else can change what is kept in *folder*, files of lax modes included."""
    return is_private(folder) and all(map(is_private, folder.glob("*.nb[ci]")))


def words(compiled: Any, source: str) -> str:
    """Return what to tell before *compiled* of the file *source* is first called; empty if it is on disk."""
    path, folder = Path(source), compiled.stats.cache_path
    if not folder:
        return "compiling the engine (some seconds); NUMBA_CACHE_DIR can name a directory to keep it in"
    kept = Path(folder).glob(f"{path.stem}.*.nbi")
    if any(index.stat().st_mtime >= path.stat().st_mtime for index in kept):
        return ""
    return "compiling the engine, once (some seconds)"
