"""Autocast of a GPU, done by autocast of the processor."""

from __future__ import annotations

import threading
from typing import Any, Final

from foretrace.tracer.rehearse.replacing import replaces

SETTERS: Final = ("set_autocast_enabled", "set_autocast_dtype", "set_autocast_gpu_dtype")
"""Functions of torch by which a script, or a region, sets it: for any device, or for CUDA alone."""


class _Host(threading.local):
    """Whether autocast of the processor was on before that of the GPU was turned on, and in what type."""

    before: tuple[bool, Any] | None = None


def install(torch: Any) -> None:
    """Have autocast of the processor be that of the GPU while that is on; torch keeps both by thread."""
    host = _Host()
    enable, choose = torch.set_autocast_enabled, torch.set_autocast_dtype

    def follow(original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if torch.is_autocast_enabled("cuda"):
            host.before = host.before or (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
            is_on, dtype = True, torch.get_autocast_dtype("cuda")
        elif host.before:
            (is_on, dtype), host.before = host.before, None
        else:
            return
        enable("cpu", is_on)
        choose("cpu", dtype)

    for name in SETTERS:
        replaces(torch, name=name)(follow)
