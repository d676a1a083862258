"""Answers about the machine outside ``torch.cuda``: accelerators, versions, profilers.

``torch.accelerator`` names the GPU to scripts and libraries. torch's own code still gets the CPU.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.rehearse.gpu.devices import answers

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.gpu.askers import Askers
    from foretrace.tracer.rehearse.gpu.meter import Meter
    from foretrace.tracer.rehearse.gpu.placement import Placement

VERSIONS: Final = {
    (2, 11): ("13.0", (2, 28, 9), 91900),
    (0, 0): ("12.8", (2, 27, 5), 91002),
}
"""CUDA, NCCL and cuDNN in the wheels of torch, by the torch version they begin with. Scripts choose dtypes by
them.

Source: what the wheels of torch 2.10.0 and 2.11.0 on PyPI require.
"""

OF_MEMORY: Final = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("memory_stats", "empty_cache", "reset_peak_memory_stats"),
)
"""Functions of ``torch.accelerator`` that give the same answer as those of ``torch.cuda`` with that name."""

IGNORED: Final = (
    *("_record_memory_history", "_dump_snapshot", "reset_accumulated_memory_stats"),
    *("reset_max_memory_cached", "reset_peak_host_memory_stats", "reset_accumulated_host_memory_stats"),
)
"""Functions of ``torch.cuda.memory`` that do nothing here: there is no allocator to record or to reset."""


class Runtime:
    """Replaces the CUDA runtime library: every function does nothing and returns success."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: 0


NO_GPU: Final = {
    "is_available": False,
    "is_initialized": False,
    "is_bf16_supported": False,
    "device_count": 0,
    "get_arch_list": [],
}
"""What ``torch.cuda`` returns on a machine without a GPU."""


def install(placement: Placement, memory: Meter, *, has_gpu: bool = True) -> None:
    """Give the answers of a machine with GPUs, or of one without.

    Args:
        placement: knows which code asks, and the device of this rank.
        memory: the bytes that are allocated.
        has_gpu: whether the script is told that there is a GPU.
    """
    import torch

    tell_versions()
    tell_generators()
    tell_memory(memory)
    tell_accelerator(placement.asker, torch.device(placement.device.type), has_gpu=has_gpu)
    tell_profilers()
    if not has_gpu:
        _deny(placement)


def _deny(placement: Placement) -> None:
    """Say that there is no GPU. A script that requests one anyway ends with an error, as in a real run."""
    import torch

    anywhere: Any = torch
    placement.is_denied = True
    for name, answer in NO_GPU.items():
        setattr(anywhere.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    anywhere.version.cuda = None
    anywhere.backends.cuda.is_flash_attention_available = lambda: False
    anywhere.distributed.is_nccl_available = lambda: False


def _wheel() -> tuple[str, tuple[int, int, int], int]:
    """Return the versions of CUDA, NCCL and cuDNN in the GPU wheel of this version of torch."""
    import torch

    own = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return next(versions for since, versions in VERSIONS.items() if own >= since)


def tell_versions() -> None:
    """Report versions of CUDA and NCCL: scripts choose a dtype by them."""
    import torch
    import torch.cuda.nccl

    anywhere: Any = torch
    cuda, nccl, _ = _wheel()
    if torch.version.cuda is None:  # else torchvision compares it with its own version
        anywhere.version.cuda = cuda
    anywhere.cuda.nccl.version = lambda: nccl
    anywhere.cuda.nccl.is_available = lambda tensors: True
    anywhere.backends.cuda.is_flash_attention_available = lambda: True


def tell_generators() -> None:
    """Give each GPU of the node a generator, and ``torch.cuda.random`` the functions of ``torch.cuda``.

    The states of these generators are never used: random numbers come from the generator of the CPU.
    """
    import torch
    from torch.cuda import random

    anywhere: Any = torch.cuda
    anywhere.default_generators = tuple(torch.Generator() for _ in range(torch.cuda.device_count()))
    for name in set(vars(random)) & set(vars(anywhere)):
        if callable(getattr(anywhere, name)):
            setattr(random, name, getattr(anywhere, name))


def tell_memory(meter: Meter) -> None:
    """Make ``torch.cuda.memory`` and ``torch.accelerator`` return what ``torch.cuda`` returns."""
    import torch

    anywhere: Any = torch
    module, accelerator = anywhere.cuda.memory, anywhere.accelerator
    for name, function in answers(meter).items():
        if getattr(getattr(module, name, None), "__module__", "") == module.__name__:
            setattr(module, name, function)
    for name in IGNORED:
        for place in (anywhere.cuda, module):
            if hasattr(place, name):
                setattr(place, name, lambda *args, **kwargs: None)
    for name in OF_MEMORY:
        for place in (accelerator, getattr(accelerator, "memory", None)):
            if hasattr(place, name):
                setattr(place, name, getattr(anywhere.cuda, name))
    accelerator.get_memory_info = anywhere.cuda.mem_get_info


def tell_accelerator(asker: Askers, gpu: Any, *, has_gpu: bool) -> None:
    """Report *gpu*, a device, or none, to code that asks for an accelerator and is not torch's."""
    import torch

    anywhere: Any = torch
    is_torch, module_of, cpu = asker.is_torch, torch.get_device_module, torch.device("cpu")

    def tell(owner: Any, name: str, answer: Any) -> None:
        original = getattr(owner, name)

        def asked(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if is_torch(sys._getframe(1)) else answer

        setattr(owner, name, asked)

    tell(anywhere.accelerator, "is_available", has_gpu)
    tell(anywhere.accelerator, "device_count", torch.cuda.device_count() if has_gpu else 0)
    tell(anywhere.accelerator, "current_accelerator", gpu if has_gpu else None)
    tell(anywhere._C, "_get_accelerator", gpu if has_gpu else cpu)  # transformers asks this for its meshes
    tell(anywhere.backends.cuda, "is_built", has_gpu)
    tell(anywhere.backends.cudnn, "is_available", has_gpu)
    tell(anywhere.backends.cudnn, "version", _wheel()[2] if has_gpu else None)
    usual = gpu if has_gpu else cpu
    anywhere.get_device_module = lambda device=None: module_of(usual if device is None else device)
    anywhere.accelerator.device_index = anywhere.cuda.device if has_gpu else lambda device: nullcontext()


def tell_profilers() -> None:
    """Let scripts start and stop the CUDA profilers, which record nothing."""
    import torch
    import torch.cuda.nvtx
    import torch.cuda.profiler
    from torch.autograd import profiler

    def ranges(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        del args, kwargs
        return nullcontext()

    anywhere: Any = torch.cuda
    for module in (anywhere, anywhere.profiler):
        module.cudart, module.check_error = Runtime, lambda status: None
    for name in ("range_start", "range_end"):
        setattr(anywhere.nvtx, name, lambda *args, **kwargs: 0)
    named: Any = profiler
    named.emit_nvtx = ranges
    _traces()


def _traces() -> None:
    """Make torch's profiler record the host only: it may wait forever for a GPU that does not exist."""
    from torch.profiler import ProfilerActivity, profiler

    anywhere: Any = profiler._KinetoProfile
    made = anywhere.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.activities = set(self.activities) - {ProfilerActivity.CUDA} or {ProfilerActivity.CPU}
        self.use_device = None

    anywhere.__init__ = init
