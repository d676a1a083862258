"""Other parts of torch that must behave as on a GPU, or cannot work here: optimizers, data, storages."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.events import embedded
from foretrace.tracer.rehearse.gpu import kernels, offloading
from foretrace.tracer.rehearse.gpu.memory import rounded
from foretrace.tracer.rehearse.operators import calling, empty, jagged
from foretrace.tracer.rehearse.script import (
    checkpoints,
    compiling,
    delivering,
    libraries,
    sparse,
    stand_ins,
)
from foretrace.tracer.rehearse.words import asker

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession


def install(session: RehearsalSession) -> list[Any]:
    """Replace everything; return objects that must be kept alive."""
    from torch.utils import _device

    _device._device_constructors()  # torch caches this list: fill it before any function is replaced
    _multi_tensor_optimizers()
    compiling.install(session)
    delivering.install(session)
    embedded.install(session)
    _seeds(session.rank)
    offloading.install(session)
    calling.install(session)
    empty.install()
    _exports(session)
    sparse.install(session)
    scaler()
    _storages(session)
    _addresses()
    _fsdp1(session)
    _join()
    _chunks()
    _swaps()
    _parameters(session)
    _stubs(session)
    session.bodies.install()
    return [
        *checkpoints.install(session),
        *kernels.install(),
        *libraries.install(session),
        *stand_ins.install(session),
        *jagged.install(),
    ]


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


def _exports(session: RehearsalSession) -> None:
    """Ignore ``torch.export.export``, by which pipelines are split: nothing of it is on the device."""
    import torch

    anywhere: Any = torch.export
    original = anywhere.export

    def export(*args: Any, **kwargs: Any) -> Any:
        with session.aside():
            return original(*args, **kwargs)

    anywhere.export = export


def _multi_tensor_optimizers() -> None:
    """Make optimizers and clipping use their multi-tensor kernels, as on CUDA."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        anywhere: Any = module
        original = module._get_foreach_kernels_supported_devices
        anywhere._get_foreach_kernels_supported_devices = _and_cpu(original)
        module._foreach_supported_types.append(FakeTensor)


def _and_cpu(original: Callable[[], list[str]]) -> Callable[[], list[str]]:
    return lambda: [*original(), "cpu"]


def scaler() -> None:
    """Make a gradient scaler always step: an overflow would be unknown."""
    from torch.amp import grad_scaler

    anywhere: Any = grad_scaler.GradScaler
    made = anywhere.__init__

    def init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        del device
        made(self, "cpu", *args, **kwargs)

    def step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        del self, state
        return optimizer.step(*args, **kwargs)

    anywhere.__init__, anywhere._maybe_opt_step = init, step


def _storages(session: RehearsalSession) -> None:
    """Count the memory of storages that are resized, as FSDP does to free and allocate them."""
    import torch

    anywhere: Any = torch.UntypedStorage
    original = anywhere.resize_

    def resize(self: Any, size: int) -> Any:
        found = original(self, size)
        session.memory.resized(self)
        return found

    anywhere.resize_ = resize


def _addresses() -> None:
    """Give storages distinct addresses: libraries compare them, and those of fake tensors are all zero."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    anywhere: Any = torch.UntypedStorage
    fakes: Any = FakeTensor
    original = anywhere.data_ptr
    free = [_FIRST_ADDRESS]

    def of_storage(storage: Any) -> int:
        if storage.device.type != "meta":
            return int(original(storage))
        if not storage.nbytes():
            return 0
        found = vars(storage).get("rehearsed_address")
        if found is None:
            found = storage.rehearsed_address = free[0]
            free[0] += rounded(storage.nbytes())
        return int(found)

    def of_tensor(tensor: Any) -> int:
        start = of_storage(tensor.untyped_storage())
        return start + tensor.storage_offset() * tensor.element_size() if start else 0

    anywhere.data_ptr, fakes.data_ptr = of_storage, of_tensor


_FIRST_ADDRESS = 1 << 40
"""First address of the device memory that does not exist."""


def _fsdp1(session: RehearsalSession) -> None:
    """Make FSDP1 use the CPU as its device, whatever device it is given.

    Whole parameters that it moves to the host for a checkpoint stay where they are.
    """
    import torch
    from torch.distributed.fsdp import _init_utils
    from torch.distributed.fsdp import fully_sharded_data_parallel as module

    anywhere: Any = module.FullyShardedDataParallel
    made = anywhere.__init__
    names: Any = _init_utils
    names._check_module_states_for_sync_module_states = lambda module: None  # requires parameters on a GPU

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("device_id") is not None or session.placement.is_met:
            kwargs["device_id"] = torch.device("cpu")
        module: Any = kwargs.get("module", args[0] if args else None)
        session.placement.put_left((*module.parameters(), *module.buffers()))
        made(self, *args, **kwargs)

    anywhere.__init__ = init


def _join() -> None:
    """Make ``Join`` find that all ranks have joined: the others are assumed to have as many batches."""
    from torch.distributed.algorithms.join import Join

    anywhere: Any = Join
    original = anywhere._get_num_nonjoined_procs

    def left(self: Any) -> int:
        original(self)
        return 0

    anywhere._get_num_nonjoined_procs = left


def _chunks() -> None:
    """Make FSDP2 create the shard of this rank only: it would create those of all, which takes time."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param

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

    for module in (_fsdp_common, _fsdp_param):
        anywhere: Any = module
        anywhere._chunk_with_empty = Chunks


def _swaps() -> None:
    """Make modules movable: fake tensors cannot be swapped, but one can take the data of another."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    anywhere: Any = torch.utils
    original = anywhere.swap_tensors

    def swap(one: Any, other: Any) -> None:
        if one is other:
            return
        if not (type(one) is FakeTensor and type(other) is FakeTensor):
            original(one, other)
        elif one.fake_device == other.fake_device:
            one.data = other.data
        else:  # from the meta device, as with FSDP1
            one.__dict__, other.__dict__ = other.__dict__, one.__dict__
            torch._C._swap_tensor_impl(one, other)

    anywhere.swap_tensors = swap


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
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    kind: Any = FakeTensor
    original = kind.__new__

    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and kwargs.keys() == {"requires_grad"}:
            return torch.nn.Parameter(*args, **kwargs)
        if kwargs or (args and isinstance(args[0], FakeTensorMode)):
            return original(cls, *args, **kwargs)
        if len(args) != 1 or not isinstance(args[0], torch.Tensor):
            return torch.Tensor(*args)
        session.warn(TAKEN_FOR_PARAMETER.format(place=asker()))
        return torch.nn.Parameter(args[0])

    kind.__new__ = made


def _stubs(session: RehearsalSession) -> None:
    """Let a stub describe an operator that the script defines later: kept until its first call."""
    import torch

    anywhere: Any = torch.library
    original = anywhere.register_fake

    def register(name: Any, function: Any = None, /, **kwargs: Any) -> Any:
        if function is None:
            return lambda found: register(name, found, **kwargs)
        try:
            original(name, function, **kwargs)
        except RuntimeError as error:
            if "does not exist" not in str(error):
                raise
            session.fakes[str(name)] = lambda: original(name, function, **kwargs)
        return function

    anywhere.register_fake = register
