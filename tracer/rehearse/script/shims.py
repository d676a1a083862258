"""Other parts of torch that must behave as on a GPU, or cannot work here: optimizers, data, storages."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.events import embedded
from foretrace.tracer.rehearse.operators import empty, jagged
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
    scaler()
    empty.install()
    _exports(session)
    sparse.install(session)
    _storages(session)
    _join()
    _chunks()
    _parameters(session)
    _stubs(session)
    session.bodies.install()
    return [
        *checkpoints.install(session),
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
    """Make optimizers and clipping take fake tensors for what they are: they ask for the class."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        module._foreach_supported_types.append(FakeTensor)


def scaler() -> None:
    """Make a gradient scaler always step: an overflow would be unknown."""
    from torch.amp import grad_scaler

    anywhere: Any = grad_scaler.GradScaler

    def step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        del self, state
        return optimizer.step(*args, **kwargs)

    anywhere._maybe_opt_step = step


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
