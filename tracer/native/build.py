"""Compiles the hooks of a recording for the torch of this environment, once, and finds them again.

What is compiled is kept under ``$XDG_CACHE_HOME/foretrace``, by the version and build of torch, the Python,
the machine, the text of the sources and flags of one's own. What a compiler has refused is remembered there
too, so that it is tried and told once. Compiling imports no torch; whoever loads the hooks has done so.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ExtensionFileLoader
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from foretrace.tracer.launched import is_first
from foretrace.tracer.native.compiler import (
    COMPILE_S,
    compile_into,
    flags,
    folder,
    has_refused,
    last_line,
    tools,
)

SWITCH: Final = "FORETRACE_NATIVE"
"""Environment variable that says ``0`` where hooks in C++ are refused, which are the default."""

NAME: Final = "foretrace_hooks"
"""Name of the module that is compiled."""

SOURCES: Final = Path(__file__).parent
"""Folder of ``hooks.cpp`` and its headers."""

GPUS: Final = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""Device files of the drivers of NVIDIA and AMD: where one is, trainings use GPUs."""

TOLD_S: Final = 1
"""Time after which a person is told that another process compiles."""

KEPT: Final = 8
"""Builds that are kept, those last used: some 0.4 MB each."""

SPARED_S: Final = 3600
"""Age below which nothing is deleted: another process may compile it, or be about to load it."""


def is_wanted() -> bool:
    """Whether hooks in C++ are not refused and of use: on Linux, in a Python with its lock, without a GPU."""
    if (
        os.environ.get(SWITCH) == "0"
        or sys.platform != "linux"
        or sysconfig.get_config_var("Py_GIL_DISABLED")
    ):
        return False
    return not any(path.exists() for path in GPUS)


def library() -> Path | None:
    """Return where compiled hooks are kept; None without torch, or for a user without a home."""
    try:
        torch, build = version("torch"), _build()
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except (PackageNotFoundError, OSError, RuntimeError):  # the last: no home
        return None
    text = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]pp")))
    key = hashlib.sha256(text + build + " ".join(flags()).encode()).hexdigest()[:12]
    abi = sysconfig.get_config_var("SOABI")  # tells the machine, too
    return Path(home) / "foretrace" / f"{NAME}-torch{torch}-{abi}-{key}.so"


def _build() -> bytes:
    """Return what tells two builds of one version of torch apart; raise OSError where torch has no files."""
    sizes = [(folder() / "lib" / name).stat().st_size for name in ("libc10.so", "libtorch_python.so")]
    return repr(sizes).encode() + (folder() / "version.py").read_bytes()


def ensure(say: Callable[[str], None]) -> Path | None:
    """Return the compiled hooks, and compile them first if need be; None where that is not wanted or fails.

    Args:
        say: told, in one line, that this takes its time, or why it did not work. Of the ranks that a launcher
            starts the first tells what all of them meet.
    """
    found = library() if is_wanted() else None
    try:
        if found is None or _is_used(found):
            return found
        found.parent.mkdir(parents=True, exist_ok=True)
        with found.with_suffix(".lock").open("w") as lock:
            _wait_for(lock, say)
            return _compiled(found, say)
    except OSError as error:
        if is_first():
            say(f"hooks not compiled, those in Python do: {error}")
        return None


def advice() -> str:
    """Return how to have hooks compiled that are not, in one line; empty where they are, or cannot be."""
    try:
        found = library() if is_wanted() else None
        if found is None or found.exists() or not all(tools()) or _refusal(found).is_known:
            return ""
    except OSError:  # a cache that cannot be looked at
        return ""
    return (
        "by hooks in Python, which cost ten times as much: 'foretrace record -- true' compiles those in C++, "
        f"once; {SWITCH}=0 is content with these"
    )


class _Refusal(NamedTuple):
    """What is remembered of tools that could not compile.

    Attributes:
        path: where.
        tried: what is written there ahead of why: the tools of now.
        is_known: whether the same tools have failed before.
    """

    path: Path
    tried: str
    is_known: bool


def _refusal(found: Path) -> _Refusal:
    """Return what is remembered of compiling the hooks *found*."""
    compiler, has_headers = tools()
    path, tried = found.with_suffix(".failed"), f"{compiler}, Python.h: {has_headers}\n"
    return _Refusal(path, tried, path.exists() and path.read_text().startswith(tried))


def _wait_for(lock: TextIO, say: Callable[[str], None]) -> None:
    """Lock the file *lock*, which another process that compiles gives back. Raises OSError if it does not."""
    begun_s, is_told = time.monotonic(), not is_first()
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited_s = time.monotonic() - begun_s
            if waited_s > COMPILE_S:
                raise
            if waited_s > TOLD_S and not is_told:
                say("waiting for hooks that another recording compiles, once")
                is_told = True
            time.sleep(0.1)


def _is_used(found: Path) -> bool:
    """Note at the file *found* that it is used now; return whether it is there."""
    with suppress(OSError):  # not there, or of another user
        os.utime(found)
    return found.exists()


def _compiled(found: Path, say: Callable[[str], None]) -> Path | None:
    """Compile unless it was done, or was not possible, by now; raise OSError where it cannot be kept."""
    if found.exists():
        return found
    refusal = _refusal(found)
    if refusal.is_known:
        return None
    compiler, has_headers = tools()
    try:
        if compiler is None or not has_headers:
            raise FileNotFoundError(f"no {'headers of Python' if compiler else 'C++ compiler'} here")
        torch = version("torch")
        say(f"compiling hooks for torch {torch}, once: 20 s of processor time; {SWITCH}=0 does without")
        compile_into(found, compiler, SOURCES / "hooks.cpp")
    except (subprocess.SubprocessError, FileNotFoundError) as error:
        if not has_refused(error):
            say(f"hooks not compiled, those in Python do: {last_line(error)}; the next recording tries again")
            return None
        again = f"to try again with the same compiler, delete {refusal.path}"
        refusal.path.write_text(f"{refusal.tried}{getattr(error, 'stderr', '') or error}\n")
        say(f"hooks not compiled, those in Python do: {last_line(error)}; {again}")
        return None
    _prune(found.parent)
    return found


def _prune(cache: Path) -> None:
    """Delete from *cache* all but the last builds, and what killed compilers left, if not used for long."""
    last_used_s: dict[str, float] = {}
    builds = set()
    for path in cache.glob(f"{NAME}-*"):
        with suppress(OSError):  # another process prunes, too
            last_used_s[path.stem] = max(path.stat().st_mtime, last_used_s.get(path.stem, 0.0))
            builds |= {path.stem} if path.suffix in {".so", ".failed"} else set()
    kept = sorted(builds, key=lambda stem: -last_used_s[stem])[:KEPT]
    spared = {stem for stem, used_s in last_used_s.items() if time.time() - used_s < SPARED_S}
    for path in cache.glob(f"{NAME}-*"):
        if path.stem in spared.union(kept) or path.stem not in last_used_s:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def load() -> Any:
    """Return the module of the compiled hooks, None if there is none or it does not fit.

    Torch has been imported, and the training uses no GPU.
    """
    if NAME in sys.modules:
        return sys.modules[NAME]
    found = library() if is_wanted() else None
    if found is None:
        return None
    with suppress(ImportError, OSError):  # of no use, not there, or not to be read
        loader = ExtensionFileLoader(NAME, str(found.resolve(strict=True)))
        spec = importlib.util.spec_from_file_location(NAME, found, loader=loader)
        if spec is not None:
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
            sys.modules[NAME] = module
            _is_used(found)
            return module
    return None
