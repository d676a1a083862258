"""Compiles the C++ of the device, once for each PyTorch, and keeps it where nobody else can write."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from foretrace.tracer.rehearse.errors import RehearsalError

SOURCE: Final = Path(__file__).with_name("device.cpp")

COMPILERS: Final = ("c++", "g++", "clang++")
"""Names of compilers, in the order in which they are looked for after ``$CXX``."""

FLAGS: Final = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")
"""A warning would be about headers of PyTorch: the suite compiles this file in every version it runs on."""

TIMEOUT_S: Final = 600
"""Time after which a compiler counts as hanging: it takes 10 s, and minutes on a machine that others use."""

ONLY_OWNER: Final = 0o700


def cache_folder() -> Path:
    """Return the folder of what has been compiled: below ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "foretrace" / "device"


def checked(folder: Path) -> Path:
    """Return *folder*, made if it is not there.

    Raises:
        RehearsalError: others own it or can write to it: what lies there would be run as this user.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=ONLY_OWNER, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise RehearsalError(
            f"{folder}: {error.strerror}; what is compiled for a rehearsal is kept there: "
            "set XDG_CACHE_HOME to a folder that you can write to"
        ) from error
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.getuid()
        or stat.S_IMODE(found.st_mode) != ONLY_OWNER
    ):
        raise RehearsalError(
            f"{folder} must be a folder of yours that nobody else can write to, because its files are run: "
            f"chmod 700 {folder}, or remove it"
        )
    return folder


def compiler() -> str:
    """Return the path of a C++ compiler.

    Raises:
        RehearsalError: there is none.
    """
    asked = os.environ.get("CXX", "").split()
    for name in (*asked[:1], *COMPILERS):
        if found := shutil.which(name):
            return found
    raise RehearsalError(
        "a rehearsal needs a C++ compiler, once for each version of PyTorch: install g++ "
        "(apt install g++, dnf install gcc-c++, conda install gxx), or name one in CXX"
    )


def library(torch_folder: Path, *, new_abi: bool, runtime: int) -> Path:
    """Return the compiled library for the PyTorch in *torch_folder*; compile it unless that was done before.

    Args:
        torch_folder: of the package, with its headers and libraries.
        new_abi: whether this PyTorch has the strings of C++11.
        runtime: CUDA to tell, as a number: 12080 for 12.8.

    Raises:
        RehearsalError: there is no compiler, it fails, or the folder of what is compiled is not safe.
    """
    flags = (*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(new_abi)}", f"-DCUDA_VERSION={runtime}")
    parts = (SOURCE.read_bytes(), (torch_folder / "version.py").read_bytes(), " ".join(flags).encode())
    key = hashlib.sha256(b"\0".join((*parts, platform.machine().encode()))).hexdigest()[:24]
    folder = checked(cache_folder())
    found = folder / f"{key}.so"
    if not found.exists():
        _compile(torch_folder, flags, found)
    return found


def _compile(torch_folder: Path, flags: tuple[str, ...], target: Path) -> None:
    """Compile to *target*, which is there at once and whole, also if another process does the same."""
    headers = torch_folder / "include"
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [compiler(), *flags, str(SOURCE), "-o", str(made)]
        command += [f"-I{folder}" for folder in (headers, headers / "torch" / "csrc" / "api" / "include")]
        command += [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RehearsalError(f"{command[0]} has not compiled {SOURCE.name} in {TIMEOUT_S} s") from None
        if done.returncode:
            said = next(
                (line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-300:]
            )
            raise RehearsalError(f"{command[0]} cannot compile {SOURCE.name} for this PyTorch: {said}")
        made.replace(target)
