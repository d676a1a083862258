"""Parts of torch and Triton that need a GPU, memory or other processes, or take fake tensors amiss."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
import random
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Final

from foretrace.tracer import internals
from foretrace.tracer.internals import compile_as, makers
from foretrace.tracer.operators import dtype_name, tensor_bytes
from foretrace.tracer.rehearse.data import checkpoints, learning, loaders, unknown
from foretrace.tracer.rehearse.data.numbers import Numbers
from foretrace.tracer.rehearse.data.unknown import Unknown, filled
from foretrace.tracer.rehearse.device import compiling, jagged, libraries
from foretrace.tracer.rehearse.replacing import replaces, when_imported
from foretrace.tracer.rehearse.session import RehearsalSession
from foretrace.tracer.rehearse.tape.calls import tensors_in
from foretrace.tracer.rehearse.tape.works import Work
from foretrace.tracer.rehearse.words import asker
from foretrace.tracer.rehearse.world.communicating import install_futures
from foretrace.tracer.rehearse.world.started import install_children
from foretrace.traces.rehearsal import HOST_WAIT


def install(session: RehearsalSession) -> None:
    """Replace everything."""
    internals.fill_constructors()  # torch caches this list: fill it before any function is replaced
    for kinds in internals.kinds_updated_together():  # optimizers and clipping ask for the class
        kinds.append(internals.fake_tensor())
    compiling.install(session)
    loaders.install(session)
    learning.install(session)
    _seeds(session.rank)
    scaler()
    mend_empty_gradients()
    _counted(session)
    _join()
    _chunks()
    _parameters(session)
    _stubs(session)
    session.bodies.install()
    checkpoints.install(session)
    libraries.install(session)
    _arrays(session)
    _random_states(session)
    _lists(session)
    _elements(session)
    unknown.install(session.stated)
    _copies()
    _plain_tensors(session)
    install_futures()
    install_children(session)
    profile_host_only()
    synced_norms()
    _grouped_products()
    jagged.install()
    when_imported(TRITON, functools.partial(_triton, session))
    when_imported(TRITON_DRIVER, _triton_driver)


# Gradients of losses over no elements, as of a mask that selects nothing: empty as well. PyTorch's kernels
# return an empty gradient; the decompositions that fake tensors use divide by the number of elements
# instead, and raise ``ZeroDivisionError``.

MEANS: Final = ("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward")
"""Operators whose decomposition divides by the number of elements of their second argument, the input."""


def mend_empty_gradients() -> None:
    """Make the decompositions of ``MEANS`` return an empty gradient for an empty input."""
    import torch

    decompositions = internals.decompositions()

    def with_empty(decomposed: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(decomposed)
        def gradient(grad: Any, values: Any, *rest: Any, **named: Any) -> Any:
            return (
                decomposed(grad, values, *rest, **named) if values.numel() else values.new_empty(values.shape)
            )

        return gradient

    for name in MEANS:
        operator = getattr(torch.ops.aten, name).default
        decompositions[operator] = with_empty(decompositions[operator])


_STEP: Final = 0x9E3779B97F4A7C15
"""Between the seeds of two ranks: 2**64 over the golden mean, so that no two are near each other."""


def _seeds(rank: int) -> None:
    """Seed what Python, NumPy and torch draw from where a script seeds nothing; real ranks are not seeded.

    A process that was forked would draw what every other one draws, in another order in each rehearsal.
    """
    import numpy as np
    import torch

    seed = (rank + 1) * _STEP % 2**63
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def scaler() -> None:
    """Make a gradient scaler always step: an overflow would be unknown."""
    from torch.amp import grad_scaler

    @replaces(grad_scaler.GradScaler, name="_maybe_opt_step")
    def step(_: Any, self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)


def _counted(session: RehearsalSession) -> None:
    """Count storages that are resized, as FSDP does; leave out exports, of which nothing is on the device."""
    import torch

    @replaces(torch.UntypedStorage)
    def resize_(original: Any, self: Any, size: int) -> Any:
        found = original(self, size)
        session.memory.resized(self)
        return found

    @replaces(torch.UntypedStorage)  # which have no memory to share
    def share_memory_(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return self if self.device.type == "meta" else original(self, *args, **kwargs)

    @replaces(torch.export)
    def export(original: Any, *args: Any, **kwargs: Any) -> Any:
        with session.aside():
            return original(*args, **kwargs)


def _join() -> None:
    """Make ``Join`` find that all ranks have joined: the others are assumed to have as many batches."""
    from torch.distributed.algorithms.join import Join

    @replaces(Join, name="_get_num_nonjoined_procs")
    def left(original: Any, self: Any) -> int:
        original(self)
        return 0


def _chunks() -> None:
    """Make FSDP2 create the shard of this rank only: it would create those of all, which takes time."""

    class Chunks:
        """The chunks of *tensor* along *dim*, created when they are used."""

        def __init__(self, tensor: Any, num_chunks: int, dim: int) -> None:
            self._tensor, self._dim = tensor, dim
            self._length = -(-tensor.size(dim) // num_chunks)

        def __getitem__(self, at: int) -> Any:
            tensor, start = self._tensor, at * self._length
            if start >= tensor.size(self._dim):
                return tensor.new_empty(0)
            return tensor.narrow(self._dim, start, min(self._length, tensor.size(self._dim) - start))

    for module in (internals.fsdp2_sharding(), internals.fsdp2_parameters()):
        module._chunk_with_empty = Chunks


TAKEN_FOR_PARAMETER: Final = (
    "{place} makes a tensor of one by the type of another: in a rehearsal that type is the same for all, and "
    "the new one is taken to be a parameter"
)


def _parameters(session: RehearsalSession) -> None:
    """Make ``type(parameter)(data, requires_grad=...)`` a parameter: libraries load weights by it.

    The type of a fake parameter is that of all fake tensors. No class of torch but that of parameters takes
    this argument alone. Without it, what is made of a tensor is mostly a parameter: that is said.
    """
    import torch

    fake_mode = internals.fake_mode()

    @replaces(internals.fake_tensor(), name="__new__")
    def made(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and kwargs.keys() == {"requires_grad"}:
            return torch.nn.Parameter(*args, **kwargs)
        if kwargs or (args and isinstance(args[0], fake_mode)):
            return original(cls, *args, **kwargs)
        if len(args) != 1 or not isinstance(args[0], torch.Tensor):
            return torch.Tensor(*args)
        session.warn(TAKEN_FOR_PARAMETER.format(place=asker()))
        return torch.nn.Parameter(args[0])


def _stubs(session: RehearsalSession) -> None:
    """Let a stub describe an operator that the script defines later: kept until its first call."""
    import torch

    @replaces(torch.library)
    def register_fake(original: Any, name: Any, function: Any = None, /, **kwargs: Any) -> Any:
        if function is None:
            return lambda found: register_fake(name, found, **kwargs)
        try:
            original(name, function, **kwargs)
        except RuntimeError as error:
            if "does not exist" not in str(error):
                raise
            session.fakes[str(name)] = lambda: original(name, function, **kwargs)
        return function


def _arrays(session: RehearsalSession) -> None:
    """Make ``Tensor.numpy`` return known numbers, else objects like those that ``item()`` returns.

    Also texts, as in ``f"{loss:.3f}"``, shapes as tensors, and files that are mapped into memory.
    """
    import torch

    fake_tensor = internals.fake_tensor()
    numpy = torch.Tensor.numpy

    def told(tensor: Any) -> Any:
        if session.position.step >= 0 and not session.host.holds(tensor):
            session.tape.note(HOST_WAIT)
        own = session.stated.numbers.of(tensor)
        with session.stated.reading() as read:
            value = session.stated.scalar(tensor) if own is None and tensor.numel() else 0
        if read.said:
            return filled(Unknown(session.stated, read.said), tensor.shape)
        with internals.without_fakes():
            if own is not None:
                return numpy(own.clone())
            return numpy(makers().full(tuple(tensor.shape), value, dtype=tensor.dtype))

    @replaces(torch.Tensor, fake_tensor, name="numpy")
    def to_numpy(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return told(self) if type(self) is fake_tensor else original(self, *args, **kwargs)

    @replaces(torch.Tensor, name="__array__")
    def to_array(original: Any, self: Any, dtype: Any = None) -> Any:
        if type(self) is not fake_tensor:
            return original(self, dtype)
        return told(self) if dtype is None else told(self).astype(dtype, copy=False)

    @replaces(torch.Tensor, name="__format__")
    def written(original: Any, self: Any, how: str) -> str:
        is_number = type(self) is fake_tensor and not self.dim()
        return format(self.detach().item(), how) if is_number else str(original(self, how))

    @replaces(torch)
    def from_file(original: Any, filename: str, *args: Any, **kwargs: Any) -> Any:
        with internals.without_fakes():
            found = original(filename, *args, **kwargs)
        return session.host.faked(found)

    @replaces(torch, name="_shape_as_tensor")
    def shape_as_tensor(_: Any, tensor: Any) -> Any:
        return torch.tensor(tuple(tensor.shape), dtype=torch.int64)


def _random_states(session: RehearsalSession) -> None:
    """Accept a state of the generator that was on the device, such as one that a rank has sent."""
    import torch

    fake_tensor = internals.fake_tensor()

    def known(state: Any) -> Any:
        return session.stated.numbers.of(state) if type(state) is fake_tensor else state

    @replaces(torch.random, torch)
    def set_rng_state(original: Any, new_state: Any) -> None:
        if (own := known(new_state)) is not None:
            original(own)

    class Generator(torch.Generator):  # type: ignore[misc]  # torch is untyped here
        """A generator that takes such a state, too."""

        def set_state(self, new_state: Any) -> Any:
            """Set a state; of one that was on the device, as much as is known."""
            return self if (own := known(new_state)) is None else super().set_state(own)

    torch.Generator = Generator

    def state(device: Any = "cuda") -> Any:
        """Return the state of a generator of a GPU, seed and offset of Philox: nothing is drawn by it."""
        with internals.without_fakes():
            return makers().zeros(16, dtype=torch.uint8)

    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = state
        module.get_rng_state_all = lambda: [state() for _ in range(torch.cuda.device_count())]
        module.set_rng_state = module.set_rng_state_all = lambda *args, **kwargs: None


# Tensors that are made of a list of tensors: the host reads the number of each, as on a GPU. torch would
# read memory that does not exist.

FROM_LISTS: Final = ("tensor", "as_tensor", "asarray")
"""Functions of torch that create a tensor from numbers."""


def _lists(session: RehearsalSession) -> None:
    """Read the numbers of tensors in lists one by one, and make what is made of a storage a fake tensor."""
    import torch

    fake_tensor = internals.fake_tensor()

    def holds(data: Any) -> bool:
        return any(map(holds, data)) if isinstance(data, list | tuple) else isinstance(data, fake_tensor)

    def numbers(data: Any) -> Any:
        """Return *data* with each tensor in it replaced by its number, if *data* is a list."""
        if not isinstance(data, list | tuple) or not holds(data):
            return data
        return [one.tolist() if isinstance(one, fake_tensor) else numbers(one) for one in data]

    @replaces(torch)
    def asarray(original: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(obj, torch.UntypedStorage):  # as of safetensors
            return original(obj, *args, **kwargs)
        with session.aside(), internals.without_fakes(), internals.without_functions()():
            real = makers().empty(0, dtype=kwargs.get("dtype") or torch.uint8).set_(obj)
        return session.host.faked(real)

    for name in FROM_LISTS:
        made = getattr(torch, name)
        compile_as(
            made, replaces(torch, name=name)(lambda o, data, *args, **kw: o(numbers(data), *args, **kw))
        )
    for kind, name in ((torch.Tensor, "__new__"), (fake_tensor, "new")):
        replaces(kind, name=name)(lambda o, first, *args, **kw: o(first, *map(numbers, args), **kw))

    def listed(places: Any) -> Any:
        return places.tolist() if isinstance(places, fake_tensor) else places

    for owner in (torch, torch.Tensor):  # of cuts that are in a tensor

        @replaces(owner)
        def tensor_split(original: Any, *args: Any, **kwargs: Any) -> Any:
            named = {name: value if name == "input" else listed(value) for name, value in kwargs.items()}
            return original(*args[:1], *map(listed, args[1:]), **named)


# Numbers that a script writes one by one to a tensor of the host, as a loop that fills a batch does. For
# each of them PyTorch makes a view and calls an operator, which a rehearsal takes up to a millisecond to
# follow; a batch may have a hundred thousand. But what the host does to single numbers takes no time, and
# is not recorded. So all that is left to do is to write the number where those of the tensor are known.

SHARED: Final = frozenset({"torch.int64", "torch.int32", "torch.float32", "torch.float64", "torch.bool"})
"""Types of tensors of which arrays share the numbers."""


def _elements(session: RehearsalSession) -> None:
    """Do ``tensor[place] = number`` here where that can be done, else as torch does it."""
    host, stated, kept = session.host, session.stated, Kept(session.stated.numbers)

    @replaces(internals.fake_tensor(), name="__setitem__")
    def write(original: Any, tensor: Any, place: Any, number: Any) -> None:
        places = place if type(place) is tuple else (place,)
        is_plain = type(number) in {int, float, bool} and not tensor.requires_grad and host.holds(tensor)
        if is_plain and _is_inside(places, tensor.shape) and kept.is_written(tensor, places, number):
            stated.forget_mean((tensor,))
        else:
            original(tensor, place, number)


class Kept:
    """Writes to known *numbers*, through an array of those of the tensor that was written to last."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._last: tuple[Any, Any, Any] = (None, None, None)

    def is_written(self, tensor: Any, places: tuple[int, ...], number: float) -> bool:
        """Write *number* among those of *tensor*, if any is known; return False if it cannot."""
        held = self._numbers.held(tensor)
        # No number of the tensor is known, so there is none to keep.
        if held is None:
            return True
        last, flat, array = self._last
        if last is None or last() is not tensor or flat is not held.numbers:
            array = None if held.is_shared else self._array(tensor)
            if array is None or (held := self._numbers.held(tensor)) is None:
                return False
            self._last = weakref.ref(tensor), held.numbers, array
        array[places] = number
        return True

    def _array(self, tensor: Any) -> Any | None:
        """Return the known numbers of *tensor* as an array that shares them; a rule has none to share."""
        found, held = self._numbers.of(tensor), self._numbers.held(tensor)
        if found is None or held is None or not hasattr(held.numbers, "untyped_storage"):
            return None
        if str(found.dtype) not in SHARED:
            return None
        with self._numbers.really():
            return found.numpy()


def _is_inside(places: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
    """Whether *places* are whole numbers that name one element of a tensor of that *shape*."""
    if len(places) != len(shape):
        return False
    return all(type(at) is int and -n <= at < n for at, n in zip(places, shape, strict=True))


def _copies() -> None:
    """Copy a real tensor, such as the ranks of a mesh, as it is: its storage is real, too."""
    import torch

    @replaces(torch.Tensor, name="__deepcopy__")
    def of_numbers(original: Any, self: Any, memo: dict[int, Any]) -> Any:
        with internals.without_modes() if type(self) is torch.Tensor else nullcontext():
            return original(self, memo)


def _plain_tensors(session: RehearsalSession) -> None:
    """Leave a tensor plain if the script puts it into its own class: a fake tensor cannot change its class.

    Classes with ``__torch_dispatch__``, which may store numbers in another form, are refused by torch.
    """
    import torch

    fake_tensor, dispatched = internals.fake_tensor(), torch.Tensor.__torch_dispatch__

    @replaces(torch.Tensor)
    def as_subclass(original: Any, self: Any, kind: Any) -> Any:
        is_torchs = kind.__module__.startswith("torch.") or kind.__torch_dispatch__ is not dispatched
        if type(self) is not fake_tensor or is_torchs:
            return original(self, kind)
        session.warn(
            f"tensors of the class {kind.__name__} that are created outside a loader are plain tensors here, "
            "without the attributes and methods of the class"
        )
        return torch.ops.aten.alias(self)


def profile_host_only() -> None:
    """Make torch's profilers record the host only: they may wait forever for a GPU that does not exist."""
    from torch.autograd import profiler as ranges
    from torch.profiler import ProfilerActivity

    @replaces(internals.profiler_base(), name="__init__")
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.activities = set(self.activities) - {ProfilerActivity.CUDA} or {ProfilerActivity.CPU}
        self.use_device = None

    ranges.emit_nvtx = lambda *args, **kwargs: nullcontext()


def synced_norms() -> None:
    """Make SyncBatchNorm, which asks whether a rank has rows, a norm that sends what the real one sends.

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

    @replaces(batchnorm.SyncBatchNorm)
    def forward(_: Any, self: Any, x: Any) -> Any:
        group = self.process_group
        if self.training and dist.is_initialized() and dist.get_world_size(group) > 1:
            x = Synced.apply(x, group)
        return internals.batch_norm().forward(self, x)

    replaces(DistributedDataParallel, name="_passing_sync_batchnorm_handle")(lambda _, self, module: None)


def _grouped_products() -> None:
    """Accept any dtype in products of experts, as on a GPU: torch describes their result for bf16 only."""
    import torch

    metas = internals.meta_registrations()
    if not hasattr(metas, internals.GROUPED_PRODUCT):
        return

    @replaces(metas, name=internals.GROUPED_PRODUCT)
    def common(original: Any, mat_a: Any, mat_b: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("scale_a") is not None or mat_a.dtype == torch.bfloat16:
            return original(mat_a, mat_b, *args, **kwargs)
        found = original(mat_a.to(torch.bfloat16), mat_b.to(torch.bfloat16), *args, **kwargs)
        return found.to(kwargs.get("out_dtype") or mat_a.dtype)


TRITON: Final = "triton.runtime.autotuner"
"""The module of Triton that is imported last, of those that launch kernels."""


def _triton(session: RehearsalSession, module: Any) -> None:
    """Record launches of Triton kernels instead of compiling them; they may write all their operands."""

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = tensors_in((args, kwargs))
        session.stated.numbers.forget(tensors)
        name = f"triton.{getattr(self, '__name__', 'kernel')}"
        dtype = dtype_name(tensors[0]) if tensors else ""
        shapes = ", ".join("x".join(map(str, tensor.shape)) for tensor in tensors[:4])
        work = Work(name, "memory", shapes, dtype, 0, sum(map(tensor_bytes, tensors)), is_known=False)
        if session.position.step >= 0:
            session.tape.op(session.tape.number_of(work))

    sys.modules["triton.runtime.jit"].JITFunction.run = run
    # The tuner would time each of its configurations.
    module.Autotuner.run = lambda self, *args, **kwargs: self.fn.run(*args, **kwargs)


TRITON_DRIVER: Final = "triton.backends.nvidia.driver"
"""The module of Triton that asks CUDA; what else it asks of a GPU it asks torch."""


def _triton_driver(module: Any) -> None:
    """Tell Triton of the GPU that torch tells, in place of a library of C that it compiles against CUDA."""
    import torch

    def properties(device: int) -> dict[str, int]:
        gpu = torch.cuda.get_device_properties(device)
        return {
            "max_shared_mem": gpu.shared_memory_per_block_optin,
            "max_num_regs": gpu.regs_per_multiprocessor,
            "multiprocessor_count": gpu.multi_processor_count,
            "warpSize": gpu.warp_size,
            "sm_clock_rate": gpu.clock_rate,
            "mem_clock_rate": gpu.memory_clock_rate,
            "mem_bus_width": gpu.memory_bus_width,
        }

    module.CudaUtils = lambda: SimpleNamespace(get_device_properties=properties)
