"""Which tensors of a rehearsal are on the host, and what goes between it and the device.

All tensors of a rehearsal are fake ones of a processor. They count as the device's unless the script, or
torch on its behalf, has put them on the host in words that mean nothing else: ``Tensor.cpu``, ``to("cpu")``,
``device="cpu"``, pinned memory. What comes of nothing but such tensors is on the host as well, and what
computes it runs there.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tracer.operators import dtype_name, tensor_bytes
from tracer.rehearse.calls import tensors_in
from tracer.rehearse.memory import Memory
from tracer.rehearse.tape import HOST_WAIT
from tracer.rehearse.works import Work
from traces.rehearsal import ON_HOST, TO_DEVICE, TO_HOST

if TYPE_CHECKING:
    from tracer.rehearse.session import RehearsalSession

COPYING: Final = frozenset({"aten.copy_", "aten._foreach_copy_"})
"""Operators that write their second operand to their first, wherever the two are."""


class Host:
    """The memory of the host as far as the script asks for it.

    Args:
        session: the rehearsal.

    Attributes:
        memory: what is held there.
        is_meant: whether a device without a number means the host, where torch itself speaks of it.
    """

    def __init__(self, session: RehearsalSession) -> None:
        self._session = session
        self.memory = Memory(lambda n_bytes: None)
        session.memory.host = self.memory
        self.is_meant = False
        self._direction, self._makes = "", False
        self._moved = _moved(self._move)

    @property
    def is_used(self) -> bool:
        """Whether an operator may have to do with the host."""
        return bool(self._direction) or self._makes or self.memory.holds_any

    def holds(self, tensor: Any) -> bool:
        """Whether *tensor* is on the host."""
        own = getattr(tensor, "_local_tensor", tensor)
        return self.memory.number_of(own.untyped_storage()) >= 0

    def settle(self, tensor: Any, *, to_host: bool = True) -> Any:
        """Take *tensor* to have been on the host from the start, or on the device, and return it."""
        self.take(getattr(tensor, "_local_tensor", tensor).untyped_storage(), to_host=to_host)
        return tensor

    def take(self, storage: Any, *, to_host: bool = True) -> None:
        """Do to a *storage* what ``settle`` does to a tensor."""
        here, there = self.memory, self._session.memory
        if not to_host:
            here, there = there, here
        if here.number_of(storage) < 0:
            here.add(storage, there.forget(storage) or "buffers")

    @contextmanager
    def making(self, *, is_meant: bool) -> Iterator[None]:
        """Let operators for a while make what they make on the host, if that *is_meant*."""
        before, self._makes = self._makes, is_meant
        try:
            yield
        finally:
            self._makes = before

    def moved(self, tensor: Any, dtype: Any, *, to_host: bool, non_blocking: bool) -> Any:
        """Return *tensor* on the other side; a blocking copy holds up the host.

        Another *dtype* is made on the device, or on the host by a blocking copy (``copy_kernel_cuda`` in
        ATen/native/cuda/Copy.cu).
        """
        is_first = to_host == non_blocking
        source = tensor.to(dtype) if dtype is not None and is_first else tensor
        out = self._moved.apply(source, to_host, non_blocking)
        return out.to(dtype) if dtype is not None else out

    def copy_as(self, written: Any, read: Any, *, to_host: bool, non_blocking: bool) -> Any:
        """Copy *read* into *written*, of another type, on the other side; cast as ``moved`` does."""
        import torch

        if to_host == non_blocking:
            cast = torch.ops.aten._to_copy.default(read, dtype=written.dtype)
            return written.copy_(cast, non_blocking=non_blocking)
        return written.copy_(self._move(read, to_host=to_host, non_blocking=non_blocking))

    def _move(self, tensor: Any, *, to_host: bool, non_blocking: bool) -> Any:
        import torch

        self._direction = TO_HOST if to_host else TO_DEVICE
        try:
            return torch.ops.aten._to_copy.default(tensor, non_blocking=non_blocking)
        finally:
            self._direction = ""

    @contextmanager
    def meant(self) -> Iterator[None]:
        """Let ``torch.device("cpu")`` be the host for a while; else it may be what a tensor says it is on."""
        before, self.is_meant = self.is_meant, True
        try:
            yield
        finally:
            self.is_meant = before

    def part(self, name: str, operands: Sequence[Any]) -> str:
        """Return the part of the host in an operator called *name*: a kind of work, ``""`` if it has none.

        Torch computes on the host with nothing but tensors that are there. Numbers that are not whole decide,
        for a kernel of the device may be told places and lengths on the host; single numbers do not. Of whole
        numbers the first ones do: those that others are places in.
        """
        if self._makes:
            return ON_HOST
        if self._direction and name == "aten._to_copy":
            return self._direction
        if name in COPYING:
            written, read = (self._holds_first(value) for value in operands[:2])
            return (TO_HOST if written else TO_DEVICE) if written != read else ON_HOST if read else ""
        tensors = tensors_in(operands)
        if not any(map(self.holds, tensors)):
            return ""
        large = [tensor for tensor in tensors if tensor.dim()]
        decide = [tensor for tensor in large if tensor.dtype.is_floating_point] or large[:1]
        is_on_host = any(map(self.holds, decide)) if decide else all(map(self.holds, tensors))
        return ON_HOST if is_on_host else ""

    def _holds_first(self, values: Any) -> bool:
        return any(map(self.holds, tensors_in(values)[:1]))

    def count(self, out: Any, category: str, part: str) -> None:
        """Count the memory of what an operator with this *part* of the host has made."""
        memory = self.memory if part in {ON_HOST, TO_HOST} else self._session.memory
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if self._session.memory.number_of(storage) < 0:
                memory.add(storage, category)

    def work(self, part: str, found: Work, operands: Sequence[Any]) -> Work:
        """Return what an operator that would be *found* on the device is as *part* of the host."""
        if part == ON_HOST:
            return found._replace(kind=ON_HOST, kernels=0)
        read = tensors_in(operands[1]) if found.name in COPYING else tensors_in(operands)[:1]
        size = sum(map(tensor_bytes, read))
        return Work(f"host.{part}", part, found.shapes, dtype_name(read[0]), 0, size)

    def waited(self, part: str, *, non_blocking: bool) -> None:
        """Note that the host waits for a copy, unless it need not."""
        if part != ON_HOST and not non_blocking:
            self._session.tape.note(HOST_WAIT)


def _moved(move: Callable[..., Any]) -> Any:
    """Return a function of autograd that moves a tensor, and its gradient back (``_to_copy_backward``)."""
    from torch.autograd import Function

    class Moved(Function):  # type: ignore[misc]  # torch is untyped here
        """The gradient is moved by a copy that blocks."""

        @staticmethod
        def forward(ctx: Any, tensor: Any, to_host: bool, non_blocking: bool) -> Any:  # noqa: FBT001
            ctx.to_host = to_host
            return move(tensor, to_host=to_host, non_blocking=non_blocking)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return move(gradient, to_host=not ctx.to_host, non_blocking=False), None, None

    return Moved
