"""Autocast of a GPU, done by autocast of the processor."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


class _OfGpu(threading.local):
    """What autocast of the GPU is told, which torch keeps for each thread.

    Attributes:
        dtype: the one that operators are cast to; None: torch's own for CUDA, fp16.
        of_host: what autocast of the host had before that of the GPU was turned on by hand; None: it is off.
    """

    dtype: Any = None
    of_host: Any = None


def install(torch: Any, is_foreign: Callable[[Any], bool]) -> None:
    """Let autocast of a GPU be that of the processor, with the dtype that the GPU would use."""
    from torch.amp import autocast_mode

    base, told = autocast_mode.autocast, _OfGpu()
    original, enter, leave = base.__init__, base.__enter__, base.__exit__

    def dtype_of_gpu() -> Any:
        return told.dtype or torch.float16

    @functools.wraps(original)
    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        self.is_of_gpu = is_foreign(device_type)
        if self.is_of_gpu:
            device_type, dtype = "cpu", dtype or dtype_of_gpu()
        original(self, device_type, dtype, *args, **kwargs)

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        if self.is_of_gpu:
            self.dtype_before, told.dtype = told.dtype, self.fast_dtype
        return enter(self)

    @functools.wraps(leave)
    def left(self: Any, *error: Any) -> Any:
        if self.is_of_gpu:
            told.dtype = self.dtype_before
        return leave(self, *error)

    base.__init__, base.__enter__, base.__exit__ = init, entered, left
    _by_hand(torch, is_foreign, told, dtype_of_gpu)


def _by_hand(
    torch: Any, is_foreign: Callable[[Any], bool], told: _OfGpu, dtype_of_gpu: Callable[[], Any]
) -> None:
    """Replace the functions that read and set the state of autocast without a region."""
    enabled, enable = torch.is_autocast_enabled, torch.set_autocast_enabled
    dtype_of, choose = torch.get_autocast_dtype, torch.set_autocast_dtype

    def is_enabled(device_type: str = "cpu") -> bool:
        return bool(enabled("cpu" if is_foreign(device_type) else device_type))

    def dtype(device_type: str) -> Any:
        return dtype_of_gpu() if is_foreign(device_type) else dtype_of(device_type)

    def set_dtype(device_type: str, dtype: Any) -> None:
        if not is_foreign(device_type):
            choose(device_type, dtype)
            return
        told.dtype = dtype
        if enabled("cpu"):
            choose("cpu", dtype)

    def set_enabled(*args: Any) -> None:
        # With one argument it is autocast of CUDA, as before torch could autocast other devices.
        device_type, is_on = args if len(args) > 1 else ("cuda", *args)
        if not is_foreign(device_type):
            enable(device_type, is_on)
            return
        enable("cpu", is_on)
        if is_on and told.of_host is None:
            told.of_host = dtype_of("cpu")
        if told.of_host is not None:
            choose("cpu", dtype_of_gpu() if is_on else told.of_host)
        told.of_host = told.of_host if is_on else None

    torch.is_autocast_enabled, torch.set_autocast_enabled = is_enabled, set_enabled
    torch.get_autocast_dtype, torch.set_autocast_dtype = dtype, set_dtype
    torch.get_autocast_gpu_dtype = dtype_of_gpu
    torch.set_autocast_gpu_dtype = functools.partial(set_dtype, "cuda")
