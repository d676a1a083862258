"""Workspaces of cuBLAS: memory that PyTorch takes from its caching allocator and never gives back.

The first matrix product of a thread on a stream takes one, after the memory of its result, and later products
of that thread on that stream use it again: a handle belongs to a thread, a workspace to a handle and a stream
(``getCurrentCUDABlasHandle`` and ``setWorkspaceForHandle`` in aten/src/ATen/cuda/CublasHandlePool.cpp of
PyTorch; cuBLASLt uses the same handles). Autograd's nodes for a GPU run in a thread of their own
(torch/csrc/autograd/engine.cpp), whatever thread has called ``backward``.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer import internals
from foretrace.tracer.rehearse.device.installing import Gpu

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession
    from foretrace.tracer.rehearse.values.questions import Kernel

SETTING: Final = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable that says how large a workspace is, as pairs ``:KIB:COUNT``."""

LARGE_BYTES: Final = 32 * 2**20
"""Size on Hopper and Blackwell, if nothing else is said."""

SMALL_BYTES: Final = 2 * 4096 * 2**10 + 8 * 16 * 2**10
"""Size on any other GPU: ``:4096:2:16:8``."""

LARGE_ON: Final = frozenset({9, 10, 11, 12})
"""Major compute capabilities of Hopper and Blackwell."""

PRODUCTS: Final = frozenset(
    {
        *("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.mv", "aten.addmv", "aten.dot"),
        *("aten.vdot", "aten._int_mm", "aten._scaled_mm", "aten._scaled_mm_v2"),
    }
)
"""Operators whose kernels on CUDA come from cuBLAS or cuBLASLt."""


def workspace_bytes(major: int, environment: Mapping[str, str]) -> int:
    """Return the size of a workspace on a GPU of compute capability *major*.

    >>> workspace_bytes(9, {}), workspace_bytes(8, {}), workspace_bytes(9, {SETTING: ":4096:2:16:8"})
    (33554432, 8519680, 8519680)
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", environment.get(SETTING, ""))
    if pairs:
        return sum(int(kib) * 2**10 * int(count) for kib, count in pairs)
    return LARGE_BYTES if major in LARGE_ON else SMALL_BYTES


class Workspaces:
    """Knows which threads and streams have a workspace.

    Args:
        session: the rehearsal.
    """

    def __init__(self, session: RehearsalSession) -> None:
        self._session, self._is_in_backward = session, internals.is_in_backward()
        self._taken = set[tuple[int, int]]()

    def used_by(self, name: str, computing: Kernel) -> Kernel:
        """Return the handler *computing* of the operator *name*: it takes a workspace, if cuBLAS does."""
        if name not in PRODUCTS:
            return computing
        host, lane = self._session.host, self._session.lane

        def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = computing(func, args, kwargs)
            if not (host.part(name, args, None)):
                self._use(lane.stream)
            return out

        return handler

    def _use(self, stream: int) -> None:
        """A matrix product is issued on *stream*, by this thread or, in a backward, by autograd's."""
        thread = 0 if self._is_in_backward() else threading.get_ident()
        if (thread, stream) not in self._taken:
            self._taken.add((thread, stream))
            self._session.memory.reserve(workspace_bytes(Gpu().major, os.environ), stream)
