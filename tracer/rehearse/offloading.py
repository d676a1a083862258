"""What puts tensors on the host: functions of tensors, both FSDPs, and saved activations.

References: ``foreach_reduce`` and ``FSDPParam.all_gather_inputs`` of torch/distributed/fsdp/_fully_shard;
``FlatParamHandle`` of torch/distributed/fsdp/_flat_param.py; ``save_on_cpu`` of torch/autograd/graph.py.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tracer.rehearse.devices import is_foreign

if TYPE_CHECKING:
    from tracer.rehearse.host import Host
    from tracer.rehearse.session import RehearsalSession

STATES: Final = "parameters, gradients and states of the optimizer"

ACTED_OUT: Final = (
    "{way} keeps {what} on the host: they are in its memory, not the device's, copies take the time of the "
    "machine's link to it, and what a processor computes is priced by the bytes that it moves alone"
)

TORCH: Final = f"{os.sep}torch{os.sep}"
"""In the path of a file of torch, where ``"cpu"`` may be the device of a mesh that is acted out."""


def moving(host: Host) -> Callable[..., Any]:
    """Return what takes the place of ``Tensor.to``, ``cuda``, ``cpu`` and ``pin_memory``.

    ``torch.device("cpu")`` is what every tensor here says it is on, so that it means the device: what is
    there stays, and what is on the host goes there.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    cpu, kinds = torch.device("cpu"), (str, torch.device, int)

    def target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        """Return whether ``to`` means the host, None if it means no place."""
        given = kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None))
        if isinstance(given, torch.Tensor):
            return host.holds(given)
        if isinstance(given, bool) or not isinstance(given, kinds):
            return None
        if is_foreign(given):
            return False
        is_said = given == "cpu" and TORCH not in sys._getframe(3).f_code.co_filename
        return is_said or (host.is_meant and given == cpu)

    def plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what *func* makes of a tensor that stays where it is."""
        if func in {torch.Tensor.cuda, torch.Tensor.pin_memory}:
            return args[0]
        if is_foreign(kwargs.get("device")):
            kwargs = {**kwargs, "device": cpu}
        if len(args) > 1 and is_foreign(args[1]):
            args = (args[0], cpu, *args[2:])
        return func(*args, **kwargs)

    def move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if type(getattr(tensor, "_local_tensor", tensor)) is not FakeTensor:
            return plain(func, args, kwargs)
        if func is torch.Tensor.pin_memory:
            return host.settle(tensor)
        to_host = target(args, kwargs) if func is torch.Tensor.to else func is torch.Tensor.cpu
        if to_host is None or host.holds(tensor) == to_host:
            return plain(func, args, kwargs)
        dtype, non_blocking = _how(args, kwargs)
        return host.moved(tensor, dtype, to_host=to_host, non_blocking=non_blocking)

    return move


def install(session: RehearsalSession) -> None:
    """Let torch offload as it is asked to, and say so."""
    import torch
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

    _told(session, CPUOffloadPolicy, STATES, lambda policy: True)
    _told(session, CPUOffload, STATES, lambda policy: policy.offload_params)
    _told(session, torch.autograd.graph.save_on_cpu, "activations", lambda hooks: True)
    _fsdp2(session.host)
    _fsdp1(session.host)


def _how(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Return the type that is asked for, None for the same, and whether the host need not wait."""
    import torch

    given = (*args[1:], *kwargs.values())
    dtypes = [one.dtype if isinstance(one, torch.Tensor) else one for one in given]
    dtype = next((one for one in dtypes if isinstance(one, torch.dtype)), None)
    first = next((one for one in args[1:] if isinstance(one, bool)), False)
    return dtype, bool(kwargs.get("non_blocking", first))


def _fsdp2(host: Host) -> None:
    """Let shards be where the policy wants them: in ``foreach_reduce`` a bare ``cpu`` is the host."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    groups: Any = _fsdp_param_group
    params: Any = _fsdp_param.FSDPParam
    reduce, reset = groups.foreach_reduce, params.reset_sharded_param

    def reducing(*args: Any, **kwargs: Any) -> Any:
        with host.meant():
            return reduce(*args, **kwargs)

    def resetting(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.offload_to_cpu:  # else torch refuses it: it was given its memory there
            host.settle(getattr(self._module_info.module, self._module_info.param_name))
        reset(self, *args, **kwargs)

    groups.foreach_reduce, params.reset_sharded_param = reducing, resetting


def _fsdp1(host: Host) -> None:
    """Let shards be copied before they are gathered: torch would find them on the device already."""
    from torch.distributed.fsdp import _flat_param

    handles: Any = _flat_param.FlatParamHandle
    attributes, unshard = handles.init_flat_param_attributes, handles.pre_unshard
    prepared = handles.prepare_gradient_for_backward

    def init(self: Any) -> None:
        attributes(self)
        if self._offload_params and self._uses_param_mixed_precision:  # made like a shard, for the device
            host.settle(self.flat_param._mp_shard, to_host=False)

    def pre_unshard(self: Any) -> bool:
        found = unshard(self)
        if not self._offload_params or not host.holds(self.flat_param):
            return bool(found)
        self.flat_param_to(self.device, non_blocking=True)
        return True

    def prepare(self: Any) -> None:
        grad = self.flat_param.grad
        if self._offload_params and grad is not None and host.holds(grad):
            self.flat_param.grad = None  # as where it is on another device: nothing is added to it there
        prepared(self)

    handles.init_flat_param_attributes, handles.pre_unshard = init, pre_unshard
    handles.prepare_gradient_for_backward = prepare


def _told(session: RehearsalSession, kind: Any, what: str, offloads: Callable[[Any], bool]) -> None:
    """Note that *what* is offloaded as soon as an object of *kind* is made that does so."""
    made = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if offloads(self):
            session.warn(ACTED_OUT.format(way=kind.__name__, what=what))

    kind.__init__ = init
