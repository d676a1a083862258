"""The C++ compiler of this machine: whether there is one, and how it makes hooks for the torch of here."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

NEW_STRINGS: Final = b"_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx11"
"""A name in a torch whose strings are those of C++ 11 (``_GLIBCXX_USE_CXX11_ABI``): on PyPI since 2.7."""

FLAGS: Final = "FORETRACE_NATIVE_FLAGS"
"""Environment variable with more flags for the compiler, as ``-g -fsanitize=address``: a build of its own."""

COMPILE_S: Final = 600
"""Time after which a compiler is given up; 20 s of a processor are enough."""

KILLED: Final = 128
"""Above it the status of a shell is that of what a signal has ended."""

KILLED_INSIDE: Final = ("signal terminated program", "unable to execute command", "failed due to signal")
"""What GCC and Clang say, with a status of their own, where a signal has ended the compiler that they run."""

SUPERVISED: Final = """
exec 3<&0 </dev/null
(read -r _ <&3; kill 0) >/dev/null 2>&1 & guard=$!
"$0" "$@" 3<&-; status=$?
kill $guard; exit $status
"""
"""How a shell runs a compiler: its standard input is a pipe of which this process has the other end, which is
closed when it is killed, and then everything in the group of the shell ends. A shell need not know numbers of
files of two digits; 3 it does. A signal at the death of a parent (``PR_SET_PDEATHSIG``) would reach the
driver of the compiler, and not the compiler that it has started."""


def tools() -> tuple[str | None, bool]:
    """Return where the C++ compiler is, if there is one, and whether the headers of Python are there."""
    has_headers = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    return shutil.which(os.environ.get("CXX") or "c++"), has_headers


def flags() -> list[str]:
    """Return the flags that a person adds to ours."""
    return os.environ.get(FLAGS, "").split()


def folder() -> Path:
    """Return the folder of torch, which is not imported by that.

    Raises:
        OSError: torch is not where it should be.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise OSError("torch has no folder")
    return Path(next(iter(spec.submodule_search_locations)))


def command(compiler: str, source: Path, target: Path) -> list[str]:
    """Return the command that compiles *source* into the library *target*.

    Raises:
        OSError: torch is not where it should be.
    """
    torch = folder()
    folders = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    has_new_strings = NEW_STRINGS in (torch / "lib/libc10.so").read_bytes()
    return [
        *(compiler, "-std=c++20", "-O2", "-fPIC", "-shared", "-w", "-DUSE_DISTRIBUTED"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(has_new_strings)}",
        *flags(),
        *(f"-I{folder}" for folder in folders),
        *(str(source), "-o", str(target)),
        *(f"-L{torch / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"),
    ]


def compile_into(target: Path, compiler: str, source: Path) -> None:
    """Have *compiler* make the library *target* of *source*: all of it, or nothing.

    Raises:
        SubprocessError: the compiler failed, or took too long.
        OSError: the library cannot be written, or torch is not where it should be.
    """
    with tempfile.TemporaryDirectory(prefix=f"{target.name.partition('-')[0]}-", dir=target.parent) as folder:
        made = Path(folder) / target.name
        _run(command(compiler, source, made))
        with made.open("rb") as file:  # a machine that loses its power leaves all of it, or nothing
            os.fsync(file.fileno())
        made.replace(target)


def _run(arguments: list[str]) -> None:
    """Run a compiler, which ends with this process, however that ends, and with it all that it has started.

    Raises:
        SubprocessError: it failed, or took too long.
    """
    ours, theirs = os.pipe()
    try:
        with subprocess.Popen(
            ["sh", "-c", SUPERVISED, *arguments],
            stdin=ours,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        ) as running:
            try:
                _, said = running.communicate(timeout=COMPILE_S)
            except BaseException:  # as Ctrl-C
                os.killpg(running.pid, signal.SIGTERM)
                raise
    finally:
        os.close(ours)
        os.close(theirs)
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, arguments[0], stderr=said)


def has_refused(error: Exception) -> bool:
    """Whether a compiler says no, or there is none: it would say so again. One that was killed has not."""
    if isinstance(error, subprocess.TimeoutExpired):
        return False
    if not isinstance(error, subprocess.CalledProcessError):
        return True
    said = str(error.stderr or "")
    return 0 < error.returncode < KILLED and not any(words in said for words in KILLED_INSIDE)


def last_line(error: Exception) -> str:
    """Return the line in which a compiler, or the system, says what is wrong."""
    said = str(getattr(error, "stderr", "") or error).strip().splitlines()
    return next((line for line in said if "error" in line), said[-1] if said else type(error).__name__)
