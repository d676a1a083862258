"""Which tensors of a rehearsal are on the host, and what is copied between host and device.

All tensors of a rehearsal are fake CPU tensors. A tensor is on the host if it was created without a device
and not moved since, or was put there: ``Tensor.cpu``, ``to("cpu")``, ``device="cpu"``, pinned memory. The
result of an operator whose operands are all on the host is on the host too, and the operator runs there. All
other tensors count as on the device, as do all tensors before the script first names a GPU
(``Placement.is_met``).
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.operators import dtype_name, tensor_bytes
from foretrace.tracer.rehearse.events.tape import HOST_WAIT
from foretrace.tracer.rehearse.gpu.memory import Memory
from foretrace.tracer.rehearse.operators.calls import tensors_in
from foretrace.tracer.rehearse.operators.work import Work
from foretrace.traces.rehearsal import ON_HOST, TO_DEVICE, TO_HOST

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

COPYING: Final = frozenset({"aten.copy_", "aten._foreach_copy_"})
"""Operators that copy their second operand into their first, between host and device too."""

HOST, DEVICE = "host", "device"
"""Where the results of operators are to be created."""

PLACING: Final = frozenset({"aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"})
"""Operators that accept indices on the host for a tensor on the device, as in a real run."""

LEFT, MADE, PINNED = "rehearsed_left", "rehearsed_made", "rehearsed_pinned"
"""Attributes of a storage: it is on the host only because the script named no device; its contents have never
been on the device; it is pinned memory."""

INPUT: Final = "input"
"""Prefix of the name of a copy to the device if the data has never been there, such as a batch."""

STAGED_BYTES: Final = 64 * 2**10
"""Largest copy from unpinned memory to the device for which the host does not wait (CUDA C++ Programming
Guide, "Implicit synchronization"): the driver keeps a copy of the data."""


class _Doing(threading.local):
    """State of one thread: other threads may move or create tensors at the same time.

    Attributes:
        makes: where results are to be created, ``""`` for anywhere.
        direction: of the copy between host and device that is being made, ``""`` if there is none.
        is_meant: whether ``cpu`` without a number means the host in torch's own code.
        is_loading: whether the thread loads a batch, which worker processes do in a real run.
    """

    makes = direction = ""
    is_meant = is_loading = False


class Host:
    """The host, with its memory.

    Args:
        session: the rehearsal.

    Attributes:
        memory: the storages on the host.
        doing: the state of this thread.
    """

    def __init__(self, session: RehearsalSession) -> None:
        import torch

        self._session, self._parameter = session, torch.nn.Parameter
        self._real = {torch.Tensor, torch.nn.Parameter}
        self.memory = Memory(lambda n_bytes: None, block_bytes=1)
        session.memory.host = self.memory
        self.doing = _Doing()
        self._moved = _moved(self._move)

    @property
    def is_used(self) -> bool:
        """Whether the next operator may involve the host."""
        return self._session.placement.is_met or bool(self.doing.direction) or self.memory.holds_any

    def holds(self, tensor: Any) -> bool:
        """Whether *tensor* is on the host. A real tensor is, once the script has named a GPU."""
        own = getattr(tensor, "_local_tensor", tensor)
        if type(own) in self._real:
            return self._session.placement.is_met
        return self.memory.number_of(own.untyped_storage()) >= 0

    def settle(self, tensor: Any, *, to_host: bool = True) -> Any:
        """Count *tensor* as on the host, or on the device, from the start, without a copy; return it."""
        self.take(getattr(tensor, "_local_tensor", tensor).untyped_storage(), to_host=to_host)
        return tensor

    def take(self, storage: Any, *, to_host: bool = True) -> None:
        """Count a *storage* as on the host or on the device, as ``settle`` does for a tensor."""
        here, there = self.memory, self._session.memory
        if not to_host:
            here, there = there, here
        if here.number_of(storage) < 0:
            here.add(storage, there.forget(storage) or "buffers")
        if not to_host:
            vars(storage).pop(MADE, None)

    def faked(self, tensor: Any) -> Any:
        """Return a fake tensor on the host for a real one, such as a tensor made from an array."""
        import torch

        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if mode is None or hasattr(tensor, "fake_mode"):
            return tensor
        found = mode.from_tensor(tensor)
        if not self._session.placement.is_met:  # not counted yet: no operator has created it
            self._session.memory.add(found.untyped_storage(), "activations")
        self._session.placement.leave(found)
        self._session.stated.numbers.keep(found, tensor)
        return found

    def pin(self, tensor: Any) -> Any:
        """Count *tensor* as pinned memory and return it."""
        setattr(getattr(tensor, "_local_tensor", tensor).untyped_storage(), PINNED, True)
        return self.settle(tensor)

    @contextmanager
    def making(self, where: str) -> Iterator[None]:
        """Inside this context, create results on the ``HOST``, on the ``DEVICE``, or anywhere."""
        before, self.doing.makes = self.doing.makes, where
        try:
            yield
        finally:
            self.doing.makes = before

    def moved(self, tensor: Any, dtype: Any, *, to_host: bool, non_blocking: bool, layout: Any = None) -> Any:
        """Return a copy of *tensor* on the host or on the device, in another memory *layout* if one is given.

        The host waits for a blocking copy. A cast to another *dtype* runs on the device, or on the host in a
        blocking copy (``copy_kernel_cuda`` in ATen/native/cuda/Copy.cu).
        """
        is_first = to_host == non_blocking
        source = tensor.to(dtype) if dtype is not None and is_first else tensor
        out = self._moved.apply(source, to_host, non_blocking, layout)
        if not to_host and isinstance(tensor, self._parameter):
            self._session.memory.move(out.untyped_storage(), "parameters")
        if to_host and non_blocking:  # ``_to_copy`` in ATen/native/TensorConversions.cpp
            self.pin(out)
        return out.to(dtype) if dtype is not None else out

    def copy_as(self, written: Any, read: Any, *, to_host: bool, non_blocking: bool) -> Any:
        """Copy *read* into *written*, which has another dtype and place; the cast is that of ``moved``."""
        import torch

        if to_host == non_blocking:
            cast = torch.ops.aten._to_copy.default(read, dtype=written.dtype)
            return written.copy_(cast, non_blocking=non_blocking)
        return written.copy_(self._move(read, to_host=to_host, non_blocking=non_blocking))

    def _move(self, tensor: Any, *, to_host: bool, non_blocking: bool, layout: Any = None) -> Any:
        import torch

        self.doing.direction = TO_HOST if to_host else TO_DEVICE
        try:
            return torch.ops.aten._to_copy.default(tensor, non_blocking=non_blocking, memory_format=layout)
        finally:
            self.doing.direction = ""

    @contextmanager
    def meant(self, *, is_meant: bool = True) -> Iterator[None]:
        """Inside this context ``torch.device("cpu")`` is the host, else maybe the device of a fake tensor."""
        before, self.doing.is_meant = self.doing.is_meant, is_meant
        try:
            yield
        finally:
            self.doing.is_meant = before

    def part(self, name: str, operands: Sequence[Any]) -> str:
        """Return how the host takes part in the operator *name*: a kind of work, ``""`` if it does not.

        An operator runs on the host if all its tensors are there. Tensors of one number may be elsewhere;
        they count only if there are no others. A host tensor for which the script named no device is moved
        to the device if another operand is there: a real run would end with an error.
        """
        if self.doing.makes:
            return ON_HOST if self.doing.makes == HOST else ""
        if self.doing.direction and name == "aten._to_copy":
            return self.doing.direction
        if name in COPYING:
            written, read = (self._holds_first(value) for value in operands[:2])
            return (TO_HOST if written else TO_DEVICE) if written != read else ON_HOST if read else ""
        tensors = tensors_in(operands)
        large = [tensor for tensor in tensors if tensor.dim()]
        there = list(map(self.holds, large or tensors))
        if all(there):
            return ON_HOST if there else ""
        if large and any(there) and name not in PLACING:
            self._session.placement.put_left(large, is_said=False)
        return ""

    def _holds_first(self, values: Any) -> bool:
        return any(map(self.holds, tensors_in(values)[:1]))

    def count(self, out: Any, category: str, part: str, operands: Sequence[Any] = ()) -> None:
        """Count the memory of the results *out* of an operator; *part* is what ``part`` returns for it."""
        is_there = part in {ON_HOST, TO_HOST}
        memory = self.memory if is_there else self._session.memory
        for tensor in tensors_in(out):
            if type(tensor) in self._real:  # a real tensor, of a mesh or of a loader
                continue
            storage = tensor.untyped_storage()
            if part == TO_HOST:
                vars(storage).pop(MADE, None)
            if self._session.memory.number_of(storage) < 0 and memory.add(storage, category) and is_there:
                self._mark(storage, operands, part)

    @staticmethod
    def _mark(storage: Any, operands: Sequence[Any], part: str) -> None:
        """Give *storage*, made of *operands*, the marks that all of them have."""
        for name in (MADE, LEFT) if part == ON_HOST else ():
            if all(is_marked(one, name) for one in tensors_in(operands)):
                setattr(storage, name, True)

    def work(self, part: str, found: Work, operands: Sequence[Any]) -> Work:
        """Return the work of an operator on the host, or of a copy; *found* is its work on the device."""
        if part == ON_HOST:
            return found._replace(kind=ON_HOST, kernels=0)
        read = tensors_in(operands[1]) if found.name in COPYING else tensors_in(operands)[:1]
        size = sum(map(tensor_bytes, read))
        is_input = part == TO_DEVICE and all(is_marked(one, MADE) for one in read)
        return Work(f"{INPUT if is_input else HOST}.{part}", part, found.shapes, dtype_name(read[0]), 0, size)

    def waited(self, part: str, name: str, operands: Sequence[Any], *, non_blocking: bool) -> None:
        """Note that the host waits for a copy by the operator *name*, unless it does not have to.

        It also waits for a non-blocking copy if the memory on the host is not pinned: until a copy from the
        device is done, or until the driver has read the data of a copy to the device (CUDA Runtime API, "API
        synchronization behavior").
        """
        if part == ON_HOST:
            return
        is_write, is_up = name in COPYING, part == TO_DEVICE
        here = tensors_in(operands[1] if is_write and is_up else operands[:1])
        is_free = all(is_marked(one, PINNED) for one in here)
        is_free |= sum(map(tensor_bytes, here)) <= STAGED_BYTES if is_up else not is_write
        if not (non_blocking and is_free):
            self._session.tape.note(HOST_WAIT)


def is_marked(tensor: Any, name: str) -> bool:
    """Whether the storage of *tensor* has the mark *name*. A real tensor was created on the host."""
    found = vars(tensor.untyped_storage())
    return name in found or (name != PINNED and not hasattr(tensor, "fake_mode"))


def _moved(move: Callable[..., Any]) -> Any:
    """Return an autograd function that moves a tensor, and its gradient back (``_to_copy_backward``)."""
    from torch.autograd import Function

    class Moved(Function):  # type: ignore[misc]  # torch is untyped here
        """Copies a tensor. The copy of the gradient is blocking."""

        @staticmethod
        def forward(ctx: Any, tensor: Any, to_host: bool, non_blocking: bool, layout: Any) -> Any:  # noqa: FBT001
            ctx.to_host = to_host
            return move(tensor, to_host=to_host, non_blocking=non_blocking, layout=layout)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return move(gradient, to_host=not ctx.to_host, non_blocking=False), None, None, None

    return Moved
