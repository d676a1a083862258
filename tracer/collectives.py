"""Sees every collective and transfer of a process.

All of them, from Python, from the C++ reducer of DDP or from a compiled graph, are dispatched as ``c10d::*``
operators. An implementation at the dispatch key ``BackendSelect``, which comes first and which none of them
uses, sees each call on any thread and any device, and passes it on with the key removed. Other ways miss
some of them, or deadlock because they hold the interpreter's lock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tracer import internals
from tracer.operators import OPERATORS, Operator, dtype_name
from tracer.records import Communication
from tracer.stamps import cuda_stamp, host_stamp

if TYPE_CHECKING:
    from tracer.session import Session

_DISTRIBUTED: Final = "distributed_c10d.py"
"""File of the Python functions that hand a work to their caller, who then waits in Python."""

_ENGINE: Final = "_engine_run_backward"
"""Innermost Python function while C++ code issues communication in a backward pass."""


class CollectiveHook:
    """Implementations of the ``c10d`` operators that note each call.

    Args:
        session: the recording.
    """

    def __init__(self, session: Session) -> None:
        import torch
        import torch.distributed as dist

        self._session = session
        self._lane = session.lane
        self._dist = dist
        self._coalescing = internals.coalescing_groups()
        self._after = internals.keys_after_backend_select()
        self._library: Any = torch.library.Library("c10d", "IMPL")
        self._functional: Any = torch.library.Library("_c10d_functional", "IMPL")
        for name, operator in OPERATORS.items():
            if (packet := getattr(torch.ops.c10d, name, None)) is not None:
                self._override(self._library, packet.default, self._noting(name, operator, packet.default))
        wait_tensor = internals.wait_tensor()
        self._override(self._functional, wait_tensor, self._waiting(wait_tensor))

    def remove(self) -> None:
        """Give the operators back as they were."""
        for library in (self._library, self._functional):
            internals.destroy_library(library)

    @staticmethod
    def _override(library: Any, operator: Any, kernel: Callable[..., Any]) -> None:
        library.impl(operator, kernel, "BackendSelect", with_keyset=True)

    def _noting(self, name: str, operator: Operator, overload: Any) -> Callable[..., Any]:
        """Return the kernel that notes a call of one operator and passes it on."""
        before, issued, failed = (
            self._session.guarded("collectives", f) for f in (self._before, self._issued, self._failed)
        )
        pause, resume = (self._session.guarded("modules", f) for f in (self._lane.pause, self._lane.resume))
        redispatch, after, flag = overload.redispatch, self._after, internals.async_flag(overload)

        def kernel(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
            communication = before(operator, args)
            if communication is None:
                return redispatch(keyset & after, *args, **kwargs)
            # NCCL runs a synchronous collective on the compute stream itself.
            on_nccl = communication.group.on_nccl and communication.on_device
            on_compute = on_nccl and args[flag : flag + 1] == (False,)
            is_paused = pause() if on_compute else False
            try:
                result = redispatch(keyset & after, *args, **kwargs)
            except BaseException:
                failed(communication)
                resume(is_paused)
                raise
            caller = sys._getframe().f_back  # noqa: SLF001 - None on a thread of C++
            issued(communication, result, caller, on_compute=on_compute)
            resume(is_paused)
            return result

        kernel.__name__ = f"foretrace_{name}"
        return kernel

    def _before(self, operator: Operator, args: tuple[Any, ...]) -> Communication:
        """Describe a call before it is made."""
        session = self._session
        group = session.groups.of(self._dist.ProcessGroup.unbox(args[operator.group]))
        tensor = operator.tensor(args)
        on_device = tensor.is_cuda
        stamp = cuda_stamp if on_device else host_stamp
        at, block, peer = session.position, session.lane.block, -1
        if operator.peer >= 0:
            peer = group.ranks[args[operator.peer]]
            pair = (session.rank, peer) if operator.kind == "send" else (peer, session.rank)
            sequence = group.next_transfer(pair)
            at, block = session.transfer(operator.kind, tensor)
        else:
            sequence = group.next_collective()
        communication = Communication(  # by position: half as long
            operator.kind,
            group,
            sequence,
            peer,
            operator.size(args, len(group.ranks)),
            dtype_name(tensor),
            block,
            (at.step, at.stage, at.virtual_stage, at.microbatch),
            stamp(),
            () if on_device else tuple([_address(output) for output in operator.outputs(args)]),
            on_device,
        )
        session.sink.put(communication)  # before it is made: NCCL may wait for a missing rank inside of it
        session.issued.note(communication)
        return communication

    @staticmethod
    def _failed(communication: Communication) -> None:
        """The call raised: what was asked for is over."""
        communication.end = host_stamp() if isinstance(communication.start, int) else cuda_stamp()

    def _issued(self, communication: Communication, result: Any, caller: Any, *, on_compute: bool) -> None:
        """Follow a call that has just been made to its end; *caller* is the Python frame it came from."""
        boxed = result[-1] if isinstance(result, tuple | list) else result
        work = None if on_compute else self._unboxed(boxed)
        code = caller.f_code if caller is not None else None
        from_python = code is not None and code.co_filename.endswith(_DISTRIBUTED)
        in_engine = code is None or code.co_name == _ENGINE
        completions = self._session.completions
        watchable = _watchable(communication, from_python=from_python)
        completions.issued(
            communication,
            work,
            watch_now=in_engine,
            watchable=watchable,
            is_coalesced=communication.is_p2p and bool(self._coalescing),
        )
        if not communication.on_device:
            completions.sweep(communication.start)

    def _unboxed(self, boxed: Any) -> Any:
        """Return the work in what an operator returned, None if it was complete on return."""
        try:
            return self._dist.Work.unbox(boxed)
        except (RuntimeError, TypeError):
            return None

    def _waiting(self, overload: Any) -> Callable[..., Any]:
        """Return the kernel of ``wait_tensor``, by which functional collectives are waited for."""
        completions, lane, guarded = self._session.completions, self._session.lane, self._session.guarded
        ended, claim = (guarded("collectives", f) for f in (completions.ended, completions.claim))
        pause, resume = (guarded("modules", f) for f in (lane.pause, lane.resume))
        redispatch, after, by_storage = overload.redispatch, self._after, completions.by_storage

        def kernel(keyset: Any, tensor: Any) -> Any:
            communication = by_storage.get(_address(tensor)) if by_storage else None
            if communication is None and not tensor.is_cuda:
                return redispatch(keyset & after, tensor)  # waited for before: DTensor asks more than once
            if communication is not None:
                claim(communication)
            is_paused = pause()
            try:
                return redispatch(keyset & after, tensor)
            finally:
                if communication is not None:
                    ended(communication)
                resume(is_paused)

        return kernel


def _watchable(communication: Communication, *, from_python: bool) -> bool:
    """Whether a second thread may wait for *communication*."""
    if communication.is_p2p:
        return from_python
    return communication.group.on_gloo and communication.kind != "reduce_scatter"


def _address(tensor: Any) -> int:
    """Return where the elements of *tensor* are, 0 if nowhere."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return 0
