"""Where tensors are, as every code but torch's own is told.

All tensors of a rehearsal are fake ones of a processor, and torch and its dispatcher have to find them there.
A script or a library that asks one for its device is told that of the GPU, unless a real run had it on the
host (``host``): it was put there, or it was made without a device and has not been moved since. What is made
of nothing but such tensors is such a one, too.

Before a script speaks of a GPU, all is where its device is. What it has made without one by then is noted,
and is on the host as soon as there is a GPU beside it.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

from tracer.rehearse.errors import RehearsalError
from tracer.rehearse.gpu import ordinals
from tracer.rehearse.gpu.askers import Askers
from tracer.rehearse.gpu.devices import is_gpu, local_rank
from tracer.rehearse.gpu.host import LEFT, MADE
from tracer.rehearse.operators.calls import tensors_in
from tracer.rehearse.peers.backends import STAGED, UNSAID
from tracer.rehearse.script.libraries import everywhere

if TYPE_CHECKING:
    from tracer.rehearse.session import RehearsalSession


class Placement:
    """Which tensors are on the device.

    Args:
        session: the rehearsal.

    Attributes:
        device: that of this rank.
        there: told of a tensor on the host, and so in torch's own code, too, the host and nothing else.
        asker: tells who asks.
        is_used: whether somebody has said so far that a tensor is on the device.
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
        self.chosen_gpu = 0  # on its node, as in a process that has chosen none
        session.note_job(device="cpu")
        self._waiting: dict[int, weakref.ref[Any]] = {}

    @property
    def is_met(self) -> bool:
        """Whether the script has spoken of a GPU so far; until then there is no host beside its device."""
        return self._is_met

    @is_met.setter
    def is_met(self, is_met: bool) -> None:
        if is_met and self.is_denied:
            raise RehearsalError("asks for a GPU; --without-gpu says that there is none")
        self._is_met = is_met
        if is_met:
            self._session.job.pop("device", None)
        if is_met and self._waiting:
            waiting, self._waiting = list(self._waiting.values()), {}
            for storage in (found() for found in waiting):
                if storage is not None:
                    self._session.host.take(storage)

    def use_default(self) -> None:
        """Let a model be where torch puts it unasked, as ``fully_shard`` does: on a GPU where there is one.

        Where gloo is named by a script that speaks of no GPU, host and device are not told apart.
        """
        if self.is_denied or self._is_met:
            return
        self._session.job.pop("device", None)
        if self._session.backends.of() == UNSAID:
            self.is_met = True
        else:
            self._session.warn(STAGED.format(call="fully_shard, which takes a GPU where it finds one"))

    def keep(self, tensor: Any) -> None:
        """Take the fake *tensor* to be on the host because somebody has said so."""
        self._on_host(tensor.untyped_storage())
        vars(tensor.untyped_storage()).pop(LEFT, None)

    def leave(self, tensor: Any) -> None:
        """Take the fake *tensor* to have been made without a device."""
        asides = self._session.asides
        if type(tensor) is self._kind and not (asides and get_ident() in asides):
            self._on_host(tensor.untyped_storage())
            setattr(tensor.untyped_storage(), LEFT, True)

    def _on_host(self, storage: Any) -> None:
        """Let *storage* be on the host from now on, or as soon as there is one."""
        setattr(storage, MADE, True)
        if self.is_met:
            self._session.host.take(storage)
        elif (key := storage._cdata) not in self._waiting:
            self._waiting[key] = weakref.ref(storage, lambda _: self._waiting.pop(key, None))

    def put(self, tensor: Any, *, is_said: bool = True) -> None:
        """Take *tensor* to have been on the device from the start, or have been moved there as a whole."""
        self.is_used |= is_said
        own = _own(tensor)
        storage = own.untyped_storage()
        vars(storage).pop(LEFT, None)
        self._waiting.pop(storage._cdata, None)
        if self._session.host.holds(own):
            self._session.host.settle(own, to_host=False)

    def put_left(self, tensors: Iterable[Any], *, is_said: bool = True) -> None:
        """Put those of *tensors* on the device of which nobody has said where they are."""
        for tensor in tensors if self.is_met else ():
            if self.is_left(_own(tensor)):
                self.put(tensor, is_said=is_said)

    def is_left(self, tensor: Any) -> bool:
        """Whether *tensor* was made without a device, or of nothing but such ones, and put nowhere since."""
        return LEFT in vars(tensor.untyped_storage())

    def holds(self, tensor: Any) -> bool:
        """Whether a real run has the fake *tensor* on the device."""
        return self.is_met and not self._session.host.holds(tensor)

    def follow(self, made: Any, operands: Sequence[Any]) -> None:
        """Let a tensor, *made* of *operands* before there is a host, be where all of these will be."""
        found = False
        for tensor in tensors_in(operands) if self._waiting else ():
            if type(tensor) is self._kind:
                if tensor.untyped_storage()._cdata not in self._waiting:
                    return
                found = True
        if found:
            self.leave(made)

    def told(self, tensor: Any) -> Any:
        """Return the device that code which is not torch's is told of the fake *tensor*, None: its own."""
        if tensor.fake_mode.in_kernel_invocation or tensor.fake_device.type != "cpu":
            return None
        return self.device if self.holds(tensor) else None


def install(session: RehearsalSession) -> None:
    """Let tensors, meshes and generators name the device that a script has asked for."""
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
    """Let tensors of a *kind* say where they are."""
    from torch._subclasses.fake_tensor import FakeTensor

    is_torch, frame = placement.asker.is_torch, sys._getframe
    device, is_cuda, is_cpu = kind.device, kind.is_cuda, kind.is_cpu
    get_device, type_of = kind.get_device, kind.type

    def told(tensor: Any, asks: FrameType) -> Any:
        """Return what to say to who *asks*, None if that is what torch says itself."""
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
    """Follow what torch itself puts on the device: it finds that to be there."""
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
    """Let meshes name the device of their tensors, which before torch 2.9 is set on each of them."""
    from torch.distributed.device_mesh import DeviceMesh

    kind: Any = DeviceMesh
    original, is_torch = getattr(kind, "device_type", None), placement.asker.is_torch

    def device_type(self: Any) -> str:
        if placement.is_met and not is_torch(sys._getframe(1)):
            return str(placement.device.type)
        return str(vars(self)["device_type"] if original is None else original.__get__(self))

    kind.device_type = property(device_type, lambda self, value: vars(self).update(device_type=value))


def _generators(placement: Placement) -> None:
    """Make generators of random numbers on the processor, which name the device that was asked for."""
    import torch

    is_torch, numbers = placement.asker.is_torch, placement._session.stated.numbers

    class Generator(torch.Generator):  # type: ignore[misc]  # torch is untyped here
        """A generator on the processor."""

        def __new__(cls, device: Any = "cpu") -> Any:
            found = super().__new__(cls)
            found.told = placement.device if is_gpu(device) else torch.device("cpu")
            return found

        @property
        def device(self) -> Any:
            """Where its numbers are drawn."""
            return super().device if is_torch(sys._getframe(1)) else self.told

        def set_state(self, new_state: Any) -> Any:
            """Take a state; of one that has been on the device what is known."""
            known = numbers.of(new_state) if type(new_state) is placement._kind else new_state
            return self if known is None else super().set_state(known)

    anywhere: Any = torch
    anywhere.Generator = Generator


def _defaults(placement: Placement) -> None:
    """Let torch say on what device it makes tensors by itself, and note that a GPU is chosen."""
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
