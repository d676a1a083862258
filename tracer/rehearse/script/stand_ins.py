"""Replaces parts of torch and Triton that need a GPU, memory or other processes: arrays, copies, graphs."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.internals import makers
from foretrace.tracer.operators import dtype_name, tensor_bytes
from foretrace.tracer.rehearse.errors import RehearsalError
from foretrace.tracer.rehearse.events.tape import HOST_WAIT
from foretrace.tracer.rehearse.gpu import elements, listed
from foretrace.tracer.rehearse.hints import OLD_TYPES
from foretrace.tracer.rehearse.operators.calls import tensors_in
from foretrace.tracer.rehearse.operators.work import Work
from foretrace.tracer.rehearse.peers.waits import install_futures
from foretrace.tracer.rehearse.script import children, lazy
from foretrace.tracer.rehearse.script.libraries import when_imported
from foretrace.tracer.rehearse.values import unknown
from foretrace.tracer.rehearse.values.unknown import Unknown, filled

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession

TRITON: Final = "triton.runtime.autotuner"
"""The module of Triton that is imported last, of those that launch kernels."""


def install(session: RehearsalSession) -> list[Any]:
    """Replace everything; return objects that must be kept alive."""
    _arrays(session)
    _mapped_files(session)
    _random_states(session)
    _texts()
    _shapes()
    listed.install(session)
    elements.install(session)
    unknown.install(session.stated)
    _copies()
    _plain_tensors(session)
    lazy.install(session)
    install_futures()
    children.install(session)
    _graphs(session)
    _shared()
    profile_host_only()
    _old_types(session)
    synced_norms()
    _grouped_products()
    return when_imported(TRITON, lambda module: _triton(session, module))


def _arrays(session: RehearsalSession) -> None:
    """Make ``Tensor.numpy`` return known numbers, else objects like those that ``item()`` returns."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

    anywhere: Any = torch.Tensor
    numpy, array = anywhere.numpy, anywhere.__array__

    def told(tensor: Any) -> Any:
        if session.position.step >= 0 and not session.host.holds(tensor):
            session.tape.note(HOST_WAIT)
        own = session.stated.numbers.of(tensor)
        with session.stated.reading() as read:
            value = session.stated.scalar(tensor) if own is None and tensor.numel() else 0
        if read.said:
            return filled(Unknown(session.stated, read.said), tensor.shape)
        with unset_fake_temporarily():
            if own is not None:
                return numpy(own.clone())
            return numpy(makers().full(tuple(tensor.shape), value, dtype=tensor.dtype))

    def to_numpy(self: Any, *args: Any, **kwargs: Any) -> Any:
        return told(self) if type(self) is FakeTensor else numpy(self, *args, **kwargs)

    def to_array(self: Any, dtype: Any = None) -> Any:
        if type(self) is not FakeTensor:
            return array(self, dtype)
        return told(self) if dtype is None else told(self).astype(dtype, copy=False)

    anywhere.numpy, anywhere.__array__ = to_numpy, to_array
    kinds: Any = FakeTensor
    kinds.numpy = to_numpy


def _mapped_files(session: RehearsalSession) -> None:
    """Read files that are mapped into memory: their numbers are known, as in a loader."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    anywhere: Any = torch
    original = anywhere.from_file

    def from_file(filename: str, *args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            found = original(filename, *args, **kwargs)
        return session.host.faked(found)

    anywhere.from_file = from_file


def _random_states(session: RehearsalSession) -> None:
    """Accept a state of the generator that was on the device, such as one that a rank has sent."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    anywhere: Any = torch
    original = anywhere.random.set_rng_state

    def take(new_state: Any) -> None:
        known = session.stated.numbers.of(new_state) if type(new_state) is FakeTensor else new_state
        if known is not None:
            original(known)

    class Generator(torch.Generator):  # type: ignore[misc]  # torch is untyped here
        """A generator that takes such a state, too."""

        def set_state(self, new_state: Any) -> Any:
            """Set a state; of one that was on the device, as much as is known."""
            known = session.stated.numbers.of(new_state) if type(new_state) is FakeTensor else new_state
            return self if known is None else super().set_state(known)

    anywhere.set_rng_state = anywhere.random.set_rng_state = take
    anywhere.Generator = Generator
    for module in (anywhere.cuda, anywhere.cuda.random):
        module.get_rng_state = lambda device="cuda": _state()
        module.get_rng_state_all = lambda: [_state() for _ in range(anywhere.cuda.device_count())]
        module.set_rng_state = module.set_rng_state_all = lambda *args, **kwargs: None


def _state() -> Any:
    """Return the state of a generator of a GPU, seed and offset of Philox: nothing is drawn by it."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return makers().zeros(16, dtype=torch.uint8)


def _texts() -> None:
    """Format a tensor of one number as that number, as in ``f"{loss:.3f}"``."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    anywhere: Any = torch.Tensor
    original = anywhere.__format__

    def written(self: Any, how: str) -> str:
        if type(self) is FakeTensor and not self.dim():
            return format(self.detach().item(), how)
        return str(original(self, how))

    anywhere.__format__ = written


def _shapes() -> None:
    """Return a shape as a new tensor on the host: torch would write it to memory that a fake tensor lacks."""
    import torch

    anywhere: Any = torch
    anywhere._shape_as_tensor = lambda tensor: torch.tensor(tuple(tensor.shape), dtype=torch.int64)


def _copies() -> None:
    """Copy a real tensor, such as the ranks of a mesh, as it is: its storage is real, too."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    tensors: Any = torch.Tensor
    original = tensors.__deepcopy__

    def of_numbers(self: Any, memo: dict[int, Any]) -> Any:
        if type(self) is not torch.Tensor:
            return original(self, memo)
        with _disable_current_modes():
            return original(self, memo)

    tensors.__deepcopy__ = of_numbers


def _plain_tensors(session: RehearsalSession) -> None:
    """Leave a tensor plain if the script puts it into its own class: a fake tensor cannot change its class.

    Classes with ``__torch_dispatch__``, which may store numbers in another form, are refused by torch.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    anywhere: Any = torch.Tensor
    original, dispatched = anywhere.as_subclass, anywhere.__torch_dispatch__

    def as_subclass(self: Any, kind: Any) -> Any:
        is_torchs = kind.__module__.startswith("torch.") or kind.__torch_dispatch__ is not dispatched
        if type(self) is not FakeTensor or is_torchs:
            return original(self, kind)
        session.warn(
            f"tensors of the class {kind.__name__} that are created outside a loader are plain tensors here, "
            "without the attributes and methods of the class"
        )
        return torch.ops.aten.alias(self)

    anywhere.as_subclass = as_subclass


def _graphs(session: RehearsalSession) -> None:
    """Refuse CUDA graphs, whose contents are unknown; graphed callables are returned unchanged."""
    import torch

    class Refused:
        """A class, because scripts use the name in annotations."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise RehearsalError(
                "CUDA graphs cannot be rehearsed: turn them off with an argument of the script, or with a "
                "stub that replaces torch.cuda.graph (--stub, docs/rehearse.md section 6)"
            )

    def graphed(callables: Any, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        session.warn("torch.cuda.make_graphed_callables does nothing here: kernels are launched one by one")
        return callables

    anywhere: Any = torch.cuda
    anywhere.CUDAGraph = anywhere.graph = anywhere.graph_pool_handle = Refused
    anywhere.make_graphed_callables = graphed


def _shared() -> None:
    """Make ``share_memory_`` do nothing for fake tensors: they have no memory, and there is one process."""
    import torch

    anywhere: Any = torch.UntypedStorage
    original = anywhere.share_memory_

    def shared(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self if self.device.type == "meta" else original(self, *args, **kwargs)

    anywhere.share_memory_ = shared


def profile_host_only() -> None:
    """Make torch's profilers record the host only: they may wait forever for a GPU that does not exist."""
    from torch.autograd import profiler as ranges
    from torch.profiler import ProfilerActivity, profiler

    anywhere: Any = profiler._KinetoProfile
    made = anywhere.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.activities = set(self.activities) - {ProfilerActivity.CUDA} or {ProfilerActivity.CPU}
        self.use_device = None

    anywhere.__init__ = init
    named: Any = ranges
    named.emit_nvtx = lambda *args, **kwargs: nullcontext()


def _old_types(session: RehearsalSession) -> None:
    """Let ``torch.cuda.FloatTensor`` and the like tell tensors apart, and do nothing else."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    class Kind(type):
        """Class of such types."""

        dtype: Any

        def __instancecheck__(cls, value: Any) -> bool:
            is_there = type(value) is FakeTensor and session.host.on_device(value)
            return is_there and value.dtype == cls.dtype

        def __call__(cls, *args: Any) -> Any:
            raise RehearsalError(OLD_TYPES)

    anywhere: Any = torch
    for name in [name for name in vars(torch.cuda) if name.endswith("Tensor")]:
        if (dtype := getattr(getattr(torch, name, None), "dtype", None)) is not None:
            setattr(torch.cuda, name, Kind(f"torch.cuda.{name}", (), {"dtype": dtype}))
    original = anywhere.set_default_tensor_type

    def set_default(kind: Any) -> None:
        if "torch.cuda." in str(kind):
            raise RehearsalError(OLD_TYPES)
        original(kind)

    anywhere.set_default_tensor_type = set_default
    kinds: Any = FakeTensor
    cast = kinds.type

    def typed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "torch.cuda." in str((args, kwargs)):
            raise RehearsalError(OLD_TYPES)
        return cast(self, *args, **kwargs)

    kinds.type = typed


def synced_norms() -> None:
    """Make SyncBatchNorm, which has GPU kernels only, a batch norm that sends what the real one sends.

    The forward gathers mean, inverse deviation and count of each rank. The backward sums two gradients per
    channel (torch/nn/modules/_functions.py).
    """
    import torch
    import torch.distributed as dist
    from torch.nn.modules import batchnorm
    from torch.nn.parallel import DistributedDataParallel

    class Synced(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
        """Sends what the real norm sends; changes no value."""

        @staticmethod
        def forward(ctx: Any, x: Any, group: Any) -> Any:
            ctx.group, ctx.n_channels = group, x.shape[1]
            own = x.new_empty(2 * ctx.n_channels + 1, dtype=torch.float32)
            dist.all_gather_into_tensor(own.new_empty(dist.get_world_size(group) * len(own)), own, group)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            sums = grad.new_empty(2 * ctx.n_channels, dtype=torch.float32)
            dist.all_reduce(sums, group=ctx.group)
            return grad, None

    def forward(self: Any, x: Any) -> Any:
        group = self.process_group
        if self.training and dist.is_initialized() and dist.get_world_size(group) > 1:
            x = Synced.apply(x, group)
        return batchnorm._BatchNorm.forward(self, x)

    norms: Any = batchnorm.SyncBatchNorm
    norms.forward = forward
    ddp: Any = DistributedDataParallel
    ddp._passing_sync_batchnorm_handle = lambda self, module: None


def _grouped_products() -> None:
    """Accept any dtype in products of experts, as on a GPU: torch describes their result for bf16 only."""
    import torch
    from torch import _meta_registrations as metas

    anywhere: Any = metas
    original = getattr(anywhere, "_meta_grouped_mm_common", None)
    if original is None:  # before torch 2.8
        return

    def common(mat_a: Any, mat_b: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("scale_a") is not None or mat_a.dtype == torch.bfloat16:
            return original(mat_a, mat_b, *args, **kwargs)
        found = original(mat_a.to(torch.bfloat16), mat_b.to(torch.bfloat16), *args, **kwargs)
        return found.to(kwargs.get("out_dtype") or mat_a.dtype)

    anywhere._meta_grouped_mm_common = common


def _triton(session: RehearsalSession, module: Any) -> None:
    """Record launches of Triton kernels instead of compiling them; they may write all their operands."""

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        session.stated.numbers.forget(tensors)
        name = f"triton.{getattr(self, '__name__', 'kernel')}"
        size = sum(map(tensor_bytes, tensors))
        dtype = dtype_name(tensors[0]) if tensors else ""
        shapes = ", ".join("x".join(map(str, tensor.shape)) for tensor in tensors[:4])
        if session.position.step >= 0:
            session.tape.op(
                session.tape.number_of(Work(name, "memory", shapes, dtype, 0, size, is_known=False))
            )

    launching: Any = sys.modules["triton.runtime.jit"]
    launching.JITFunction.run = run
    module.Autotuner.run = lambda self, *args, **kwargs: self.fn.run(*args, **kwargs)
