"""Where ``torch.load`` puts each storage: where the file says, or where ``map_location`` says."""
# ruff: noqa: SLF001 - this module takes the place of parts of torch

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from foretrace.tracer.rehearse.errors import RehearsalError

if TYPE_CHECKING:
    from foretrace.tracer.rehearse.session import RehearsalSession


class _Read:
    """Represents a storage that has been read; it is on the host until ``map_location`` moves it."""

    device: Any = "cpu"

    def to(self, device: Any = "cpu", *_: Any, **__: Any) -> _Read:
        """Move it."""
        self.device = device
        return self

    def cuda(self, device: Any = None, *_: Any, **__: Any) -> _Read:
        """Move it to a GPU."""
        del device
        return self.to("cuda")

    def cpu(self) -> _Read:
        """Move it to the host."""
        return self.to()

    def untyped(self) -> _Read:
        """Return itself."""
        return self


def device_of(mapped: Any, location: str) -> str:
    """Return the device of a storage that was saved at *location*, which ``map_location`` says, *mapped*."""
    from torch.serialization import _get_restore_location

    return str(_get_restore_location(mapped)(_Read(), location).device)


def put(session: RehearsalSession, tensor: Any, where: str) -> Any:
    """Let the fake *tensor*, which has been loaded, be on the device *where*; return it."""
    import torch

    device = torch.device(where)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    tensor.fake_device = device
    session.host.settle(tensor)
    return tensor


@contextmanager
def to(session: RehearsalSession, mapped: Any) -> Iterator[None]:
    """Inside this context ``torch.load`` puts storages where the file or *mapped* says.

    *mapped* is the ``map_location``: a device, a dict, a function, or None; torch itself evaluates it. For
    fake tensors torch only notes the location in the file.

    Raises:
        RehearsalError: torch is older than 2.7, and does not note the location.
    """
    import torch
    from torch import _utils

    anywhere: Any = _utils
    if not hasattr(anywhere, "_restore_device_fake_mode"):
        raise RehearsalError(
            f"torch.load cannot be rehearsed with torch {torch.__version__}: use 2.7 or newer, or turn "
            "loading off with an argument of the script or a stub (--stub, docs/rehearse.md section 6)"
        )
    original = anywhere._restore_device_fake_mode

    def restored(tensor: Any) -> Any:
        location = getattr(tensor.untyped_storage(), "_fake_device", None)
        where = "meta" if location is None else device_of(mapped, location)
        if where.startswith("meta"):
            return original(tensor)
        return put(session, tensor, where)

    anywhere._restore_device_fake_mode = restored
    try:
        with _nothing_remembered():
            yield
    finally:
        anywhere._restore_device_fake_mode = original


@contextmanager
def _nothing_remembered() -> Iterator[None]:
    """Inside this context, turn off torch's cache of operators on fake tensors.

    Its keys are the arguments of an operator. For the operator that puts a tensor on a storage, the key would
    hold the storage itself. Its memory would then count forever, also after the script has dropped it.
    """
    import torch

    mode: Any = torch._guards.detect_fake_mode(None)
    before = mode is not None and mode.cache_enabled
    if before:
        mode.cache_enabled = False
    try:
        yield
    finally:
        if before:
            mode.cache_enabled = True
