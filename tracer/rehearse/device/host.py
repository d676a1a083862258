"""The host of a rehearsed GPU: what is in its memory, and what is copied between it and the device.

PyTorch itself knows where a tensor is. Until a script makes its first tensor on a GPU, it may be one that
trains on processors: its memory counts as that of the device, and moves to the host with that tensor.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.operators import dtype_name, tensor_bytes
from foretrace.tracer.rehearse.device import driver
from foretrace.tracer.rehearse.device.installing import Device
from foretrace.tracer.rehearse.device.memory import Memory
from foretrace.tracer.rehearse.state import State
from foretrace.tracer.rehearse.tape.calls import Kernel, tensors_in
from foretrace.tracer.rehearse.tape.works import Work
from foretrace.traces.rehearsal import HOST_WAIT, ON_HOST, TO_DEVICE, TO_HOST

COPYING: Final = frozenset({"aten.copy_", "aten._foreach_copy_"})
"""Operators that copy their second operand into their first, between host and device too."""

RETURNED: Final = "rehearsed_returned"
"""Attribute of a storage of the host whose contents come from the device."""

HOST, INPUT = "host", "input"
"""Prefixes of the names of copies to the device: any, and of what has never been there, such as a batch."""

STAGED_BYTES: Final = 64 * 2**10
"""Largest copy from unpinned memory to the device for which the host does not wait (CUDA C++ Programming
Guide, "Implicit synchronization"): the driver keeps a copy of the data."""


def kind_of(tensor: Any) -> str:
    """Return the kind of the device of *tensor*, or of its local shard, as torch names it."""
    own = getattr(tensor, "_local_tensor", tensor)
    # Asked of each operator: ``device`` of a fake tensor is an operator itself.
    kind: str = (getattr(own, "fake_device", None) or own.device).type
    return kind


class _Doing(threading.local):
    """Whether this thread loads a batch, which worker processes do in a real run."""

    is_loading = False


class Host:
    """The host, with its memory.

    Args:
        device: the devices of the process.

    Attributes:
        is_used: whether the script has made a tensor on a GPU, so that host and device are two places.
    """

    def __init__(self, session: State, device: Device) -> None:
        import torch

        self._session, self._device = session, device
        self._real = {torch.Tensor, torch.nn.Parameter}
        self.memory = Memory(lambda n_bytes: None, block_bytes=1)  # the storages on the host
        session.memory.host = self.memory
        self.doing = _Doing()  # the state of this thread
        self.is_used = False
        self._early = list[weakref.ref[Any]]()
        session.note_job(device="cpu")

    def meet_device(self) -> None:
        """Count what has been made so far as on the host: the script makes its first tensor on a GPU."""
        self.is_used = True
        self._session.job.pop("device", None)
        there = self._session.memory
        early, self._early = [kept() for kept in self._early], []
        for storage in (*there.storages(), *early):
            if storage is not None:
                self.memory.add(storage, there.forget(storage) or "buffers")
        there.begin_device()

    def on_device(self, tensor: Any) -> bool:
        """Whether *tensor*, or its local shard, is on a GPU."""
        return kind_of(tensor) == "cuda"

    def holds(self, tensor: Any) -> bool:
        """Whether *tensor* is on the host, once a GPU is used; one of the meta device is nowhere."""
        return self.is_used and kind_of(tensor) == "cpu"

    def faked(self, tensor: Any) -> Any:
        """Return a fake tensor on the host for a real one, such as a tensor made from an array."""
        if type(tensor) not in self._real:
            return tensor
        found = self._device.mode.from_tensor(tensor)
        self.count(found, "activations", ON_HOST)
        self._session.stated.numbers.keep(found, tensor)
        return found

    def settle(self, tensor: Any) -> None:
        """Count *tensor*, to which torch has given a device by itself, where it is."""
        # *here* is where the tensor is, *there* is where it may have been counted so far.
        here, there = self.memory, self._session.memory
        if self.on_device(tensor):
            if not self.is_used:
                self.meet_device()
            here, there = there, here
        storage = tensor.untyped_storage()
        if not self.is_used:
            self._early.append(weakref.ref(storage))
        elif here.number_of(storage) < 0:
            here.add(storage, there.forget(storage) or "buffers")

    def adopt(self, view: Any) -> None:
        """Count a fake tensor for one that was made of a list: no operator has made its memory."""
        if self.is_used:
            self.count(view, "activations", ON_HOST)
        else:
            self._early.append(weakref.ref(view.untyped_storage()))

    def pin(self, tensor: Any) -> Any:
        """Count *tensor*, or its local shard, as pinned memory and return it."""
        own = getattr(tensor, "_local_tensor", tensor)
        self._device.driver.place(own.untyped_storage(), driver.HOST)
        return tensor

    def part(self, name: str, operands: Sequence[Any], out: Any) -> str:
        """Return how the host takes part in the operator *name*: a kind of work, ``""`` if it does not."""
        made = tensors_in(out)
        if not self.is_used:
            if not any(map(self.on_device, made)):
                return ""
            self.meet_device()
        if name in COPYING:
            written, read = (self._holds_first(value) for value in operands[:2])
            return (TO_HOST if written else TO_DEVICE) if written != read else ON_HOST if read else ""
        tensors = made or tensors_in(operands)
        is_here = bool(tensors) and self.holds(tensors[0])
        if name == "aten._to_copy" and self._holds_first(operands[0]) != is_here:
            return TO_HOST if is_here else TO_DEVICE
        return ON_HOST if is_here else ""

    def _holds_first(self, values: Any) -> bool:
        return any(map(self.holds, tensors_in(values)[:1]))

    def count(self, out: Any, category: str, part: str, operands: Sequence[Any] = ()) -> None:
        """Count the memory of the results *out* of an operator; *part* is what ``part`` returns for it."""
        for tensor in tensors_in(out):
            if type(tensor) in self._real:  # a real tensor, of a mesh or of a loader
                continue
            storage, is_here = tensor.untyped_storage(), self.holds(tensor)
            if is_here and self._session.apart.is_building:  # numbers by which DDP finds its buckets
                continue
            memory = self.memory if is_here else self._session.memory
            memory.add(storage, category)
            if is_here and (part == TO_HOST or any(map(_is_returned, tensors_in(operands)))):
                setattr(storage, RETURNED, True)

    def work(self, part: str, found: Work, operands: Sequence[Any]) -> Work:
        """Return the work of an operator on the host, or of a copy; *found* is its work on the device."""
        if part == ON_HOST:
            return found._replace(kind=ON_HOST, kernels=0)
        read = tensors_in(operands[1]) if found.name in COPYING else tensors_in(operands)[:1]
        size = sum(map(tensor_bytes, read))
        is_input = part == TO_DEVICE and not any(map(_is_returned, read))
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
        is_free = all(map(self._is_pinned, here))
        is_free |= sum(map(tensor_bytes, here)) <= STAGED_BYTES if is_up else not is_write
        if not (non_blocking and is_free):
            self._session.tape.note(HOST_WAIT)

    def _is_pinned(self, tensor: Any) -> bool:
        return type(tensor) not in self._real and self._device.driver.is_pinned(tensor.untyped_storage())


def _is_returned(tensor: Any) -> bool:
    """Whether contents of *tensor*, which is on the host, come from the device."""
    return hasattr(tensor, "fake_mode") and RETURNED in vars(tensor.untyped_storage())


# Workspaces of cuBLAS: memory that PyTorch takes from its caching allocator and never gives back.


SETTING: Final = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable that says how large a workspace is, as pairs ``:KIB:COUNT``."""

WORKSPACE_BYTES: Final = 32 * 2**20
"""Size on a Hopper, as the rehearsed GPU is one, if nothing else is said: ``parseChosenWorkspaceSize`` in
ATen/cuda/CublasHandlePool.cpp."""

PRODUCTS: Final = frozenset(
    {
        *("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.mv", "aten.addmv", "aten.dot"),
        *("aten.vdot", "aten._int_mm", "aten._scaled_mm", "aten._scaled_mm_v2"),
    }
)
"""Operators whose kernels on CUDA come from cuBLAS or cuBLASLt."""


def workspace_bytes(environment: Mapping[str, str]) -> int:
    """Return the size of a workspace.

    >>> workspace_bytes({}), workspace_bytes({SETTING: ":4096:2:16:8"})
    (33554432, 8519680)
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", environment.get(SETTING, ""))
    return sum(int(kib) * 2**10 * int(count) for kib, count in pairs) if pairs else WORKSPACE_BYTES


class Workspaces:
    """Knows which threads and streams have a workspace."""

    def __init__(self, session: State) -> None:
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
        # A rehearsal runs a backward in the thread that asks for it. In a real run it is autograd's
        # thread, which has a handle of cuBLAS, and so a workspace, of its own.
        thread = 0 if self._is_in_backward() else threading.get_ident()
        if (thread, stream) not in self._taken:
            self._taken.add((thread, stream))
            self._session.memory.reserve(workspace_bytes(os.environ), stream)
