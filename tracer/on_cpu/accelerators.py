"""Answers about the machine outside ``torch.cuda``: accelerators, versions, profilers.

``torch.accelerator`` names the GPU to scripts and libraries. torch's own code still gets the CPU.
"""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from foretrace.tracer.internals import Wheel
from foretrace.tracer.on_cpu.devices import answers
from foretrace.tracer.rehearse.device.installing import WHEELS
from foretrace.tracer.rehearse.script import stand_ins

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.gpu.meter import Meter

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


def _wheel() -> Wheel:
    """Return the versions of CUDA, NCCL and cuDNN in the GPU wheel of this version of torch."""
    import torch

    own = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return next(wheel for since, wheel in WHEELS.items() if own >= since)


def tell_versions() -> None:
    """Report versions of CUDA and NCCL: scripts choose a dtype by them."""
    import torch
    import torch.cuda.nccl

    anywhere: Any = torch
    wheel = _wheel()
    if torch.version.cuda is None:  # else torchvision compares it with its own version
        anywhere.version.cuda = wheel.cuda
    anywhere.cuda.nccl.version = lambda: wheel.nccl
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


def tell_accelerator() -> None:
    """Report a GPU to code that asks for an accelerator and is not torch's."""
    import torch

    anywhere: Any = torch
    gpu, module_of, roots = torch.device("cuda"), torch.get_device_module, str(Path(torch.__file__).parent)

    def tell(owner: Any, name: str, answer: Any) -> None:
        original = getattr(owner, name)

        def asked(*args: Any, **kwargs: Any) -> Any:
            is_torchs = sys._getframe(1).f_code.co_filename.startswith(roots)
            return original(*args, **kwargs) if is_torchs else answer

        setattr(owner, name, asked)

    tell(anywhere.accelerator, "is_available", True)  # noqa: FBT003 - an answer
    tell(anywhere.accelerator, "device_count", torch.cuda.device_count())
    tell(anywhere.accelerator, "current_accelerator", gpu)
    tell(anywhere._C, "_get_accelerator", gpu)  # transformers asks this for its meshes
    tell(anywhere.backends.cuda, "is_built", True)  # noqa: FBT003
    tell(anywhere.backends.cudnn, "is_available", True)  # noqa: FBT003
    tell(anywhere.backends.cudnn, "version", _wheel().cudnn)
    anywhere.get_device_module = lambda device=None: module_of(gpu if device is None else device)
    anywhere.accelerator.device_index = lambda device: nullcontext()


def tell_profilers() -> None:
    """Let scripts start and stop the CUDA profilers, which record nothing."""
    import torch
    import torch.cuda.nvtx
    import torch.cuda.profiler

    anywhere: Any = torch.cuda
    for module in (anywhere, anywhere.profiler):
        module.cudart, module.check_error = Runtime, lambda status: None
    for name in ("range_start", "range_end"):
        setattr(anywhere.nvtx, name, lambda *args, **kwargs: 0)
    stand_ins.profile_host_only()
