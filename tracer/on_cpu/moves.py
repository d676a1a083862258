"""Tensors that a script puts on a GPU stay in main memory."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any, Final

from foretrace.tracer.on_cpu import devices

OWN_PLACE: Final = ("cuda", "pin_memory", "is_pinned", "record_stream")
"""Methods of tensors that have nothing to do where there is one memory."""


def placed(device: Any) -> Any:
    """Return *device*, or the processor if it names a GPU, a bare number included."""
    import torch

    is_named = isinstance(device, str | int | torch.device) and devices.is_foreign(device)
    return torch.device("cpu") if is_named else device


def install(torch: Any) -> None:
    """Replace devices in all that this process asks of *torch*, in all its threads."""
    mode = _mode(torch)
    devices.differentiate_in(mode)
    devices.save_in(mode, torch.autograd.graph)
    mode.__enter__()
    _in_threads(mode)
    _without_mode(torch)


def _mode(torch: Any) -> Any:
    """Return the mode in which functions of torch take the processor for a GPU."""
    from torch.overrides import TorchFunctionMode

    kept = {getattr(torch.Tensor, name): name for name in OWN_PLACE}
    named = torch.device

    class OnCpu(TorchFunctionMode):  # type: ignore[misc]  # torch is untyped here
        """Replaces devices in arguments."""

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            given = dict(kwargs or {})
            if func in kept:
                return True if kept[func] == "is_pinned" else args[0]
            if func is named:
                is_bare = len(args) == 1 and isinstance(args[0], int)
                return named(*(("cuda", *args) if is_bare else args), **given)
            if given.get("device") is not None:
                given["device"] = placed(given["device"])
            if given.get("pin_memory"):
                given["pin_memory"] = False
            if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
                args = (args[0], placed(args[1]), *args[2:])
            if func is torch.Tensor.type and len(args) > 1 and isinstance(args[1], str):
                args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
            args = tuple(placed(one) if isinstance(one, str | torch.device) else one for one in args)
            return func(*args, **given)

    return OnCpu()


def _in_threads(mode: Any) -> None:
    """Run threads of Python inside *mode*, which torch keeps for each thread."""
    anywhere: Any = threading.Thread
    run = anywhere.run

    @functools.wraps(run)
    def inside(self: Any) -> None:
        with mode:
            run(self)

    anywhere.run = inside


def _without_mode(torch: Any) -> None:
    """Replace devices in what torch does not offer to modes: files, storages, generators."""
    load = torch.load

    @functools.wraps(load)
    def loaded(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(f, _mapped(torch, map_location), *args, **kwargs)

    class Generator(torch.Generator):  # type: ignore[misc]
        """A generator of the processor, whatever device is named."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, placed(device))

    torch.load, torch.Generator = loaded, Generator
    for kind in (torch.UntypedStorage, torch.TypedStorage):
        kind.cuda = kind.pin_memory = lambda self, *args, **kwargs: self


def _mapped(torch: Any, location: Any) -> Any:
    """Return where ``torch.load`` puts what a file holds, for its argument *location*."""
    if location is None:  # where it was, which may be a GPU
        return "cpu"
    if isinstance(location, Mapping):
        return lambda storage, _: storage
    return location if callable(location) else placed(location)
