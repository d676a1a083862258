"""Facts about a model call that no operator shows: where its tensors are, and whether it has gradients."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.parallelism import data_parallel
from foretrace.tracer.rehearse.gpu.host import DEVICE, HOST
from foretrace.tracer.rehearse.operators.calls import parts_of
from foretrace.tracer.wrapped import inside

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

STAYS: Final = (
    "{name} was created without a device and is called with tensors on the host: it stays on the host, "
    "where operators take the time to move their bytes"
)


def install(session: RehearsalSession) -> None:
    """Make DDP and FSDP move their inputs to the device: for torch they are there already."""
    from torch.distributed import utils
    from torch.distributed.fsdp._fully_shard import _fsdp_state
    from torch.nn.parallel import DistributedDataParallel

    anywhere: Any = utils
    wrapper: Any = DistributedDataParallel
    states: Any = _fsdp_state.FSDPState
    moved, made, before = anywhere._recursive_to, wrapper.__init__, wrapper._pre_forward
    root = states._root_pre_forward

    def recursive_to(inputs: Any, *args: Any) -> Any:
        return moved(_moved(session, inputs), *args)

    @functools.wraps(made)
    def init(self: Any, module: Any, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        made(self, module, device_ids, *args, **kwargs)
        self.rehearsed_moves = bool(device_ids)

    def pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        found = before(self, *inputs, **kwargs)
        return _moved(session, found) if self.rehearsed_moves else found

    def root_pre_forward(self: Any, module: Any, *given: Any) -> Any:
        is_outermost = self._state_ctx.iter_forward_root is None
        found = root(self, module, *given)
        return _moved(session, found) if is_outermost else found

    anywhere._recursive_to, states._root_pre_forward = recursive_to, root_pre_forward
    wrapper.__init__, wrapper._pre_forward = init, pre_forward


def watch_functions(session: RehearsalSession) -> None:
    """Remember whether an autograd function has gradients: inside it, gradients are turned off."""
    import torch

    kind: Any = torch.autograd.Function
    original, lane = inspect.getattr_static(kind, "apply"), session.lane  # in C since torch 2.15

    def apply(own: Any, /, *args: Any, **kwargs: Any) -> Any:
        before, lane.applies = lane.applies, session.has_gradients()
        try:
            return original.__get__(None, own)(*args, **kwargs)
        finally:
            lane.applies = before

    kind.apply = classmethod(apply)


def settle(session: RehearsalSession, model: Any, args: Any) -> None:
    """Put tensors of *model* for which the script has named no device where its arguments are.

    Also count its parameters: no operator has created those that were copied.
    """
    place, is_met = session.placement, session.placement.is_met
    held = [part for one in (*model.parameters(), *inside(model).buffers()) for part in parts_of(one)]
    where = _where(session, held, args) if not data_parallel(model)[0] else DEVICE
    for tensor in held:
        session.memory.add(tensor.untyped_storage(), "parameters")
        if is_met and where == DEVICE and place.is_left(tensor):
            place.put(tensor, is_said=False)
        elif is_met and where == HOST and place.is_left(tensor):
            session.warn(STAYS.format(name=type(model).__name__))
            place.keep(tensor)


def _where(session: RehearsalSession, held: list[Any], args: Any) -> str:
    """Return where the tensors *held* by a model without a device are, ``""`` if its operators decide.

    They are on the host if the script uses a device, but neither the model nor *args* have a tensor on it. If
    a part of the model is on the device, each operator decides about the others: an embedding table that was
    not moved is used on the host.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils import _pytree

    place = session.placement
    given = [one for one in _pytree.tree_leaves(args) if isinstance(one, FakeTensor)]
    if any(map(place.holds, held)):
        return ""
    return HOST if place.is_used and given and not any(map(place.holds, given)) else DEVICE


def _moved(session: RehearsalSession, inputs: Any) -> Any:
    """Return *inputs* with all tensors on the device."""
    import torch
    from torch.utils import _pytree

    def moved(tensor: Any) -> Any:
        return tensor.cuda() if session.host.holds(tensor) else tensor

    return _pytree.tree_map_only(torch.Tensor, moved, inputs) if session.placement.is_met else inputs
