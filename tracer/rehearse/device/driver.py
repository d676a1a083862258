"""The compiled part of the device, with types; and what its streams went through, in order."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from foretrace.tracer import internals
from foretrace.tracer.rehearse.device.memory import Meter
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.traces.private import is_private, private_folder
from foretrace.traces.replacing import scratch_folder

# Compiles the C++ of the device, once for each PyTorch, and keeps it where nobody else can write.


SOURCE: Final = Path(__file__).with_name("device.cpp")

COMPILERS: Final = ("c++", "g++", "clang++")
"""Names of compilers, in the order in which they are looked for after ``$CXX``."""

FLAGS: Final = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")
"""A warning would be about headers of PyTorch: the suite compiles this file in every version it runs on."""

TIMEOUT_S: Final = 600
"""Time after which a compiler counts as hanging: it takes 10 s, and minutes on a machine that others use."""

WHY: Final = "what is compiled for a rehearsal is kept there: set XDG_CACHE_HOME to a folder of yours alone"


def cache_folder() -> Path:
    """Return the folder of what has been compiled: below ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "foretrace" / "device"


def compiler() -> str:
    """Return the path of a C++ compiler.

    Raises:
        RehearsalError: there is none.
    """
    asked = os.environ.get("CXX", "").split()
    # Behind the name of a compiler CXX may have options.
    for name in (*asked[:1], *COMPILERS):
        if found := shutil.which(name):
            return found
    raise RehearsalError(
        "a GPU that is not there takes a C++ compiler, once for each version of PyTorch: install g++ "
        "(apt install g++, dnf install gcc-c++, conda install gxx), or name one in CXX"
    )


def library(
    torch_folder: Path, *, new_abi: bool, runtime: int, tell: Callable[[str], None] = lambda words: None
) -> Path:
    """Return the compiled library for the PyTorch in *torch_folder*; compile it unless that was done before.

    Args:
        torch_folder: of the package, with its headers and libraries.
        new_abi: whether this PyTorch has the strings of C++11.
        runtime: CUDA to tell, as a number: 12080 for 12.8.
        tell: called with what is done if it takes long.

    Raises:
        RehearsalError: there is no compiler, or it fails.
        RunError: the folder of what is compiled is not safe.
    """
    flags = (*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(new_abi)}", f"-DCUDA_VERSION={runtime}")
    parts = (SOURCE.read_bytes(), (torch_folder / "version.py").read_bytes(), " ".join(flags).encode())
    # Another source, PyTorch, machine or other flags have a file of their own.
    key = hashlib.sha256(b"\0".join((*parts, platform.machine().encode()))).hexdigest()[:24]
    found = private_folder(cache_folder(), WHY) / f"{key}.so"
    if not found.exists():
        by = compiler()
        tell("compiling a GPU that is not there, once for this version of PyTorch: about 20 seconds")
        _compile(by, torch_folder, flags, found)
    if not is_private(found):
        raise RehearsalError(f"{found}: others can write to it, and it would be run: remove it")
    return found


def _compile(by: str, torch_folder: Path, flags: tuple[str, ...], target: Path) -> None:
    """Compile to *target*, which is there at once and whole, also if another process does the same."""
    headers = torch_folder / "include"
    with scratch_folder(target) as (scratch, _):
        made = scratch / target.name
        command = [by, *flags, str(SOURCE), "-o", str(made)]
        command += [f"-I{folder}" for folder in (headers, headers / "torch" / "csrc" / "api" / "include")]
        command += [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
        try:
            own = {**os.environ, "TMPDIR": str(scratch)}  # so that a compiler that is killed leaves nothing
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=own
            )
        except subprocess.TimeoutExpired:
            raise RehearsalError(f"{command[0]} has not compiled {SOURCE.name} in {TIMEOUT_S} s") from None
        if done.returncode:
            said = next(
                (line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-300:]
            )
            raise RehearsalError(f"{command[0]} cannot compile {SOURCE.name} for this PyTorch: {said}")
        made.replace(target)


KINDS: Final = ("record", "wait", "synchronize_stream", "synchronize_event", "synchronize_device")
"""What happens to streams, as device.cpp numbers it."""

MOST_DEVICES: Final = 120
"""Devices of a process, as device.cpp has room for them."""

HOST: Final = -1
"""Number of the device of pinned memory."""

PAGED: Final = -2
"""Number of the device of other memory of the host."""

_ROOM: Final = 1024


class Entry(NamedTuple):
    """Something that happened to a stream or an event."""

    kind: str  # one of `KINDS`
    stream: int  # number of the stream that records or waits; 0 is the default stream
    number: int  # of the event


class Driver:
    """The device below PyTorch's operators, for ``internals.become_cuda_build``.

    Args:
        library: the compiled part.
        count: devices of the process.
        capability: major and minor version of the architecture.
        cudnn: version of cuDNN as a number.

    Attributes:
        meter: what a script is told of memory; a session, which follows that, puts its own here.
    """

    def __init__(self, library: Path, count: int, capability: tuple[int, int], cudnn: int) -> None:
        self._library = ctypes.PyDLL(
            str(library)
        )  # keeps Python's lock: each call takes less than giving it up
        self._entries = (ctypes.c_int64 * (len(Entry._fields) * _ROOM))()
        self._count, self.meter = count, Meter(lambda: 0)
        self._call("install", count, *capability, cudnn)
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        self._place = self._function("place", number, pointer, number)
        self._take = self._function("take", number, pointer, number)
        self._resized = self._function("resized", None, pointer)
        self._is_pinned = self._function("is_pinned", number, pointer)
        self._exchange = self._function("exchange", number, number)
        self._stream = self._function("stream", number, number)
        tensors = (pointer,) * 4
        self._takes = self._function("takes", number, number, *tensors, ctypes.c_double, number, number)

    def _function(self, name: str, returned: Any, *taken: Any) -> Any:
        found = getattr(self._library, f"device_{name}")
        found.restype, found.argtypes = returned, taken
        return found

    def _call(self, name: str, *values: int) -> None:
        self._function(name, None, *[ctypes.c_int64] * len(values))(*values)

    @property
    def count(self) -> int:
        """Devices of the process; may change until PyTorch has first used one."""
        return self._count

    @count.setter
    def count(self, count: int) -> None:
        self._count = count
        self._call("count", count)

    def exchange(self, device: int) -> int:
        """Make *device* current in this thread unless it is negative; return the one that was."""
        before: int = self._exchange(device)
        return before

    def stream(self, device: int) -> int:
        """Return the number of the current stream of *device* (-1: the current one) in this thread."""
        number: int = self._stream(device)
        return number

    def set_stream(self, device: int, stream: int) -> None:
        """Make *stream* the current one of *device* in this thread."""
        self._call("set_stream", device, stream)

    def synchronize(self) -> None:
        """Note that the host waits for the current device."""
        self._call("synchronize")

    def note(self, *, is_on: bool) -> None:
        """Note what happens from now on, or do not."""
        self._call("log", is_on)

    def take(self) -> Iterator[Entry]:
        """Yield what has happened since the last call, in order."""
        width = len(Entry._fields)
        while n := self._take(self._entries, _ROOM):
            rows = self._entries[: width * n]
            for at in range(0, width * n, width):
                yield Entry(KINDS[rows[at]], *rows[at + 1 : at + width])

    def place(self, storage: Any, device: int) -> int:
        """Give *storage* an address on *device* unless it has one; return it, 0 for a storage of no bytes."""
        address: int = self._place(internals.number_of_storage(storage), device)
        return address

    def resized(self, storage: Any) -> None:
        """Give *storage*, which has another size now, another address if it had one."""
        self._resized(internals.number_of_storage(storage))

    def is_pinned(self, storage: Any) -> bool:
        """Whether *storage* is pinned memory of the host."""
        return bool(self._is_pinned(internals.number_of_storage(storage)))

    def takes(self, kernel: int, *of: Any) -> bool:
        """Whether a kernel of attention takes tensors (where C++ holds them), a rate of dropout and flags.

        Raises:
            RehearsalError: the shapes do not tell.
        """
        found: int = self._takes(kernel, *of)
        if found < 0:
            raise RehearsalError("the shapes of an attention do not tell which kernel a GPU takes for it")
        return bool(found)
