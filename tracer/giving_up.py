"""Ends a wait for a transfer of gloo from outside, and the transfer goes on as if nobody had waited.

gloo has that for waits (``abortWaitSend`` and ``abortWaitRecv`` in ``gloo/transport/unbound_buffer.h``) and
torch for transfers (``SendWork::abort`` and ``RecvWork::abort`` in ``ProcessGroupGloo.cpp``), but Python
does not have it. So the functions are called in the library of torch, with the address that pybind11 keeps
behind the head of an object (``instance::simple_value_holder`` in ``pybind11/detail/common.h``), and only if
what is there begins with the table of functions of just that class.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

CLASSES: Final = ("N4c10d16ProcessGroupGloo8SendWork", "N4c10d16ProcessGroupGloo8RecvWork")
"""Works of transfers of gloo, as compilers write their names."""

_VIRTUAL: Final = 2 * ctypes.sizeof(ctypes.c_void_p)
"""Bytes in a table of functions before those: an offset and the type (Itanium C++ ABI, 2.5.2)."""


def give_up(work: Any) -> bool:
    """Have whoever waits for a transfer give up, or else who waits for it next; whether that could be done.

    Args:
        work: a ``Work``.
    """
    with suppress(OSError, AttributeError, ValueError):  # another torch
        library = _library()
        address = _address(work)
        table = ctypes.c_void_p.from_address(address).value if address else None
        for name in CLASSES:
            own = ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{name}E"))
            if table == own + _VIRTUAL:
                abort = library[f"_Z{name}5abortEv"]
                abort.argtypes, abort.restype = [ctypes.c_void_p], None
                abort(address)
                return True
    return False


def _library() -> ctypes.CDLL:
    """Return torch's library for processors, which a process that has a group has loaded."""
    import torch

    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _address(work: Any) -> int | None:
    """Return where the object of C++ is that *work* holds, None if it is no plain one of torch."""
    import torch.distributed as dist

    if type(work) is not dist.Work:  # a class of Python's own may hold it elsewhere
        return None
    return ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value
