"""Functions of torch that create a tensor on a device, or move it between host and device.

Tensors are always created on the CPU, whatever device is named. ``Host`` and ``Placement`` remember where a
real run would have them.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from foretrace.tracer.rehearse.gpu import ordinals
from foretrace.tracer.rehearse.gpu.devices import is_foreign, is_gpu
from foretrace.tracer.rehearse.gpu.host import DEVICE, HOST, LEFT
from foretrace.tracer.rehearse.operators import jagged

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession


class Moves:
    """Replaces functions of torch that take a device.

    torch itself sees the tensors of the device on ``cpu``. So in torch's own code ``cpu`` means the device: a
    tensor on the device stays, one on the host moves to the device. The exception is the device object that
    a tensor on the host reports (``Placement.there``), which means the host.

    Args:
        session: the rehearsal.
    """

    def __init__(self, session: RehearsalSession) -> None:
        import torch
        from torch._subclasses.fake_tensor import FakeTensor
        from torch.utils import _device

        self._torch, self._kind, self._default = torch, FakeTensor, _device
        self._session, self._host, self._placement = session, session.host, session.placement
        self._cpu, self._kinds = torch.device("cpu"), (str, torch.device, int)
        self._makes = _device._device_constructors()
        self._modules = str(Path(torch.nn.modules.__file__).parent)

    def make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call *func*, which creates a tensor, or converts one as ``torch.as_tensor`` does."""
        device, asks = kwargs.get("device"), sys._getframe(2)
        given = args[0] if args and isinstance(args[0], self._torch.Tensor) else None
        is_left = device is None and func in self._makes
        if is_left:  # the mode of ``torch.set_default_device`` acts after this one
            device = self._default.CURRENT_DEVICE
            is_left = given is None and (device is None or device == self._cpu)
        ordinals.meet(self._session, device)
        to_host = self._names_host(device, asks) or is_left
        if is_foreign(device):
            kwargs = {**kwargs, "device": self._cpu}
        is_pinned = bool(kwargs.get("pin_memory"))
        with self._host.making(self._where(device, to_host=to_host or is_pinned)):
            made = func(*args, **({**kwargs, "pin_memory": False} if is_pinned else kwargs))
        if made is None:  # an assertion of an exported graph: no tensor
            return None
        if given is not None and (to_host or is_gpu(device)) and _is_same_memory(made, given):
            return self._moved(made, to_host=to_host)
        if is_gpu(device) and type(made) is self._torch.Tensor:  # asarray calls no operator
            made = self._host.faked(made)
        if type(made) is self._kind:
            self._settle(made, device, to_host=to_host, is_left=is_left)
        return self.move(self._torch.Tensor.pin_memory, (made,), {}) if is_pinned else made

    def _where(self, device: Any, *, to_host: bool) -> str:
        """Return where a new tensor is to be, for ``Host.making``."""
        if to_host and self._placement.is_met:
            return HOST
        return DEVICE if is_gpu(device) else ""

    def _settle(self, made: Any, device: Any, *, to_host: bool, is_left: bool) -> None:
        """Note that the new tensor *made* is where the caller wanted it."""
        if is_left:
            self._placement.leave(made)
        elif to_host:
            self._placement.keep(made)
        elif is_gpu(device):
            self._placement.put(made)
            ordinals.made(self._session, made, device)
        elif isinstance(device, self._torch.device):  # torch's own code passes the device of a tensor
            self._placement.put(made, is_said=False)

    def _names_host(self, device: Any, asks: FrameType) -> bool:
        """Return whether *device*, passed by the frame *asks*, means the host.

        It does if a script passes it, or if a module creates its parameters with it. Elsewhere in torch's own
        code it may be the device that a fake tensor reports.
        """
        if device is self._placement.there:
            return True
        if device is None or str(device).partition(":")[0] != "cpu":
            return False
        code = asks.f_code
        is_module = code.co_name == "__init__" and code.co_filename.startswith(self._modules)
        return is_module or not self._placement.asker.is_torch(asks)

    def _moved(self, tensor: Any, *, to_host: bool) -> Any:
        """Return *tensor* on the host or on the device, moved if necessary."""
        if self._is_on_device(tensor) != to_host:
            return tensor
        return self.move(self._torch.Tensor.cpu if to_host else self._torch.Tensor.cuda, (tensor,), {})

    def move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Move a tensor as *func* does: ``to``, ``cuda``, ``cpu``, ``type_as`` or ``pin_memory``."""
        tensor, host = args[0], self._host
        is_pinned = func is self._torch.Tensor.pin_memory
        to_host = None if is_pinned else self._target(func, args, kwargs, sys._getframe(2))
        if to_host is False and type(tensor) is self._torch.Tensor:
            tensor = host.faked(tensor)
        if to_host is not None and tensor.is_nested:
            ends = self._torch.Tensor.cpu if to_host else self._torch.Tensor.cuda
            return jagged.of_parts(
                tensor,
                lambda values: self._across(func, (values, *args[1:]), kwargs, to_host=to_host),
                lambda one: self._across(ends, (one,), {}, to_host=to_host),
            )
        if type(getattr(tensor, "_local_tensor", tensor)) is not self._kind:
            return self._plain(func, args, kwargs)
        if is_pinned:
            return host.pin(tensor)
        return self._across(func, (tensor, *args[1:]), kwargs, to_host=to_host)

    def _across(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, to_host: bool | None
    ) -> Any:
        """Move a fake tensor to the host or to the device as *func* does, unless it is there."""
        tensor, host, place = args[0], self._host, self._placement
        if to_host and not (place.is_met or host.doing.is_meant):
            to_host = None  # the script uses no device so far
        if to_host and type(tensor) is self._kind and host.holds(tensor):
            vars(tensor.untyped_storage()).pop(LEFT, None)  # the script names the host
        if to_host is None or host.holds(tensor) == to_host:
            return self._plain(func, args, kwargs)
        place.is_used |= not to_host
        dtype, non_blocking = self._how(args, kwargs)
        layout = kwargs.get("memory_format")
        return host.moved(tensor, dtype, to_host=to_host, non_blocking=non_blocking, layout=layout)

    def _target(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asks: FrameType
    ) -> bool | None:
        """Return True if *func* moves a tensor to the host, False for the device, None for neither."""
        methods = self._torch.Tensor
        if func not in {methods.to, methods.type_as}:
            if func is methods.cuda:
                self._placement.is_met = True
                self._place(args[0], kwargs.get("device", args[1] if len(args) > 1 else None))
            return bool(func is methods.cpu)
        given = kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None))
        if isinstance(given, methods):
            ordinals.move_to(args[0], given)
            return self._beside(args[0], given)
        if isinstance(given, bool) or not isinstance(given, self._kinds):
            return None
        ordinals.meet(self._session, given)
        self._place(args[0], given)
        return False if is_gpu(given) else self._to_cpu(args[0], given, asks)

    def _place(self, tensor: Any, device: Any) -> None:
        """Check the GPU that *tensor* moves to against those of other ranks; None: the current GPU."""
        given = "cuda" if device is None else device
        if isinstance(tensor, self._torch.nn.Parameter):
            ordinals.place(self._session, given)
        ordinals.move(self._session, tensor, given)
        ordinals.meet_others(self._session)

    def _to_cpu(self, tensor: Any, given: Any, asks: FrameType) -> bool | None:
        """Return the result of ``_target`` if the CPU is *given* for *tensor* by the frame *asks*."""
        if given is self._placement.there or is_foreign(given):  # ``cpu:0`` can only mean the host
            return True
        if not self._host.doing.is_meant and self._placement.asker.is_torch(asks):
            return False if self._on_host(tensor) else None
        return True if self._torch.device(given).type == "cpu" else None

    def _beside(self, tensor: Any, other: Any) -> bool | None:
        """Return whether *other* is on the host, None if *tensor* is in the same place."""
        if self._on_host(other):
            return True
        is_here, is_there = self._is_on_device(tensor), self._is_on_device(other)
        return None if is_here == is_there else not is_there

    def _is_on_device(self, tensor: Any) -> bool:
        own = getattr(tensor, "_local_tensor", tensor)
        return type(own) is self._kind and self._placement.holds(own)

    def _on_host(self, tensor: Any) -> bool:
        own = getattr(tensor, "_local_tensor", tensor)
        return type(own) is self._kind and self._host.holds(own)

    def _plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of *func* for a tensor that stays where it is."""
        if func in {self._torch.Tensor.cuda, self._torch.Tensor.pin_memory}:
            return args[0]
        if is_foreign(kwargs.get("device")):
            kwargs = {**kwargs, "device": self._cpu}
        if len(args) > 1 and isinstance(args[1], self._kinds) and is_foreign(args[1]):
            args = (args[0], self._cpu, *args[2:])
        return func(*args, **kwargs)

    def _how(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """Return the dtype that is requested, None for the same one, and whether the copy is non-blocking."""
        torch, given = self._torch, (*args[1:], *kwargs.values())
        dtypes = [one.dtype if isinstance(one, torch.Tensor) else one for one in given]
        dtype = next((one for one in dtypes if isinstance(one, torch.dtype)), None)
        first = next((one for one in args[1:] if isinstance(one, bool)), False)
        return dtype, bool(kwargs.get("non_blocking", first))


def _is_same_memory(one: Any, other: Any) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
