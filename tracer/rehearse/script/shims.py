"""What else of torch has to behave as on a GPU, or must not be asked: kernels, optimizers, data."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tracer.rehearse.gpu import kernels, offloading
from tracer.rehearse.gpu.memory import rounded
from tracer.rehearse.operators import calling, jagged
from tracer.rehearse.script import checkpoints, compiling, exporting, libraries, loaders, stand_ins

if TYPE_CHECKING:
    from tracer.rehearse.session import RehearsalSession


def install(session: RehearsalSession) -> list[Any]:
    """Put everything in place; return what has to be kept alive."""
    from torch.utils import _device

    _device._device_constructors()  # torch looks them up once: before any of them is replaced
    _multi_tensor_optimizers()
    compiling.install(session)
    _loaders(session)
    checkpoints.install(session)
    offloading.install(session)
    calling.install(session)
    exporting.install(session)
    _scaler()
    _storages(session)
    _addresses()
    _fsdp1(session)
    _join()
    _chunks()
    _swaps()
    _stubs(session)
    return [*kernels.install(), *libraries.install(session), *stand_ins.install(session), *jagged.install()]


def _multi_tensor_optimizers() -> None:
    """Let optimizers and clipping choose their multi-tensor kernels, as they do on CUDA."""
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


def _loaders(session: RehearsalSession) -> None:
    """Load data as the script does, in this process; of batches only small whole numbers stay known."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils import _pytree
    from torch.utils.data import DataLoader, dataloader

    anywhere: Any = dataloader._BaseDataLoaderIter
    loader: Any = DataLoader
    following, made, iterated = anywhere.__next__, loader.__init__, loader.__iter__
    pins: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
    owners: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @functools.wraps(made)  # whoever makes a loader anew reads there what to take over
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        pins[self] = bool(kwargs.get("pin_memory"))
        args = (*args[:5], 0, *args[6:]) if len(args) > _POSITION_OF_WORKERS else args
        kept = {key: value for key, value in kwargs.items() if key not in _WORKERS}
        made(self, *args, **kept)

    def iterate(self: Any) -> Any:
        with unset_fake_temporarily():
            found = iterated(self)
        if said := loaders.without_batches(self):
            session.warn(said)
        pins[found], owners[found] = pins.get(self, False), id(self)
        return found

    def next_batch(self: Any) -> Any:
        session.host.doing.is_loading = True
        try:
            with unset_fake_temporarily():
                batch = following(self)
        finally:
            session.host.doing.is_loading = False
        session.trainings.loaded.note(owners.get(self, 0), batch)

        is_pinned = bool(pins.get(self)) and session.placement.is_met
        loaded = functools.partial(_loaded, session, is_pinned=is_pinned)
        return _pytree.tree_map_only(torch.Tensor, loaded, batch)

    loader.__init__, loader.__iter__, anywhere.__next__ = init, iterate, next_batch


def _loaded(session: RehearsalSession, tensor: Any, *, is_pinned: bool) -> Any:
    """Return *tensor* of a batch as a rehearsal has it, in pinned memory if the loader *is_pinned*."""
    if tensor.is_nested:
        parts = functools.partial(_loaded, session, is_pinned=is_pinned)
        return jagged.of_parts(tensor, parts, parts)
    found = session.host.faked(tensor)
    return session.host.pin(found) if is_pinned and session.host.holds(found) else found


_WORKERS = frozenset(
    {
        "num_workers",
        "prefetch_factor",
        "persistent_workers",
        "multiprocessing_context",
        "pin_memory",
        "timeout",
    }
    | {"pin_memory_device"}
)
"""How batches are loaded by other processes: here, there are none."""

_POSITION_OF_WORKERS = 5
"""Place of ``num_workers`` among the arguments of a loader."""


def _scaler() -> None:
    """Let a gradient scaler always step: nobody knows of an overflow."""
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
    """Follow storages that are freed and brought back by their size, as FSDP does."""
    import torch

    anywhere: Any = torch.UntypedStorage
    original = anywhere.resize_

    def resize(self: Any, size: int) -> Any:
        found = original(self, size)
        session.memory.resized(self)
        return found

    anywhere.resize_ = resize


def _addresses() -> None:
    """Give tensors addresses by which libraries tell them apart, as Accelerate does; all would be at zero."""
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
"""Where the memory of a device that is not there begins."""


def _fsdp1(session: RehearsalSession) -> None:
    """Let the first FSDP have the processor for its device, whatever number it is told.

    Whole parameters that it moves to the host for a checkpoint stay where they are.
    """
    import torch
    from torch.distributed.fsdp import _init_utils
    from torch.distributed.fsdp import fully_sharded_data_parallel as module

    anywhere: Any = module.FullyShardedDataParallel
    made = anywhere.__init__
    names: Any = _init_utils
    names._check_module_states_for_sync_module_states = lambda module: None  # wants parameters on a GPU

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("device_id") is not None or session.placement.is_met:
            kwargs["device_id"] = torch.device("cpu")
        module: Any = kwargs.get("module", args[0] if args else None)
        session.placement.put_left((*module.parameters(), *module.buffers()))
        made(self, *args, **kwargs)

    anywhere.__init__ = init


def _join() -> None:
    """Let nobody be left with more batches than this rank: others have as many, as whatever they tell."""
    from torch.distributed.algorithms.join import Join

    anywhere: Any = Join
    original = anywhere._get_num_nonjoined_procs

    def left(self: Any) -> int:
        original(self)
        return 0

    anywhere._get_num_nonjoined_procs = left


def _chunks() -> None:
    """Let FSDP2 cut out its own shard only: of a thousand ranks it would otherwise make all shards of all."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param

    class Chunks:
        """The chunks of *tensor* along *dim*, made when they are asked for."""

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
    """Let modules be moved: two fake tensors do not swap, but one can take the data of another."""
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
        else:  # from the meta device, as FSDP1 has it
            one.__dict__, other.__dict__ = other.__dict__, one.__dict__
            torch._C._swap_tensor_impl(one, other)

    anywhere.swap_tensors = swap


def _stubs(session: RehearsalSession) -> None:
    """Let a stub say what an operator makes that the script defines later: kept until its first call."""
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
