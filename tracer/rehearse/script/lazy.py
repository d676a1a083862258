"""Parameters and buffers that get their size from the first input, as in ``torch.nn.LazyLinear``.

Torch gives them special classes, and changes the class of the object once there is an input. A fake tensor
cannot change its class. So here they are fake tensors without elements, with a mark that they have no size.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.script.libraries import everywhere

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

SHAPELESS: Final = "materialize"
"""Method that gives a tensor its size; a tensor has it only as long as it has no size."""


def install(session: RehearsalSession) -> None:
    """Replace torch's uninitialized parameters and buffers."""
    import torch
    from torch.nn import parameter

    def marked(tensor: Any) -> Any:
        setattr(tensor, SHAPELESS, partial(_materialize, session, tensor))
        return tensor

    def new_parameter(
        kind: Any,
        requires_grad: Any = True,  # noqa: FBT002 - as torch has it
        device: Any = None,
        dtype: Any = None,
    ) -> Any:
        del kind
        return marked(torch.nn.Parameter(torch.empty(0, device=device, dtype=dtype), requires_grad))

    def new_buffer(
        kind: Any,
        requires_grad: Any = False,  # noqa: FBT002
        device: Any = None,
        dtype: Any = None,
        persistent: Any = True,  # noqa: FBT002
    ) -> Any:
        del kind
        made = torch.empty(0, device=device, dtype=dtype, requires_grad=requires_grad)
        made.persistent, made._is_buffer = persistent, True
        return marked(made)

    kinds: Any = parameter.UninitializedParameter, parameter.UninitializedBuffer
    for kind, made in zip(kinds, (new_parameter, new_buffer), strict=True):
        kind.__new__ = made
    _tell_apart(parameter)
    _keep_buffers(marked)
    _keep_copies(marked)


def is_shapeless(tensor: Any) -> bool:
    """Whether *tensor* has no size yet."""
    return SHAPELESS in getattr(tensor, "__dict__", ())


def _materialize(
    session: RehearsalSession, tensor: Any, shape: Any, device: Any = None, dtype: Any = None
) -> None:
    """Give *tensor* its size, on its present device and in its dtype unless others are given."""
    asked = {name: value for name, value in (("device", device), ("dtype", dtype)) if value is not None}
    tensor.data = tensor.data.new_empty(shape, **asked)
    delattr(tensor, SHAPELESS)
    memory = session.host.memory if session.host.holds(tensor) else session.memory
    memory.move(tensor.untyped_storage(), "parameters")


def _tell_apart(module: Any) -> None:
    """Make both tests for tensors without a size, ``is_lazy`` and ``isinstance``, recognise these."""
    everywhere("is_lazy", module.is_lazy, is_shapeless)
    kind: Any = module.UninitializedParameter
    meta: Any = type(module.Parameter)
    original = meta.__instancecheck__

    def is_instance(cls: Any, instance: Any) -> bool:
        return is_shapeless(instance) if cls is kind else bool(original(cls, instance))

    meta.__instancecheck__ = is_instance


def _keep_buffers(marked: Any) -> None:
    """Keep the mark on buffers that a module moves or converts."""
    import torch
    from torch.nn.modules.lazy import LazyModuleMixin

    lazy: Any = LazyModuleMixin
    original = torch.nn.Module._apply

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = [name for name, buffer in self._buffers.items() if is_shapeless(buffer)]
        found = original(self, *args, **kwargs)
        for name in names:
            marked(self._buffers[name])
        return found

    lazy._apply = apply


def _keep_copies(marked: Any) -> None:
    """Keep the mark on copies, as when a model is copied before its first call."""
    from torch._subclasses.fake_tensor import FakeTensor

    kind: Any = FakeTensor
    original = kind.__deepcopy__

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        found = original(self, memo)
        return marked(found) if is_shapeless(self) else found

    kind.__deepcopy__ = copied
