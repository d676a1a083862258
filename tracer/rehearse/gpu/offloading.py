"""Offloading to the host by modules, by both versions of FSDP, and of saved activations.

References: ``foreach_reduce`` and ``FSDPParam.all_gather_inputs`` of torch/distributed/fsdp/_fully_shard;
``FlatParamHandle`` of torch/distributed/fsdp/_flat_param.py; ``save_on_cpu`` of torch/autograd/graph.py.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.script.libraries import everywhere

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.gpu.host import Host
    from foretrace.tracer.rehearse.session import RehearsalSession

STATES: Final = "parameters, gradients and states of the optimizer"

ACTED_OUT: Final = (
    "{way} keeps {what} on the host: they count as memory of the host, copies take the time of the link "
    "between host and GPU, and operators on the host take the time to move their bytes"
)


def install(session: RehearsalSession) -> None:
    """Make offloading by torch move tensors to the host, and report it."""
    import torch
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

    _told(session, CPUOffloadPolicy, STATES, lambda policy: True)
    _told(session, CPUOffload, STATES, lambda policy: policy.offload_params)
    _told(session, torch.autograd.graph.save_on_cpu, "activations", lambda hooks: True)
    _modules(session)
    _fsdp2(session.host)
    _fsdp1(session.host)
    _states(session.host)
    _groups(session)
    _shared()


def _shared() -> None:
    """Make ``share_memory_`` do nothing for fake tensors: they have no memory, and there is one process."""
    import torch

    anywhere: Any = torch.UntypedStorage
    original = anywhere.share_memory_

    def shared(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self if self.device.type == "meta" else original(self, *args, **kwargs)

    anywhere.share_memory_ = shared


def _groups(session: RehearsalSession) -> None:
    """Group lists of tensors by host and device, as torch groups them by device in a real run."""
    import torch
    from torch.nn.utils import clip_grad
    from torch.optim import optimizer, swa_utils
    from torch.utils import _foreach_utils

    host, place, there = session.host, session.placement, torch.device("cpu", 0)
    original = _foreach_utils._group_tensors_by_device_and_dtype

    def grouped(lists: Any, with_indices: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - as it is called
        on_host = [one is not None and host.is_used and host.holds(one) for one in lists[0]]
        if all(on_host) or not any(on_host):
            return dict(original(lists, with_indices))
        found: dict[Any, Any] = {}
        for is_host in (False, True):
            at = [i for i, one in enumerate(on_host) if one == is_host]
            part = original([[one[i] for i in at] if one else [] for one in lists], with_indices)
            for (device, dtype), (tensors, indices) in part.items():
                found[there if is_host else device, dtype] = tensors, [at[i] for i in indices]
        return found

    def told(*args: Any) -> dict[Any, Any]:
        """Return the groups under the devices that a script sees: averages of weights are moved there."""
        found = [(dtype, of, of[0][0][0]) for (_, dtype), of in grouped(*args).items()]
        return {(place.device if place.holds(one) else one.device, dtype): of for dtype, of, one in found}

    for module in (_foreach_utils, optimizer, clip_grad):
        anywhere: Any = module
        anywhere._group_tensors_by_device_and_dtype = grouped
    averages: Any = swa_utils
    averages._group_tensors_by_device_and_dtype = told
    _one_by_one(host)


def _one_by_one(host: Host) -> None:
    """Make optimizers without a ``foreach`` argument update one by one if a parameter is on the host."""
    import torch
    from torch.optim import optimizer

    choose = optimizer._default_to_fused_or_foreach

    def chosen(
        params: list[torch.Tensor],
        differentiable: bool,  # noqa: FBT001 - as it is called
        use_fused: bool = False,  # noqa: FBT001, FBT002
    ) -> tuple[bool, bool]:
        if torch.jit.is_scripting():  # scripted code ends here, as in torch's own function
            return False, False
        is_fused, is_listed = choose(params, differentiable, use_fused)
        is_there = host.is_used and any(one is not None and host.holds(one) for one in params)
        return is_fused, is_listed and not is_there

    everywhere(choose.__name__, choose, chosen)


def _modules(session: RehearsalSession) -> None:
    """Take ``cpu`` for the host if a script moves a module there: the tensors are moved by torch's code."""
    import torch

    modules: Any = torch.nn.Module
    original, empty, is_torch = modules.to, modules.to_empty, session.placement.asker.is_torch
    parse: Any = torch._C._nn._parse_to

    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_asked = session.placement.is_met and not is_torch(sys._getframe(1))
        device = parse(*args, **kwargs)[0] if is_asked else None
        with session.host.meant() if device == torch.device("cpu") else nullcontext():
            return original(self, *args, **kwargs)

    def emptied(self: Any, *, device: Any, recurse: bool = True) -> Any:
        made = empty(self, device=device, recurse=recurse)
        is_cpu = str(device).partition(":")[0] == "cpu"
        if is_cpu and not is_torch(sys._getframe(1)):  # FSDP1, which asks too, takes it for its device
            for tensor in (*self.parameters(recurse), *self.buffers(recurse)):
                session.placement.keep(getattr(tensor, "_local_tensor", tensor))
        return made

    modules.to, modules.to_empty = moved, emptied


def _fsdp2(host: Host) -> None:
    """Keep shards where the offload policy puts them: in ``foreach_reduce``, ``cpu`` means the host."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    groups: Any = _fsdp_param_group
    params: Any = _fsdp_param.FSDPParam
    reduce, reset = groups.foreach_reduce, params.reset_sharded_param

    def reducing(*args: Any, **kwargs: Any) -> Any:
        with host.meant():
            return reduce(*args, **kwargs)

    def resetting(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.offload_to_cpu:  # torch gave the shard its memory there, and checks that
            host.settle(getattr(self._module_info.module, self._module_info.param_name))
        reset(self, *args, **kwargs)

    groups.foreach_reduce, params.reset_sharded_param = reducing, resetting


def _fsdp1(host: Host) -> None:
    """Copy shards to the device before they are gathered: torch believes that they are there already."""
    from torch.distributed.fsdp import _flat_param

    handles: Any = _flat_param.FlatParamHandle
    unshard, prepared, whole = handles.pre_unshard, handles.prepare_gradient_for_backward, handles.to_cpu

    def pre_unshard(self: Any) -> bool:
        found = unshard(self)
        if not self._offload_params or not host.holds(self.flat_param):
            return bool(found)
        self.flat_param_to(self.device, non_blocking=True)
        return True

    def prepare(self: Any) -> None:
        grad = self.flat_param.grad
        if self._offload_params and grad is not None and host.holds(grad):
            self.flat_param.grad = None  # as on another device: nothing accumulates into it
        prepared(self)

    @contextmanager
    def to_cpu(self: Any) -> Iterator[None]:
        with ExitStack() as stack:
            with host.meant():
                stack.enter_context(whole(self))
            yield

    handles.pre_unshard, handles.prepare_gradient_for_backward = pre_unshard, prepare
    handles.to_cpu = to_cpu


def _states(host: Host) -> None:
    """Put states of a model or an optimizer on the host if ``cpu_offload`` is requested."""
    from torch.distributed import _state_dict_utils

    states: Any = _state_dict_utils
    gone_through = states._iterate_state_dict

    def gathering(gather: Callable[..., Any]) -> Callable[..., Any]:
        def gathered(*args: Any) -> Any:
            with host.meant(is_meant=False):  # on the device of a mesh
                return gather(*args)

        return gathered

    def going_through(
        found: Any, *gather: Callable[..., Any], cpu_offload: bool = False, **asked: Any
    ) -> Any:
        with host.meant(is_meant=cpu_offload):
            return gone_through(found, *map(gathering, gather), cpu_offload=cpu_offload, **asked)

    states._iterate_state_dict = going_through


def _told(session: RehearsalSession, kind: Any, what: str, offloads: Callable[[Any], bool]) -> None:
    """Report that *what* is offloaded once an object of the class *kind* that does so is created."""
    made = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if offloads(self):
            session.warn(ACTED_OUT.format(way=kind.__name__, what=what))

    kind.__init__ = init
