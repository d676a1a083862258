"""The device of each tensor, as scripts and libraries see it.

All tensors of a rehearsal are fake CPU tensors, and torch and its dispatcher must see them there. A script or
a library that reads the device of a tensor gets the GPU, unless a real run would have the tensor on the host
(module ``host``): it was put there, or it was created without a device and not moved since, or it is the
result of an operator on such tensors only.

Before a script first names a GPU, all tensors count as on its device. Those created without a device are
remembered, and are on the host as soon as the script names a GPU.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.gpu import ordinals
from foretrace.tracer.rehearse.gpu.askers import Askers
from foretrace.tracer.rehearse.gpu.devices import is_gpu, local_rank
from foretrace.tracer.rehearse.gpu.host import LEFT, MADE
from foretrace.tracer.rehearse.operators.calls import tensors_in
from foretrace.tracer.rehearse.peers.backends import STAGED, UNSAID
from foretrace.tracer.rehearse.script.libraries import everywhere

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession


class Placement:
    """Which tensors are on the device.

    Args:
        session: the rehearsal.

    Attributes:
        device: the GPU of this rank.
        there: the object that tensors on the host report as their device. Even in torch's own code it means
            the host.
        asker: finds out which code asks.
        is_used: whether the script has put a tensor on the device so far.
        is_denied: whether the script is told that there is no GPU.
    """

    def __init__(self, session: RehearsalSession) -> None:
        import torch
        from torch._subclasses.fake_tensor import FakeTensor

        self._session, self._torch, self._kind = session, torch, FakeTensor
        self.device = torch.device("cuda", local_rank())
        self.there = torch.device("cpu")
        self.asker = Askers()
        self.is_used = self._is_met = self.is_denied = self.is_shared = False
        self.chosen_gpu = 0  # the current GPU of a process that has not set one
        session.note_job(device="cpu")
        self._waiting: dict[int, weakref.ref[Any]] = {}

    @property
    def is_met(self) -> bool:
        """Whether the script has named a GPU so far; until then host and device are not told apart."""
        return self._is_met

    @is_met.setter
    def is_met(self, is_met: bool) -> None:
        if is_met and self.is_denied:
            raise RehearsalError("requests a GPU, but --without-gpu says that there is none")
        self._is_met = is_met
        if is_met:
            self._session.job.pop("device", None)
        if is_met and self._waiting:
            waiting, self._waiting = list(self._waiting.values()), {}
            for storage in (found() for found in waiting):
                if storage is not None:
                    self._session.host.take(storage)
            self._session.memory.begin_device()

    def use_default(self) -> None:
        """Note that torch puts a model on the GPU by itself if there is one, as ``fully_shard`` does.

        If the script names gloo and no GPU, host and device are not told apart, which is reported.
        """
        if self.is_denied or self._is_met:
            return
        self._session.job.pop("device", None)
        if self._session.backends.of() == UNSAID:
            self.is_met = True
        else:
            self._session.warn(STAGED.format(call="fully_shard, which uses a GPU if there is one"))

    def keep(self, tensor: Any) -> None:
        """Count the fake *tensor* as on the host: the script has put it there."""
        self._on_host(tensor.untyped_storage())
        vars(tensor.untyped_storage()).pop(LEFT, None)

    def leave(self, tensor: Any) -> None:
        """Note that the fake *tensor* was created without a device."""
        asides = self._session.asides
        if type(tensor) is self._kind and not (asides and get_ident() in asides):
            self._on_host(tensor.untyped_storage())
            setattr(tensor.untyped_storage(), LEFT, True)

    def _on_host(self, storage: Any) -> None:
        """Count *storage* as on the host from now on, or from when the script names a GPU."""
        setattr(storage, MADE, True)
        if self.is_met:
            self._session.host.take(storage)
        elif (key := storage._cdata) not in self._waiting:
            self._waiting[key] = weakref.ref(storage, lambda _: self._waiting.pop(key, None))

    def put(self, tensor: Any, *, is_said: bool = True) -> None:
        """Count *tensor* as on the device, without a copy: it was created or completely moved there."""
        self.is_used |= is_said
        own = _own(tensor)
        storage = own.untyped_storage()
        vars(storage).pop(LEFT, None)
        self._waiting.pop(storage._cdata, None)
        if self._session.host.holds(own):
            self._session.host.settle(own, to_host=False)

    def put_left(self, tensors: Iterable[Any], *, is_said: bool = True) -> None:
        """Count those of *tensors* as on the device for which the script has named no place."""
        for tensor in tensors if self.is_met else ():
            if self.is_left(_own(tensor)):
                self.put(tensor, is_said=is_said)

    def is_left(self, tensor: Any) -> bool:
        """Whether *tensor* was created without a device, or from such tensors only, and not moved since."""
        return LEFT in vars(tensor.untyped_storage())

    def holds(self, tensor: Any) -> bool:
        """Whether a real run would have the fake *tensor* on the device."""
        return self.is_met and not self._session.host.holds(tensor)

    def follow(self, made: Any, operands: Sequence[Any]) -> None:
        """Count a result *made* before a GPU is named as without a device, if all *operands* are so."""
        found = False
        for tensor in tensors_in(operands) if self._waiting else ():
            if type(tensor) is self._kind:
                if tensor.untyped_storage()._cdata not in self._waiting:
                    return
                found = True
        if found:
            self.leave(made)

    def told(self, tensor: Any) -> Any:
        """Return the device that scripts see for the fake *tensor*; None: the one it really has."""
        if tensor.fake_mode.in_kernel_invocation or tensor.fake_device.type != "cpu":
            return None
        return self.device if self.holds(tensor) else None


def install(session: RehearsalSession) -> None:
    """Make tensors, meshes and generators report the device that the script has requested."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed.tensor import DTensor

    placement = session.placement
    for kind in (FakeTensor, DTensor):
        _tensors(placement, kind)
    _moves(placement)
    _meshes(placement)
    _generators(placement)
    _defaults(placement)


def _own(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def _tensors(placement: Placement, kind: Any) -> None:
    """Make tensors of the class *kind* report their device."""
    from torch._subclasses.fake_tensor import FakeTensor

    is_torch, frame = placement.asker.is_torch, sys._getframe
    device, is_cuda, is_cpu = kind.device, kind.is_cuda, kind.is_cpu
    get_device, type_of = kind.get_device, kind.type

    def told(tensor: Any, asks: FrameType) -> Any:
        """Return the device for the frame *asks*, None if it is the one that torch reports."""
        own = _own(tensor)
        return None if is_torch(asks) or type(own) is not FakeTensor else placement.told(own)

    def told_device(self: Any) -> Any:
        if (found := told(self, frame(1))) is not None:
            return found
        found, own = device.__get__(self), _own(self)
        is_there = type(own) is FakeTensor and found == placement.there and placement.is_met
        return placement.there if is_there and not placement.holds(own) else found

    def told_is_cuda(self: Any) -> bool:
        return told(self, frame(1)) is not None or bool(is_cuda.__get__(self))

    def told_is_cpu(self: Any) -> bool:
        return told(self, frame(1)) is None and bool(is_cpu.__get__(self))

    def told_get_device(self: Any) -> int:
        found = told(self, frame(1))
        return int(get_device(self) if found is None else found.index)

    def told_type(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_asked = not args and not kwargs and told(self, frame(1)) is not None
        found = type_of(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if is_asked else found

    kind.device = property(told_device, getattr(device, "__set__", None))
    kind.is_cuda, kind.is_cpu = property(told_is_cuda), property(told_is_cpu)
    kind.get_device, kind.type = told_get_device, told_type


def _moves(placement: Placement) -> None:
    """Note tensors that torch itself puts on the device: for torch they are there already."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init
    from torch.distributed.tensor import _api

    states, distribute = _fsdp_init._move_states_to_device, _api.distribute_tensor

    def move_states(params: Sequence[Any], buffers: Sequence[Any], *args: Any) -> None:
        for tensor in (*params, *buffers):
            placement.put(tensor)
        states(params, buffers, *args)

    def distributed(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) is placement._kind and placement.is_met and not placement.holds(tensor):
            tensor = tensor.detach().cuda().requires_grad_(tensor.requires_grad)
        found = distribute(tensor, *args, **kwargs)
        placement.put(found)
        return found

    everywhere("_move_states_to_device", states, move_states)
    everywhere("distribute_tensor", distribute, distributed)


def _meshes(placement: Placement) -> None:
    """Make meshes report the device of their tensors; before torch 2.9 it is an attribute of each mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    kind: Any = DeviceMesh
    original, is_torch = getattr(kind, "device_type", None), placement.asker.is_torch

    def device_type(self: Any) -> str:
        if placement.is_met and not is_torch(sys._getframe(1)):
            return str(placement.device.type)
        return str(vars(self)["device_type"] if original is None else original.__get__(self))

    kind.device_type = property(device_type, lambda self, value: vars(self).update(device_type=value))


def _generators(placement: Placement) -> None:
    """Create random generators on the CPU that report the device that was requested."""
    import torch

    is_torch, numbers = placement.asker.is_torch, placement._session.stated.numbers

    class Generator(torch.Generator):  # type: ignore[misc]  # torch is untyped here
        """A generator on the CPU."""

        def __new__(cls, device: Any = "cpu") -> Any:
            found = super().__new__(cls)
            found.told = placement.device if is_gpu(device) else torch.device("cpu")
            return found

        @property
        def device(self) -> Any:
            """The device that was requested."""
            return super().device if is_torch(sys._getframe(1)) else self.told

        def set_state(self, new_state: Any) -> Any:
            """Set a state; of a state that was on the device, as much as is known."""
            known = numbers.of(new_state) if type(new_state) is placement._kind else new_state
            return self if known is None else super().set_state(known)

    anywhere: Any = torch
    anywhere.Generator = Generator


def _defaults(placement: Placement) -> None:
    """Make torch report the default device of new tensors, and note which GPU is chosen."""
    import torch
    from torch import overrides
    from torch.utils._device import DeviceContext

    anywhere: Any = torch
    original = anywhere.get_default_device

    def default() -> Any:
        modes = reversed(overrides._get_current_function_mode_stack())
        chosen = next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)
        return placement.device if is_gpu(chosen) else original()

    anywhere.get_default_device = default
    ordinals.install(placement._session)
